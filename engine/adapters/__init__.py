"""LoRA adapters: read and checked from headers, then mounted on the projections that a graph names.

`config`, `files` and `plan` never import mlx; `mounting` reads tensors on the engine thread.
"""
