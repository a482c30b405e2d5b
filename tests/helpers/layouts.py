"""Published layouts at full size, written out here on their own: cards, tensor names and shapes, and files that hold a
header and no data (sparse)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Shapes = dict[str, tuple[int, ...]]
FULL5, SLIDING5 = ["full_attention"] * 5, ["sliding_attention"] * 5
QWEN3_TAPS = [1, 9, 17, 25, 33]


def backbone(hidden: int, inner: int, layers: int, taps: int, heads: int = 32, kv: int = 8, head: int = 128) -> Shapes:
    """3 + 11 L tensors."""
    shapes: Shapes = {"fc.weight": (hidden, taps * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for i in range(layers):
        parts: Shapes = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (heads * head, hidden),
            "self_attn.k_proj": (kv * head, hidden),
            "self_attn.v_proj": (kv * head, hidden),
            "self_attn.o_proj": (hidden, heads * head),
            "self_attn.q_norm": (head,),
            "self_attn.k_norm": (head,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in parts.items()}
    return shapes


def card(
    hidden: int, inner: int, layers: int, vocab: int, target_layers: int, theta: float, kv: int = 8, **more: Any
) -> dict[str, Any]:
    """The Qwen3-shaped part of a card, with what libraries write around it."""
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "attention_bias": False, "attention_dropout": 0.0,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "bos_token_id": 151643, "eos_token_id": 151645,
        "dtype": "bfloat16", "hidden_act": "silu", "initializer_range": 0.02, "max_window_layers": layers, "use_cache": True,
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": 32,
        "num_key_value_heads": kv, "head_dim": 128, "rms_norm_eps": 1e-6, "vocab_size": vocab, "rope_theta": theta,
        "rope_scaling": None, "num_target_layers": target_layers, "tie_word_embeddings": False,
        "max_position_embeddings": 40960, **more,
    }  # fmt: skip


def dflash_part(mask: int, taps: list[int], **more: Any) -> dict[str, Any]:
    return {"mask_token_id": mask, "target_layer_ids": taps, **more}


def published() -> dict[str, tuple[dict[str, Any], Shapes, str]]:
    """name -> (card, shapes, method) of every layout that must load."""
    eight = card(4096, 12288, 5, 151936, 36, 1e6, block_size=16)
    bones = backbone(4096, 12288, 5, 5)
    qwen3 = dflash_part(151669, QWEN3_TAPS)
    layouts: dict[str, tuple[dict[str, Any], Shapes, str]] = {
        "Qwen3-8B-DFlash-b16": (eight | {"dflash_config": qwen3}, bones, "dflash"),
        "Qwen3-4B-DFlash-b16": (
            card(2560, 9728, 5, 151936, 36, 1e6, block_size=16, dflash_config=qwen3),
            backbone(2560, 9728, 5, 5),
            "dflash",
        ),
        "Qwen3.5-4B-DFlash": (
            card(2560, 9728, 5, 248320, 32, 1e7, dflash_config=dflash_part(248070, [1, 8, 15, 22, 29], block_size=16)),
            backbone(2560, 9728, 5, 5),
            "dflash",
        ),
        "Qwen3.5-35B-A3B-DFlash": (  # eight layers, five taps
            card(2048, 6144, 8, 248320, 40, 1e7, 4, block_size=16, dflash_config=dflash_part(248070, [1, 10, 19, 28, 37])),
            backbone(2048, 6144, 8, 5, kv=4),
            "dflash",
        ),
        "Qwen3.6-27B-DFlash": (
            card(
                5120, 17408, 5, 248320, 64, 1e7, block_size=16, sliding_window=2048, use_sliding_window=True,
                layer_types=[*SLIDING5[:4], "full_attention"], dflash_config=dflash_part(248070, [1, 16, 31, 46, 61]),
            ),
            backbone(5120, 17408, 5, 5),
            "dflash",
        ),
    }  # fmt: skip
    layouts |= _dflash2() | _heads(eight, bones, qwen3)
    return layouts


def _dflash2() -> dict[str, tuple[dict[str, Any], Shapes, str]]:
    layouts = {}
    for name, hidden, inner, vocab, target, theta, eps, mask, taps, more in (
        ("Qwen3.6-27B-DFlash2", 5120, 17408, 248320, 64, 1e7, 1e-6, 248070, [5, 19, 33, 47, 61], {"block_size": 8}),
        (
            "Muse-DFlash2", 6656, 19968, 202048, 52, 5e5, 1e-5, 201818, [1, 13, 25, 37, 49],
            {"block_size": 16, "output_multiplier": 0.19611613513818404, "final_logit_softcapping": 20.0},
        ),
    ):  # fmt: skip
        nested = dflash_part(mask, taps, conv_kernel_size=2, conv_group_size=16, selector_rank=256, selector_top_k=16, **more)
        data = card(hidden, inner, 5, vocab, target, theta, layer_types=SLIDING5, sliding_window=2048, is_causal=False)
        data |= {"architectures": ["DFlash2DraftModel"], "rms_norm_eps": eps, "dflash_config": nested}
        data["rope_parameters"] = {"rope_theta": data.pop("rope_theta"), "rope_type": "default"}
        del data["auto_map"], data["rope_scaling"]
        shapes = backbone(hidden, inner, 5, 5)
        for i in range(5):
            for part in ("attention_conv", "mlp_conv"):
                shapes[f"layers.{i}.{part}.base_kernel"] = (2, 2, hidden)
                shapes[f"layers.{i}.{part}.kernel_projection.weight"] = (4 * hidden // 16, hidden)
        shapes["candidate_selector.predecessor_codebook"] = shapes["candidate_selector.successor_codebook"] = (vocab, 256)
        shapes["candidate_selector.hidden_projection.weight"] = (256, hidden)
        layouts[name] = (data, shapes, "dflash2")
    return layouts


def _heads(eight: dict[str, Any], bones: Shapes, qwen3: dict[str, Any]) -> dict[str, tuple[dict[str, Any], Shapes, str]]:
    vocab, hidden = 151936, 4096
    domino = qwen3 | {
        "projector_type": "domino",
        "pure_draft_prefix_len": 1,
        "emb_dim": 256,
        "gru_hidden_dim": 1024,
        "shift_label": True,
    }
    gru: Shapes = {
        "prefix_gru.weight_ih_l0": (3072, hidden),
        "prefix_gru.weight_hh_l0": (3072, 1024),
        "embed_proj.0.weight": (256, 5120),
        "embed_proj.2.weight": (vocab, 256),
    }
    spark = {
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    markov: Shapes = {"markov_head.markov_w1.weight": (vocab, 256), "markov_head.markov_w2.weight": (vocab, 256)}
    confidence: Shapes = {"confidence_head.proj.weight": (1, hidden + 256), "confidence_head.proj.bias": (1,)}
    tables: Shapes = {"embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    deepspec = {key: value for key, value in eight.items() if key != "auto_map"}
    deepspec |= {"architectures": ["Qwen3DSparkModel"], "block_size": 7, "num_anchors": 512, **qwen3}
    forge = qwen3 | {"projector_type": "dspark", "attention_mode": "gqa", "confidence_head_alpha": 1.0}
    injection: Shapes = {f"injection.readouts.{i}.weight": (1024, hidden) for i in range(5)}
    injection |= {f"injection.writes.{i}.weight": (hidden, 512) for i in range(5)}
    injection |= {f"injection.{part}.weight": (512, 1024) for part in ("message", "receiver_gate", "predecessor_gate")}
    injection |= {"injection.bias": (512,), "transfer_codes": (vocab, 1024), "transfer_ready": ()}
    spine = {"architectures": ["DSpineDraftModel"], "is_causal": True, "dflash_config": qwen3}
    spine["dspine_config"] = {"transfer_rank": 1024, "message_size": 512, "top_k": 16}
    return {
        "Qwen3-8B-Domino": (eight | {"emb_dim": 256, "dflash_config": domino}, bones | gru, "domino"),
        "DSpark-block7 (DeepSpec)": (deepspec | spark, bones | markov | confidence | tables, "dspark"),
        "dflash_qwen3_8b_block7 (DeepSpec, rank 0)": (deepspec | {"markov_rank": 0}, bones | tables, "dspark"),
        "Qwen3-8B-DSpark (SpecForge)": (
            eight | {"architectures": ["DSparkDraftModel"], "dflash_config": forge | spark},
            bones | {f"logit_head.{name}": shape for name, shape in (markov | confidence).items()},
            "dspark",
        ),
        "DSpark, dspark_config beside dflash_config": (
            eight | {"architectures": ["DSparkDraftModel"], "dflash_config": forge, "dspark_config": spark},
            bones | markov | confidence,
            "dspark",
        ),
        "Qwen3-8B-DSpine (SpecForge)": (eight | spine, bones | injection, "dspine"),
    }


def write_header(path: Path, shapes: Shapes, dtypes: dict[str, str] | None = None) -> Path:
    """A safetensors file with this header and a hole for data: bfloat16 unless `dtypes` says otherwise."""
    sizes = {"BF16": 2, "F32": 4, "BOOL": 1, "I8": 1, "F8_E4M3": 1, "U32": 4, "I64": 8}
    header, offset = {}, 0
    for name, shape in shapes.items():
        dtype = (dtypes or {}).get(name, "BOOL" if name == "transfer_ready" else "BF16")
        size = sizes[dtype]
        for dimension in shape:
            size *= dimension
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + offset)
    return path


def write_layout(folder: Path, data: dict[str, Any], shapes: Shapes, dtypes: dict[str, str] | None = None) -> Path:
    """A checkpoint folder of this layout, without data."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(data))
    write_header(folder / "model.safetensors", shapes, dtypes)
    return folder
