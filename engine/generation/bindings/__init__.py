"""Bindings: each checks once that a graph provides what a method needs, and fixes the facts its loop reads."""
