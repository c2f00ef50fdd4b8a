"""Writes the demo model once as a Hugging Face folder in float32, so that every contestant multiplies the same numbers.

Run as a process of its own: `python -m benchmarks.serving.export MODEL FOLDER STATE`. The folder names an end token
that the model never draws, which makes the peers generate to the limit as we do, at no cost to them.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.execution.resident import EngineSettings, find_files
from engine.execution.text_model import open_text_model
from engine.runtime.prepare import prepare_runtime
from engine.runtime.settings import RuntimeSettings

if TYPE_CHECKING:
    from engine.artifacts.artifact import Artifact

NEVER_DRAWN = "<reponame>"


def main(model: str, folder: Path, state: Path) -> None:
    """Write `folder`, whole or not at all."""
    files = find_files(EngineSettings(model=model, state_dir=state))
    half_done = folder.with_suffix(".part")
    shutil.rmtree(half_done, ignore_errors=True)
    half_done.mkdir(parents=True)
    pipeline = open_text_model(files.artifact).tokenizer._pipeline  # noqa: SLF001 - the tokenizer has no other way out to a file
    pipeline.save(str(half_done / "tokenizer.json"))
    end_token_id = pipeline.token_to_id(NEVER_DRAWN)
    if end_token_id is None:
        raise SystemExit(f"the model has no token {NEVER_DRAWN} to stand for an end that never comes")
    _write(half_done / "config.json", config_of(files.artifact, end_token_id))
    _write(half_done / "tokenizer_config.json", tokenizer_config_of(files.artifact))
    prepare_runtime(RuntimeSettings(cache_directory=state / "cache"))
    save_weights(files.artifact, half_done / "model.safetensors")
    half_done.rename(folder)


def config_of(artifact: Artifact, end_token_id: int) -> dict[str, Any]:
    """The configuration in the terms of the peers."""
    config = artifact.config
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": config.model_type,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "rope_theta": config.layer_ropes[0].theta,
        "rope_traditional": config.layer_ropes[0].traditional,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": "float32",
        "bos_token_id": config.bos_token_id,
        "eos_token_id": end_token_id,
    }


def tokenizer_config_of(artifact: Artifact) -> dict[str, Any]:
    """What the peers need to open tokenizer.json."""
    template = artifact.metadata.get("tokenizer.chat_template")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": NEVER_DRAWN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": artifact.config.context_length,
        **({"chat_template": template} if isinstance(template, str) else {}),
    }


def save_weights(artifact: Artifact, file: Path) -> None:
    """All tensors, dense, in float32."""
    import mlx.core as mx

    from engine.artifacts.weights import WeightStore, dense

    store = WeightStore(artifact)
    names = [name for name in artifact.tensors if not name.endswith((".scales", ".biases"))]
    tensors = {name: dense(store.take(name)) for name in names}
    mx.eval(tensors)
    mx.save_safetensors(str(file), tensors, metadata={"format": "mlx"})


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
