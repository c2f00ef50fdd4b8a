"""The model as a function of its weights, for many rows at once, so that it can be differentiated.

The same mathematics as `engine.models.diffusion`, and the test of it is that both give the same logits: prompt and
canvas go through the layers side by side, told apart by masks and by the factors on layers' results, and experts are
multiplied for every token, chosen or not. Activations are [B, P + L, hidden]. Weights are named as they are stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Mapping

Weights = dict[str, mx.array]
EPS: Final = 1e-6
ROOT: Final = "model.decoder"
LOG2_E: Final = math.log2(math.e)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of the model. `kinds` names one layer each."""

    vocab_size: int = 640
    hidden: int = 128
    inner: int = 256
    heads: int = 4
    kv_heads: int = 2
    full_kv_heads: int = 1
    head_dim: int = 32
    full_head_dim: int = 64
    experts: int = 4
    chosen: int = 2
    expert_inner: int = 64
    window: int = 48
    canvas: int = 64
    context: int = 1024
    cap: float = 30.0
    kinds: tuple[str, ...] = ("sliding_attention", "sliding_attention", "full_attention")

    def head_dim_of(self, kind: str) -> int:
        """The size of a head."""
        return self.full_head_dim if kind == "full_attention" else self.head_dim

    def kv_heads_of(self, kind: str) -> int:
        """Heads of keys and values."""
        return self.full_kv_heads if kind == "full_attention" else self.kv_heads

    def document(self) -> dict[str, object]:
        """The `config.json` of the model."""
        return {
            "model_type": "diffusion_gemma",
            "canvas_length": self.canvas,
            "text_config": {
                "model_type": "diffusion_gemma_text",
                "vocab_size": self.vocab_size,
                "hidden_size": self.hidden,
                "intermediate_size": self.inner,
                "moe_intermediate_size": self.expert_inner,
                "num_hidden_layers": len(self.kinds),
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads,
                "num_global_key_value_heads": self.full_kv_heads,
                "head_dim": self.head_dim,
                "global_head_dim": self.full_head_dim,
                "num_experts": self.experts,
                "top_k_experts": self.chosen,
                "sliding_window": self.window,
                "max_position_embeddings": self.context,
                "final_logit_softcapping": self.cap,
                "layer_types": list(self.kinds),
                "bos_token_id": 2,
                "eos_token_id": 1,
                "pad_token_id": 0,
            },
        }


def initial_weights(sizes: Sizes, *, seed: int) -> Weights:
    """Random weights; gains of queries and keys are small, since scores have no factor of their own."""
    keys = iter(mx.random.split(mx.random.key(seed), 4 + 16 * len(sizes.kinds)))

    def matrix(*shape: int) -> mx.array:
        return mx.random.normal(shape, key=next(keys)) * shape[-1] ** -0.5

    hidden, weights = sizes.hidden, {}
    weights[f"{ROOT}.embed_tokens.weight"] = matrix(sizes.vocab_size, hidden)
    weights[f"{ROOT}.norm.weight"] = mx.ones(hidden)
    weights[f"{ROOT}.self_conditioning.pre_norm.weight"] = mx.ones(hidden)
    for module in (f"{ROOT}.self_conditioning", *(f"{ROOT}.layers.{layer}.mlp" for layer in range(len(sizes.kinds)))):
        weights[f"{module}.gate_proj.weight"] = matrix(sizes.inner, hidden)
        weights[f"{module}.up_proj.weight"] = matrix(sizes.inner, hidden)
        weights[f"{module}.down_proj.weight"] = matrix(hidden, sizes.inner)
    for layer, kind in enumerate(sizes.kinds):
        module = f"{ROOT}.layers.{layer}"
        head_dim, kv_heads = sizes.head_dim_of(kind), sizes.kv_heads_of(kind)
        weights[f"{module}.self_attn.q_proj.weight"] = matrix(sizes.heads * head_dim, hidden)
        weights[f"{module}.self_attn.k_proj.weight"] = matrix(kv_heads * head_dim, hidden)
        if kind != "full_attention":
            weights[f"{module}.self_attn.v_proj.weight"] = matrix(kv_heads * head_dim, hidden)
        weights[f"{module}.self_attn.o_proj.weight"] = matrix(hidden, sizes.heads * head_dim)
        weights[f"{module}.self_attn.q_norm.weight"] = mx.full((head_dim,), head_dim**-0.25)
        weights[f"{module}.self_attn.k_norm.weight"] = mx.full((head_dim,), head_dim**-0.25)
        weights[f"{module}.router.proj.weight"] = matrix(sizes.experts, hidden)
        weights[f"{module}.router.scale"] = mx.ones(hidden)
        weights[f"{module}.router.per_expert_scale"] = mx.ones(sizes.experts)
        weights[f"{module}.experts.gate_up_proj"] = matrix(sizes.experts, 2 * sizes.expert_inner, hidden)
        weights[f"{module}.experts.down_proj"] = matrix(sizes.experts, hidden, sizes.expert_inner)
        for name, gain in _NORMS.items():
            weights[f"{module}.{name}.weight"] = mx.full((hidden,), gain)
        weights[f"{module}.layer_scalar"] = mx.ones(1)
        weights[f"model.encoder.language_model.layers.{layer}.layer_scalar"] = mx.ones(1)
    return weights


def canvas_logits(
    weights: Mapping[str, mx.array], sizes: Sizes, prompt: mx.array, canvas: mx.array, feedback: mx.array | None
) -> mx.array:
    """What the model proposes for canvases that follow prompts.

    Args:
        weights: by stored name.
        sizes: the model's sizes.
        prompt: ids [B, P].
        canvas: ids [B, L].
        feedback: soft embeddings [B, L, hidden] of a step before, or None.

    Returns:
        Logits [B, L, V].
    """
    table, read = weights[f"{ROOT}.embed_tokens.weight"], prompt.shape[1]
    scale = sizes.hidden**0.5
    drafted = table[canvas] * scale
    signal = mx.zeros_like(drafted) if feedback is None else feedback
    module = f"{ROOT}.self_conditioning"
    conditioned = _feed_forward(weights, module, _norm(signal, weights[f"{module}.pre_norm.weight"]))
    x = mx.concatenate([table[prompt] * scale, mx.fast.rms_norm(drafted + conditioned, None, EPS)], axis=1)
    is_canvas = (mx.arange(x.shape[1]) >= read)[:, None]
    for layer, kind in enumerate(sizes.kinds):
        x = _layer(weights, sizes, layer, kind, x, read)
        encoder = weights[f"model.encoder.language_model.layers.{layer}.layer_scalar"]
        x = x * mx.where(is_canvas, weights[f"{ROOT}.layers.{layer}.layer_scalar"], encoder)
    logits = _norm(x[:, read:], weights[f"{ROOT}.norm.weight"]) @ table.T
    return sizes.cap * (1.0 - 2.0 / (1.0 + _power_of_two(logits * (2.0 * LOG2_E / sizes.cap))))


def cross_entropy(logits: mx.array, targets: mx.array) -> mx.array:
    """The mean over positions [B, L] of the surprise at `targets`, in nats, of `logits` [B, L, V]."""
    top = mx.stop_gradient(mx.max(logits, axis=-1, keepdims=True))
    total = mx.log(mx.sum(_power_of_two((logits - top) * LOG2_E), axis=-1)) + top.squeeze(-1)
    return mx.mean(total - mx.take_along_axis(logits, targets[..., None], axis=-1).squeeze(-1))


def softmax(scores: mx.array) -> mx.array:
    """Over the last axis."""
    top = mx.stop_gradient(mx.max(scores, axis=-1, keepdims=True))
    powers = _power_of_two((scores - top) * LOG2_E)
    return powers / mx.sum(powers, axis=-1, keepdims=True)


@mx.custom_function
def _power_of_two(x: mx.array) -> mx.array:
    """Exponentials are what this network costs most: the library's own is slow on CPUs, and so is its derivative."""
    return mx.power(2.0, x)


@_power_of_two.vjp
def _power_of_two_vjp(_primal: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
    return cotangent * output * math.log(2.0)


def soft_embeddings(weights: Mapping[str, mx.array], sizes: Sizes, probabilities: mx.array) -> mx.array:
    """The mean embedding [B, L, hidden] of each position, of `probabilities` [B, L, V]."""
    return (probabilities @ weights[f"{ROOT}.embed_tokens.weight"]) * sizes.hidden**0.5


_NORMS: Final = {
    "input_layernorm": 1.0,
    "post_attention_layernorm": 0.4,
    "pre_feedforward_layernorm": 1.0,
    "pre_feedforward_layernorm_2": 1.0,
    "post_feedforward_layernorm_1": 1.0,
    "post_feedforward_layernorm_2": 1.0,
    "post_feedforward_layernorm": 0.4,
}


def _layer(weights: Mapping[str, mx.array], sizes: Sizes, layer: int, kind: str, x: mx.array, read: int) -> mx.array:
    module = f"{ROOT}.layers.{layer}"

    def norm(name: str, part: mx.array) -> mx.array:
        return _norm(part, weights[f"{module}.{name}.weight"])

    attended = _attention(weights, sizes, f"{module}.self_attn", kind, norm("input_layernorm", x), read)
    x = x + norm("post_attention_layernorm", attended)
    dense = _feed_forward(weights, f"{module}.mlp", norm("pre_feedforward_layernorm", x))
    routed = _experts(weights, sizes, module, x, norm("pre_feedforward_layernorm_2", x))
    both = norm("post_feedforward_layernorm_1", dense) + norm("post_feedforward_layernorm_2", routed)
    return x + norm("post_feedforward_layernorm", both)


def _attention(
    weights: Mapping[str, mx.array], sizes: Sizes, module: str, kind: str, x: mx.array, read: int
) -> mx.array:
    rows, length, head_dim, kv_heads = *x.shape[:2], sizes.head_dim_of(kind), sizes.kv_heads_of(kind)

    def heads(name: str) -> mx.array:
        return (x @ weights[f"{module}.{name}.weight"].T).reshape(rows, length, -1, head_dim)

    keys = heads("k_proj")
    values = keys if kind == "full_attention" else heads("v_proj")
    queries = _rotated(_norm(heads("q_proj"), weights[f"{module}.q_norm.weight"]), sizes, kind)
    keys = _rotated(_norm(keys, weights[f"{module}.k_norm.weight"]), sizes, kind)
    values = mx.fast.rms_norm(values, None, EPS).swapaxes(1, 2)[:, :, None]
    grouped = queries.reshape(rows, kv_heads, -1, length, head_dim)
    scores = grouped @ keys[:, :, None].swapaxes(-1, -2) + _mask(
        length, read, 0 if kind == "full_attention" else sizes.window
    )
    mixed = (softmax(scores) @ values).reshape(rows, sizes.heads, length, head_dim)
    return mixed.swapaxes(1, 2).flatten(2) @ weights[f"{module}.o_proj.weight"].T


def _mask(length: int, read: int, window: int) -> mx.array:
    """What is added to scores [P + L, P + L]: prompts look back, canvases everywhere; `window` 0 means no limit."""
    queries, keys = mx.arange(length)[:, None], mx.arange(length)[None, :]
    seen_by_prompt = keys <= queries
    seen_by_canvas = keys >= 0
    if window:
        seen_by_prompt = seen_by_prompt & (keys > queries - window)
        seen_by_canvas = (keys >= read) | (keys >= read - (window - 1))
    return mx.where(mx.where(queries < read, seen_by_prompt, seen_by_canvas), 0.0, -1e9)


def _rotated(x: mx.array, sizes: Sizes, kind: str) -> mx.array:
    """[B, T, H, D] as [B, H, T, D], rotated: a quarter of a full layer's components, all of a sliding one's."""
    head_dim = sizes.head_dim_of(kind)
    theta, rotating = (1e6, head_dim // 4) if kind == "full_attention" else (1e4, head_dim)
    frequencies = theta ** (mx.arange(0, rotating, 2, dtype=mx.float32) / head_dim)
    still = mx.full(((head_dim - rotating) // 2,), mx.inf)
    frequencies = mx.concatenate([frequencies, still])
    return mx.fast.rope(
        x.swapaxes(1, 2), head_dim, traditional=False, base=None, scale=1.0, offset=0, freqs=frequencies
    )


def _experts(weights: Mapping[str, mx.array], sizes: Sizes, module: str, x: mx.array, normed: mx.array) -> mx.array:
    """All experts of every token, weighed by zero where they are not chosen."""
    scaled = mx.fast.rms_norm(x, None, EPS) * weights[f"{module}.router.scale"] * sizes.hidden**-0.5
    scores = scaled @ weights[f"{module}.router.proj.weight"].T
    least = mx.sort(mx.stop_gradient(scores), axis=-1)[..., -sizes.chosen][..., None]
    shares = mx.softmax(mx.where(scores >= least, scores, -1e9), axis=-1)
    shares = shares * weights[f"{module}.router.per_expert_scale"]
    gate_up = weights[f"{module}.experts.gate_up_proj"]
    each = (normed @ gate_up.reshape(-1, sizes.hidden).T).reshape(*x.shape[:2], sizes.experts, 2, sizes.expert_inner)
    inner = _gelu(each[..., 0, :]) * each[..., 1, :] * shares[..., None]
    down = weights[f"{module}.experts.down_proj"].swapaxes(-1, -2).reshape(-1, sizes.hidden)
    return inner.flatten(-2) @ down


def _feed_forward(weights: Mapping[str, mx.array], module: str, x: mx.array) -> mx.array:
    gate, up = x @ weights[f"{module}.gate_proj.weight"].T, x @ weights[f"{module}.up_proj.weight"].T
    return (_gelu(gate) * up) @ weights[f"{module}.down_proj.weight"].T


def _gelu(x: mx.array) -> mx.array:
    """By tanh, in a form whose derivative is finite wherever it is."""
    inner = x * (1.0 + 0.044715 * (x * x))
    return x / (1.0 + _power_of_two(mx.minimum(inner * (-2.0 * LOG2_E * (2 / math.pi) ** 0.5), 60.0)))


def _norm(x: mx.array, gain: mx.array) -> mx.array:
    return mx.fast.rms_norm(x, gain, EPS)
