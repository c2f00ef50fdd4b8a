"""Static ranges of every option, checked on construction and named by their schema path."""

import dataclasses
import math

import pytest

from engine.contracts import options
from engine.contracts.errors import InvalidRequestError
from engine.contracts.hlg import HlgEotf, HlgOetf, HlgParametric, HlgPipeline, HlgShaper
from engine.contracts.option_groups import AdapterSelection, DenoisingOptions, SpeculationOptions
from engine.contracts.options import GenerateOptions

GROUPS = {
    "denoising": (DenoisingOptions, {}),
    "speculation": (SpeculationOptions, {}),
    "adapters[0]": (AdapterSelection, {"id": "a"}),
    **{f"hlg.{curve.MODE}": (curve, {}) for curve in (HlgParametric, HlgOetf, HlgEotf, HlgPipeline, HlgShaper)},
}
RANGES = [
    *((name, limits, name) for name, limits in options._RANGES.items()),
    *((f"{group}.{name}", limits, name) for group, (kind, _) in GROUPS.items() for name, limits in kind.RANGES.items()),
]


def given(path, value):
    """The one option at `path`, with its group."""
    group, _, name = path.rpartition(".")
    if not group:
        return {name: value}
    kind, needed = GROUPS[group]
    built = kind(**needed, **{name: value})
    field = group.split(".")[0].removesuffix("[0]")
    return {field: (built,) if field == "adapters" else built}


def violations(**values):
    with pytest.raises(InvalidRequestError) as caught:
        GenerateOptions(**values)
    return [violation.field for violation in caught.value.violations]


def beyond(bound, step):
    """The number a step away, or the next one where a step is too small to count."""
    return bound + step if bound + step != bound else math.nextafter(bound, math.copysign(math.inf, step))


def outside(limits):
    """Numbers that are no finite number of the range, on both sides where there are sides."""
    integral = isinstance(limits.low, int)
    step = 1 if integral else 1e-9
    found = [] if integral else [math.nan, math.inf, -math.inf]
    if math.isfinite(limits.low):
        found.append(limits.low if limits.above else beyond(limits.low, -step))
    if math.isfinite(limits.high):
        found.append(beyond(limits.high, step))
    return found


@pytest.mark.parametrize(("path", "limits", "name"), RANGES, ids=[path for path, _, _ in RANGES])
def test_every_number_outside_its_range_is_refused_by_name(path, limits, name):
    assert len(outside(limits)) >= 2
    for value in outside(limits):
        assert violations(**given(path, value)) == [f"options.{path}"]


@pytest.mark.parametrize("scale", [1e300, -1e300])
def test_a_scale_of_an_adapter_that_is_infinite_on_the_device_is_refused_by_name(scale):
    selection = AdapterSelection(id="a", scale=scale)
    assert violations(adapters=(selection,)) == ["options.adapters[0].scale"]


def test_every_number_has_a_range():
    numbers = {
        field.name
        for kind in (GenerateOptions, *(kind for kind, _ in GROUPS.values()))
        for field in dataclasses.fields(kind)
        if field.type.split(" |")[0] in {"int", "float"}
    }
    assert len(numbers) > 40
    assert {name for _, _, name in RANGES} == numbers


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.0),
        ("temperature", 1e-45),
        ("temperature", 1e300),
        ("top_p", 0.0),
        ("top_p", 1.0),
        ("top_k", 2**32 - 1),
        ("seed", 0),
        ("seed", 2**63),
        ("seed", 2**64 - 1),
        ("max_tokens", 2**31),
        ("presence_penalty", -3.0),
        ("repetition_penalty", 5e-324),
        ("xtc_threshold", 0.5),
        ("top_logprobs", 20),
    ],
)
def test_the_edges_of_each_range_are_accepted(name, value):
    assert getattr(GenerateOptions(**{name: value}), name) == value


def test_every_bad_field_is_named_at_once():
    assert violations(temperature=math.nan, top_p=2.0, max_tokens=0) == [
        "options.max_tokens",
        "options.temperature",
        "options.top_p",
    ]


@pytest.mark.parametrize(
    ("stops", "field"),
    [
        (("",), "options.stop_sequences[0]"),
        (("x", ""), "options.stop_sequences[1]"),
        (("x" * 100_000,), "options.stop_sequences[0]"),
        (tuple(f"stop {i}" for i in range(1000)), "options.stop_sequences"),
    ],
)
def test_stop_sequences_are_bounded_and_never_empty(stops, field):
    assert violations(stop_sequences=stops) == [field]


@pytest.mark.parametrize("bias", [math.nan, math.inf, -math.inf])
def test_a_bias_that_is_not_finite_is_refused_with_its_position(bias):
    assert violations(logit_bias=((1, 1.0), (5, bias))) == ["options.logit_bias[1].bias"]
