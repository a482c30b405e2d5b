"""What `decode` times: one call of each operation at the shapes of two models, over memory that no cache holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

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
    "8b readout": (1024, 4096),  # of a DSpine drafter's layer
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
