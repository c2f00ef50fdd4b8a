"""Tensor operations that graphs share: linear products, rotary embedding, packed attention.

No model knowledge and no state of their own beyond the arrays they are built from.
"""
