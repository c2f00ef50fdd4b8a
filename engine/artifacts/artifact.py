"""One model on disk: its configuration, the account of its weights, and which text files came with it.

Opening reads headers and JSON alone, checks them against each other, and never imports mlx. Tensors are read by
`weights`, the tokenizer and the chat template by their own modules.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from engine.artifacts import foreign_config, gguf, gguf_model, huggingface, safetensors
from engine.artifacts.consistency import HEAD_WEIGHT, check_weights, logical_shape
from engine.artifacts.fields import read_object
from engine.artifacts.generation_files import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from engine.artifacts.model_files import is_named, naming_folder
from engine.artifacts.recurrent_fields import has_original_convolutions
from engine.contracts.errors import CorruptArtifactError, MissingArtifactError, UnsupportedArtifactError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from engine.artifacts.config import ModelConfig
    from engine.artifacts.gguf import MetadataValue
    from engine.artifacts.tensor_header import TensorHeader

PACKED_DTYPES: Final = frozenset({"U8", "I8", "U32", "I32", "F8_E4M3"})
"""What holds packed values where a model is quantized."""
_SCALES: Final = (".scales", ".biases", "_scales", "_scale", "_scale_inv", ".qzeros", ".g_idx")
_DENSE_DTYPES: Final = frozenset({"F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFiles:
    """The files of a model's text side; None where the folder lacks one, and for every one of a GGUF file."""

    tokenizer: Path | None = None
    tokenizer_config: Path | None = None
    special_tokens_map: Path | None = None
    chat_template: Path | None = None
    generation_config: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A model that can be loaded.

    `graph` says whose graph serves it. `tensors` are keyed by canonical (Hugging Face) name, or as they are stored
    where that is mlx-lm's. `metadata` is a GGUF file's own, by key, with arrays as tuples, and empty for a folder; a
    GGUF file has its tokenizer and chat template there.
    """

    path: Path
    kind: Literal["huggingface", "gguf"]
    config: ModelConfig
    tensors: Mapping[str, TensorHeader]
    graph: Literal["native", "mlx-lm"] = "native"
    text_files: TextFiles = field(default_factory=TextFiles)
    metadata: Mapping[str, MetadataValue] = field(default_factory=dict)

    @property
    def weight_files(self) -> tuple[Path, ...]:
        """The files that hold tensors, sorted by name."""
        return tuple(sorted({tensor.file for tensor in self.tensors.values()}))

    @property
    def weights_bytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def parameters(self) -> int:
        """Values in all stored tensors, a quantized matrix counted unpacked."""
        return sum(self.values(name) for name in self.tensors if not self.is_scale(name))

    def is_scale(self, name: str) -> bool:
        """Whether tensor `name` only helps to unpack another one."""
        return name.endswith((".scales", ".biases") if self.graph == "native" else _SCALES)

    def values(self, name: str) -> int:
        """Values of tensor `name`, unpacked; where mlx-lm reads the file, its module may have another name there."""
        header, quantization = self.tensors[name], self.config.quantization
        if self.graph == "native":
            return math.prod(logical_shape(self.config, self.tensors, name))
        module = name.removesuffix(".weight")
        scheme = None if quantization is None else quantization.scheme(module)
        scales = self.tensors.get(f"{module}.scales")
        if scheme is None or header.dtype not in PACKED_DTYPES:
            return math.prod(header.shape)
        if scales is not None:
            return math.prod(scales.shape) * scheme.group_size
        return header.nbytes * 8 // scheme.bits

    @property
    def stored_quantization(self) -> str:
        """How most bytes are quantized, such as "Q4_1" or "affine 4-bit, groups of 64"; "" when dense."""
        if self.kind == "huggingface":
            return "" if self.config.quantization is None else str(self.config.quantization.default)
        sizes: Counter[str] = Counter()
        for tensor in self.tensors.values():
            sizes[tensor.dtype] += 0 if tensor.dtype in _DENSE_DTYPES else tensor.nbytes
        name, nbytes = sizes.most_common(1)[0]
        return name if nbytes else ""


def open_artifact(path: Path) -> Artifact:
    """Open the model folder or `.gguf` file at `path`.

    Raises:
        ArtifactError: nothing is there, it is of another kind, or its parts are missing, damaged or contradictory.
    """
    path = path.absolute()
    try:
        if path.is_dir():
            with naming_folder(path):
                return _open_folder(path)
        if not path.exists():
            raise MissingArtifactError(path.name, "no such file or folder")
    except OSError as error:
        raise CorruptArtifactError(path.name, f"cannot be read ({error.strerror})") from None
    if path.suffix != ".gguf" or not path.is_file():
        raise UnsupportedArtifactError(path.name, "is neither a model folder nor a .gguf file")
    return _open_gguf(path)


def _open_folder(folder: Path) -> Artifact:
    if not is_named(folder / huggingface.CONFIG_FILE):
        raise MissingArtifactError(folder.name, _what_is_there_instead(folder))
    document = read_object(folder / huggingface.CONFIG_FILE)
    tensors = safetensors.read_folder(folder)
    own = foreign_config.has_own_graph(document)
    if own:
        sees = huggingface.sees_images(document, tensors)
        tensors = huggingface.canonical_tensors(document, tensors, sees=sees)
        config = huggingface.read_config(
            folder,
            document,
            head_is_stored=HEAD_WEIGHT in tensors,
            is_original=has_original_convolutions(tensors),
            sees=sees,
        )
        check_weights(folder.name, config, tensors)
    else:
        config = foreign_config.read_foreign_config(folder, document)
    return Artifact(
        path=folder,
        kind="huggingface",
        graph="native" if own else "mlx-lm",
        config=config,
        tensors=tensors,
        text_files=_text_files(folder),
    )


def _open_gguf(path: Path) -> Artifact:
    header = gguf.read_header(path)
    config = gguf_model.model_config(path, header)
    tensors = gguf_model.canonical_tensors(header)
    check_weights(path.name, config, tensors)
    return Artifact(path=path, kind="gguf", config=config, tensors=tensors, metadata=header.metadata)


def _text_files(folder: Path) -> TextFiles:
    def present(name: str) -> Path | None:
        return folder / name if is_named(folder / name) else None

    return TextFiles(
        tokenizer=present(TOKENIZER_FILE),
        tokenizer_config=present(TOKENIZER_CONFIG_FILE),
        special_tokens_map=present("special_tokens_map.json"),
        chat_template=present("chat_template.jinja"),
        generation_config=present(huggingface.GENERATION_CONFIG_FILE),
    )


def _what_is_there_instead(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    files = [name for name in names if name.endswith(".gguf")]
    if not names:
        return "is an empty folder"
    if files:
        return f"has no {huggingface.CONFIG_FILE}; to use a GGUF file, name it: {', '.join(files[:3])}"
    return f"has no {huggingface.CONFIG_FILE}"
