"""Says for each tiny denoising model whether every pass gives mlx-vlm's own bits: "equal" or "unequal".

A script, because bits are the same only with the BLAS inside mlx, and a process has one BLAS: mlx is imported here
without the product's preparation. Single tokens after others are left out: mlx-vlm writes those into a ring, and adds
up in the ring's order.
"""

import tempfile
from pathlib import Path

import mlx.core as mx

from tests.engine.models import tiny_diffusion, tiny_vision

OTHERS = {"biases": {"attention_bias": True}, "sizes that quantize": tiny_diffusion.WIDE}


def compared(changes: dict, lengths: list[int], folder: Path) -> str:
    """The answer for one model, whose files are written into `folder`."""
    model = tiny_diffusion.build(scale=3.0, **changes)
    tiny_diffusion.save(folder, model)
    graph = tiny_diffusion.graph(folder, library_arithmetic=True)
    pairs = tiny_diffusion.passes(tiny_diffusion.Oracle(model), graph, lengths)
    return "equal" if all(mx.array_equal(found, wanted).item() for wanted, found in pairs) else "unequal"


def seen(changes: dict, folder: Path) -> str:
    """The answer for one model with a tower, and a canvas after a prompt with two images."""
    model = tiny_vision.build(changes, scale=3.0)
    tiny_vision.save(folder, model)
    graph, images = (
        tiny_diffusion.graph(folder, library_arithmetic=True),
        [tiny_vision.picture(1), tiny_vision.picture(2, 9, 70)],
    )
    ids, state = tiny_vision.read(folder, graph, images)
    caches, canvas = tiny_vision.oracle_caches(model, ids, images), tiny_diffusion.ids(1, tiny_diffusion.CANVAS)
    pairs = [(tiny_diffusion.logits(graph, canvas, state), tiny_diffusion.Oracle(model).logits(canvas, caches))]
    for image in images:
        pixels = tiny_vision.prompt_image(folder, image).pixels
        pairs.append((graph._tower(pixels)[0], tiny_vision.seen_by(model, image)))
    return "equal" if all(mx.array_equal(found, wanted).item() for found, wanted in pairs) else "unequal"


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
    for name, changes in tiny_vision.SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            print(f"sees, {name}: {seen(changes, Path(folder))}")
