"""A scripted language model in NumPy behind the real server: it says what a script tells it, else seeded printable noise.

Its features are the tokens themselves, so its drafter really depends on what it was given: a drafter whose context is
missing or shifted (case R4) drafts other tokens.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import uvicorn
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Raw

from dspine.common.protocols import (
    Availability,
    DraftRequest,
    Engine,
    Prefill,
    Proposal,
    ServingSupport,
    StageZero,
    TargetInfo,
    Verification,
)
from dspine.common.serving.scheduler import SchedulerSettings
from dspine.common.serving.server import Server
from dspine.common.serving.settings import ServerSettings
from dspine.common.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.toys import NumpyArrays

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if think %}<think>\n{% endif %}{% endif %}"
)
CONTEXT = 512


def make_tokenizer(folder: Path, template: str = TEMPLATE) -> Tokenizer:
    """One token a byte, four special tokens, four markers that are one token and not special (as Qwen has them)."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Raw(models.BPE({word: i for i, word in enumerate([*SPECIAL, *alphabet])}, []))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    raw.add_tokens([AddedToken(word, special=False, normalized=False) for word in MARKERS])
    raw.save(str(folder / "tokenizer.json"))
    card = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(card))
    return load_tokenizer(folder)


class ScriptTarget:
    """`scripts`: the last user text -> the answer. Every third script token is a near-tie, so that sampling has choices."""

    record_routing = False

    def __init__(self, tokenizer: Tokenizer, context: int = CONTEXT, slow: float = 0.0) -> None:
        self.tokenizer, self.slow = tokenizer, slow
        self.vocab = len(tokenizer.backend)
        self.info = TargetInfo("toy", "toy", 1, 1, self.vocab, context, frozenset(), "float64", "cpu", "toy")
        self.arrays = NumpyArrays()
        self.scripts: dict[str, str] = {}
        self.forwards, self.break_on = 0, None  # a marker text whose prompt makes the device fail
        self.threads: set[int] = set()
        self._noise = np.random.default_rng(7).normal(size=(self.vocab, self.vocab))
        allowed = np.full(self.vocab, -30.0)
        allowed[[tokenizer.encode(chr(c))[0] for c in range(97, 123)]] = 0.0
        allowed[tokenizer.encode("<think>")[0]] = -90.0  # noise does not think
        self._noise += allowed
        self._start = tokenizer.encode("<|im_start|>")[0]
        self._end = tokenizer.encode("<|im_end|>")[0]

    def logits_of(self, context: list[int]) -> np.ndarray:
        row = self._noise[(3 * (context[-2] if len(context) > 1 else 0) + context[-1]) % self.vocab].copy()
        starts = [i for i, token in enumerate(context) if token == self._start]
        if len(starts) > 1:
            user = self.tokenizer.decode(context[starts[-2] + 1 : starts[-1]]).strip().removeprefix("user\n")
            script = self.scripts.get(user)
            if script is not None:
                said = len(context) - starts[-1] - 1 - len("assistant\n")
                ids = [*self.tokenizer.encode(script), self._end]
                if 0 <= said < len(ids):
                    row[ids[said]] += 200.0
        return row

    def make_cache(self, capacity: int) -> SimpleNamespace:
        return SimpleNamespace(tokens=[], capacity=capacity, nbytes=8 * capacity)

    def prefill(self, cache: Any, tokens: np.ndarray, *, chunk: int) -> Prefill:
        self._work(cache.tokens + tokens[0].tolist())
        cache.tokens += tokens[0].tolist()
        return Prefill(self.logits_of(cache.tokens)[None], tokens[..., None].astype(np.float64))

    def begin(self, cache: Any, tokens: np.ndarray) -> StageZero:
        return StageZero(tokens, None)

    def finish(self, cache: Any, stage: StageZero, w: int) -> Verification:
        block = stage.tokens[0, :w].tolist()
        self._work(cache.tokens)
        rows = [self.logits_of(cache.tokens + block[: i + 1]) for i in range(w)]
        return Verification(np.stack(rows)[None], stage.tokens[:, :w, None].astype(np.float64), factors=block)

    def commit(self, cache: Any, verification: Verification, m: int) -> None:
        cache.tokens += verification.factors[:m]
        assert len(cache.tokens) <= cache.capacity

    def _work(self, tokens: list[int]) -> None:
        self.forwards += 1
        self.threads.add(threading.get_ident())
        time.sleep(self.slow)
        if self.break_on is not None and self.break_on in self.tokenizer.decode(tokens):
            raise RuntimeError("the device ran out of something at /secret/path")


class EchoDrafter:
    """Drafts the target's greedy text from its own context, with every fifth position of the text wrong."""

    def __init__(self, target: ScriptTarget, block: int = 6) -> None:
        self.target = target
        self.config = SimpleNamespace(block_size=block, num_proposals=block - 1, method="dflash")
        self.info: dict[str, Any] = {}

    def make_cache(self, capacity: int) -> SimpleNamespace:
        return SimpleNamespace(tokens=[], nbytes=8 * capacity)

    def commit(self, cache: Any, features: np.ndarray) -> None:
        cache.tokens += [int(x) for x in features[0, :, 0]]

    def propose(self, cache: Any, anchor: np.ndarray, request: DraftRequest) -> Proposal:
        text = [*cache.tokens, int(anchor[0])]
        drafts = []
        for _ in range(self.config.num_proposals):
            token = int(np.argmax(self.target.logits_of(text)))
            text.append(token)
            drafts.append(token if len(text) % 5 else (token + 1) % self.target.vocab)
        return Proposal(np.asarray([drafts], dtype=np.int32), np.array([True]))


class ToyBatcher:
    """A batch is a loop over the sequences; it remembers how large its batches were."""

    shares_length = False

    def __init__(self, target: ScriptTarget, drafter: EchoDrafter | None) -> None:
        self.target, self.drafter, self.sizes = target, drafter, []

    def propose(self, caches: Any, anchors: Any, requests: Any) -> list[Proposal]:
        return [
            self.drafter.propose(cache, np.array([anchor]), request)
            for cache, anchor, request in zip(caches, anchors, requests, strict=True)
        ]

    def verify(self, caches: Any, blocks: Any) -> list[Verification]:
        self.sizes.append(len(caches))
        return [
            self.target.finish(cache, self.target.begin(cache, block), block.shape[1])
            for cache, block in zip(caches, blocks, strict=True)
        ]

    def commit(self, caches: Any, verifications: Any, counts: Any) -> None:
        for cache, verification, count in zip(caches, verifications, counts, strict=True):
            self.target.commit(cache, verification, count)

    def commit_drafts(self, caches: Any, features: Any) -> None:
        for cache, part in zip(caches, features, strict=True):
            self.drafter.commit(cache, part)


class ToyPrefixes:
    """Lists of tokens, eight bytes each."""

    def nbytes(self, cache: Any, draft_cache: Any, length: int) -> int:
        return 8 * length * (1 if draft_cache is None else 2)

    def save(self, cache: Any, draft_cache: Any, length: int) -> Any:
        assert length <= len(cache.tokens) and (draft_cache is None or length <= len(draft_cache.tokens))
        return cache.tokens[:length], None if draft_cache is None else draft_cache.tokens[:length]

    def load(self, saved: Any, cache: Any, draft_cache: Any, length: int) -> None:
        cache.tokens += saved[0][:length]
        if draft_cache is not None:
            draft_cache.tokens += saved[1][:length]

    def copy(self, cache: Any, draft_cache: Any, to_cache: Any, to_draft: Any, length: int) -> None:
        self.load(self.save(cache, draft_cache, length), to_cache, to_draft, length)


class ToyRuntime:
    """The runtime `toy`; `batched` decides what it offers the server."""

    name = "toy"

    def __init__(self, batched: bool = True) -> None:
        self.batched, self.batcher = batched, None

    def availability(self) -> Availability:
        return Availability(True, "toys run everywhere", ("cpu",))

    def serving(self, target: Any, drafter: Any) -> ServingSupport:
        self.batcher = ToyBatcher(target, drafter) if self.batched else None
        return ServingSupport(self.batcher, ToyPrefixes(), "a toy")


class Point:
    """An entry point."""

    def __init__(self, loaded: Any) -> None:
        self.loaded = loaded

    def load(self) -> Any:
        return self.loaded


def toy_engine(folder: Path, *, draft: bool = True, slow: float = 0.0, template: str = TEMPLATE) -> Engine:
    target = ScriptTarget(make_tokenizer(folder, template), slow=slow)
    drafter = EchoDrafter(target) if draft else None
    return Engine(target, drafter, target.tokenizer, "toy", "asked for", "toy", "/somewhere/private/draft" if draft else None)


def toy_settings(**changes: Any) -> ServerSettings:
    scheduler = {name: changes.pop(name) for name in list(changes) if name in SchedulerSettings.__dataclass_fields__}
    scheduler = {"prefix_grain": 8} | scheduler
    return ServerSettings(**{"names": ("toy",), "port": 0, "scheduler": SchedulerSettings(**scheduler), **changes})


@contextmanager
def running(server: Server) -> Iterator[str]:
    """Serve over real sockets on another thread; yields the base URL."""
    config = uvicorn.Config(server.app, host="127.0.0.1", port=0, log_config=None, access_log=False, lifespan="off")
    web = uvicorn.Server(config)
    thread = threading.Thread(target=web.run, daemon=True)
    thread.start()
    while not web.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{web.servers[0].sockets[0].getsockname()[1]}"
    finally:
        web.should_exit = True
        thread.join(20)
        server.close(5.0)
        assert not thread.is_alive()
