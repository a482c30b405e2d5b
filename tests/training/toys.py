"""A tiny Llama-shaped target with random weights, tiny data shards and a tiny config for the trainer's tests."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

VOCAB, HIDDEN, LAYERS = 96, 32, 4
CARD = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_target(folder: Path, seed: int = 0) -> Path:
    """A Hugging Face folder of the toy target."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 0.25) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    weights = {
        "model.embed_tokens.weight": normal(VOCAB, HIDDEN, scale=1.0),
        "model.norm.weight": 1 + normal(HIDDEN, scale=0.1),
    }
    for i in range(LAYERS):
        stem = f"model.layers.{i}."
        weights |= {
            stem + "input_layernorm.weight": 1 + normal(HIDDEN, scale=0.1),
            stem + "post_attention_layernorm.weight": 1 + normal(HIDDEN, scale=0.1),
            stem + "self_attn.q_proj.weight": normal(32, HIDDEN),
            stem + "self_attn.k_proj.weight": normal(16, HIDDEN),
            stem + "self_attn.v_proj.weight": normal(16, HIDDEN),
            stem + "self_attn.o_proj.weight": normal(HIDDEN, 32),
            stem + "mlp.gate_proj.weight": normal(48, HIDDEN),
            stem + "mlp.up_proj.weight": normal(48, HIDDEN),
            stem + "mlp.down_proj.weight": normal(HIDDEN, 48),
        }
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CARD))
    return folder


def write_shards(folder: Path, conversations: int = 40, seed: int = 1) -> Path:
    """Two npz shards whose answers follow a fixed successor table (so that there is something to learn)."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    successor = np.random.default_rng(7).permutation(VOCAB)
    for shard in range(2):
        tokens, lengths, prompts = [], [], []
        for _ in range(conversations):
            prompt, answer = int(rng.integers(2, 6)), int(rng.integers(8, 24))
            row = [int(rng.integers(3, VOCAB - 1))]
            while len(row) < prompt + answer:
                row.append(int(successor[row[-1]]))
            tokens += row
            lengths.append(len(row))
            prompts.append(prompt)
        np.savez(
            folder / f"toy_{shard}.npz",
            tokens=np.array(tokens, dtype=np.uint16),
            lengths=np.array(lengths, dtype=np.int32),
            prompt_lengths=np.array(prompts, dtype=np.int32),
            greedy=np.ones(conversations, dtype=bool),
        )
    return folder


TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {{ m['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> Path:
    """A tokenizer of VOCAB words: a few marks (the end of a turn is id 2) and w7 .. w95."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<s>", "<|im_end|>", "<|im_start|>", "user", "assistant", "system"]
    words += [f"w{i}" for i in range(len(words), VOCAB)]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.add_special_tokens([AddedToken(word, special=True) for word in words[:4]])
    raw.save(str(folder / "tokenizer.json"))
    card = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    card |= {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(card))
    return folder


def train_settings(tmp_path: Path, **sections: dict) -> dict:
    """A run of a few steps on the toy target, as the YAML file would hold it; sections are merged in."""
    settings: dict = {
        "model": {
            "target": str(tmp_path / "target"), "num_layers": 2, "block_size": 5, "taps": [1, 3], "mask_token_id": VOCAB - 1,
            "transfer_rank": 12, "message_size": 8, "top_k": 4,
        },
        "data": {"path": str(tmp_path / "data"), "sequence_length": 48, "rows_per_step": 4, "num_anchors": 8, "holdout": 8},
        "loss": {"chunk_rows": 50, "alignment_scale": 0.2},
        "schedule": {"max_steps": 30, "replacement_layers": 1},
        "optimizer": {"learning_rate": 3e-3},
        "run": {
            "output_dir": str(tmp_path / "run"), "device": "cpu", "dtype": "float32", "log_every": 5, "checkpoint_every": 10,
            "eval_every": 0, "eval_conversations": 8, "eval_stride": 4, "progress": False,
        },
    }  # fmt: skip
    for name, values in sections.items():
        settings[name] = settings.get(name, {}) | values
    return settings
