"""Gated DeltaNet at the shape of Qwen3.6-35B-A3B: verify, commit, both forms of both, and other people's kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError

from benchmarks.kernels.timing import Floors, Timing, replay
from dspine.common import gdn
from dspine.common.gdn import GdnFactors
from dspine.kernels_triton import gdn_commit, gdn_verify

LAYERS, KEY_HEADS, VALUE_HEADS, SIZE, WIDTH = 30, 16, 32, 128, 4
CHANNELS = 2 * KEY_HEADS * SIZE + VALUE_HEADS * SIZE
SETS = 3
STATE_BYTES = 4 * LAYERS * VALUE_HEADS * SIZE * SIZE


@dataclass
class Block:
    """Everything a round of all layers touches; arrays are stacked over layers."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor
    states: Tensor
    out: Tensor
    z: Tensor
    g: Tensor
    windows: Tensor
    inputs: Tensor
    m: Tensor

    @property
    def factors(self) -> GdnFactors:
        return GdnFactors(self.z, self.k, self.g)


def make_block(count: int, layers: int = LAYERS, seed: int = 0) -> Block:
    """Random inputs of batch 1 and `count` tokens, all of them committed."""
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    q, k = (normal(layers, 1, count, KEY_HEADS, SIZE, dtype=torch.float32) for _ in range(2))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    v = normal(layers, 1, count, VALUE_HEADS, SIZE)
    gates = (layers, 1, count, VALUE_HEADS)
    log_decay = -0.3 * torch.rand(gates, generator=generator, device="cuda")
    beta = torch.rand(gates, generator=generator, device="cuda")
    return Block(
        (q * SIZE**-0.5).to(torch.bfloat16), k.to(torch.bfloat16), v, log_decay, beta,
        normal(layers, 1, VALUE_HEADS, SIZE, SIZE, dtype=torch.float32), torch.empty_like(v),
        torch.empty(v.shape, device="cuda"), torch.empty(gates, device="cuda"),
        normal(layers, 1, WIDTH - 1, CHANNELS), normal(layers, 1, count, CHANNELS),
        torch.full((1,), count, dtype=torch.int32, device="cuda"),
    )  # fmt: skip


def verify(block: Block, parameters: gdn_verify.Launch | None = None, overlap: bool = False) -> None:
    """Every layer's launch. With `overlap` each fetches its state while the launch before it still works."""
    for i in range(block.q.shape[0]):
        gdn_verify.launch(
            block.q[i], block.k[i], block.v[i], block.log_decay[i], block.beta[i], block.states[i],
            block.out[i], block.z[i], block.g[i], parameters=parameters, overlap=overlap and i > 0,
        )  # fmt: skip


def commit(block: Block, parameters: gdn_commit.Launch | None = None) -> None:
    """The one launch of all layers."""
    gdn_commit.launch(block.states, block.factors, block.windows, block.inputs, block.m, parameters)


def deferred(block: Block, last: Block, parameters: gdn_verify.Launch | None = None, overlap: bool = False) -> None:
    """Every layer folds the factors of `last` first; no commit."""
    for i in range(block.q.shape[0]):
        gdn_verify.launch(
            block.q[i], block.k[i], block.v[i], block.log_decay[i], block.beta[i], block.states[i],
            block.out[i], block.z[i], block.g[i], None, GdnFactors(last.z[i], last.k[i], last.g[i]), block.m,
            parameters, overlap and i > 0,
        )  # fmt: skip


def _reference(block: Block) -> None:
    """The core's own code."""
    for i in range(block.q.shape[0]):
        _, factors = gdn.gdn_verify.reference(
            block.q[i], block.k[i], block.v[i], block.log_decay[i], block.beta[i], block.states[i]
        )
        block.z[i].copy_(factors.z)
        block.g[i].copy_(factors.g)
    states, windows = gdn.gdn_commit.reference(block.states, block.factors, block.windows, block.inputs, block.m)
    block.states.copy_(states)
    block.windows.copy_(windows)


def errors(count: int) -> dict[str, float]:
    """Relative Frobenius errors against the token recurrence in float64, four layers, every way to run it.

    The benchmark's own launches are checked, the overlapped ones too: they are what is timed.
    """
    found: dict[str, float] = {}
    for name, overlap in (("plain", False), ("overlap", True)):
        block, later = make_block(count, layers=4), make_block(count, layers=4, seed=1)
        later.states = block.states.clone()
        wide = [x.double().flatten(0, 1) for x in (block.q, block.k, block.v, block.log_decay, block.beta, block.states)]
        out, z, states, last = gdn.gdn_recurrence(*wide)
        verify(block, overlap=overlap)
        deferred(later, block, overlap=overlap)
        commit(block)
        wide = [x.double().flatten(0, 1) for x in (later.q, later.k, later.v, later.log_decay, later.beta)]
        again = gdn.gdn_recurrence(*wide, last)[0]
        for what, got, want in (("out", block.out, out), ("z", block.z, z), ("state", block.states, last),
                                ("deferred state", later.states, last), ("deferred out", later.out, again)):  # fmt: skip
            want = want.view(got.shape)
            found[f"{name} {what}"] = float((got.double() - want).norm() / want.norm())
    return found


def bound(name: str) -> float:
    """The bound of one of `errors`: outputs carry the rounding of bfloat16."""
    return 2e-3 if name.endswith("out") else 1e-5


def _pairs(count: int, sets: int) -> list[tuple[Block, Block]]:
    """(this round, the round before) of several sets of memory."""
    pairs = [(make_block(count, seed=i), make_block(count, seed=100 + i)) for i in range(sets)]
    for _, last in pairs:
        verify(last)
    return pairs


def _ways(count: int) -> dict[str, tuple[list[Callable[[], object]], tuple[int, int, int]]]:
    """way -> (the runs, (states read, states written, launches))."""

    def both(block: Block, overlap: bool) -> None:
        verify(block, overlap=overlap)
        commit(block)

    pairs = _pairs(count, SETS)
    together = LAYERS + 1
    return {
        "verify": ([partial(verify, b) for b, _ in pairs], (1, 0, LAYERS)),
        "verify, overlapped": ([partial(verify, b, overlap=True) for b, _ in pairs], (1, 0, LAYERS)),
        "commit": ([partial(commit, b) for b, _ in pairs], (1, 1, 1)),
        "verify + commit": ([partial(both, b, False) for b, _ in pairs], (2, 1, together)),
        "verify + commit, overlapped": ([partial(both, b, True) for b, _ in pairs], (2, 1, together)),
        "deferred": ([partial(deferred, b, last) for b, last in pairs], (1, 1, LAYERS)),
        "deferred, overlapped": ([partial(deferred, b, last, overlap=True) for b, last in pairs], (1, 1, LAYERS)),
    }


def _reference_runs(count: int) -> list[Callable[[], object]]:
    return [partial(_reference, make_block(count))]


def rows(counts: tuple[int, ...], floors: Floors, vendors: dict[str, Any], *, reference: bool) -> Iterator[dict[str, Any]]:
    """One row a length and way: microseconds, floors, ratio. A length whose errors miss their bound is not timed."""
    for count in counts:
        measured = errors(count)
        bad = {name: error for name, error in measured.items() if not error <= bound(name)}
        if bad:
            yield {"op": "gdn", "w": count, "way": "all", "refused": bad}
            continue
        ways = _ways(count)
        for name, build in vendors.items():
            ways[name] = (build(count), (2, 1, LAYERS + 1))
        for way, (runs, (reads, writes, launches)) in ways.items():
            yield {"op": "gdn", "w": count, "way": way, "errors": measured} | timed(
                runs, floors, reads * STATE_BYTES, writes * STATE_BYTES, launches
            )
    for count in counts if reference else ():  # last: a capture that fails may spoil what follows it
        row = {"op": "gdn", "w": count, "way": "core's code on torch"}
        yield row | timed(_reference_runs(count), floors, 2 * STATE_BYTES, STATE_BYTES, LAYERS + 1)


def timed(runs: list[Callable[[], object]], floors: Floors, read: float, written: float, launches: int) -> dict[str, Any]:
    """Microseconds with both floors; what the device refuses becomes the row's `failed`."""
    try:
        time: Timing = replay(runs)
    except (
        RuntimeError,
        TypeError,
        ValueError,
        TritonError,
    ) as error:  # other people's kernels fail in their own ways; say so, go on
        return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"}
    traffic, empty = floors.of(read, written, launches)
    return {
        "us": time.median, "low": time.low, "high": time.high, "floor_bytes": traffic, "floor_launches": empty,
        "launches": launches,
    }  # fmt: skip


def _choices(count: int) -> list[gdn_verify.Launch]:
    """Launch parameters worth trying at this length; a block of H beyond the length changes nothing."""
    blocks = [8] if count <= 8 else [4, 8, 16]
    shapes = ((8, 1), (8, 2), (16, 1), (16, 2), (32, 1), (32, 2), (32, 4))
    return [gdn_verify.Launch(block_v, num_warps, block) for block_v, num_warps in shapes for block in blocks]


def _compile(task: tuple[int, gdn_verify.Launch]) -> None:
    """Fill Triton's cache from another process: one launch of each kind."""
    count, chosen = task
    block, last = make_block(count, layers=2), make_block(count, layers=2)
    verify(last)
    with suppress(TritonError):  # too much shared memory: the timing run says so
        verify(block, chosen)
        verify(block, chosen, overlap=True)
        deferred(block, last, chosen, overlap=True)
    torch.cuda.synchronize()


def _quick(runs: list[Callable[[], object]]) -> float:
    """Microseconds, fewer repeats; infinite where the launch asks for too much."""
    try:
        return replay(runs, repeats=5, inner=6).median
    except TritonError:
        return float("inf")


def sweep(counts: tuple[int, ...], processes: int = 12) -> Iterator[dict[str, Any]]:
    """Every launch choice of verify and deferred (per length) and of commit: what goes into the static tables."""
    tasks = [(count, chosen) for count in counts for chosen in _choices(count)]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile, tasks))
    for count in counts:
        pairs = _pairs(count, 2)
        for chosen in _choices(count):
            row: dict[str, Any] = {"op": "sweep", "w": count} | asdict(chosen)
            for way, runs in (
                ("verify", [partial(verify, b, chosen) for b, _ in pairs]),
                ("overlapped", [partial(verify, b, chosen, True) for b, _ in pairs]),
                ("deferred", [partial(deferred, b, last, chosen, True) for b, last in pairs]),
            ):
                row[way] = _quick(runs)
            yield row
        for block_v, num_warps in ((16, 2), (16, 4), (32, 2), (32, 4), (64, 4), (64, 8), (128, 8)):
            runs = [partial(commit, b, gdn_commit.Launch(block_v, num_warps)) for b, _ in pairs]
            yield {"op": "sweep", "w": count, "commit_v": block_v, "num_warps": num_warps, "commit": _quick(runs)}
