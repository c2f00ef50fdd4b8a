"""Tiny seeded model files, written as other tools write them, and ways to damage them."""

import json
import struct

import gguf
import numpy as np
from safetensors.numpy import save_file

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 48,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def llama_tensors(*, head=False, seed=7):
    """Canonical names and float32 values of a model of `CONFIG`."""
    random = np.random.default_rng(seed)

    def draw(*shape):
        return random.standard_normal(shape, dtype=np.float32)

    tensors = {"model.embed_tokens.weight": draw(48, 64), "model.norm.weight": draw(64)}
    for layer in range(2):
        at = f"model.layers.{layer}"
        tensors |= {
            f"{at}.input_layernorm.weight": draw(64),
            f"{at}.post_attention_layernorm.weight": draw(64),
            f"{at}.self_attn.q_proj.weight": draw(64, 64),
            f"{at}.self_attn.k_proj.weight": draw(32, 64),
            f"{at}.self_attn.v_proj.weight": draw(32, 64),
            f"{at}.self_attn.o_proj.weight": draw(64, 64),
            f"{at}.mlp.gate_proj.weight": draw(96, 64),
            f"{at}.mlp.up_proj.weight": draw(96, 64),
            f"{at}.mlp.down_proj.weight": draw(64, 96),
        }
    if head:
        tensors["lm_head.weight"] = draw(48, 64)
    return tensors


def write_folder(folder, tensors=None, *, config=None, head=False):
    """A model folder: `config` replaces `CONFIG`'s fields, a value of None drops one."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {name: value for name, value in (CONFIG | (config or {})).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(llama_tensors(head=head) if tensors is None else tensors, folder / "model.safetensors")
    return folder


def write_shards(folder, tensors, shards=3):
    """`tensors` dealt over `shards` files with an index; returns the index's weight map."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder, weight_map):
    """The index of a sharded model."""
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def raw_safetensors(header, data=b"", *, length=None):
    """A file's bytes from any header (an object, or bytes as they are), with a truthful length unless given."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded + data


def permuted(matrix, heads):
    """Query or key rows in the order of the llama converter: neighbours instead of halves."""
    rows = matrix.shape[0]
    return matrix.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2).reshape(matrix.shape)


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    """The name that the converter gives to a canonical one."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{GGUF_NAMES[module]}.{kind}"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[rest]}.{kind}"


def write_gguf(path, tensors=None, *, kind="F32", config=None, architecture="llama", extra=None, drop=()):
    """A GGUF file as the llama converter writes it: matrices as `kind`, vectors as F32, query and key rows permuted.

    `extra(writer)` may add metadata or tensors; keys and tensors named in `drop` are left out.
    """
    fields = CONFIG | (config or {})
    writer = gguf.GGUFWriter(path, architecture)
    heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    numbers = {
        "block_count": fields["num_hidden_layers"],
        "context_length": fields["max_position_embeddings"],
        "embedding_length": fields["hidden_size"],
        "feed_forward_length": fields["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
    }
    for key, value in numbers.items():
        if key not in drop:
            writer.add_uint32(f"{architecture}.{key}", value)
    if "attention.layer_norm_rms_epsilon" not in drop:
        writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", fields["rms_norm_eps"])
    writer.add_float32(f"{architecture}.rope.freq_base", fields.get("rope_theta", 10000.0))
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    writer.add_uint32("tokenizer.ggml.bos_token_id", 1)
    for name, values in (llama_tensors() if tensors is None else tensors).items():
        stored = gguf_name(name)
        if stored in drop:
            continue
        if ".q_proj." in name or ".k_proj." in name:
            values = permuted(values, heads if ".q_proj." in name else kv_heads)
        type_ = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
        writer.add_tensor(stored, gguf.quants.quantize(values, type_), raw_dtype=type_)
    if extra is not None:
        extra(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
