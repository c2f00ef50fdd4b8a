"""The numbers in the schema's comments are those that the contracts check: ranges, limits of length, defaults."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest

from engine.contracts import option_groups, options
from engine.contracts.curve_points import MAX_CURVE_POINTS, MIN_CURVE_POINTS
from engine.contracts.hlg import HlgEotf, HlgOetf, HlgParametric, HlgPipeline, HlgShaper
from engine.contracts.option_groups import UINT32_MAX, AdapterSelection, DenoisingOptions, SpeculationOptions
from engine.contracts.options import UINT64_MAX
from engine.contracts.ranges import Range
from engine.contracts.vision import MAX_IMAGE_PIXELS, MAX_IMAGE_SIDE_PIXELS, MAX_IMAGES, MAX_IMAGES_PIXELS

SCHEMA = Path(__file__).resolve().parents[2] / "proto" / "mlxstream" / "v1" / "options.proto"
CURVES = (HlgParametric, HlgOetf, HlgEotf, HlgPipeline, HlgShaper)
GROUPS: dict[str, Any] = {
    kind.__name__: kind for kind in (*CURVES, AdapterSelection, SpeculationOptions, DenoisingOptions)
}


def comments() -> dict[str, str]:
    """The comment above each field and each message, in one line, by `Message.field` and `Message`."""
    found, block, message = {}, [], ""
    for line in SCHEMA.read_text(encoding="utf-8").splitlines():
        stripped = line.strip()
        if stripped.startswith("//"):
            block.append(stripped.removeprefix("//").strip())
            continue
        if match := re.match(r"message (\w+)", stripped):
            message = match[1]
            found[message] = " ".join(block)
        elif match := re.match(r"[\w .<>]+ (\w+) = \d+;", stripped):
            found[f"{message}.{match[1]}"] = " ".join(block)
        block = []
    return found


COMMENTS = comments()


# Where the range is said in other words than its own numbers.
IN_OTHER_WORDS = {
    "GenerateOptions.seed": "The whole range is valid, 0 too.",
    "GenerateOptions.presence_context_size": "by the same rule",
    "GenerateOptions.frequency_context_size": "by the same rule",
    "HlgShaper.x_floor": "From 0 to 0.001 below `x_m`.",
    "HlgShaper.y_floor": "From 0 to `y_m`.",
    "DenoisingOptions.t_max": "At least `t_min`.",
    "AdapterSelection.scale": "Any number that float32 can hold",
}


def ranges() -> list[Any]:
    tables = {"GenerateOptions": options._RANGES, **{name: kind.RANGES for name, kind in GROUPS.items()}}
    paths = [(f"{message}.{field}", limits) for message, table in tables.items() for field, limits in table.items()]
    return [pytest.param(path, limits, id=path) for path, limits in paths]


def numbers_in(text: str) -> set[float]:
    return {float(number.replace(",", "")) for number in re.findall(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?", text)}


@pytest.mark.parametrize(("field", "limits"), ranges())
def test_the_bounds_of_a_range_are_stated(field: str, limits: Range) -> None:
    comment = COMMENTS[field]
    if field.startswith("HlgShaper") or field == "HlgPipeline.max_brightness":
        comment = comment.replace("Above 0.", "From 0.001 to 1000.")  # as the comment of HlgOptions says
    bounds = {bound for bound in (limits.low, limits.high) if math.isfinite(bound)} - {UINT32_MAX, UINT64_MAX}
    if field in IN_OTHER_WORDS:
        assert IN_OTHER_WORDS[field] in comment
    elif not bounds and limits.low != 0:
        assert "Any finite number" in comment
    else:
        assert bounds <= numbers_in(comment), comment


def test_what_above_zero_means_for_tone_curves_is_stated() -> None:
    assert "a number that must be above 0 is from 0.001 to 1000" in COMMENTS["HlgOptions"]


@pytest.mark.parametrize(
    ("field", "number"),
    [
        ("GenerateOptions.max_tokens", 512),
        ("GenerateOptions.repetition_context_size", options.PENALTY_WINDOW_TOKENS),
        ("GenerateOptions.presence_context_size", options.PENALTY_WINDOW_TOKENS),
        ("GenerateOptions.frequency_context_size", options.PENALTY_WINDOW_TOKENS),
        ("GenerateOptions.xtc_threshold", options.XTC_THRESHOLD),
        ("DenoisingOptions.t_min", DenoisingOptions.DEFAULT_T_MIN),
        ("DenoisingOptions.t_max", DenoisingOptions.DEFAULT_T_MAX),
        *(
            (f"{curve.__name__}.{one.name}", one.default)
            for curve in CURVES
            for one in dataclasses.fields(curve)
            if isinstance(one.default, float)
        ),
    ],
)
def test_a_default_is_stated(field: str, number: float) -> None:
    assert f"Default {number:g}." in COMMENTS[field]


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ("GenerateOptions.stop_sequences", f"At most {options.MAX_STOP_SEQUENCES}, each of 1 to"),
        ("GenerateOptions.stop_sequences", f"1 to {options.MAX_STOP_CHARACTERS} characters"),
        ("TokenIds.ids", f"at most {options.MAX_TOKEN_IDS:,}"),
        ("GenerateOptions.xtc_special_tokens", f"at most {options.MAX_PROTECTED_IDS:,}"),
        ("GenerateOptions.logit_bias", f"at most {options.MAX_LOGIT_BIASES:,} entries"),
        ("GenerateOptions.adapters", f"at most {options.MAX_ADAPTERS}"),
        ("GenerateOptions.curve", f"{MIN_CURVE_POINTS} to {MAX_CURVE_POINTS:,} points"),
        ("ChoiceConstraint.choices", f"1 to {option_groups.MAX_CHOICES:,}"),
        ("GenerateOptions.cache_session_id", f"At most {option_groups.MAX_LABEL_CHARACTERS} characters"),
        ("CacheOptions.salt", f"At most {option_groups.MAX_LABEL_CHARACTERS} characters"),
        ("SpeculationOptions.source", f"At most {option_groups.MAX_LABEL_CHARACTERS} characters"),
        ("AdapterSelection.id", f"1 to {option_groups.MAX_LABEL_CHARACTERS} characters"),
    ],
)
def test_a_limit_of_length_is_stated(field: str, told: str) -> None:
    assert told in COMMENTS[field]


def test_the_bounds_of_images_are_stated() -> None:
    text = SCHEMA.with_name("prompt.proto").read_text(encoding="utf-8")
    for told in (
        f"At most {MAX_IMAGE_PIXELS:,} pixels, and {MAX_IMAGE_SIDE_PIXELS:,}",
        f"at most {MAX_IMAGES} images in a request, with {MAX_IMAGES_PIXELS:,} pixels in all",
    ):
        assert told in text
