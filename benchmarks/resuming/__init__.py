"""Durable streams under fire: servers that are killed at random moments, and what it costs to survive that."""
