"""Every way in which rows keep their state, on tiny models, for whoever drives a batch over each of them."""

import dataclasses

from engine.contracts.composition import PagedKvComposition
from engine.contracts.kv_scheme import AffineKv, TurboKv
from tests.engine.execution.warm_rows import CHUNK, Rows
from tests.engine.models import tiny_families, tiny_llama

CONTEXT = 1024
ROUNDING = 2e-4
QUANTIZED_ROUNDING = 0.01
"""Rounding that moves a number across the edge of a level."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """How rows keep their state. Those that do not cut reuse whole states alone, or any cut from `least_tokens` on."""

    composition: dict = dataclasses.field(default_factory=dict)
    family: str = "llama"
    cuts: bool = True
    least_tokens: int = 0
    rounding: float = ROUNDING


AFFINE = AffineKv(bits=8, group_size=32)
LATE_AFFINE = AffineKv(bits=8, group_size=32, start=150)
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
MODELS = {"llama": {}, "sliding": SLIDING, "wide heads": {"head_dim": 64}}
KINDS = {
    "pooled": Kind(),
    "alone": Kind({"library_arithmetic": True}),
    "exact": Kind({"row_tile_tokens": 8}),
    "paged": Kind({"paged_kv": PagedKvComposition(block_tokens=32)}),
    "sliding": Kind(family="sliding", cuts=False),
    "exact sliding": Kind({"row_tile_tokens": 8}, family="sliding", cuts=False),
    "recurrent": Kind(family="qwen3_5", cuts=False),
    "affine": Kind({"kv": AFFINE}, family="wide heads", least_tokens=CHUNK, rounding=QUANTIZED_ROUNDING),
    "late affine": Kind({"kv": LATE_AFFINE}, family="wide heads", least_tokens=150, rounding=QUANTIZED_ROUNDING),
    "exact affine": Kind({"kv": AFFINE, "row_tile_tokens": 8}, family="wide heads"),
    "exact late affine": Kind({"kv": LATE_AFFINE, "row_tile_tokens": 8}, family="wide heads", least_tokens=150),
    "turbo": Kind(
        {"kv": TurboKv(key_bits=8, value_bits=8)},
        family="wide heads",
        least_tokens=CHUNK,
        rounding=QUANTIZED_ROUNDING,
    ),
}


def write_folders(tmp_path_factory):
    """A tiny model of each family, by its name."""
    folders = {name: tmp_path_factory.mktemp("model") / "tiny" for name in (*MODELS, "qwen3_5")}
    for name, changes in MODELS.items():
        shape = {"tie_word_embeddings": False, "max_position_embeddings": CONTEXT}
        tiny_llama.write(folders[name], scale=4.0, **shape, **changes)
    config = tiny_families.config_of("qwen3_5", {})
    tiny_families.save(folders["qwen3_5"], tiny_families.build("qwen3_5", config), config)
    return folders


def rows_of(folders, kind):
    binding = tiny_llama.bind(folders[kind.family], prefill_chunk_tokens=CHUNK, **kind.composition)
    return Rows(binding, kind=kind, exact="row_tile_tokens" in kind.composition)


def text(seed, length):
    return tiny_llama.random_prompt(seed, CONTEXT)[:length]
