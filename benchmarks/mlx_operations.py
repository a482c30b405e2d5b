"""For `benchmarks.mlx_cuda`: a verified block of w rows by its operations, each timed at the model's own shapes.

Calls of one operation are chained, so that a device which runs independent work at once cannot hide any of it; what the links
of the chain cost (one small addition each) is timed by itself and taken off. Layers of the same shape take turns, as in a
forward pass. What an operation costs a block is its time and how often the model runs it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from dspine.common.gdn import gdn_commit, gdn_inputs, gdn_verify
from dspine_mlx.small_rows import picks_of

ROWS = (1, 2, 4, 8, 16)
CHAIN, REPEATS, PATIENCE = 8, 12, 0.15  # calls in a chain, chains, and seconds after which three chains must do
Step = Callable[[mx.array], mx.array]
LINEAR = (nn.Linear, nn.QuantizedLinear)
EXPERTS = (SwitchLinear, QuantizedSwitchLinear)


@dataclass(frozen=True)
class Operation:
    """One operation of a block: `make(w)` gives an input of w rows and the calls that take turns; the model runs `count`."""

    name: str
    count: int
    make: Callable[[int], tuple[mx.array, Sequence[Step]]]
    in_block: bool = True  # False: runs behind the block, when its length is settled

    def microseconds(self) -> dict[int, float | str]:
        """Time of one call by rows, or why MLX refuses it."""
        return {w: microseconds(*self.make(w)) for w in ROWS}


def microseconds(x: mx.array, steps: Sequence[Step]) -> float | str:
    """Median time of one call in a chain of them, the links taken off; or MLX's words where it refuses."""
    try:
        return max(0.0, _chain_time(x, steps) - _chain_time(x, [lambda x: x]))
    except (RuntimeError, ValueError) as error:
        return " ".join(str(error).split())[:160]


def _chain_time(x: mx.array, steps: Sequence[Step]) -> float:
    def chain() -> mx.array:
        out = x
        for i in range(CHAIN):
            out = steps[i % len(steps)](x + mx.reshape(out, (-1,))[:1].astype(x.dtype))
        return out

    mx.eval(x)
    mx.eval(chain())
    times: list[float] = []
    begun = perf_counter()
    while len(times) < REPEATS and (len(times) < 3 or perf_counter() - begun < PATIENCE):
        started = perf_counter()
        mx.eval(chain())
        times.append((perf_counter() - started) / CHAIN)
    return 1e6 * statistics.median(times)


def operations(model: nn.Module, target: Any, cache: Any) -> Iterator[Operation]:
    """What a block of this target runs, the costly first; `cache` holds the context that attention reads."""
    dtype = getattr(mx, target.info.dtype)
    yield from _gdn(target, cache, dtype)
    yield from _attention(target, cache, dtype)
    yield from _products(model, target, dtype)
    yield from _norms(model, dtype)


def _random(*shape: int, dtype: mx.Dtype) -> mx.array:
    return mx.random.normal(shape).astype(dtype)


def _products(model: nn.Module, target: Any, dtype: mx.Dtype) -> Iterator[Operation]:
    """Every shape of a linear map in the model, experts too, and the head."""
    found: dict[Any, list[Any]] = {}
    names: dict[Any, str] = {}
    picks = picks_of(model)
    for name, layer in model.named_modules():
        if isinstance(layer, (*LINEAR, *EXPERTS)) and not name.endswith("lm_head"):
            width = layer["scales"].shape[-1] * layer.group_size if "scales" in layer else layer["weight"].shape[-1]
            short, down = name.rpartition(".")[2], name.endswith("down_proj")
            key = (type(layer).__name__, width, layer["weight"].shape, down and isinstance(layer, EXPERTS))
            found.setdefault(key, []).append(layer)
            names.setdefault(key, f"{type(layer).__name__} {short} {width} to {layer['weight'].shape[-2]}")
    hidden, head = target.info.hidden_size, target.head
    yield Operation(f"head {hidden} to {target.info.vocab_size}", 1, lambda w: (_random(1, w, hidden, dtype=dtype), [head]))
    for key, layers in found.items():
        if isinstance(layers[0], EXPERTS):
            yield Operation(names[key], len(layers), _experts(layers, key[1], picks, key[3], dtype))
        else:
            yield Operation(names[key], len(layers), _linear(layers, key[1], dtype))


def _linear(layers: list[Any], width: int, dtype: mx.Dtype) -> Callable[[int], tuple[mx.array, list[Step]]]:
    return lambda w: (_random(1, w, width, dtype=dtype), layers)


def _experts(layers: list[Any], width: int, picks: int, down: bool, dtype: mx.Dtype) -> Any:
    """w tokens of `picks` experts each; before `down` each expert has a row of its own."""

    def make(w: int) -> tuple[mx.array, list[Step]]:
        chosen = mx.argsort(_random(1, w, layers[0]["weight"].shape[0], dtype=mx.float32), axis=-1)[..., :picks]
        mx.eval(chosen)
        steps = [lambda x, layer=layer: layer(x, chosen) for layer in layers]
        return _random(1, w, picks if down else 1, 1, width, dtype=dtype), steps

    return make


def _attention(target: Any, cache: Any, dtype: mx.Dtype) -> Iterator[Operation]:
    """w queries over the keys in the cache and those of the block, causal."""
    args = target.model.args
    facts = getattr(args, "text_config", None) or vars(args)
    heads = facts["num_attention_heads"]
    layers = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None and isinstance(layer.keys, mx.array)]
    if not layers:
        return

    def make(w: int) -> tuple[mx.array, list[Step]]:
        stop, mask = cache.length + w, "causal" if w > 1 else None
        size = layers[0].keys.shape[-1]

        def step(query: mx.array, layer: Any) -> mx.array:
            keys, values = layer.keys[..., :stop, :], layer.values[..., :stop, :]
            return mx.fast.scaled_dot_product_attention(query, keys, values, scale=size**-0.5, mask=mask)

        return _random(1, heads, w, size, dtype=dtype), [lambda x, layer=layer: step(x, layer) for layer in layers]

    yield Operation(f"attention, {cache.length} keys", len(layers), make)


def _gdn(target: Any, cache: Any, dtype: mx.Dtype) -> Iterator[Operation]:
    """The core's operations of linear attention: per layer convolution and gates, then the block; one commit for all."""
    layers = getattr(target, "gdn", None)
    if not layers:
        return
    layer, layout = next(iter(layers.values())), next(iter(layers.values())).layout
    window, state = cache.state_of(cache.gdn_ids[0])

    def block(w: int) -> list[mx.array]:
        drawn = [_random(1, w, layout.channels, dtype=dtype), *(_random(1, w, layout.value_heads, dtype=dtype) for _ in "ab")]
        mx.eval(drawn)
        return drawn

    def inputs(w: int) -> tuple[mx.array, list[Step]]:
        x, a, b = block(w)
        return x, [lambda x: _first(gdn_inputs(x, window, a, b, layer.weights, layout))]

    def verify(w: int) -> tuple[mx.array, list[Step]]:
        x, a, b = block(w)
        tokens = gdn_inputs(x, window, a, b, layer.weights, layout)
        mx.eval(tokens.q, tokens.k, tokens.v, tokens.log_decay, tokens.beta)
        rest = tokens.k, tokens.v, tokens.log_decay, tokens.beta, state
        return tokens.q, [lambda q: gdn_verify(q, *rest)[0]]

    def commit(w: int) -> tuple[mx.array, list[Step]]:
        x, a, b = block(w)
        tokens = gdn_inputs(x, window, a, b, layer.weights, layout)
        _, factors = gdn_verify(tokens.q, tokens.k, tokens.v, tokens.log_decay, tokens.beta, state)
        many = type(factors)(*(mx.stack([part] * len(layers)) for part in (factors.z, factors.k, factors.g)))
        blocks = mx.stack([x] * len(layers))
        count = mx.full((x.shape[0],), w, dtype=mx.int32)
        mx.eval(many.z, many.k, many.g, blocks, count)
        return cache.states, [lambda states: gdn_commit(states, many, cache.windows, blocks, count)[0]]

    yield Operation("gdn_inputs", len(layers), inputs)
    yield Operation("gdn_verify", len(layers), verify)
    yield Operation("gdn_commit, all layers", 1, commit, in_block=False)


def _first(tokens: Any) -> mx.array:
    """One array that is there when all outputs are."""
    return mx.depends(tokens.q, [tokens.k, tokens.v, tokens.log_decay, tokens.beta])


def _norms(model: nn.Module, dtype: mx.Dtype) -> Iterator[Operation]:
    found: dict[int, list[Any]] = {}
    for layer in model.modules():
        if isinstance(layer, nn.RMSNorm):
            found.setdefault(layer.weight.shape[0], []).append(layer)
    for size, layers in found.items():

        def make(w: int, size: int = size, layers: list[Any] = layers) -> tuple[mx.array, list[Step]]:
            return _random(1, w, size, dtype=dtype), layers

        yield Operation(f"RMSNorm {size}", len(layers), make)


def shapes(pairs: Sequence[tuple[int, int]], forms: Sequence[str]) -> Iterator[tuple[str, Operation]]:
    """(form, a product of a plain shape), `CHAIN` weights in turn so that no cache on the chip holds them all."""
    for width, columns in pairs:
        for form in forms:
            yield form, Operation(f"{width} to {columns}", 1, _shape(width, columns, int(form) if form.isdigit() else 0))


def _shape(width: int, columns: int, bits: int) -> Callable[[int], tuple[mx.array, list[Step]]]:
    def make(w: int) -> tuple[mx.array, list[Step]]:
        weights = [mx.random.normal((columns, width), key=mx.random.key(i)).astype(mx.bfloat16) for i in range(CHAIN)]
        x = _random(w, width, dtype=mx.bfloat16)
        if not bits:
            mx.eval(weights)
            return x, [lambda x, weight=weight: x @ weight.T for weight in weights]
        packed = [mx.quantize(weight, 64, bits) for weight in weights]
        mx.eval(packed)
        return x, [lambda x, p=p: mx.quantized_matmul(x, *p, group_size=64, bits=bits) for p in packed]

    return make
