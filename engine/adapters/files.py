"""The files of an adapter, from headers alone: the halves of its pairs by module, and its identity.

A pair is A and B of x·A·B. mlx-lm stores `lora_a` [in, r] and `lora_b` [r, out]; PEFT `lora_A` [r, in] and `lora_B`
[out, r]. Source: reference, autoregressive §8.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from engine.adapters.config import ScaleRule, read_scale_rule
from engine.artifacts.consistency import listed
from engine.artifacts.model_files import is_named, naming_folder, open_file
from engine.artifacts.safetensors import read_header
from engine.contracts.adapters import ID_RULE, is_adapter_id
from engine.contracts.errors import (
    ConfigurationError,
    CorruptArtifactError,
    MissingArtifactError,
    UnsupportedArtifactError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from engine.artifacts.tensor_header import TensorHeader

WEIGHT_FILES: Final = ("adapters.safetensors", "adapter_model.safetensors")
SETTING: Final = "adapters"

_HALF: Final = re.compile(r"(?P<module>.+)\.lora_(?:embedding_)?(?P<half>[abAB])(?:\.(?!weight$)\w+)?(?:\.weight)?")
_DORA: Final = re.compile(r".+\.(lora_magnitude_vector(\..+)?|m)")
_PREFIXES: Final = ("base_model.model.", "language_model.")
_VALUES: Final = frozenset({"F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPair:
    """Both halves of one module's pair as they are stored; `is_peft` says in whose spelling."""

    module: str
    a: TensorHeader
    b: TensorHeader
    is_peft: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFiles:
    """One adapter on disk: sound in itself, not yet held against a model."""

    id: str
    weights: Path
    rule: ScaleRule
    pairs: tuple[StoredPair, ...]
    revision: str

    @property
    def file_bytes(self) -> int:
        """Size of the file of weights."""
        return self.weights.stat().st_size


def open_adapters(folders: Sequence[tuple[str, Path]]) -> tuple[AdapterFiles, ...]:
    """Open each adapter folder under its id; no tensor is read.

    Raises:
        ConfigurationError: an id is no id, or is there twice.
        ArtifactError: see `open_adapter`.
    """
    seen: set[str] = set()
    for adapter_id, _ in folders:
        if not is_adapter_id(adapter_id):
            raise ConfigurationError(SETTING, f"{adapter_id!r}: {ID_RULE}")
        if adapter_id in seen:
            raise ConfigurationError(SETTING, f"{adapter_id!r} is given twice")
        seen.add(adapter_id)
    return tuple(open_adapter(adapter_id, folder.absolute()) for adapter_id, folder in folders)


def open_adapter(adapter_id: str, folder: Path) -> AdapterFiles:
    """Open the adapter in `folder`.

    Raises:
        ArtifactError: nothing is there, a file is damaged, half a pair is missing, or it is no LoRA that we read.
    """
    with naming_folder(folder):
        if not folder.is_dir():
            raise MissingArtifactError(folder.name, "is no folder of an adapter")
        rule = read_scale_rule(folder)
        name = next((name for name in WEIGHT_FILES if is_named(folder / name)), None)
        if name is None:
            raise MissingArtifactError(folder.name, f"holds no weights of an adapter ({' or '.join(WEIGHT_FILES)})")
        weights = folder / name
        pairs = _pairs(name, read_header(weights))
        return AdapterFiles(id=adapter_id, weights=weights, rule=rule, pairs=pairs, revision=_revision(weights, rule))


def canonical_module(name: str) -> str:
    """The published path of module `name`, which tuners write with prefixes of their own."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    name = name.replace("model.language_model.", "model.", 1) if name.startswith("model.language_model.") else name
    return f"model.{name}" if name.startswith("layers.") else name


def _pairs(file: str, tensors: Mapping[str, TensorHeader]) -> tuple[StoredPair, ...]:
    halves: dict[str, dict[str, TensorHeader]] = {}
    for name, header in tensors.items():
        if _DORA.fullmatch(name):
            raise UnsupportedArtifactError(file, f"{name} belongs to DoRA, which is not read")
        match = _HALF.fullmatch(name)
        if match is None:
            raise UnsupportedArtifactError(file, f"{name} is no half of a LoRA pair")
        if header.dtype not in _VALUES:
            raise UnsupportedArtifactError(file, f"{name} holds {header.dtype}; {', '.join(sorted(_VALUES))} are read")
        pair = halves.setdefault(canonical_module(match["module"]), {})
        if match["half"].lower() in (half.lower() for half in pair):
            raise CorruptArtifactError(file, f"{name} is there twice, under another prefix or spelling")
        pair[match["half"]] = header
    single = [f"{module}.lora_{'b' if half.lower() == 'a' else 'a'}" for module, pair in sorted(halves.items())
              if len(pair) == 1 for half in pair]  # fmt: skip
    if single:
        raise MissingArtifactError(file, f"has half a pair: missing are {listed(single)}")
    if not halves:
        raise MissingArtifactError(file, "holds no LoRA pair")
    return tuple(
        StoredPair(
            module=module,
            a=next(header for half, header in pair.items() if half in "aA"),
            b=next(header for half, header in pair.items() if half in "bB"),
            is_peft="A" in pair,
        )
        for module, pair in sorted(halves.items())
    )


def _revision(weights: Path, rule: ScaleRule) -> str:
    digest = hashlib.sha256(json.dumps(asdict(rule), sort_keys=True).encode("ascii"))
    with open_file(weights) as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
