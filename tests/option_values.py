"""Values of every option, as a client can send them: those that are refused by name, and edges that are taken."""

import math

SOME_POINTS = [{"x_percent": 1, "y_percent": 2}, {"x_percent": 50, "y_percent": 50}]
NOT_FINITE = (math.nan, math.inf, -math.inf)
JUST_ABOVE_ONE = 1.0000001


def pair(**first):
    """Two points of which the first is changed."""
    return [SOME_POINTS[0] | first, SOME_POINTS[1]]


def hlg(mode, **values):
    return {"hlg": {mode: values}}


def single(name, *values, path=None):
    return [({name: value}, f"options.{path or name}") for value in values]


def in_group(group, name, *values):
    return [({group: {name: value}}, f"options.{group}.{name}") for value in values]


def in_curve(mode, name, *values):
    return [(hlg(mode, **{name: value}), f"options.hlg.{mode}.{name}") for value in values]


BAD = [
    *single("max_tokens", 0),
    *single("eos_token_ids", {"ids": [1] * 1025}, path="eos_token_ids.ids"),
    *single("stop_sequences", [""], path="stop_sequences[0]"),
    *single("stop_sequences", ["x", ""], path="stop_sequences[1]"),
    *single("stop_sequences", ["x" * 4097], ["x" * 100_000], path="stop_sequences[0]"),
    *single("stop_sequences", [f"stop {index}" for index in range(1000)], ["same"] * 65),
    *single("prefill_chunk_size", 0),
    *single("temperature", -1, -1e-45, *NOT_FINITE),
    *single("top_p", -1, -1e-45, JUST_ABOVE_ONE, *NOT_FINITE),
    *single("min_p", -1, -1e-45, JUST_ABOVE_ONE, *NOT_FINITE),
    *single("min_tokens_to_keep", 0),
    *single("xtc_probability", -1, -1e-45, JUST_ABOVE_ONE, *NOT_FINITE),
    *single("xtc_threshold", -1, -1e-45, 0.51, JUST_ABOVE_ONE, *NOT_FINITE),
    *single("xtc_special_tokens", [1] * 2049),
    *single("hlg", {}),
    *single("curve", SOME_POINTS[:1], [{"x_percent": i / 100, "y_percent": 1} for i in range(1025)]),
    *single("curve", pair(x_percent=-1), pair(x_percent=100.1), path="curve[0].x_percent"),
    *single("curve", *[pair(x_percent=value) for value in NOT_FINITE], path="curve[0].x_percent"),
    *single("curve", pair(y_percent=-1e-45), pair(y_percent=100.1), path="curve[0].y_percent"),
    *single("curve", *[pair(y_percent=value) for value in NOT_FINITE], path="curve[0].y_percent"),
    *single("curve", pair(x_percent=50), pair(x_percent=49.99999), path="curve[1].x_percent"),
    *single("curve", [{"x_percent": 0}, {"x_percent": 1e-10}], path="curve[1].x_percent"),
    ({"curve": SOME_POINTS, "hlg": {"oetf": {}}}, "options.hlg"),
    *in_curve("parametric", "gain", -1, 1001, *NOT_FINITE),
    *in_curve("parametric", "width", -1, 1001, *NOT_FINITE),
    *in_curve("parametric", "shoulder", -1, 1e-45, 1001, *NOT_FINITE),
    *in_curve("parametric", "toe", -1, 1e-45, 1001, *NOT_FINITE),
    *in_curve("parametric", "pivot", 9),
    *in_curve("parametric", "pivot_offset", -1001, 1001, *NOT_FINITE),
    *in_curve("eotf", "lw", -1, 0, 9.9, 10_001, *NOT_FINITE),
    *in_curve("pipeline", "max_brightness", -1, 0, 1e-45, 1001, *NOT_FINITE),
    *in_curve("pipeline", "lw", -1, 0, 10_001, *NOT_FINITE),
    *in_curve("shaper", "window", -1, 0, 1e-45, 1001, *NOT_FINITE),
    *in_curve("shaper", "lw", 0, 10_001, *NOT_FINITE),
    *in_curve("shaper", "x_m", -1, 0, JUST_ABOVE_ONE, *NOT_FINITE),
    *in_curve("shaper", "y_m", -1, 0, JUST_ABOVE_ONE, *NOT_FINITE),
    *in_curve("shaper", "x_floor", -1, 0.55, 0.9, JUST_ABOVE_ONE, *NOT_FINITE),
    *in_curve("shaper", "y_floor", -1, 0.51, JUST_ABOVE_ONE, *NOT_FINITE),
    *in_curve("shaper", "p", -1, 0, 1e-45, 1001, *NOT_FINITE),
    *in_curve("shaper", "s_m", -1, 0, 1001, *NOT_FINITE),
    *in_curve("shaper", "shoulder_a", -1, 0, 1001, *NOT_FINITE),
    *in_curve("shaper", "target_gap", -1, 0, 1001, *NOT_FINITE),
    *in_curve("shaper", "ref_gap", -1, 0, 1001, *NOT_FINITE),
    *in_curve("shaper", "max_brightness", -1, 0, 1001, *NOT_FINITE),
    *single("logit_bias", [{"token": 1}] * 65_537),
    *single("logit_bias", [{"token": 1}, {"token": 2}, {"token": 1}], path="logit_bias[2].token"),
    *single("logit_bias", *[[{"token": 1, "bias": value}] for value in NOT_FINITE], path="logit_bias[0].bias"),
    *single("repetition_penalty", 0, -0.0, -1, *NOT_FINITE),
    *single("presence_penalty", *NOT_FINITE),
    *single("frequency_penalty", *NOT_FINITE),
    *single("top_logprobs", 21, 2**31),
    *single("adapters", [{"id": "a"}] * 65),
    *single("adapters", [{}], [{"id": "x" * 257}], path="adapters[0].id"),
    *single("adapters", *[[{"id": "a", "scale": value}] for value in NOT_FINITE], path="adapters[0].scale"),
    *single("json_schema", ""),
    *single("regex", ""),
    *single("grammar", ""),
    *single("choice", {}, {"choices": ["x"] * 1025}, path="choice.choices"),
    *single("choice", {"choices": ["x", ""]}, {"choices": ["x", "y\x00"]}, path="choice.choices[1]"),
    *single("checkpoint_every_tokens", 0),
    *single("cache_session_id", "x" * 257),
    *in_group("cache", "salt", "x" * 257),
    *in_group("speculation", "source", "x" * 257),
    *single("fill", 9),
    *in_group("denoising", "max_denoising_steps", 0),
    *in_group("denoising", "min_canvas_length", 0),
    *in_group("denoising", "max_canvas_length", 0),
    ({"denoising": {"min_canvas_length": 9, "max_canvas_length": 8}}, "options.denoising.min_canvas_length"),
    *in_group("denoising", "sampler", 9),
    *in_group("denoising", "threshold", -1e-45, JUST_ABOVE_ONE, *NOT_FINITE),
    *in_group("denoising", "entropy_bound", -1e-45, *NOT_FINITE),
    *in_group("denoising", "t_min", 0, -1, 0.9, *NOT_FINITE),
    *in_group("denoising", "t_max", 0, -1, 0.3, *NOT_FINITE),
    *in_group("denoising", "confidence_threshold", -1e-45, *NOT_FINITE),
]
"""(options, path of the field that is refused)"""

EVERY_VALUE_IS_VALID = {
    "options.top_k",
    "options.seed",
    "options.repetition_context_size",
    "options.presence_context_size",
    "options.frequency_context_size",
    "options.logprobs",
    "options.json_object",
    "options.cache.bypass",
    "options.speculation.draft_tokens",
    "options.denoising.full_canvas",
    "options.denoising.stability_threshold",
    "options.hlg.oetf",
}

EDGES = [
    {"max_tokens": 1},
    {"max_tokens": 2**31},
    {"max_tokens": 2**32 - 1},
    {"eos_token_ids": {"ids": []}},
    {"stop_sequences": [" "]},
    {"stop_sequences": ["\n"]},
    {"stop_sequences": ["same"] * 64},
    {"stop_sequences": ["x" * 4096]},
    {"temperature": -0.0},
    {"temperature": 1e-45},
    {"temperature": 5e-324},
    {"temperature": 1e308},
    {"top_p": -0.0},
    {"top_p": 5e-324},
    {"top_p": 1},
    {"top_k": 2**32 - 1},
    {"min_p": 1e-45},
    {"min_tokens_to_keep": 2**32 - 1},
    {"xtc_threshold": 0.5, "xtc_probability": 1},
    {"xtc_threshold": -0.0},
    {"seed": 0},
    {"seed": 2**63 - 1},
    {"seed": 2**63},
    {"seed": 2**64 - 1},
    {"repetition_penalty": 5e-324},
    {"repetition_penalty": 1e308},
    {"repetition_context_size": 0},
    {"repetition_context_size": 2**32 - 1},
    {"presence_penalty": -1e308},
    {"frequency_penalty": -0.0},
    {"logit_bias": [{"token": 5, "bias": 1e30}]},
    {"logit_bias": [{"token": 5, "bias": -1e308}]},
    {"top_logprobs": 20},
    {"curve": [{"x_percent": -0.0, "y_percent": -0.0}, {"x_percent": 100, "y_percent": 100}]},
    hlg("parametric", gain=-0.0, width=-0.0, shoulder=-0.0, toe=0.001),
    hlg("shaper", x_floor=-0.0, y_floor=0),
    hlg("eotf", lw=10),
]
