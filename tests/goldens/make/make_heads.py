"""Golden arrays of the heads, by the code of three packages: sglang 0.5.23, specforge 0.2.0, speculators 0.9.0.

    python -m tests.goldens.make.make_heads WHEELS tests/goldens/heads

WHEELS holds the unpacked wheels in folders `sglang`, `specforge`, `speculators`. Needs torch; no GPU, no model.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from tests.goldens.make.borrow import borrow

V, H, R, M, K, B = 23, 12, 5, 6, 4, 2  # vocabulary, hidden, rank, proposals, candidates, batch
Arrays = dict[str, torch.Tensor]


def randomised(module: nn.Module, seed: int) -> nn.Module:
    """Every parameter normal, so that none can be left out unseen."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.6)
    return module


def state(prefix: str, module: nn.Module) -> Arrays:
    return {f"{prefix}/{name}": tensor.detach().clone() for name, tensor in module.state_dict().items()}


def markov(wheels: Path, out: Arrays) -> None:
    """Bias of each kind along given tokens: sglang step by step, specforge and speculators over the block."""
    kinds = {"vanilla": "VanillaMarkov", "gated": "GatedMarkovHead", "rnn": "RNNHead"}
    served = borrow(
        wheels / "sglang/sglang/srt/models/dspark.py", "BaseDSparkMarkovHead", *kinds.values(), "DSparkConfidenceHead",
        VocabShard=object, expect=lambda *a: None, _CONFIDENCE=None,
    )  # fmt: skip
    twins = {"vanilla": "VanillaMarkovHead", "gated": "GatedMarkovHead", "rnn": "RNNMarkovHead"}
    trained = borrow(wheels / "specforge/specforge/modeling/draft/dspark.py", *twins.values(), "_sample")
    other = borrow(wheels / "speculators/speculators/models/dspark/model_definitions.py", "MarkovHead", "ConfidenceHead")
    hidden, tokens = out["hidden"], out["previous"].long()
    for seed, (kind, name) in enumerate(kinds.items()):
        sizes = {"vocab_size": V, "markov_rank": R} | ({} if kind == "vanilla" else {"hidden_size": H})
        head = randomised(served[name](**sizes), seed)
        memory, steps = head.init_state(hidden), []
        for t in range(M):
            bias, memory = head.step_bias(tokens[:, t], hidden_states=hidden[:, t], state=memory)
            steps.append(bias)
        out[f"markov_{kind}/bias_sglang"] = torch.stack(steps, 1)
        out |= state(f"markov_{kind}", head)
        twin = trained[twins[kind]](**sizes)
        twin.load_state_dict(head.state_dict())
        zero = torch.zeros(B, M, V)
        out[f"markov_{kind}/bias_specforge"] = twin.apply_block_logits(zero, token_ids=tokens, hidden_states=hidden)
        greedy, corrected = twin.sample_block_tokens(out["base"], first_prev_token_ids=tokens[:, 0], hidden_states=hidden)
        out[f"markov_{kind}/greedy_specforge"], out[f"markov_{kind}/corrected_specforge"] = greedy, corrected
        twin = other["MarkovHead"](verifier_vocab_size=V, draft_vocab_size=V, markov_rank=R, hidden_size=H, head_type=kind)
        twin.load_state_dict(head.state_dict())
        out[f"markov_{kind}/bias_speculators"] = twin.block_bias(prev_token_ids=tokens, hidden_states=hidden)
        if kind == "rnn":
            sure = randomised(served["DSparkConfidenceHead"](hidden_size=H, markov_rank=R), 9)
            drafts = torch.cat([tokens[:, 1:], tokens[:, :1]], dim=1)
            out["confidence/sglang"], _ = sure.predict(
                hidden.reshape(-1, H), anchor_tokens=tokens[:, 0], draft_tokens=drafts, markov_head=head
            )
            out |= state("confidence", sure)


def domino(wheels: Path, out: Arrays) -> None:
    """sglang's greedy rollout, both row meanings, whole vocabulary as the pool."""
    space = borrow(wheels / "sglang/sglang/srt/speculative/domino_utils.py", "_domino_gru_cell", "domino_greedy_rollout")
    gru = randomised(nn.GRU(H, 7, batch_first=True, bias=False), 3)
    up = randomised(nn.Sequential(nn.Linear(H + 7, 6, bias=False), nn.SiLU(), nn.Linear(6, V, bias=False)), 4)
    table, head = nn.Embedding(V, H), torch.randn(V, H, generator=torch.Generator().manual_seed(6))
    randomised(table, 5)
    out |= (
        state("domino/gru", gru)
        | state("domino/embed_proj", up)
        | {"domino/embed": table.weight.detach(), "domino/lm_head": head}
    )
    rows = torch.randn(B, M + 1, H, generator=torch.Generator().manual_seed(8))
    out["domino/rows"] = rows
    for shift in (True, False):
        out[f"domino/tokens_{'shift' if shift else 'own'}"] = space["domino_greedy_rollout"](
            draft_hidden=rows, bonus_tokens=out["previous"][:, 0].long(), target_embedding=table, lm_head_weight=head,
            prefix_gru=gru, embed_proj=up, vocab_size=V, shift_label=shift, candidate_pool_size=0, in_cuda_graph=False,
        )  # fmt: skip


def dflash2(wheels: Path, out: Arrays) -> None:
    """sglang's lattice and sampled walk, speculators' selector and convolution over packed blocks."""
    space = borrow(
        wheels / "sglang/sglang/srt/models/dflash.py", "CandidateSelector", "_score_edges", "_follow_maps",
        _flashinfer_top_k=object(), logger=None,
    )  # fmt: skip
    used = ("zeros", "cat", "einsum", "softmax", "where", "stack", "Tensor")
    unmarked = SimpleNamespace(mark_static=lambda *a: None)
    space["torch"] = SimpleNamespace(**{name: getattr(torch, name) for name in used}, _dynamo=unmarked)
    selector = randomised(space["CandidateSelector"](hidden_size=H, vocab_size=V, state_rank=R, top_k=K), 11)
    unary, ids = out["base"].topk(K, dim=-1)
    anchor = out["previous"][:, 0].long()
    lattice = selector.build_lattice(
        candidate_ids=ids, unary_logits=unary, hidden_states=out["hidden"], anchor_token_ids=anchor
    )
    uniforms = torch.rand(B, M, generator=torch.Generator().manual_seed(12))
    cold = torch.tensor([False] * B)
    tokens, q = selector.sample_path(
        candidate_ids=ids, scores=lattice, uniforms=uniforms, temperatures=torch.full((B,), 0.7), greedy_mask=cold
    )
    greedy, _ = selector.sample_path(
        candidate_ids=ids, scores=lattice, uniforms=uniforms, temperatures=torch.ones(B), greedy_mask=~cold
    )
    out |= {"selector/unary": unary, "selector/candidates": ids, "selector/lattice": lattice, "selector/uniforms": uniforms}
    out |= {"selector/tokens": tokens, "selector/q": q, "selector/greedy": greedy} | state("selector", selector)
    space = borrow(
        wheels / "speculators/speculators/models/dflash2/model_definitions.py",
        "grouped_dynamic_conv", "GroupedDynamicCausalConv", "CandidateSelector",
    )  # fmt: skip
    other = space["CandidateSelector"](vocab_size=V, hidden_size=H, rank=R, top_k=K)
    other.load_state_dict(selector.state_dict())
    chosen, scores = other.select(out["base"], out["hidden"], out["previous"].long())
    out["selector/candidates_speculators"], out["selector/scores_speculators"] = chosen, scores
    for taps in (1, 2, 3):
        conv = randomised(space["GroupedDynamicCausalConv"](H, block_size=M, kernel_size=taps, group_size=4), 13 + taps)
        packed = out["hidden"].reshape(1, B * M, H)  # two blocks side by side: neither may see the other
        prepared, kernel = conv.prepare(packed)
        out[f"conv_{taps}/prepared"] = prepared.view(B, M, H)
        out[f"conv_{taps}/finished"] = conv.finish(packed.flip(-1), kernel).view(B, M, H)
        out |= state(f"conv_{taps}", conv)


def masks(wheels: Path, out: Arrays) -> None:
    """Block rows [6] against 12 context tokens and the block's keys, one block behind an anchor at 9; windows 3 and 8."""
    from torch.nn.attention.flex_attention import or_masks

    forge = borrow(wheels / "specforge/specforge/algorithms/common/dflash_family_model.py", "create_dflash_sdpa_mask")
    other = borrow(
        wheels / "speculators/speculators/models/dflash/attention.py", "create_anchor_block_mask_mod", or_masks=or_masks
    )
    anchor, zero, length, block = torch.tensor([[9]]), torch.tensor(0), 12, 6
    rows, keys = torch.arange(block)[:, None], torch.arange(length + block)[None, :]
    for window in (None, 3, 8):
        made = forge["create_dflash_sdpa_mask"](anchor, torch.ones(1, 1, dtype=torch.bool), length, block, "cpu", window)
        out[f"mask/specforge_{window}"] = made[0, 0]
        for whole in (False, True):
            mod, _, _ = other["create_anchor_block_mask_mod"](
                torch.zeros(length, dtype=torch.long), length, anchor[0], block, window, whole
            )
            out[f"mask/speculators_{window}_{whole}"] = mod(zero, zero, rows, keys)


def main() -> None:
    wheels, folder = Path(sys.argv[1]), Path(sys.argv[2])
    generator = torch.Generator().manual_seed(20)
    out: Arrays = {
        "hidden": torch.randn(B, M, H, generator=generator),
        "base": torch.randn(B, M, V, generator=generator) * 2,
        "previous": torch.randint(0, V, (B, M), generator=generator, dtype=torch.int32),
    }
    with torch.no_grad():
        for part in (markov, domino, dflash2, masks):
            part(wheels, out)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {name: t.int().numpy() if t.dtype is torch.int64 else t.numpy() for name, t in out.items()}
    np.savez_compressed(folder / "io.npz", **arrays)
    print(f"{folder / 'io.npz'}: {len(arrays)} arrays, {(folder / 'io.npz').stat().st_size} bytes")


if __name__ == "__main__":
    main()
