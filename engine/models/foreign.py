"""Any architecture that mlx-lm implements, as a graph that is stepped row by row. Needs the extra `mlx-lm`.

The one module that imports mlx_lm, and only when such a model is loaded. mlx-lm reads the configuration, builds the
modules and packs quantized weights; which files it sees, how wide they are held and how rows are stepped is ours. It
returns logits at once, so these stand for the final hidden states. No code of a model's folder is ever run.
"""

from __future__ import annotations

import resource
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from engine.contracts.errors import UnsupportedArtifactError
from engine.models import declarations
from engine.models.foreign_state import ForeignState, ForeignStates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from engine.artifacts.artifact import Artifact
    from engine.contracts.composition import Composition
    from engine.contracts.graph import PackedSegment
    from engine.runtime.policy import ComputeDtype, LayoutPolicy

_LONGEST_REASON_CHARACTERS = 300
_MORE_QUANTIZATION = ("hf_quant_config.json",)
"""Where one method of quantization is stated beside the configuration."""


class ForeignGraph:
    """A resident model of mlx-lm. What it says of itself: see `engine.contracts.graph.ResidentGraph`."""

    def __init__(
        self, artifact: Artifact, model: Any, make_prompt_cache: Callable[[Any], Any], composition: Composition
    ):
        """Take a loaded model."""
        self.model_type = artifact.config.model_type
        self.graph_capabilities = declarations.FOREIGN
        self.geometry = artifact.config.geometry()
        self.composition = composition
        self.eos_token_ids = artifact.config.eos_token_ids
        self.weights_bytes = sum(array.nbytes for array in _parameters(model))
        self.experts: None = None
        self.adapters: None = None  # mlx-lm's modules are its own
        self._model = model
        self.states = ForeignStates(lambda: make_prompt_cache(self._model))

    def hidden(self, tokens: mx.array, segments: Sequence[PackedSegment]) -> mx.array:
        """Logits [1, T, V] of the one segment whose `tokens` [1, T] these are; those not used are never computed."""
        (segment,) = segments
        state = cast("ForeignState", segment.caches[0])
        logits: mx.array = self._model(tokens, cache=state.caches)
        state.advance(segment.length)
        return logits

    def project(self, hidden: mx.array) -> mx.array:
        """The logits that `hidden` already is."""
        return hidden

    def close(self) -> None:
        """Release the weights."""
        self._model = None


def load_foreign_graph(
    artifact: Artifact,
    layout: LayoutPolicy,
    composition: Composition,
    *,
    stored_dtype: ComputeDtype,
    before_each: Callable[[], None],
) -> ForeignGraph:
    """Build and load the model of `artifact` with mlx-lm.

    Weights of the stored dtype, and all of 16 bits, are held in the layout's; those that the file keeps wider stay as
    they are. Scales are widened before they unpack anything, so that no value is rounded to 16 bits on its way.

    Args:
        artifact: a folder whose configuration and headers have been checked.
        layout: how weights are held; quantized ones are unpacked if it says so.
        composition: facts of the run.
        stored_dtype: the dtype of most dense weights.
        before_each: may raise to end the load between two tensors.

    Raises:
        UnsupportedArtifactError: mlx-lm is not installed, does not know the architecture, or refuses the files.
    """
    with _descriptor_limit_kept():
        try:
            from mlx_lm import utils
            from mlx_lm.models.cache import make_prompt_cache
        except ImportError as error:
            raise UnsupportedArtifactError(artifact.path.name, f"mlx-lm cannot be imported: {_reason(error)}") from None
    model = _load(artifact, utils.load_model)
    held, narrow = getattr(mx, layout.compute_dtype), (mx.float16, mx.bfloat16, getattr(mx, stored_dtype))

    def hold(array: mx.array) -> mx.array:
        return array.astype(held) if array.dtype in narrow else array

    model.apply(hold)
    if layout.dequantize:
        model = utils.dequantize_model(model)
        model.apply(hold)
    for array in _parameters(model):
        before_each()
        mx.eval(array)
    return ForeignGraph(artifact, model, make_prompt_cache, composition)


def _load(artifact: Artifact, load_model: Callable[..., tuple[Any, Any]]) -> Any:
    """The model with its weights unread, from a view of the folder that holds what we have checked and no more."""
    with tempfile.TemporaryDirectory(prefix="mlx-stream-") as view:
        folder = Path(view)
        for name in ("config.json", *_MORE_QUANTIZATION):
            if (artifact.path / name).is_file():
                (folder / name).symlink_to(artifact.path / name)
        for index, file in enumerate(artifact.weight_files):
            (folder / f"model-{index:05}.safetensors").symlink_to(file)
        try:
            model, _ = load_model(folder, lazy=True, strict=True, trust_remote_code=False)
        except (Exception, SystemExit) as error:  # some of its modules end the process when a package is missing
            reason = _reason(error).replace(view, artifact.path.name)
            raise UnsupportedArtifactError(
                artifact.path.name, f"mlx-lm cannot load a {artifact.config.model_type} model from it: {reason}"
            ) from None
    return model


def _parameters(model: Any) -> list[mx.array]:
    return [cast("mx.array", array) for _, array in cast("list[tuple[str, Any]]", tree_flatten(model.parameters()))]


def _reason(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _LONGEST_REASON_CHARACTERS else f"{text[:_LONGEST_REASON_CHARACTERS]}..."


@contextmanager
def _descriptor_limit_kept() -> Iterator[None]:
    """mlx_lm.utils lowers the process's limit of open files for good when it is imported; a server needs its own."""
    lower, resource.setrlimit = resource.setrlimit, lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = lower
