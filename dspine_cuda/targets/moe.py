"""The MLP behind a layer's mixer: dense, or routed experts with a shared one.

A mixture of experts runs in two parts: `route` makes everything that every token needs (router, shared expert's input
products, the picks), `run` the experts. HybridSpec decides between the two how many tokens go on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dspine_cuda.targets.exact import make_exact_linear, rows_exact
from dspine_cuda.targets.hybrid_config import HybridConfig
from dspine_cuda.targets.hybrid_tensors import HybridTensors
from dspine_cuda.targets.layers import make_linear

_SMALL = 256  # (token, expert) pairs that are sorted in Python
_GATHERED = 1 << 26  # elements of expert weights that one gathered product may copy
_LOOPED = 4096  # pairs from which CUDA loops over the experts, with one read of the counts (prefill only)


@dataclass(frozen=True)
class Routed:
    """entry [N, E + ...]: router logits, then the shared expert's gate and input products; picks int64 [N, k], of equal
    probabilities the lower expert first; weights [N, k] in the model's dtype."""

    entry: Tensor
    picks: Tensor
    weights: Tensor


def pick_experts(probabilities: Tensor, k: int, inverted_ids: Tensor) -> Tensor:
    """The k largest of float32 `probabilities` [N, E], descending, of equal ones the lower id first: int64 [N, k].

    `inverted_ids` int64 [E] is E-1..0. `torch.topk` leaves ties open. The bits of a non-negative double are ordered like
    its value, and a float32 leaves 29 of them zero: the inverted id goes there, and no two keys are equal.
    """
    keys = (probabilities + 0.0).to(torch.float64).view(torch.int64).add_(inverted_ids)
    return torch.topk(keys, k, dim=-1).indices


class DenseMlp:
    """down(silu(gate(x)) * up(x))."""

    def __init__(
        self, config: HybridConfig, tensors: HybridTensors, layer: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        def read(name: str) -> Tensor:
            return tensors.read(f"model.layers.{layer}.mlp.{name}_proj.weight").to(dtype)

        self.gate_up = make_exact_linear(torch.cat([read("gate"), read("up")]).to(device))
        self.down = make_exact_linear(read("down").to(device))

    def run(self, x: Tensor) -> Tensor:
        """x [N, H] -> [N, H]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class SparseMlp:
    """Routed experts, and the shared expert where there is one."""

    def __init__(
        self, config: HybridConfig, tensors: HybridTensors, layer: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        moe = config.moe
        self.experts, self.top_k, self.normalised = moe.experts, moe.top_k, moe.normalised  # type: ignore[union-attr]
        self.shared = moe.shared_inner  # type: ignore[union-attr]
        self.dtype, self.device = dtype, device
        prefix = f"model.layers.{layer}.mlp."

        def read(name: str) -> Tensor:
            return tensors.read(f"{prefix}{name}.weight").to(dtype)

        entry = [read("gate")]
        if self.shared:
            entry += [read(f"shared_expert{name}") for name in ("_gate", ".gate_proj", ".up_proj")]
            self.shared_down = make_exact_linear(read("shared_expert.down_proj").to(device))
        self.entry = make_exact_linear(torch.cat(entry).to(device))
        self.inverted_ids = torch.arange(self.experts - 1, -1, -1, device=device)
        self.exact = rows_exact(dtype, device)
        gate_up, down = tensors.experts(layer, config, dtype)
        if device.type == "cpu":
            self._pack(gate_up, down)
        else:
            self.gate_up, self.down = gate_up.to(device), down.to(device)

    def _pack(self, gate_up: Tensor, down: Tensor) -> None:
        """CPU: one matrix an expert, in the form its product wants."""
        if self.exact:
            self.ups = gate_up.transpose(1, 2).contiguous().unbind(0)
            self.downs = down.transpose(1, 2).contiguous().unbind(0)
        else:
            self.ups = [make_linear(matrix.contiguous()) for matrix in gate_up.unbind(0)]
            self.downs = [make_linear(matrix.contiguous()) for matrix in down.unbind(0)]

    def reads_host(self, rows: int) -> bool:
        """Whether `run` of so many rows reads the device's counts: it cannot be captured then."""
        grouped = can_group(self.gate_up) and can_group(self.down)
        return not grouped and rows * self.top_k >= _LOOPED

    def route(self, x: Tensor) -> Routed:
        """x [N, H], normed. Softmax over all experts in float32, then the top k (normalised where the model does that)."""
        entry = self.entry(x)
        probabilities = torch.softmax(entry[:, : self.experts], dim=-1, dtype=torch.float32)
        picks = pick_experts(probabilities, self.top_k, self.inverted_ids)
        weights = probabilities.gather(1, picks)
        if self.normalised:
            weights = weights.div_(weights.sum(dim=-1, keepdim=True))
        return Routed(entry, picks, weights.to(self.dtype))

    def run(self, x: Tensor, routed: Routed) -> Tensor:
        """x [N, H] as `route` had it -> [N, H]: the weighted sum of the picked experts, plus the shared one."""
        if self.device.type == "cpu":
            each = self._on_cpu(x, routed.picks)
        else:
            each = self._on_cuda(x, routed.picks)
        out = each.mul_(routed.weights.unsqueeze(-1)).sum(dim=1)
        if self.shared:
            gate, up = routed.entry[:, self.experts + 1 :].chunk(2, dim=-1)
            amount = routed.entry[:, self.experts : self.experts + 1].sigmoid()
            out.addcmul_(self.shared_down(F.silu(gate) * up), amount)
        return out

    def _on_cpu(self, x: Tensor, picks: Tensor) -> Tensor:
        """Every expert that was hit, once, over its rows: [N, k, H]. Work grows with the distinct experts."""
        count, k = picks.shape
        if count == 1 and self.exact:
            return self._one_row(torch.cat((x, x)), picks[0].tolist())
        if picks.numel() <= _SMALL:
            rows, place, hits, sizes = _plan(picks.view(-1).tolist(), k, double=self.exact)
            gathered = x.index_select(0, torch.tensor(rows))
            order = torch.tensor(place)
        else:
            flat = picks.view(-1)
            by_expert = torch.argsort(flat, stable=True)
            counts = torch.bincount(flat, minlength=self.experts).tolist()
            hits = [i for i, n in enumerate(counts) if n]
            sizes = [counts[i] for i in hits]
            gathered, order = x.index_select(0, by_expert // k), torch.argsort(by_expert)
        inner = self._per_expert(gathered, self.ups, hits, sizes)
        gate, up = inner.chunk(2, dim=-1)
        outer = self._per_expert(F.silu(gate) * up, self.downs, hits, sizes)
        return outer.index_select(0, order).view(count, k, -1)

    def _one_row(self, x: Tensor, hits: list[int]) -> Tensor:
        """A plain step: nothing to sort or gather. x [2, H], the same row twice (see `exact`) -> [1, k, H]."""
        inner = torch.cat([x.mm(self.ups[e]) for e in hits])
        gate, up = inner.chunk(2, dim=-1)
        rows = (F.silu(gate) * up).split(2)
        return torch.stack([row.mm(self.downs[e]) for row, e in zip(rows, hits, strict=True)])[:, 0].unsqueeze(0)

    def _per_expert(self, x: Tensor, matrices: object, hits: list[int], sizes: list[int]) -> Tensor:
        """Rows of x, grouped by expert, through each expert's matrix."""
        parts = x.split(sizes)
        if not self.exact:
            return torch.cat([matrices[e](part) for e, part in zip(hits, parts, strict=True)])  # type: ignore[index]
        out = x.new_empty((x.shape[0], matrices[0].shape[1]))  # type: ignore[index]
        for e, part, place in zip(hits, parts, out.split(sizes), strict=True):
            torch.mm(part, matrices[e], out=place)  # type: ignore[index]
        return out

    def _on_cuda(self, x: Tensor, picks: Tensor) -> Tensor:
        """[N, k, H] without a host read: grouped products over rows sorted by expert, or gathered weights."""
        count, k = picks.shape
        flat = picks.reshape(-1)
        if can_group(self.gate_up) and can_group(self.down):
            order = torch.argsort(flat, stable=True)
            ends = torch.searchsorted(flat[order], torch.arange(self.experts, device=x.device), right=True).to(torch.int32)
            inner = torch._grouped_mm(x.index_select(0, order // k), self.gate_up.transpose(1, 2), offs=ends)
            gate, up = inner.chunk(2, dim=-1)
            outer = torch._grouped_mm(F.silu(gate) * up, self.down.transpose(1, 2), offs=ends)
            return outer.index_select(0, torch.argsort(order)).view(count, k, -1)
        if flat.numel() >= _LOOPED:
            return self._looped(x, flat, k).view(count, k, -1)
        tokens = torch.arange(flat.numel(), device=x.device) // k
        step = max(1, _GATHERED // self.gate_up[0].numel())
        pieces = []
        for experts, rows in zip(flat.split(step), tokens.split(step), strict=True):
            inner = torch.bmm(self.gate_up[experts], x[rows].unsqueeze(-1)).squeeze(-1)
            gate, up = inner.chunk(2, dim=-1)
            pieces.append(torch.bmm(self.down[experts], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1))
        return torch.cat(pieces).view(count, k, -1)

    def _looped(self, x: Tensor, flat: Tensor, k: int) -> Tensor:
        """Long prefill where grouped products are not available: one read of the counts."""
        order = torch.argsort(flat, stable=True)
        sizes = torch.bincount(flat, minlength=self.experts).tolist()
        outs = []
        for expert, rows in enumerate(x.index_select(0, order // k).split(sizes)):
            gate, up = F.linear(rows, self.gate_up[expert]).chunk(2, dim=-1)
            outs.append(F.linear(F.silu(gate) * up, self.down[expert]))
        return torch.cat(outs).index_select(0, torch.argsort(order))


def can_group(weight: Tensor) -> bool:
    """Whether torch's grouped product takes weights [E, out, in]: bfloat16 on compute capability 9, rows of whole 16 bytes."""
    if weight.dtype != torch.bfloat16 or not hasattr(torch, "_grouped_mm") or any(n % 8 for n in weight.shape[1:]):
        return False
    return torch.cuda.get_device_capability(weight.device)[0] == 9


def _plan(flat: list[int], k: int, *, double: bool) -> tuple[list[int], list[int], list[int], list[int]]:
    """Pairs (token i // k, expert flat[i]) grouped by expert: token of every grouped row, row of every pair, experts, and
    their row counts. `double`: an expert with one row gets it twice (see `exact`)."""
    rows: list[int] = []
    place = [0] * len(flat)
    hits: list[int] = []
    sizes: list[int] = []
    of_expert: dict[int, list[int]] = {}
    for pair, expert in enumerate(flat):
        of_expert.setdefault(expert, []).append(pair)
    for expert, pairs in of_expert.items():
        for pair in pairs:
            place[pair] = len(rows)
            rows.append(pair // k)
        if double and len(pairs) == 1:
            rows.append(rows[-1])
        hits.append(expert)
        sizes.append(max(len(pairs), 2) if double else len(pairs))
    return rows, place, hits, sizes
