"""Says for each case of every family whether logits are mlx-lm's own bits: "equal", "unequal", "slides" or "recurs".

A script, because bits are the same only with the BLAS inside mlx, and a process has one BLAS: mlx is imported here
without the product's preparation.
"""

import tempfile
from pathlib import Path

import mlx.core as mx

from engine.artifacts.artifact import open_artifact
from tests.engine.models import tiny_families, tiny_llama
from tests.engine.models.packed import logits_of


def compared(family: str, case: str, folder: Path) -> str:
    """The answer for one case, whose files are written into `folder`."""
    config = tiny_families.config_of(family, tiny_families.CASES[family, case])
    model = tiny_families.build(family, config)
    tiny_families.save(folder, model, config)
    opened = open_artifact(folder).config
    if opened.sliding_window or opened.recurrent:
        return "slides" if opened.sliding_window else "recurs"
    prompt = tiny_llama.random_prompt(1, 40)
    found = logits_of(tiny_llama.bind(folder, library_arithmetic=True), prompt)
    return "equal" if mx.array_equal(found, tiny_llama.Oracle(model).logits(prompt)).item() else "unequal"


if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    for family, case in tiny_families.CASES:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{family}: {case}: {compared(family, case, Path(folder))}")
