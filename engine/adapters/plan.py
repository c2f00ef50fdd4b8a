"""An adapter held against a model, from headers alone: every pair fits its projection, or nothing is mounted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.artifacts.consistency import listed
from engine.contracts.errors import MismatchedArtifactError

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from engine.adapters.files import AdapterFiles, StoredPair
    from engine.contracts.adapters import AdapterTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPair:
    """A pair that fits: `is_transposed` where A is stored as [r, in] and B as [out, r].

    `permuted_head_dim` is the size of a head where the model holds the projection's rows as converters to GGUF permute
    them, so that rotation pairs neighbours; 0 where they are in their own order.
    """

    stored: StoredPair
    rank: int
    scale: float
    is_transposed: bool
    permuted_head_dim: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MountPlan:
    """What a mount will do: pairs to apply, and names of tensors whose modules take no adapters."""

    files: AdapterFiles
    pairs: tuple[PlannedPair, ...]
    skipped: tuple[str, ...]


def plan_mount(
    files: AdapterFiles,
    targets: Mapping[str, AdapterTarget],
    stored: Container[str],
    *,
    permuted_head_dim: int = 0,
) -> MountPlan:
    """Fit `files` to the projections `targets` of a model whose tensors are `stored`.

    A pair of a module that the model has, and that takes no adapters, is skipped. `permuted_head_dim` is for its
    queries and keys, see `PlannedPair`.

    Raises:
        MismatchedArtifactError: a pair is of no module of the model, or does not fit it, or none is left to apply;
            every bad one is named, up to twelve.
    """
    planned, skipped, bad = [], [], []
    for pair in files.pairs:
        target = targets.get(pair.module)
        if target is not None:
            is_permuted = pair.module.endswith((".q_proj", ".k_proj"))
            fitted = _fitted(files, pair, target, permuted_head_dim if is_permuted else 0)
            if isinstance(fitted, str):
                bad.append(fitted)
            else:
                planned.append(fitted)
        elif f"{pair.module}.weight" in stored:
            skipped += [pair.a.name, pair.b.name]
        else:
            bad.append(f"{pair.module} (the model has no such module that takes adapters)")
    if bad:
        raise MismatchedArtifactError(files.weights.name, f"does not fit the model: {listed(bad)}")
    if not planned:
        raise MismatchedArtifactError(
            files.weights.name, f"changes no projection of the model; skipped: {listed(skipped)}"
        )
    return MountPlan(files=files, pairs=tuple(planned), skipped=tuple(skipped))


def _fitted(files: AdapterFiles, pair: StoredPair, target: AdapterTarget, permuted_head_dim: int) -> PlannedPair | str:
    """The pair as it is applied, or what is wrong with it."""
    a, b = pair.a.shape, pair.b.shape
    shapes = f"{pair.module} ({list(a)} and {list(b)}"
    if len(a) != 2 or len(b) != 2:
        return f"{shapes}; matrices are needed)"
    fits = {
        False: a[0] == target.in_features and b[1] == target.out_features and a[1] == b[0],
        True: a[1] == target.in_features and b[0] == target.out_features and a[0] == b[1],
    }
    is_transposed = pair.is_peft if fits[pair.is_peft] else not pair.is_peft
    rank = a[0] if is_transposed else a[1]
    if not fits[is_transposed] or rank == 0:
        return f"{shapes}; the projection takes {target.in_features} to {target.out_features})"
    if files.rule.rank not in (None, rank):
        return f"{pair.module} (rank {rank}; the configuration states {files.rule.rank})"
    return PlannedPair(
        stored=pair,
        rank=rank,
        scale=files.rule.of_rank(rank),
        is_transposed=is_transposed,
        permuted_head_dim=permuted_head_dim,
    )
