"""Block diffusion against mlx-vlm, on one tiny model, in one process."""
