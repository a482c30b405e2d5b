"""Torch modules of DFlash2, Domino and DSpark heads, named as in the checkpoints; the maths is `common.draft_heads`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspine.common.configs import DrafterConfig
from dspine.common.draft_heads import DominoWeights, MarkovWeights, SelectorWeights, conv_kernels, grouped_conv
from dspine.common.proposing import DraftParts


class GroupedConv(nn.Module):
    """DFlash2's pair of dynamic convolutions around one sublayer; a new one is the identity."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        assert config.conv is not None
        self.taps, hidden = config.conv.kernel_size, config.hidden_size
        groups = hidden // config.conv.group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, self.taps, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * self.taps * groups, bias=False)
        if not self.base_kernel.is_meta:
            with torch.no_grad():
                self.base_kernel[:, 0] = 1.0
                self.kernel_projection.weight.zero_()

    def prepare(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Normed input [..., R, H] -> (what the sublayer gets, the kernel for its output)."""
        first, second = conv_kernels(x, self.kernel_projection, self.taps)
        return grouped_conv(x, first, self.base_kernel[0]), second

    def finish(self, x: Tensor, kernel: Tensor) -> Tensor:
        """Sublayer output [..., R, H] before the residual."""
        return grouped_conv(x, kernel, self.base_kernel[1])


class CandidateSelector(nn.Module):
    """DFlash2's factors A and B, and W of the hidden state."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        assert config.selector is not None
        rank = config.selector.rank
        self.predecessor_codebook = nn.Parameter(torch.zeros(config.vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(config.vocab_size, rank))
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)

    def weights(self) -> SelectorWeights:
        """As the core takes them."""
        return SelectorWeights(
            predecessor=lambda ids: F.embedding(ids, self.predecessor_codebook),
            successor=lambda ids: F.embedding(ids, self.successor_codebook),
            hidden=self.hidden_projection,
        )


class PrefixGRU(nn.Module):
    """Domino's recurrent cell, under the names `torch.nn.GRU` gives its tensors."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        assert config.domino is not None
        size = config.domino.gru_hidden_dim
        self.weight_ih_l0 = nn.Parameter(torch.zeros(3 * size, config.hidden_size))
        self.weight_hh_l0 = nn.Parameter(torch.zeros(3 * size, size))


def embed_projection(config: DrafterConfig) -> nn.Sequential:
    """Domino's low-rank logit correction E2 silu(E0 x)."""
    assert config.domino is not None
    inner = config.domino.emb_dim
    first = nn.Linear(config.hidden_size + config.domino.gru_hidden_dim, inner, bias=False)
    return nn.Sequential(first, nn.SiLU(), nn.Linear(inner, config.vocab_size, bias=False))


class MarkovHead(nn.Module):
    """DSpark's W1, W2 and, in the gated and recurrent forms, their mixing layer."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        assert config.dspark is not None
        rank, hidden, self.kind = config.dspark.markov_rank, config.hidden_size, config.dspark.markov_head_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def weights(self) -> MarkovWeights:
        """As the core takes them."""
        mix = {"vanilla": None, "gated": "gate_proj", "rnn": "joint_proj"}[self.kind]
        return MarkovWeights(self.kind, self.markov_w1, self.markov_w2, None if mix is None else getattr(self, mix))


class ConfidenceHead(nn.Module):
    """DSpark's estimate of each draft's acceptance."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        assert config.dspark is not None
        extra = config.dspark.markov_rank if config.dspark.confidence_with_markov else 0
        self.proj = nn.Linear(config.hidden_size + extra, 1)


def add_heads(model: nn.Module, config: DrafterConfig) -> None:
    """Give a `DrafterModel` the modules of its kind, under the checkpoint's names."""
    model.candidate_selector = CandidateSelector(config) if config.selector is not None else None
    model.prefix_gru = PrefixGRU(config) if config.domino is not None else None
    model.embed_proj = embed_projection(config) if config.domino is not None else None
    spark = config.dspark
    model.markov_head = MarkovHead(config) if spark is not None and spark.markov_rank else None
    model.confidence_head = ConfidenceHead(config) if spark is not None and spark.confidence else None


def draft_parts(model: Any, target: Any) -> DraftParts:
    """The heads of a loaded model as callables; Domino's GRU reads the target's embedding."""
    domino = None
    if model.prefix_gru is not None:
        gru, up = model.prefix_gru, model.embed_proj
        domino = DominoWeights(
            input=lambda x: F.linear(x, gru.weight_ih_l0),
            state=lambda s: F.linear(s, gru.weight_hh_l0),
            down=up[0],
            up=up[2],
            embed=lambda ids: target.embed(ids[:, None])[:, 0],
        )
    return DraftParts(
        selector=None if model.candidate_selector is None else model.candidate_selector.weights(),
        domino=domino,
        markov=None if model.markov_head is None else model.markov_head.weights(),
        confidence=None if model.confidence_head is None else model.confidence_head.proj,
    )
