"""mlx-stream against its peers: the same weights, the same BLAS, the same requests, in turns, in one run."""
