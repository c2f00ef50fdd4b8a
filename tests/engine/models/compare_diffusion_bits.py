"""Says for each tiny denoising model whether every pass gives mlx-vlm's own bits: "equal" or "unequal".

A script, because bits are the same only with the BLAS inside mlx, and a process has one BLAS: mlx is imported here
without the product's preparation. Single tokens after others are left out: mlx-vlm writes those into a ring, and adds
up in the ring's order.
"""

import tempfile
from pathlib import Path

import mlx.core as mx

from tests.engine.models import tiny_diffusion

OTHERS = {"biases": {"attention_bias": True}, "sizes that quantize": tiny_diffusion.WIDE}


def compared(changes: dict, lengths: list[int], folder: Path) -> str:
    """The answer for one model, whose files are written into `folder`."""
    model = tiny_diffusion.build(scale=3.0, **changes)
    tiny_diffusion.save(folder, model)
    graph = tiny_diffusion.graph(folder, library_arithmetic=True)
    pairs = tiny_diffusion.passes(tiny_diffusion.Oracle(model), graph, lengths)
    return "equal" if all(mx.array_equal(found, wanted).item() for wanted, found in pairs) else "unequal"


if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    cases = {
        f"{shape}, {read}": (changes, lengths)
        for shape, changes in tiny_diffusion.SHAPES.items()
        for read, lengths in tiny_diffusion.READ.items()
        if 1 not in lengths[1:]
    }
    cases |= {name: (changes, [21]) for name, changes in OTHERS.items()}
    for name, (changes, lengths) in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            print(f"{name}: {compared(changes, lengths, Path(folder))}")
