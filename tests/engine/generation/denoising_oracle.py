"""mlx-vlm's own block diffusion on a tiny model: what it generates, and the account that it gives."""

import importlib
from dataclasses import dataclass
from types import SimpleNamespace

import mlx.core as mx

diffusion = importlib.import_module("mlx_vlm.generate.diffusion")  # the package's attribute is a function


@dataclass(frozen=True)
class Told:
    """Ids, why it ended, tokens examined, passes over all blocks, and positions of all canvases."""

    tokens: tuple[int, ...]
    reason: str
    examined: int
    passes: int
    canvas_tokens: int
    blocks: int


class _Criteria:
    def __init__(self, ends):
        self._ends = set(ends)

    def __call__(self, token):
        return token in self._ends

    def add_eos_token_ids(self, ids):
        raise AssertionError(f"the configuration must not bring ends: {ids}")


class _Detokenizer:
    last_segment = ""

    def add_token(self, token, skip_special_token_ids=()):
        pass

    def finalize(self):
        pass


def generate(model, prompt, *, seed, ends, max_tokens, stopping=None, bounds=None, pixels=None, **options):
    """Run mlx-vlm's loop; `stopping` and `bounds` are what it takes from a model's configuration alone.

    `pixels` are those of the images whose tokens are in `prompt`.
    """
    model.config.generation_config = {**(stopping or {}), **(bounds or {})}
    tokenizer = SimpleNamespace(stopping_criteria=_Criteria(ends), decode=str, vocab={})
    seen = {} if pixels is None else {"mm_token_type_ids": token_types(model, prompt)}
    made, diffusion.make_streaming_detokenizer = diffusion.make_streaming_detokenizer, lambda _: _Detokenizer()
    try:
        mx.random.seed(seed)
        results = list(
            diffusion.stream_diffusion_generate(
                model, tokenizer, tokenizer, mx.array([prompt], dtype=mx.int32), pixels, None,
                max_tokens=max_tokens, skip_special_token_ids=[], temperature=0.0, **seen, **options,
            )
        )  # fmt: skip
    finally:
        diffusion.make_streaming_detokenizer = made
        model.config.generation_config = None
    last = results[-1]
    shown = [one for one in results[:-1] if not one.is_draft and not one.diffusion_block_complete]
    return Told(
        tokens=tuple(one.token for one in shown),
        reason=last.finish_reason,
        examined=last.generation_tokens,
        passes=last.diffusion_denoising_steps,
        canvas_tokens=last.diffusion_canvas_tokens,
        blocks=sum(one.diffusion_block_complete for one in results),
    )


def token_types(model, prompt):
    """Which of `prompt` are an image's, as mlx-vlm's processor says it."""
    return (mx.array([prompt]) == model.config.image_token_id).astype(mx.int32)
