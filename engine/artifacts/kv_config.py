"""`kv_config.json` beside a model: how each layer's keys and values are best quantized. Absent for most models.

A list of objects with `layer_idx`, `bits` and `group_size`; layers that it does not name stay plain.
Source: reference, denoising-and-models §6.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.artifacts.fields import CONFIG_LIMIT_BYTES, Fields, parse_list
from engine.artifacts.model_files import is_named, read_file
from engine.contracts.errors import CorruptArtifactError
from engine.contracts.kv_scheme import AFFINE_BITS, AFFINE_GROUP_SIZES, DEFAULT_GROUP_SIZE, AffineLayer

if TYPE_CHECKING:
    from pathlib import Path

KV_CONFIG_FILE = "kv_config.json"


def read_kv_config(model: Path) -> tuple[AffineLayer, ...] | None:
    """The layers that the files of `model`, a folder or a file in one, want quantized; None when they say nothing.

    Raises:
        CorruptArtifactError: the file cannot be understood.
    """
    path = (model if model.is_dir() else model.parent) / KV_CONFIG_FILE
    if not is_named(path):
        return None
    layers = [
        _layer(index, entry) for index, entry in enumerate(parse_list(path.name, read_file(path, CONFIG_LIMIT_BYTES)))
    ]
    if len({layer.layer for layer in layers}) != len(layers):
        raise CorruptArtifactError(KV_CONFIG_FILE, "names a layer twice")
    return tuple(layers)


def _layer(index: int, entry: object) -> AffineLayer:
    if not isinstance(entry, dict):
        raise CorruptArtifactError(KV_CONFIG_FILE, f"entry {index} must be an object")
    fields = Fields(KV_CONFIG_FILE, entry, f"[{index}].")
    bits, group_size = fields.count("bits"), fields.count("group_size", DEFAULT_GROUP_SIZE)
    if bits not in AFFINE_BITS:
        raise fields.bad("bits", f"must be one of {AFFINE_BITS}")
    if group_size not in AFFINE_GROUP_SIZES:
        raise fields.bad("group_size", f"must be one of {AFFINE_GROUP_SIZES}")
    layer = fields.raw("layer_idx")
    if not isinstance(layer, int) or isinstance(layer, bool) or layer < 0:
        raise fields.bad("layer_idx", "must be a whole number, 0 at least")
    return AffineLayer(layer=layer, bits=bits, group_size=group_size)
