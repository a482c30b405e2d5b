"""What a calibration times on static rounds: whole rounds of each length, Stage 0, and one more distinct expert.

On CUDA every function is captured and its replays are timed with events; on the CPU the same steps run one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from dspine.common.experts import routed_experts
from dspine_cuda.graphs import capture
from dspine_cuda.static.hybrid import StaticHybrid
from dspine_cuda.static.round import StaticRound

WARM = 3  # replays before the first that counts


@torch.inference_mode()
def seconds_of(function: Callable[[], Any], device: torch.device, repetitions: int) -> list[float]:
    """Seconds of each of `repetitions` runs of `function`. Every slot of its arena must be idle."""
    if device.type != "cuda":
        return [_clocked(function) for _ in range(WARM + repetitions)][WARM:]
    with torch.cuda.device(device):
        graph = capture(function, device, torch.cuda.graph_pool_handle())
        found = []
        for _ in range(WARM + repetitions):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(1e-3 * begin.elapsed_time(end))
    return found[WARM:]


def _clocked(function: Callable[[], Any]) -> float:
    started = perf_counter()
    function()
    return perf_counter() - started


@dataclass(frozen=True)
class ExpertBlocks:
    """The routed experts of all layers for a block whose tokens share their experts (`few`) and for one that hits as many as it
    can (`many`); more: the distinct (layer, expert) pairs between the two."""

    few: Callable[[], None]
    many: Callable[[], None]
    more: int


def expert_blocks(round_: StaticRound) -> ExpertBlocks | None:
    """Blocks of the arena's width; None where the target has no experts."""
    target = round_.target
    if not isinstance(target, StaticHybrid) or not target.experts:
        return None
    stacks = list(target.experts.values())
    gate_up = stacks[0][0]
    count, experts, size = round_.rows, gate_up.shape[0], gate_up.shape[2]
    k = next(layer.mlp.top_k for layer in target.target.layers if layer.index in target.experts)
    x = torch.randn((count, size), generator=torch.Generator().manual_seed(0)).to(gate_up.device, gate_up.dtype)
    spread = (torch.arange(count * k, device=x.device) % experts).view(count, k).to(torch.int32)
    shared = spread[:1].expand(count, k).contiguous()
    weights = torch.full((count, k), 1.0 / k, device=x.device)

    def run(picks: torch.Tensor) -> None:
        for up, down in stacks:
            routed_experts(x, picks, weights, up, down)

    more = len(stacks) * (min(count * k, experts) - k)
    return ExpertBlocks(lambda: run(shared), lambda: run(spread), more) if more > 0 else None


def timed_rounds(loop: Any, lengths: Iterator[int]) -> Iterator[tuple[int, float]]:
    """(w, seconds on the device) of the drafted rounds of a `StaticLoop`, w from `lengths`, one in flight at a time; rounds
    that the budget or the end cut are left out. Not from launch to report: in a text two rounds are in flight, and the host's
    part would make every length look alike."""
    loop.depth = 1
    while loop.reading_prompt:
        loop.step()
    while loop.finish_reason is None and loop.drafter is not None:
        w = loop.mode = next(lengths)
        left = loop.round_limit()
        loop.step()
        if loop.finish_reason is None and left >= w:
            yield w, loop.round_seconds
