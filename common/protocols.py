"""What a backend must offer, with shapes. The loop (`decoding.py`), the command line and the server know runtimes only
through these protocols.

Letters: B batch, T tokens, w verified input tokens (the anchor included), M proposals, K candidates a position,
H hidden size, V vocabulary, F feature width (taps x H). `Array` is an array of the runtime's own library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

Array = Any


@dataclass(frozen=True)
class TargetInfo:
    """Facts of a loaded target model."""

    name: str
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    eos_token_ids: frozenset[int]
    dtype: str
    device: str
    adapter: str  # which decoder runs it, and why: queryable, never silent
    quantization: str | None = None


@dataclass(frozen=True)
class DraftRequest:
    """How a draft is to be made: `temperature` 0 is greedy; else `uniforms` float32 [B, M] drive the sampled walk."""

    temperature: float = 0.0
    uniforms: Array | None = None
    signals: bool = False  # top-1 probability and entropy over the vocabulary, for length policies that read them


@dataclass(frozen=True)
class Proposal:
    """One block of drafts, all arrays on the device.

    tokens int [B, M]; finite bool [B]: every draft logit was finite. candidates int [B, M, K] and q float32 [B, M, K]:
    the distribution each token was DRAWN from (renormalised over the candidates; None for greedy drafts, which are
    point masses). Drafts drawn from the whole vocabulary: candidates None, q [B, M, V]. confidence float32 [B, M]: the top
    token's probability, or what a confidence head says of the draft's acceptance; entropy float32 [B, M] (nats). Both only
    where asked for.
    """

    tokens: Array
    finite: Array
    candidates: Array | None = None
    q: Array | None = None
    confidence: Array | None = None
    entropy: Array | None = None


@dataclass(frozen=True)
class StageZero:
    """What `begin` leaves for `finish`: the router's picks of layer 0 (int [B, u, k]; None on dense targets)."""

    tokens: Array  # int [B, u]
    resume: Any
    router_picks: Array | None = None


@dataclass(frozen=True)
class Verification:
    """Outputs of the first w tokens: logits float32 [B, w, V]; features [B, w, F] (None without taps)."""

    logits: Array
    features: Array | None
    factors: Any = None  # what `commit` needs to rebuild the accepted state (compact factors); None on dense targets
    router_picks: Array | None = None  # int [B, w, MoE layers, k], only while the target's `record_routing` is true


@dataclass(frozen=True)
class Prefill:
    """logits float32 [B, V] after the last prompt token; features [B, T, F] of every prompt token (None without taps)."""

    logits: Array
    features: Array | None


@runtime_checkable
class ArrayOps(Protocol):
    """Between host and device: the only reads of the loop go through here."""

    def to_device(self, array: Any) -> Array: ...

    def to_host(self, *arrays: Array) -> tuple[Any, ...]:
        """NumPy copies of the arrays, after ONE synchronisation."""
        ...


@runtime_checkable
class Target(Protocol):
    """A target model. Caches are explicit objects, so one loaded target serves any number of sequences."""

    info: TargetInfo
    arrays: ArrayOps
    record_routing: bool  # calibration sets it: `finish` then also returns the router picks of every MoE layer

    def bind_features(self, layer_ids: Sequence[int]) -> None:
        """Capture the OUTPUT of these 0-based decoder layers (raw residual stream), concatenated in this order."""
        ...

    def embed(self, tokens: Array) -> Array:
        """int [B, T] -> [B, T, H], the target's embedding scale applied."""
        ...

    def head(self, hidden: Array) -> Array:
        """Final-normed [..., H] -> logits float32 [..., V] (scale and softcap applied)."""
        ...

    def head_rows(self, ids: Array) -> Array:
        """LM-head rows of `ids` int [...] -> [..., H]."""
        ...

    def head_weight(self) -> Any:
        """LM head as float32 NumPy [V, H] (dequantised), for building a transfer space."""
        ...

    def make_cache(self, capacity: int) -> Any:
        """Empty cache for up to `capacity` tokens (committed plus one block)."""
        ...

    def prefill(self, cache: Any, tokens: Array, *, chunk: int) -> Prefill: ...

    def begin(self, cache: Any, tokens: Array) -> StageZero: ...

    def finish(self, cache: Any, stage: StageZero, w: int) -> Verification: ...

    def commit(self, cache: Any, verification: Verification, m: int) -> None:
        """Keep the first `m` input tokens of the verified block; drop the rest from every layer."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """A drafter bound to one target (it reads the target's embedding and LM head)."""

    config: Any
    info: dict[str, Any]

    def make_cache(self, capacity: int) -> Any: ...

    def commit(self, cache: Any, features: Array) -> None:
        """Append context features [B, T, F] of newly committed tokens: project once, cache K/V of every layer."""
        ...

    def propose(self, cache: Any, anchor: Array, request: DraftRequest) -> Proposal:
        """anchor int [B] at position = number of committed tokens. Block K/V are dropped; the cache is unchanged."""
        ...


class LengthPolicy(Protocol):
    """How many tokens to verify. Lengths are Python ints here; device-side policies come with the graphs.

    The loop hands over host copies: confidence and entropy of the proposal (where `needs_signals`), and the router picks of
    Stage 0 (where it covers more tokens than `nominal`) are NumPy arrays.
    """

    name: str
    needs_signals: bool
    reads_draft_tokens: bool  # true: breaks the rejection rule, refused in that combination

    def nominal(self, proposal: Proposal, limit: int) -> int:
        """Tokens to verify, anchor included: 1..limit."""
        ...

    def stage_zero_length(self, nominal: int, limit: int) -> int: ...

    def correct(self, stage: StageZero, nominal: int, limit: int) -> int: ...


@dataclass(frozen=True)
class Availability:
    """Whether a runtime can run here: `reason` says why (not), `devices` what it offers, `install` the way to get it."""

    ok: bool
    reason: str
    devices: tuple[str, ...] = ()
    install: str = ""


class Runtime(Protocol):
    """A runtime as the entry-point group `dspine.runtimes` names it."""

    name: str

    def availability(self) -> Availability: ...

    def load_target(self, folder: Path, *, device: str, dtype: str) -> Target: ...

    def load_drafter(self, folder: Path, target: Target) -> Drafter: ...

    def accelerator(self, device: str) -> str:
        """Product name of a device of this runtime (`cuda:0` -> `NVIDIA H200`); empty for the CPU."""
        ...

    def parity_backends(self) -> list[Any]:
        """What `dspine parity` can run here: `common.parity.backends.ParityBackend`s, absent ones with their reason."""
        ...


class Batcher(Protocol):
    """Rounds of several sequences at once. Every sequence keeps its own caches and its own length, so sequences join and leave
    between rounds and nothing is padded; lists run over the sequences. `shares_length`: drafted rows of one round should verify
    one length (targets whose operations want a rectangle); false: any lengths side by side cost what their sum costs."""

    shares_length: bool

    def propose(self, caches: Sequence[Any], anchors: Sequence[int], requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Like `Drafter.propose` for each (B = 1)."""
        ...

    def verify(self, caches: Sequence[Any], blocks: Sequence[Array]) -> list[Verification]:
        """Like `begin` and `finish` for each block int [1, w]; `commit` of the same sequences follows."""
        ...

    def commit(self, caches: Sequence[Any], verifications: Sequence[Verification], counts: Sequence[int]) -> None:
        """Like `Target.commit` for each: the first counts[i] tokens of its block stay, 0 or more."""
        ...

    def commit_drafts(self, caches: Sequence[Any], features: Sequence[Array]) -> None:
        """Like `Drafter.commit` for each features [1, T, F]."""
        ...


class PrefixOps(Protocol):
    """Committed tokens of one sequence's caches as something that can be kept. The drafter's cache goes with the target's, or
    is None where nothing is drafted. `cuts` (true where it is absent): fewer tokens than were saved can be loaded; false:
    `save` takes exactly the committed tokens, `load` exactly the saved ones, and there is no `copy`."""

    def nbytes(self, cache: Any, draft_cache: Any, length: int) -> int:
        """Bytes that `save` would take."""
        ...

    def save(self, cache: Any, draft_cache: Any, length: int) -> Any:
        """Copy of the first `length` tokens of both caches."""
        ...

    def load(self, saved: Any, cache: Any, draft_cache: Any, length: int) -> None:
        """The first `length` tokens of `saved` into two empty caches."""
        ...

    def copy(self, cache: Any, draft_cache: Any, to_cache: Any, to_draft_cache: Any, length: int) -> None:
        """The first `length` committed tokens of two caches into two empty ones."""
        ...


@dataclass(frozen=True)
class ServingSupport:
    """What a runtime adds for the server; None: rounds of several sequences take turns, prefixes are computed anew. `reason`
    says why, for the start-up summary."""

    batcher: Batcher | None
    prefixes: PrefixOps | None
    reason: str


@runtime_checkable
class ServingRuntime(Protocol):
    """A runtime that can batch or keep prefixes (others serve all the same)."""

    def serving(self, target: Target, drafter: Drafter | None) -> ServingSupport: ...


class Timer(Protocol):
    """Points on a device's timeline. `source` says by which clock (`CUDA events`, `host clock`)."""

    source: str

    def mark(self, *produced: Any) -> Any:
        """A point behind everything queued so far. A lazy library computes `produced` first (arrays, or objects and caches
        that hold them); others ignore it."""
        ...

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Between neighbouring marks (one number less than marks), after waiting for the last."""
        ...


@runtime_checkable
class TimedRuntime(Protocol):
    """A runtime that can time its device; for others `dspine bench` takes the host's clock between host reads."""

    def timer(self, device: str) -> Timer: ...


class Rounds(Protocol):
    """Whole rounds as device work (CUDA graphs)."""

    def loop(self, drafter: Drafter | None, prompt: Sequence[int], params: Any, policy: LengthPolicy) -> tuple[Any, str]:
        """(A `DecodingLoop` for this request, how its rounds run), or (None, why it runs in the eager loop)."""
        ...

    def slots(self, count: int, tokens: int) -> Slots:
        """Rounds of up to `count` sequences of up to `tokens` tokens (fewer where memory is short). DSpineError where they
        cannot run."""
        ...

    def time_rounds(self, prompt: Sequence[int], params: Any, lengths: Iterator[int]) -> Iterator[tuple[int, float]]:
        """(w, seconds) of drafted rounds of one request, the w of each taken from `lengths`; a round that the end cut is
        left out."""
        ...

    def time_stage_zero(self, u: int, repetitions: int) -> list[float]:
        """Seconds of Stage 0 of u tokens; empty where the target has none."""
        ...

    def time_expert(self, repetitions: int) -> float:
        """Seconds that one more distinct (layer, expert) pair costs in a block; 0.0 where the target has no experts."""
        ...


class Slots(Protocol):
    """Rounds of several sequences without the CPU. A sequence takes a slot, is read into its caches by `read` (where `piece` is
    0 by the target's own `prefill` and the drafter's `commit`), begins, and ends; rounds of the others do not touch it. kind:
    (acceptance rule, sampling parameters with seed 0)."""

    drafter: Any
    count: int
    tokens: int  # committed tokens that a slot holds
    rows: int  # tokens that a round verifies at most
    widths: Sequence[int]  # tokens each that drafted rounds are made for, up to `rows`: a shorter one costs the next of them
    reason: str  # how rounds run
    piece: int  # prompt tokens that `read` takes at most; 0: it cannot be used
    prompts: str  # how prompts are read, and why
    nbytes: int

    def caches(self, slot: int, drafting: bool) -> tuple[Any, Any | None]:
        """Empty caches (the target's, the drafter's) over the memory of an idle slot."""
        ...

    def read(self, slot: int, start: int, tokens: Sequence[int]) -> Array:
        """Queue the reading of up to `piece` prompt tokens behind the `start` that the slot's caches hold. Returns the logits
        float32 [1, V] of the last one, which the next call writes over."""
        ...

    def later(self, array: Array) -> Callable[[], np.ndarray]:
        """What waits for the array, and for nothing that is queued after this call."""
        ...

    def begin(self, slot: int, length: int, anchor: int, remaining: int, uniforms: np.ndarray | None) -> None:
        """The slot's caches hold `length` tokens; `anchor` follows, and `remaining` may be emitted behind it. uniforms
        float32 [n, 3] from output position 0 on; None: greedy."""
        ...

    def end(self, slot: int) -> None:
        """The slot is idle again, whatever it was."""
        ...

    def move(self, slot: int, to: int, length: int, drafting: bool) -> tuple[Any, Any | None]:
        """A sequence of at most `length` tokens that has begun goes on in the idle slot `to`; `slot` is idle then. Returns the
        caches over `to`, empty ones that the caller gives their lengths."""
        ...

    def reach(self, slots: int) -> int:
        """Slots that a round over the first `slots` costs."""
        ...

    def ready(self, kind: tuple[str, Any], limits: Sequence[int], drafting: bool) -> bool:
        """Whether `launch` of the same finds what it needs; else it takes time, and every launched round must have been
        read before."""
        ...

    def launch(self, kind: tuple[str, Any], limits: Sequence[int], drafting: bool) -> Callable[[], tuple[list[Any], float]]:
        """Start a round of slots 0, 1, ..: each verifies up to limits[i] tokens (0: it takes no part, 1: no drafts). drafting:
        some sequence of the round drafts, in this round or a later one. Returns what waits for the round and gives a report
        a slot (`tokens` emitted, `accepted`, `drafts`, `finite`) and the seconds on the device. Two rounds of a kind may be
        under way; they are read in order."""
        ...

    def drop(self, kind: tuple[str, Any]) -> None:
        """Forget what was made for this kind; none of its rounds is under way."""
        ...

    def measure(self) -> tuple[dict[tuple[int, int], float], dict[int, float]]:
        """Seconds of verifying {(slots, tokens each): ..} and of drafting {slots: ..}; makes greedy rounds ready. Every slot
        must be idle."""
        ...

    def prepare_prompts(self, chunk: int) -> None:
        """Make the reading of prompts in pieces of up to `chunk` tokens ready, as far as it is worth it before one has come."""
        ...

    def close(self) -> None:
        """Free what was made ready; nothing runs."""
        ...


@dataclass
class Engine:
    """A loaded pair, ready to generate: what `load` of either runtime returns."""

    target: Target
    drafter: Drafter | None
    tokenizer: Any
    runtime: str
    backend_reason: str
    model: str
    draft_model: str | None
    notes: list[str] = field(default_factory=list)
    rounds: Rounds | None = None  # rounds without the CPU, where the runtime has them for this pair
    rounds_reason: str = ""  # why rounds run as they do: set by `load`, and again by each request
    device_class: str = ""  # kind and accelerator of the target's device, e.g. `cuda-nvidia-h200`; "" is info.device's kind
