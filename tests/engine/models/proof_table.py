"""Writes docs/models.md: every family, what sets it apart, and what the tests prove of it.

Derived from the families' records and from the cases that the tests run, so that the page cannot claim more.
`python -m tests.engine.models.proof_table` writes it; a test compares.
"""

from pathlib import Path

from engine.artifacts.families import ALIASES, FAMILIES
from engine.artifacts.gguf_architectures import ARCHITECTURES
from engine.artifacts.huggingface import model_config
from tests.engine.models import test_gguf_families, tiny_diffusion, tiny_families, tiny_vision

PAGE = Path(__file__).resolve().parents[3] / "docs" / "models.md"

INTRODUCTION = """# Models

These families run as native graphs, in packed steps. Each is a record in `engine/artifacts/families.py`.
This page is written by `python -m tests.engine.models.proof_table`, from those records and from the tests' cases.

## What is proven of every case below

Each case is a tiny model with random weights, made by mlx-lm, saved, and read as a user's files are
(`tests/engine/models/test_families.py`). In float32:

* logits equal mlx-lm's within 1e-5 of the largest, with mlx's own exponential and with the faster one for CPUs;
* they are mlx-lm's own bits, with mlx's own arithmetic and BLAS, in the cases that the last column counts; elsewhere
  mlx-lm's rotating cache adds in another order, or a recurrent layer computes stretches of tokens in chunks;
* 64 greedy ids equal mlx-lm's;
* a row's logits in company are the bits of the row alone, with `--row-tile-tokens`;
* with weights quantized by MLX, kept packed or unpacked, logits equal mlx-lm's within 1e-5.

Of every family: a tensor that is missing, has another shape or is not used, a bias that is not announced, a field of
another kind and an activation that the graph does not have are refused, and the message names them
(`tests/engine/models/test_family_refusals.py`).

## Families
"""

ROTATION = """
## Windows

Layers slide where `layer_types` say so, else as the family's own definition has it. mlx-lm attends fully in `mistral`,
`gemma2`, `phi3`, `starcoder2`, and in `qwen2`, `qwen3` and `smollm3` with `use_sliding_window`: beyond the window its
results are others, and within it the same. A test shows for each of them that a token sees its window alone.

## Rotation

In every family: `default`, `linear`, `dynamic` (within the trained context), `llama3`, `yarn`, `longrope` (`su`) and
`proportional`, in the spellings of old and new files; sliding layers may rotate in their own way. Other kinds are
refused by name.
"""


DENOISING = """
## Block diffusion

`diffusion_gemma` does not write token by token: its encoder reads what is settled, and its decoder proposes a whole
canvas of tokens at once, again and again, each time conditioned on the proposal before. It is a record like the others
and a graph of its own (`engine/models/diffusion.py`). Tiny models with random weights, made by mlx-vlm 0.7.10, are
proven in these shapes: {cases}. In float32:

* in every pass, over prompts shorter and longer than the window, read whole or in parts, and after a canvas was
  appended, logits are mlx-vlm's own bits with mlx's own arithmetic, and equal within 1e-5 with the faster one for CPUs;
* with weights quantized by MLX as mlx-vlm's converter does, packed or unpacked, they equal mlx-vlm's within 1e-5;
* experts stored one by one, stacked, or with gate and up in one tensor are the same model, to the bit;
* what a token of a prompt and of a canvas sees in each kind of layer is what masks written out in numpy say.

Its files may state nothing but token ids, `canvas_length` and the quantization. Tensors that are missing, misshapen or
of no use, and fields that the graph would not follow, are refused by name (`test_diffusion_files.py`,
`test_denoising_fields.py`).

A vision tower beside it is served where the configuration describes it, in these shapes: {towers}. What it sees, and
canvases after prompts with images, equal mlx-vlm's in the same two ways, within 1e-5 with quantized weights too, and
read in parts (`test_vision_tower.py`). An image is scaled as mlx-vlm does it, to the byte (`test_image_decoding.py`),
and whole conversations have its tokens (`test_image_generations.py`).
"""


GGUF = """
## GGUF

These architectures are read: {architectures}. Of each, a tiny model is written as its converter writes it, with
permuted rows, whole gains and fused tensors where the converter makes them, and its logits equal mlx-lm's within 1e-5
of the largest (`tests/engine/models/test_gguf_families.py`).
"""


def page() -> str:
    """The whole page."""
    rows = ["| `model_type` | what sets it apart | cases | bits |", "| --- | --- | --- | --- |"]
    rows += [_row(name) for name in tiny_families.FAMILIES]
    towers = "; ".join(tiny_vision.SHAPES)
    denoising = DENOISING.format(cases="; ".join(denoising_cases()), towers=towers)
    return INTRODUCTION + "\n" + "\n".join(rows) + "\n" + denoising + ROTATION + _gguf()


def denoising_cases() -> list[str]:
    """The shapes of denoising models that are proven."""
    return list(tiny_diffusion.SHAPES)


def _gguf() -> str:
    proven = [name for name in ARCHITECTURES if name in test_gguf_families.MODELS]
    return GGUF.format(architectures=", ".join(f"`{name}`" for name in proven))


def _row(name: str) -> str:
    cases = tiny_families.FAMILIES[name].cases
    equal = sum(not _slides_or_recurs(name, changes) for changes in cases.values())
    return f"| `{name}` | {_apart(name)} | {'; '.join(cases)} | {equal} of {len(cases)} |"


def _slides_or_recurs(name: str, changes: dict[str, object]) -> bool:
    config = model_config(tiny_families.config_of(name, changes))
    return config.sliding_window > 0 or config.recurrent is not None


def _apart(name: str) -> str:
    """In words, what the record of a family states differently from llama's."""
    family, llama = (ALIASES | FAMILIES)[name], FAMILIES["llama"]
    norms = family.norms
    facts = {
        "layer norms with biases": family.norm == "layer",
        "norms by 1 + gain": family.norm == "rms_plus_one",
        "norms after both parts alone": bool(norms.after_mixer) and not norms.before_mixer,
        "norms before and after both parts": bool(norms.after_mixer and norms.before_mixer),
        "queries and keys normed over each head": family.head_norms == "each",
        "queries and keys normed over all heads": family.head_norms == "all",
        "query, key and value in one tensor": len(family.query_key_value) == 1,
        "gate and up in one tensor": family.gated and len(family.feed_forward) == 1,
        "no gate": not family.gated,
        {"gelu": "exact GELU", "gelu_tanh": "GELU by tanh"}.get(family.activation, ""): family.activation != "silu",
        "query, key and value biases": family.attention_bias is True,
        "scaled embeddings": family.embedding_scale != "one",
        "soft caps": "attn_logit_softcapping" in family.defaults,
        "factors on embeddings, residuals, scores and logits": "attention_multiplier" in family.defaults,
        "layers without rotation": "no_rope_layer_interval" in family.defaults,
        "part of a head rotates": "partial_rotary_factor" in family.defaults,
        _SLIDING[family.sliding]: family.sliding != llama.sliding,
        "linear attention by the gated delta rule in most layers": family.recurrent,
        "attention's output gated": family.gates_attention,
        "full layers with heads of their own size": family.varied,
        "layers that attend to an earlier one's keys and values": family.varied,
        "a vector of each token for every layer": family.varied,
        "routed experts": family.mixture is not None,
        "and one for every token": family.mixture is not None and bool(family.mixture.shared),
        "text half of multimodal checkpoints": family.multimodal,
    }
    return ", ".join(fact for fact, holds in facts.items() if holds) or "the plain form"


_SLIDING = {
    "stated": "",
    "throughout": "one window for all layers",
    "in_use": "a window for all layers where it is switched on",
    "alternating": "every second layer slides",
    "pattern": "all but every n-th layer slide, and rotate in their own way",
    "upper_layers": "upper layers slide where that is switched on",
    "unrotated": "layers without rotation slide where that is switched on",
}

if __name__ == "__main__":
    PAGE.write_text(page())
