"""Factors and bounds that a configuration states: of embeddings, residuals, attention scores and logits."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

from engine.artifacts.config import Scaling

if TYPE_CHECKING:
    from engine.artifacts.family import Family
    from engine.artifacts.fields import Fields


def parse_scaling(fields: Fields, stated: Fields, family: Family) -> Scaling:
    """The factors of a model; a stated one counts in every family. `fields` are `stated` over the family's defaults."""
    scores = fields.positive("attention_multiplier") if "attention_multiplier" in fields else None
    if "query_pre_attn_scalar" in fields:
        scores = fields.positive("query_pre_attn_scalar") ** -0.5
    return Scaling(
        embeddings=fields.positive("embedding_multiplier", _embedding_scale(fields, family)),
        residuals=fields.positive("residual_multiplier", 1.0),
        scores=scores,
        score_softcap=_softcap(fields, stated, "attn_logit_softcapping"),
        logits=fields.positive("logits_scaling", 1.0),
        logit_softcap=_softcap(fields, stated, "final_logit_softcapping"),
    )


def _embedding_scale(fields: Fields, family: Family) -> float:
    root = math.sqrt(fields.count("hidden_size"))
    return {"one": 1.0, "root": root, "root_bfloat16": _rounded_to_bfloat16(root)}[family.embedding_scale]


def _rounded_to_bfloat16(value: float) -> float:
    """The nearest bfloat16, ties to even; `value` is finite and far from the largest."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", rounded))[0])


def _softcap(fields: Fields, stated: Fields, name: str) -> float:
    """A bound, 0 for none; of these fields a stated null counts, and means none."""
    return fields.positive(name) if name in fields and stated.raw(name, name) is not None else 0.0
