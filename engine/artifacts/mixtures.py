"""Experts in a family's layers: what differs between families, what a configuration says, and the tensors' names.

A layer with experts has a router, and E gated feed-forwards of which each token uses a few. Their matrices are stored
one by one, or stacked over the experts; both forms are read. Imports no mlx.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from engine.contracts.errors import CorruptArtifactError

if TYPE_CHECKING:
    from collections.abc import Container

    from engine.artifacts.fields import Fields

MOST_EXPERTS = 4096
BESIDE_NORMS = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
"""Norms after a dense feed-forward that runs beside experts, before the experts, and after them."""

Weighing = Literal["shares", "scores"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureRecord:
    """What sets one family's experts apart.

    Attributes:
        module: where they stand in a layer; "" for the layer itself.
        router: the module of the router, in there.
        gate, up, down: what one expert's matrices are called when each is stored by itself.
        stacked: the module of matrices stacked over the experts, as MLX stores them.
        weighing: a softmax over all experts before the choice, or over the chosen ones after it.
        beside: whether a dense feed-forward runs beside the experts, each between norms of its own, and the router
            scales its input and the chosen ones' weights.
        scales_apart: whether such a router's scale is a product of its own and not a part of its norm, and the largest
            scores are found from the other end: that decides last bits alone.
        switch: the field that must be true for a model to have experts; "" where their number says so.
        count: the field that counts experts.
        chosen: the field that counts those that a token uses.
        inner: the field of one expert's inner size.
        normalises: whether a field may ask for weights that add up to one.
        shared: the module of an expert that every token uses besides, weighed by a gate of its own; "" without one.
    """

    module: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    stacked: str = "switch_mlp"
    weighing: Weighing = "shares"
    beside: bool = False
    scales_apart: bool = False
    switch: str = ""
    count: str = "num_experts"
    chosen: str = "num_experts_per_tok"
    inner: str = "moe_intermediate_size"
    normalises: bool = True
    shared: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The experts of one model. `layers` have them; every token uses `chosen` of `experts`, each `inner` values wide.

    `normalised`: the weights of a token's experts add up to one. `shared_inner` is the inner size of an expert that
    every token uses besides, 0 without one.
    """

    experts: int
    chosen: int
    inner: int
    normalised: bool
    layers: frozenset[int]
    shared_inner: int = 0


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """The stored tensors of one layer's experts: stacks that are joined to gate and up, and the stack of down.

    A stack is one tensor [E, out, in], or one tensor [out, in] for each expert.
    """

    gate_up: tuple[tuple[str, ...], ...]
    down: tuple[str, ...]
    form: Literal["single", "stacked", "fused"]

    def has_gate_or_up(self, stored: Container[str]) -> bool:
        """Whether any tensor of a gate or an up is `stored`; those that are not are then missing."""
        return any(name in stored for stack in self.gate_up for name in stack)


def parse_mixture(fields: Fields, record: MixtureRecord, *, layers: int) -> Mixture | None:
    """Read what `fields` say of experts; None for a model without any.

    Raises:
        MissingArtifactError, CorruptArtifactError: a size is absent or impossible.
    """
    sparse = _sparse_layers(fields, layers)
    switched_off = bool(record.switch) and not fields.flag(record.switch, default=False)
    if switched_off or fields.number(record.count, 0) == 0 or not sparse:
        return None
    experts, chosen = fields.count(record.count, most=MOST_EXPERTS), fields.count(record.chosen)
    if chosen > experts:
        raise CorruptArtifactError(fields.file, f"{record.chosen} {chosen} is more than all {experts} experts")
    return Mixture(
        experts=experts,
        chosen=chosen,
        inner=fields.count(record.inner),
        normalised=record.normalises and fields.flag("norm_topk_prob", default=False),
        layers=sparse,
        shared_inner=fields.count("shared_expert_intermediate_size") if record.shared else 0,
    )


def module_of(record: MixtureRecord, layer: str) -> str:
    """The module of the experts of `layer`, such as "model.layers.0.mlp"."""
    return f"{layer}.{record.module}" if record.module else layer


def expert_tensors(record: MixtureRecord, module: str, experts: int, stored: Container[str]) -> ExpertTensors:
    """The names of the experts' tensors in `module` of a layer, in the form in which they are `stored`."""
    together, whole = f"{module}.experts", f"{module}.{record.stacked}"
    gate, up, down = (
        tuple(f"{together}.{expert}.{name}.weight" for expert in range(experts))
        for name in (record.gate, record.up, record.down)
    )
    forms = (
        *(
            ExpertTensors(((f"{together}.gate_up_proj{ending}",),), (f"{together}.down_proj{ending}",), "fused")
            for ending in ("", ".weight")
        ),
        ExpertTensors(
            ((f"{whole}.gate_proj.weight",), (f"{whole}.up_proj.weight",)), (f"{whole}.down_proj.weight",), "stacked"
        ),
    )
    single = ExpertTensors((gate, up), down, "single")
    # Two forms may call the way back alike, so that gate and up decide where any of them is stored.
    decided = next((form for form in (*forms, single) if form.has_gate_or_up(stored)), None)
    return decided or next((form for form in forms if form.down[0] in stored), single)


def _sparse_layers(fields: Fields, layers: int) -> frozenset[int]:
    """Every n-th layer, but for those that are listed to be dense."""
    step, dense = fields.count("decoder_sparse_step", 1), fields.numbers("mlp_only_layers")
    return frozenset(layer for layer in range(layers) if (layer + 1) % step == 0 and layer not in dense)
