"""Durable generations: their token logs, who reads them, and how they go on after a lost connection or a crash."""
