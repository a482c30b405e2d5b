"""One decoding step's kernels at the shapes of Qwen3-8B and Qwen3.6-35B-A3B, against the bytes that they must move.

    python -m benchmarks.kernels.decode --json decode.json
    python -m benchmarks.kernels.decode --tune --json tune.json    launch parameters of linear_rows and routed_experts
    python -m benchmarks.kernels.decode --compare --json ab.json  split products; then layers with and without each choice

Times are CUDA graph replays of a chain of calls over different memory (so no cache holds it), divided by the calls: launches
overlap as they do in a step. `x` is the time over the bytes' time at the bandwidth measured first. Everything is compiled
beforehand in parallel processes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.errors import TritonError

from benchmarks.kernels.timing import measure_floors, replay
from benchmarks.provenance import provenance
from dspine.common.environment import kernel_variants
from dspine.common.experts import SharedExpert
from dspine.common.gdn import GdnFactors, GdnInputWeights, GdnLayout
from dspine.common.gdn_rounds import GdnKept, GdnLayerWeights
from dspine.kernels_triton import (
    add_rms_norm,
    attention_inputs,
    block_attention,
    gated_rows,
    gdn_keep,
    gdn_round,
    linear_rows,
    pick_experts,
    routed_experts,
    sigmoid_mul,
    silu_mul,
)

LENGTHS, CONTEXT, CACHED = (1, 4, 8, 16), 2048, 256 * 2**20  # CACHED: bytes that a chain must touch before memory repeats
EXPERTS, PICKS, HIDDEN, INNER = 256, 8, 2048, 512
LAYOUT = GdnLayout(16, 32, 128, 128)
MATRICES = {  # name -> outputs, inputs
    "8b qkv": (6144, 4096),
    "8b o": (4096, 4096),
    "8b gate_up": (24576, 4096),
    "8b down": (4096, 12288),
    "35b gdn in": (12352, 2048),
    "35b attention in": (9216, 2048),
    "35b out": (2048, 4096),
    "35b router": (1281, 2048),
    "35b head": (248320, 2048),
}
HEADS = {"8b": (32, 8, 128, 128), "35b": (16, 2, 256, 64)}  # query and key heads, size, rotated


@dataclass(frozen=True)
class Case:
    """Calls over different memory; bytes that one of them reads and writes, and its launches."""

    calls: list[Callable[[], object]]
    read: float
    written: float
    launches: int


def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random numbers on the device."""
    return torch.empty(shape, device="cuda", dtype=dtype).normal_(std=scale)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros on the device."""
    return torch.zeros(shape, device="cuda", dtype=dtype)


def sets_of(size: float, short: bool, least: int = 4) -> int:
    """Copies of `size` bytes that are more than any cache; one where a call is only compiled."""
    return 1 if short else max(least, min(64, -(-CACHED // int(size))))


def product(name: str, w: int, short: bool, way: str = "rows", chosen: linear_rows.Launch | None = None) -> Case:
    """A matrix by `linear_rows` or by the vendor's library."""
    columns, size = MATRICES[name]
    sets = sets_of(2 * columns * size, short)
    x, weights = normal(w, size), [normal(columns, size, scale=size**-0.5) for _ in range(sets)]
    if way == "vendor":
        calls: list[Callable[[], object]] = [partial(F.linear, x, weight) for weight in weights]
    else:
        out = torch.empty((w, -(-columns // 16) * 16), device="cuda", dtype=x.dtype)[:, :columns]
        calls = [partial(linear_rows.launch, x, weight, out, chosen) for weight in weights]
    return Case(calls, 2 * columns * size + 2 * w * size, 2 * w * columns, 1)


def attention(model: str, w: int, short: bool) -> Case:
    """`block_attention` behind CONTEXT tokens."""
    heads, key_heads, size, _ = HEADS[model]
    bytes_each = 4 * key_heads * (CONTEXT + w) * size
    stores = [normal(2, 1, key_heads, CONTEXT + 64, size) for _ in range(sets_of(bytes_each, short))]
    query, lengths = normal(1, w, heads, size), torch.full((1,), CONTEXT, dtype=torch.int32, device="cuda")
    calls = [partial(block_attention.block_attention, query, s[0], s[1], lengths, size**-0.5) for s in stores]
    return Case(calls, bytes_each + 2 * query.numel(), 2 * query.numel(), 2)


def inputs(model: str, w: int, short: bool) -> Case:
    """`attention_inputs` at the same place."""
    heads, key_heads, size, turned = HEADS[model]
    projected, tables = normal(1, w, heads + 2 * key_heads, size), normal(2, CONTEXT + 64, turned)
    store, lengths = normal(2, 1, key_heads, CONTEXT + 64, size), torch.full((1,), CONTEXT, dtype=torch.int32, device="cuda")
    norm, live = SimpleNamespace(weight=normal(heads + key_heads, size), eps=1e-6), torch.full_like(lengths, w)
    call = partial(
        attention_inputs.attention_inputs, projected, tables[0], tables[1], lengths, live, store[0], store[1], heads, norm
    )
    return Case([call] * (1 if short else 32), 2 * projected.numel(), 2 * projected.numel(), 1)


def small(name: str, w: int, short: bool) -> Case:
    """Operations between products: their floor is a launch, not bytes."""
    norm = SimpleNamespace(weight=normal(HIDDEN, dtype=torch.float32), eps=1e-6)
    x, y, wide, entry = normal(w, HIDDEN), normal(w, HIDDEN), normal(w, 24576), normal(w, 1296)
    mixed, gates = normal(1, w, 16, 256), normal(1, w, 36, 256)
    call: Callable[[], object] = {
        "add_rms_norm": partial(add_rms_norm.add_rms_norm, x, y, norm),
        "silu_mul 12288": partial(silu_mul.silu_mul, wide),
        "sigmoid_mul 4096": partial(sigmoid_mul.sigmoid_mul, mixed, gates[:, :, 20:]),
        "pick_experts": partial(pick_experts.pick_experts, entry[:, :EXPERTS], PICKS, True),
    }[name]
    size = {"add_rms_norm": 2 * HIDDEN, "silu_mul 12288": 24576, "sigmoid_mul 4096": 8192, "pick_experts": EXPERTS}[name]
    return Case([call] * (1 if short else 32), 2 * w * size, 2 * w * size // 2, 1)


@dataclass(frozen=True)
class Stacks:
    """One layer's experts."""

    gate_up: Tensor
    down: Tensor
    shared: Tensor

    @staticmethod
    def make() -> Stacks:
        return Stacks(
            normal(EXPERTS, 2 * INNER, HIDDEN, scale=HIDDEN**-0.5), normal(EXPERTS, HIDDEN, INNER, scale=INNER**-0.5),
            normal(HIDDEN, INNER, scale=INNER**-0.5),
        )  # fmt: skip


EXPERT_BYTES = 2 * 3 * INNER * HIDDEN


def drawn_picks(w: int, count: int) -> list[Tensor]:
    """`count` choices of PICKS experts a token; one token's are disjoint from choice to choice."""
    generator = torch.Generator().manual_seed(w)
    if w == 1:
        return [part.view(1, PICKS).cuda() for part in torch.randperm(EXPERTS, generator=generator).split(PICKS)[:count]]
    rows = [torch.stack([torch.randperm(EXPERTS, generator=generator)[:PICKS] for _ in range(w)]) for _ in range(count)]
    return [picks.cuda() for picks in rows]


def mixture(w: int, short: bool, chosen: tuple[routed_experts.Launch, routed_experts.Launch] | None = None) -> Case:
    """The routed experts with the shared one, the residual and the next norm."""
    stacks, choices = Stacks.make(), drawn_picks(w, 1 if short else 16)
    x, residual, entry = normal(w, HIDDEN), normal(w, HIDDEN), normal(w, 1296)
    shared = SharedExpert(entry[:, 256:257], entry[:, 257:1281], stacks.shared)
    norm = SimpleNamespace(weight=normal(HIDDEN, dtype=torch.float32), eps=1e-6)
    weights = torch.full((w, PICKS), 1 / PICKS, device="cuda")
    room = routed_experts.room_of(x, choices[0], stacks.down, shared, True)
    calls = [
        partial(
            routed_experts.launch, x, picks, weights, stacks.gate_up, stacks.down, room, shared, residual, norm, chosen
        )
        for picks in choices
    ]  # fmt: skip
    hit = sum(len(picks.unique()) for picks in choices) / len(choices)
    return Case(calls, hit * EXPERT_BYTES + 2 * INNER * HIDDEN, 4 * w * HIDDEN, 3)


def gdn_weights() -> GdnLayerWeights:
    """One Gated DeltaNet layer between its products."""
    conv = GdnInputWeights(normal(LAYOUT.channels, 4), normal(32, dtype=torch.float32), normal(32, dtype=torch.float32))
    return GdnLayerWeights(conv, SimpleNamespace(weight=normal(128, dtype=torch.float32), eps=1e-6), LAYOUT)


def gdn_memory(layers: int) -> GdnKept:
    """Room of 16 rows for every layer."""
    z, g = zeros(layers, 1, 16, 32, 128), zeros(layers, 1, 16, 32)
    k, rows = zeros(layers, 1, 16, 16, 128, dtype=torch.bfloat16), zeros(layers, 1, 16, LAYOUT.channels, dtype=torch.bfloat16)
    return GdnKept(GdnFactors(z, k, g), rows)


def at(memory: GdnKept, layer: int) -> GdnKept:
    """The memory of one layer."""
    factors = memory.factors
    return GdnKept(GdnFactors(factors.z[layer], factors.k[layer], factors.g[layer]), memory.inputs[layer])


def gdn(w: int, short: bool) -> Case:
    """`gdn_round` of many layers, the state of each read and written."""
    layers = 1 if short else 90
    weights, states = gdn_weights(), normal(layers, 1, 32, 128, 128, dtype=torch.float32)
    past, room, windows = gdn_memory(layers), gdn_memory(layers), normal(layers, 1, 3, LAYOUT.channels)
    m, live = (torch.full((1,), min(w, 4), dtype=torch.int32, device="cuda") for _ in range(2))
    live.fill_(w)
    projected = normal(1, w, sum(weights.sections))
    calls = [
        partial(
            gdn_round.gdn_round, projected, windows[i], states[i], at(past, i).factors, m, at(room, i), weights, live
        )
        for i in range(layers)
    ]  # fmt: skip
    state = 4 * 32 * 128 * 128
    return Case(calls, state + 2 * projected.numel(), state + 2 * w * 4096, 3)


def keep(w: int, short: bool) -> Case:
    """`gdn_keep` of 30 layers after w accepted tokens."""
    past, fresh, windows = gdn_memory(30), gdn_memory(30), normal(30, 1, 3, LAYOUT.channels)
    m = torch.full((1,), w, dtype=torch.int32, device="cuda")
    moved = 30.0 * (w * (4 * 4096 + 2 * 2048 + 4 * 32) + 3 * 2 * LAYOUT.channels)
    return Case([partial(gdn_keep.gdn_keep, windows, past.factors, fresh, m)] * (1 if short else 8), moved, moved, 1)


def layer(w: int, short: bool, way: str = "rows") -> Case:
    """A whole Gated DeltaNet layer with experts, as `static.hybrid` runs it; `way`: its products as in `product`."""
    layers = 1 if short else 4
    run = F.linear if way == "vendor" else linear_rows.linear_rows
    weights, norm = gdn_weights(), SimpleNamespace(weight=normal(HIDDEN, dtype=torch.float32), eps=1e-6)
    past, room, windows = gdn_memory(layers), gdn_memory(layers), normal(layers, 1, 3, LAYOUT.channels)
    states = normal(layers, 1, 32, 128, 128, dtype=torch.float32)
    live, m = (torch.full((1,), n, dtype=torch.int32, device="cuda") for n in (w, min(w, 4)))
    x, normed = normal(w, HIDDEN), normal(w, HIDDEN)

    def call(i: int, entry: Tensor, project: Tensor, out: Tensor, stacks: Stacks) -> None:
        projected = run(normed, project).view(1, w, -1)
        rows, _, _ = gdn_round.gdn_round(
            projected, windows[i], states[i], at(past, i).factors, m, at(room, i), weights, live
        )  # fmt: skip
        h, second = add_rms_norm.add_rms_norm(x, run(rows.view(w, -1), out), norm)
        made = run(second, entry)
        picks, shares = pick_experts.pick_experts(made[:, :EXPERTS], PICKS, True)
        shared = SharedExpert(made[:, EXPERTS : EXPERTS + 1], made[:, EXPERTS + 1 :], stacks.shared)
        routed_experts.routed_experts(second, picks, shares, stacks.gate_up, stacks.down, shared, h, norm)

    names = ("35b router", "35b gdn in", "35b out")
    calls, hit = [], 0.0
    for i in range(layers):
        matrices = [normal(*MATRICES[name], scale=MATRICES[name][1] ** -0.5) for name in names]
        calls.append(partial(call, i, *matrices, Stacks.make()))
    hit = EXPERTS * (1 - (1 - PICKS / EXPERTS) ** w)  # of independent tokens, on average
    read = 2 * sum(a * b for a, b in (MATRICES[name] for name in names)) + hit * EXPERT_BYTES + 2 * INNER * HIDDEN
    return Case(calls, read + 4 * 32 * 128 * 128, 4 * 32 * 128 * 128, 11)


def dense_layer(w: int, short: bool) -> Case:
    """A whole layer of Qwen3-8B's shape behind CONTEXT tokens, as `static.dense` runs it."""
    heads, key_heads, size, turned = HEADS["8b"]
    names, width = ("8b qkv", "8b o", "8b gate_up", "8b down"), MATRICES["8b o"][0]
    tables, lengths = normal(2, CONTEXT + 64, turned), torch.full((1,), CONTEXT, dtype=torch.int32, device="cuda")
    norm, live = SimpleNamespace(weight=normal(heads + key_heads, size), eps=1e-6), torch.full_like(lengths, w)
    one = kernel_variants().get("gated_rows", "1") == "1"  # 0: as with DSPINE_KERNELS_OFF=gated_rows
    row_norm, stream = (
        SimpleNamespace(weight=normal(width, dtype=torch.float32), eps=1e-6),
        [normal(w, width), normal(w, width)],
    )

    def call(store: Tensor, qkv: Tensor, out: Tensor, gate_up: Tensor, down: Tensor) -> None:
        entry, normed = stream
        projected = linear_rows.linear_rows(normed, qkv).view(1, w, -1, size)
        query, _, _ = attention_inputs.attention_inputs(projected, *tables, lengths, live, *store, heads, norm)
        mixed = block_attention.block_attention(query, *store, lengths, size**-0.5).view(w, -1)
        h, second = add_rms_norm.add_rms_norm(entry, linear_rows.linear_rows(mixed, out), row_norm)
        inner = gated_rows.gated_rows(second, gate_up) if one else silu_mul.silu_mul(linear_rows.linear_rows(second, gate_up))
        stream[:] = add_rms_norm.add_rms_norm(h, linear_rows.linear_rows(inner, down), row_norm)

    calls = []
    for _ in range(1 if short else 6):
        matrices = [normal(*MATRICES[name], scale=MATRICES[name][1] ** -0.5) for name in names]
        calls.append(partial(call, normal(2, 1, key_heads, CONTEXT + 64, size), *matrices))
    cached = 4 * key_heads * (CONTEXT + w) * size
    return Case(calls, 2 * sum(a * b for a, b in (MATRICES[name] for name in names)) + cached, 4 * w * width, 9 if one else 10)


def cases() -> dict[str, Callable[[int, bool], Case]]:
    """name -> build(w, short)."""
    found: dict[str, Callable[[int, bool], Case]] = {}
    for model in HEADS:
        found[f"{model} block_attention"] = partial(attention, model)
        found[f"{model} attention_inputs"] = partial(inputs, model)
    for name in ("add_rms_norm", "silu_mul 12288", "sigmoid_mul 4096", "pick_experts"):
        found[name] = partial(small, name)
    found |= {"35b routed_experts": mixture, "35b gdn_round": gdn, "35b gdn_keep, 30 layers": keep}
    for name in MATRICES:
        found[f"{name}, linear_rows"] = partial(product, name)
        found[f"{name}, vendor"] = partial(product, name, way="vendor")
    found |= {"8b layer": dense_layer, "35b layer, linear_rows": layer, "35b layer, vendor": partial(layer, way="vendor")}
    return found


def linear_choices() -> list[linear_rows.Launch]:
    """Launch parameters worth trying."""
    shapes = (
        (16, 128, 4, 4), (16, 256, 4, 4), (16, 512, 4, 4), (16, 256, 2, 4), (32, 128, 4, 4), (32, 128, 4, 6), (32, 256, 4, 3),
        (32, 256, 4, 4), (64, 128, 4, 4), (64, 128, 8, 4),
    )  # fmt: skip
    return [linear_rows.Launch(*shape, fetch) for shape in shapes for fetch in (0, 512, 2048)]


def split_choices() -> list[linear_rows.Launch | None]:
    """The parameters of now (None), and products split over programs."""
    shapes = (
        (32, 128, 4, 4, 2), (32, 256, 4, 3, 2), (64, 128, 4, 3, 2), (16, 256, 4, 4, 2), (16, 512, 4, 3, 2),
        (32, 128, 4, 4, 4), (32, 256, 4, 3, 4), (64, 128, 4, 3, 4), (64, 128, 4, 4, 4), (64, 256, 8, 3, 4), (64, 128, 4, 3, 8),
    )  # fmt: skip
    return [None, *(linear_rows.Launch(*shape[:4], fetch, shape[4]) for shape in shapes for fetch in (0, 512))]


def expert_choices() -> list[tuple[routed_experts.Launch, routed_experts.Launch]]:
    """One of the two launches at a time, the other as it is."""
    make, inner, outer = routed_experts.Launch, routed_experts.INNER, routed_experts.OUTER
    first = (
        (16, 128, 4, 6), (16, 256, 4, 3), (16, 256, 4, 4), (16, 512, 4, 3), (32, 128, 4, 4), (32, 128, 2, 4), (32, 256, 4, 3),
        (64, 128, 4, 3),
    )  # fmt: skip
    second = (
        (32, 128, 4, 4), (32, 256, 4, 3), (32, 512, 4, 2), (64, 64, 4, 6), (64, 128, 8, 4), (64, 256, 8, 3), (128, 128, 8, 3),
        (16, 256, 4, 3), (64, 128, 4, 4, 0), (32, 256, 4, 3, 0),
    )  # fmt: skip
    return [(inner, outer), *((make(*shape), outer) for shape in first), *((inner, make(*shape)) for shape in second)]


def tuned(names: list[str]) -> list[tuple[str, int, Any]]:
    """(what, w, parameters) of every launch choice."""
    tasks: list[tuple[str, int, Any]] = []
    for w in (1, 16):
        tasks += [(name, w, chosen) for name in names for chosen in linear_choices()]
        tasks += [("experts", w, chosen) for chosen in expert_choices()]
    return tasks


def split_tasks(names: list[str]) -> list[tuple[str, int, Any]]:
    """(matrix, w, parameters) of every split; the parameters of now are a choice too."""

    def of(name: str, chosen: linear_rows.Launch | None) -> linear_rows.Launch:
        return chosen or linear_rows.choose(*MATRICES[name], torch.bfloat16)

    return [(name, w, of(name, chosen)) for name in names for w in (1, 16) for chosen in split_choices()]


def best_of(found: list[dict[str, Any]]) -> dict[str, linear_rows.Launch]:
    """matrix -> the parameters with the least product of its times at the lengths that were tried."""
    best: dict[str, linear_rows.Launch] = {}
    for name in dict.fromkeys(row["op"] for row in found):
        times: dict[linear_rows.Launch, list[float]] = {}
        for row in found:
            if row["op"] == name and "us" in row:
                times.setdefault(linear_rows.Launch(**row["launch"]), []).append(row["us"])
        most = max(map(len, times.values()), default=0)
        whole = {chosen: math.prod(us) for chosen, us in times.items() if len(us) == most}
        if whole:
            best[name] = min(whole, key=whole.__getitem__)
    return best


def as_variant(best: dict[str, linear_rows.Launch]) -> str:
    """`DSPINE_KERNELS_TRY` of these parameters."""
    sizes = {name: "x".join(map(str, MATRICES[name])) for name in best}
    return ";".join(f"linear_rows.{sizes[name]}={_brief(asdict(chosen))}" for name, chosen in best.items())


COMPARED = ("8b qkv", "8b o", "8b down", "35b gdn in", "35b out", "35b router")  # not the ones of most programs
VARIANTS = {  # layer -> values of DSPINE_KERNELS_TRY, the last what runs by itself
    "8b layer": ("attention_ahead=0;gated_rows=0", "attention_ahead=1;gated_rows=0", "attention_ahead=1"),
    "35b layer, linear_rows": ("experts_ahead=0", "experts_ahead=1"),
}


def compare(names: list[str], processes: int, floors: Any) -> list[dict[str, Any]]:
    """Split products one by one; then whole layers with each of VARIANTS and with the best products."""
    tasks = split_tasks(names)
    layers = [(layer, w, variant) for layer, ways in VARIANTS.items() for variant in ways for w in (1, 16)]
    compile_all(tasks + layers, processes)
    found = list(rows(tasks, floors, True))
    show_tuned(found)
    best = best_of(found)
    print("\nfor TUNED in kernels_triton/linear_rows.py:")
    for name, chosen in best.items():
        print(f"    {MATRICES[name]}: Launch({', '.join(map(str, asdict(chosen).values()))}),  # {name}")
    products = as_variant(best)
    print(f"\nDSPINE_KERNELS_TRY='{products}'\n", flush=True)
    tuned_layers = [(layer, w, f"{ways[-1]};{products}") for layer, ways in VARIANTS.items() for w in (1, 16)]
    timed_layers = list(rows(layers + tuned_layers, floors, False))
    for row in timed_layers:
        way = row["launch"].replace(products, "best products")
        row["op"] = f"{row['op'].split(',')[0]}, {way}"
    show(timed_layers)
    return found + timed_layers


def build(task: tuple[str, int, Any], short: bool) -> Case:
    """The case of a plain name (parameters None), of one with a value of DSPINE_KERNELS_TRY, or of a launch choice."""
    name, w, chosen = task
    if chosen is None or isinstance(chosen, str):
        if chosen:
            os.environ["DSPINE_KERNELS_TRY"] = chosen
        return cases()[name](w, short)
    return mixture(w, short, chosen) if name == "experts" else product(name, w, short, chosen=chosen)


def compile_first(tasks: list[tuple[str, int, Any]]) -> str | None:
    """Fill Triton's cache: one call of each task. What a launch could not do is said by the run that times it."""
    for task in tasks:
        try:
            build(task, True).calls[0]()
        except (TritonError, RuntimeError, ValueError) as error:
            return f"{task[0]} w={task[1]}: {type(error).__name__}: {str(error).splitlines()[0][:100]}"
    torch.cuda.synchronize()
    return None


def compile_all(tasks: list[tuple[str, int, Any]], processes: int) -> None:
    """Compile in parallel, tasks dealt out so that each process has its share of each kernel."""
    shares = [tasks[i::processes] for i in range(processes)]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for failure in pool.map(compile_first, [share for share in shares if share]):
            if failure:
                print(f"not compiled beforehand: {failure}", file=sys.stderr)


def timed(case: Case, quick: bool) -> float:
    """Microseconds of one call."""

    def run() -> None:
        for call in case.calls:
            call()

    return replay([run], *((3, 3) if quick else (10, 5))).median / len(case.calls)


def rows(tasks: list[tuple[str, int, Any]], floors: Any, quick: bool) -> Iterator[dict[str, Any]]:
    """One row a task; a failure ends that row only."""
    for task in tasks:
        name, w, chosen = task
        row: dict[str, Any] = {"op": name, "w": w}
        if chosen is not None:
            parts = chosen if isinstance(chosen, tuple) else (chosen,)
            made = [part if isinstance(part, str) else asdict(part) for part in parts]
            row["launch"] = made if isinstance(chosen, tuple) else made[0]
        try:
            case = build(task, False)
            row["us"] = timed(case, quick)
            row["floor"] = floors.of(case.read, case.written)[0]
            row["launches"] = case.launches
        except (TritonError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            if not quick:
                traceback.print_exc()
            row["failed"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"
        yield row
        case = None  # its memory is free before the next one's is made


def show(found: list[dict[str, Any]]) -> None:
    """One line an operation, a column a length: microseconds (times the bytes' floor)."""
    wide = max(28, *(len(row["op"]) + 1 for row in found))
    print(f"{'us (x bytes)':<{wide}}" + "".join(f"{'w=' + str(w):>18}" for w in LENGTHS))
    for name in dict.fromkeys(row["op"] for row in found):
        cells = []
        for w in LENGTHS:
            row = next((r for r in found if r["op"] == name and r["w"] == w), {})
            cells.append(f"{row['us']:.1f} ({row['us'] / row['floor']:.2f})" if "us" in row else row.get("failed", "-")[:16])
        print(f"{name:<{wide}}" + "".join(f"{cell:>18}" for cell in cells), flush=True)


def show_tuned(found: list[dict[str, Any]]) -> None:
    """The four best choices of each operation and length."""
    for name, w in dict.fromkeys((row["op"], row["w"]) for row in found):
        mine = sorted((r for r in found if (r["op"], r["w"]) == (name, w) and "us" in r), key=lambda r: r["us"])
        best = "; ".join(f"{r['us']:.1f} {_brief(r['launch'])}" for r in mine[:4])
        print(f"{name:<18} w={w:<3}floor {mine[0]['floor']:.1f}  {best}" if mine else f"{name} w={w}: none ran", flush=True)


def _brief(launch: Any) -> str:
    parts = launch if isinstance(launch, list) else [launch]
    return " | ".join(",".join(str(value) for value in part.values()) for part in parts)


def plain(options: argparse.Namespace, wanted: list[str], begun: float) -> tuple[list[dict[str, Any]], Any]:
    """(rows, floors) of every case, or of every launch choice with --tune."""
    tasks: list[tuple[str, int, Any]] = (
        tuned(wanted) if options.tune else [(name, w, None) for name in cases() for w in LENGTHS]
    )
    tasks = [task for task in tasks if not options.only or options.only in task[0]]
    compile_all(tasks, options.processes)
    compiled = time.monotonic() - begun
    floors = measure_floors((1,))
    print(
        f"compiled in {compiled:.0f} s; read {floors.read / 1e12:.2f} TB/s, empty launch {floors.launches[1]:.1f} us",
        flush=True,
    )
    with torch.inference_mode():
        found = list(rows(tasks, floors, options.tune))
    (show_tuned if options.tune else show)(found)
    return found, floors


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="try launch parameters instead of timing")
    parser.add_argument("--compare", action="store_true", help="split products, and whole layers with and without each choice")
    parser.add_argument("--matrices", help="names of MATRICES by commas, for --tune and --compare")
    parser.add_argument("--only", help="a word that names of operations must hold")
    parser.add_argument("--processes", type=int, default=14, help="that compile at once")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: the kernel benchmark needs a CUDA device", file=sys.stderr)
        sys.exit(2)
    begun = time.monotonic()
    wanted = [name for name in MATRICES if not name.endswith("head")] if options.tune else list(COMPARED)
    wanted = options.matrices.split(",") if options.matrices else wanted
    if options.compare:
        floors = measure_floors((1,))
        print(f"read {floors.read / 1e12:.2f} TB/s", flush=True)
        with torch.inference_mode():
            found = compare(wanted, options.processes, floors)
    else:
        found, floors = plain(options, wanted, begun)
    print(f"{time.monotonic() - begun:.0f} s in all")
    if options.json:
        report = provenance() | {
            "device": torch.cuda.get_device_name(),
            "read": floors.read,
            "copy": floors.copy,
            "results": found,
        }
        options.json.write_text(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
