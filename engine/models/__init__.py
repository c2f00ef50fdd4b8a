"""Graphs, one file per family, and the registry that finds them by `model_type`.

Above this package nothing branches on a model's name: graphs declare what they can do.
"""
