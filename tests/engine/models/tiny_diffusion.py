"""Tiny random DiffusionGemma models, written to disk as a user's would be, beside the mlx-vlm model they came from."""

import json
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_vlm.models.diffusion_gemma.config import ModelConfig, TextConfig, VisionConfig
from mlx_vlm.models.diffusion_gemma.diffusion_gemma import Model

from engine.artifacts.artifact import open_artifact
from engine.artifacts.weights import WeightStore
from engine.contracts.composition import Composition
from engine.models.reading import WeightReader
from engine.models.registry import build_denoising_graph
from engine.runtime.policy import LayoutPolicy

VOCAB, CANVAS, WINDOW = 64, 16, 8
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": WINDOW,
    "max_position_embeddings": 512,
    "num_experts": 4,
    "top_k_experts": 2,
}
WIDE = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "head_dim": 16, "global_head_dim": 32}
"""Sizes of which each is a whole number of groups, so that every matrix can be quantized."""
STATED = ("attention_bias", "final_logit_softcapping")
FOUR_BITS = {"bits": 4, "group_size": 32}


SHAPES = {
    "a sliding and a full layer": {},
    "one key/value head for all": {"num_key_value_heads": 1},
    "heads of one size, keys of their own number": {"global_head_dim": 8, "num_global_key_value_heads": 2},
    "a full layer first, and two that slide": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "every expert": {"top_k_experts": 4},
    "a tight cap": {"final_logit_softcapping": 2.0},
}
READ = {
    "shorter than the window": [5],
    "longer": [30],
    "in parts": [3, 12, 2, 9],
    "one token": [1],
    "by single tokens": [9, 1, 1, 1],
}


@dataclass(frozen=True)
class Oracle:
    """The same weights in mlx-vlm."""

    model: Model

    def read(self, *parts):
        """Caches that hold `parts`, each read by itself."""
        caches = self.model.make_cache()
        for part in parts:
            self.model.diffusion_update_cache(mx.array([part]), cache=caches)
        return caches

    def logits(self, canvas, caches, feedback=None):
        """Logits [L, V] of a canvas after what `caches` hold."""
        return self.model.diffusion_decoder_logits(mx.array([canvas]), caches, feedback)[0]

    def feedback(self, logits):
        """What mlx-vlm feeds back after `logits` [L, V]: soft embeddings, or logits where the table is quantized."""
        table = self.model.diffusion_prepare_self_conditioning()
        return self.model.diffusion_self_conditioning(logits[None], table)


def build(*, seed=7, scale=1.0, varied=True, canvas=CANVAS, vision=None, ids=None, **changes):
    """A seeded model; `scale` sharpens its logits, `varied` makes gains and factors other than one.

    `vision` are the sizes of a tower, `ids` the tokens that stand for an image.
    """
    mx.random.seed(seed)
    tower = None if vision is None else VisionConfig(**vision)
    text = TextConfig(**(TEXT | changes))
    model = Model(ModelConfig(text_config=text, vision_config=tower, canvas_length=canvas, **(ids or {})))
    ones = [(name, array) for name, array in tree_flatten(model.parameters()) if array.ndim == 1]
    if varied:
        model.load_weights([(name, mx.random.uniform(0.5, 1.5, array.shape)) for name, array in ones], strict=False)
    table = model.model.decoder.embed_tokens
    table.weight = table.weight * scale
    mx.eval(model.parameters())
    return model


def quantize(model, default=None, *, keep=(), **overrides):
    """Quantize as mlx-vlm's converter does, and return the `quantization` of the configuration.

    Modules whose name has a part of `keep` stay dense.
    """
    default, stated = default or FOUR_BITS, {}
    rule = model.quant_predicate

    def scheme_of(path, module):
        wanted = rule(path, module) if not any(part in path for part in keep) else False
        if wanted is True:
            return default
        if wanted:
            wanted = {"bits": 8, "group_size": min(64, default["group_size"])}
            stated[path] = wanted
        return wanted

    nn.quantize(model, class_predicate=scheme_of)
    return {**default, **stated, **overrides}


def save(folder, model, *, form=lambda tensors: tensors, canvas=CANVAS, **document):
    """Write `model` with the tensors that `form` makes of its own; returns what was written of both."""
    tensors = form(dict(tree_flatten(model.parameters())))
    text = {name: getattr(model.config.text_config, name) for name in (*TEXT, *STATED)}
    config = {"model_type": "diffusion_gemma", "canvas_length": canvas, "text_config": text} | document
    write(folder, config, tensors)
    return config, tensors


def write(folder, config, tensors):
    """Write both files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)


def graph(folder, *, dequantize=True, pretranspose=False, dtype="float32", **composition):
    """Load `folder` through the product's own reading."""
    layout = LayoutPolicy(compute_dtype=dtype, dequantize=dequantize, pretranspose_linear=pretranspose)
    artifact = open_artifact(folder)
    return build_denoising_graph(
        artifact.config, WeightReader(WeightStore(artifact), layout), Composition(**composition)
    )


def ids(seed, length):
    """Seeded ids."""
    return mx.random.randint(0, VOCAB, (length,), key=mx.random.key(seed)).tolist()


def read(found, *parts):
    """A state of graph `found` that holds `parts`, each read by itself."""
    state = found.prefill(mx.array([parts[0]]))
    for part in parts[1:]:
        found.extend_prefill(mx.array([part]), state)
    return state


def logits(found, canvas, state, feedback=None):
    """Logits [L, V] of graph `found`."""
    return found.decoder_logits(mx.array([canvas], dtype=mx.int32), state, feedback)[0]


def fed_back(found, logits_before):
    """What a step after `logits_before` [L, V] is conditioned on, as the method makes it."""
    shares = mx.softmax(logits_before[None], axis=-1, precise=True)
    return found.soft_embeddings(shares, found.dequant_embed_weight())


def passes(oracle, graph, lengths):
    """Logits of three passes, each conditioned on the one before, by both; then of one after the canvas was read."""
    parts = [ids(10 + place, length) for place, length in enumerate(lengths)]
    caches, state = oracle.read(*parts), read(graph, *parts)
    signal = feedback = None
    wanted, found = [], []
    for seed in range(3):
        canvas = ids(seed, CANVAS)
        wanted.append(oracle.logits(canvas, caches, signal))
        found.append(logits(graph, canvas, state, feedback))
        signal, feedback = oracle.feedback(wanted[-1]), fed_back(graph, wanted[-1])
    oracle.model.diffusion_update_cache(mx.array([canvas]), cache=caches)
    graph.extend_prefill(mx.array([canvas]), state)
    wanted.append(oracle.logits(canvas, caches))
    found.append(logits(graph, canvas, state))
    assert state.offset == sum(lengths) + CANVAS
    return list(zip(wanted, found, strict=True))
