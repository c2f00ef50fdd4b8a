"""`python -m service.cli`: the same as `mlx-stream`."""

from service.cli.main import main

main(prog_name="mlx-stream")
