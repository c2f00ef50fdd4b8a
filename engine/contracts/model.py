"""What the engine tells about a resident model: identity, shape, device, and what the text layer needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.contracts.adapters import AdapterInfo
    from engine.contracts.composition import Composition
    from engine.contracts.graph import GraphDeclaration, GraphDescriptor, GraphGeometry
    from engine.contracts.options import OptionDefaults


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeInfo:
    """The machinery in use. `blas` names the library behind CPU matrix products ("" where it plays no part).

    `blas_optimized` is False when CPU products run on the slow bundled fallback; `remedy` then says what to install.
    """

    device: str
    device_name: str
    mlx_version: str
    blas: str = ""
    blas_optimized: bool = True
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """One resident model. `name` is what callers ask for; `fingerprint` identifies the weights' bytes."""

    name: str
    fingerprint: str
    model_type: str
    descriptor: GraphDescriptor
    declaration: GraphDeclaration
    geometry: GraphGeometry
    composition: Composition
    runtime: RuntimeInfo
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    option_defaults: OptionDefaults
    weights_bytes: int
    parameters: int
    stored_quantization: str
    has_chat_template: bool
    load_seconds: float
    adapters: tuple[AdapterInfo, ...] = ()
