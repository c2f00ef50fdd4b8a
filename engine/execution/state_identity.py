"""What has to be equal for a state that was kept by one process to serve another. Touches no array."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from engine.contracts.durability import DurableIdentity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.contracts.model import ModelInfo
    from engine.contracts.option_groups import AdapterSelection

STATE_REVISION: Final = 2
"""To be raised whenever a graph or a cache of this build computes or lays out a state in another way."""


def state_identity(info: ModelInfo) -> str:
    """Everything that must be equal for a state written by one process to serve another: weights, code, arithmetic."""
    composition = info.composition
    return json.dumps(
        {
            "weights": info.fingerprint,
            "model_type": info.model_type,
            "graph": asdict(info.descriptor),
            "geometry": asdict(info.geometry),
            "kv": repr(composition.kv),
            "paged_kv": None if composition.paged_kv is None else asdict(composition.paged_kv),
            "compute_dtype": composition.compute_dtype,
            "row_tile_tokens": composition.row_tile_tokens,
            "library_arithmetic": composition.library_arithmetic,
            "host_kernels": composition.computes_on_host,
            "device": [info.runtime.device, info.runtime.device_name],
            "blas": info.runtime.blas,
            "versions": [info.runtime.mlx_version, STATE_REVISION],
        },
        sort_keys=True,
    )


def durable_identity(info: ModelInfo, tokenizer: str, adapters: Sequence[AdapterSelection]) -> DurableIdentity:
    """What a durable generation with these adapters is tied to; `tokenizer` is the digest of the tokenizer."""
    return DurableIdentity(
        model=info.model_type,
        weights=info.fingerprint,
        tokenizer=tokenizer,
        kv_storage=info.composition.kv_store_key,
        adapters=adapter_namespace(info, adapters),
        arithmetic=hashlib.sha256(state_identity(info).encode("utf-8")).hexdigest(),
    )


def adapter_namespace(info: ModelInfo, adapters: Sequence[AdapterSelection]) -> str:
    """The adapters of a row, in order, with their revisions and scales: another file under the same id is another."""
    revisions = {adapter.id: adapter.revision for adapter in info.adapters}
    return json.dumps([[one.id, revisions.get(one.id), one.scale] for one in adapters])
