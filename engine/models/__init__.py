"""Graphs: shared parts, and the decoder that joins them as a family's record says.

Above this package nothing branches on a model's name: graphs declare what they can do.
"""
