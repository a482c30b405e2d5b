"""Case V2 over HTTP on real tiny pairs, dense and hybrid: 1, 2, 4, 8 requests at once, half of them alike, some cancelled in
the middle; every answer and its acceptance are those of the request alone."""

from __future__ import annotations

import asyncio
import threading

import httpx
import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspine.common.generation import load
from dspine.common.runtimes import choose_runtime
from dspine.common.serving.scheduler import SchedulerSettings
from dspine.common.serving.server import Server
from dspine.common.serving.settings import ServerSettings
from dspine.common.tokenizer import load_tokenizer
from tests.helpers.drafters import drafter_folder
from tests.helpers.hybrids import save_hybrid
from tests.helpers.models import VOCAB, save_tiny
from tests.serving.toys import running

RNG = np.random.default_rng(4)
DISTINCT = [RNG.integers(3, VOCAB, size=n).tolist() for n in (5, 21, 9, 40)]
ALIKE = RNG.integers(3, VOCAB, size=14).tolist()


@pytest.fixture(scope="module", params=["llama", "qwen3_5_text", "qwen3_5_moe_text"])
def server(request, tmp_path_factory):
    """(url, server) of a pair in float32 with a batch of up to 8"""
    root = tmp_path_factory.mktemp("pair")
    save = save_tiny if request.param == "llama" else save_hybrid
    model = save(root / "target", request.param)
    raw = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    for name in ("target", "words"):
        PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="w0", eos_token="w2").save_pretrained(root / name)
    head = model.get_output_embeddings().weight.detach().float().numpy()
    drafter_folder(root / "draft", "dspine", 9, head, model.config.num_hidden_layers)
    runtime, reason = choose_runtime("torch")

    def make():
        engine = load(runtime, str(root / "target"), str(root / "draft"), device="cpu", dtype="float32", backend_reason=reason)
        engine.tokenizer = load_tokenizer(root / "words")
        return engine

    scheduler = SchedulerSettings(max_concurrency=8, prefix_grain=8, prefill_chunk=16)
    made = Server(make, ServerSettings(names=("tiny",), scheduler=scheduler))
    assert made.scheduler.batches
    batcher, made.sizes = made.scheduler._rounds.batcher, []
    verify = batcher.verify
    batcher.verify = lambda caches, blocks: made.sizes.append(len(caches)) or verify(caches, blocks)
    with running(made) as url:
        yield url, made


def body(prompt, draft=None, **change):
    return {"model": "tiny", "prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": 20, "draft": draft} | change


async def ask(client, request, cancel_after=None):
    if cancel_after is None:
        answer = (await client.post("/v1/completions", json=request)).raise_for_status().json()
        spec = answer["usage"]["speculative"]
        return answer["choices"][0]["text"], spec["drafted"], spec["accepted"], spec["rounds"]
    async with client.stream("POST", "/v1/completions", json=request | {"stream": True}) as response:
        seen = 0
        async for _ in response.aiter_lines():
            seen += 1
            if seen > cancel_after:
                break
    return None


def together(url, requests, cancelled=()):
    """All at once; `cancelled`: more requests whose client leaves in the middle."""

    async def main():
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            leaving = [asyncio.create_task(ask(client, request, i)) for i, request in enumerate(cancelled)]
            found = await asyncio.gather(*[ask(client, request) for request in requests])
            await asyncio.gather(*leaving)
            return found

    return asyncio.run(main())


@pytest.mark.parametrize("draft", ["full", None])
def test_v2_answers_and_acceptance_are_those_alone(server, draft):
    url, made = server
    prompts = [prompt for pair in zip(DISTINCT, [ALIKE] * 4, strict=True) for prompt in pair]
    alone = [together(url, [body(prompt, draft)])[0] for prompt in prompts]
    assert len({text for text, *_ in alone}) == 5 and all(drafted for _, drafted, *_ in alone)
    for count in (1, 2, 4, 8):
        leaving = [body(DISTINCT[i], draft, max_tokens=60) for i in range(count // 2)] if count > 2 else []
        found = together(url, [body(prompt, draft) for prompt in prompts[:count]], leaving)
        assert [text for text, *_ in found] == [text for text, *_ in alone[:count]]
        if draft == "full":  # lengths do not follow the clock: rounds, drafts and what was accepted are the same, to the last
            assert found == alone[:count]
    while made.scheduler.occupancy != (0, 0):
        threading.Event().wait(0.005)
    assert made.scheduler.alive and max(made.sizes) >= 8 and 2 in made.sizes


def test_m3_the_plan_counts_what_every_sequence_has(server):
    """Tokens at the longest context and states besides, for every sequence; K/V of attention layers only."""
    _, made = server
    summary, target, drafter = made.summary(), made.scheduler.engine.target, made.scheduler.engine.drafter
    cache, draft = target.make_cache(320), drafter.make_cache(320)
    assert summary["cache_bytes_per_token"] * 320 + summary["cache_bytes_per_sequence"] == cache.nbytes + draft.nbytes
    states = 0
    if hasattr(cache, "states"):
        states = cache.states.nbytes + cache.windows.nbytes
        layers = len(target.config.attention_layers)
        size = 2 * layers * target.config.num_kv_heads * target.config.head_dim * 4
        assert summary["cache_bytes_per_token"] == size + draft.nbytes // (320 + 9)
    assert summary["cache_bytes_per_sequence"] == states + draft.nbytes // (320 + 9) * 9
    each = summary["cache_bytes_per_token"] * made.service.context + 2 * summary["cache_bytes_per_sequence"]
    assert summary["cache_bytes_at_most"] == 8 * each + summary["prefix_cache_bytes"]


def test_plain_and_sampled_rows_beside_them(server):
    """Whatever is in the batch: plain rows, seeds, penalties; each as alone."""
    url, _ = server
    requests = [
        body(DISTINCT[0], False), body(DISTINCT[1], temperature=0.9, seed=5), body(DISTINCT[2], presence_penalty=1.0),
        body(ALIKE, "full"), body(ALIKE, temperature=0.7, seed=6, top_p=0.9), body(DISTINCT[3]),
    ]  # fmt: skip
    alone = [together(url, [request])[0][0] for request in requests]
    assert [text for text, *_ in together(url, requests)] == alone


def test_prefixes_are_reused_in_company(server):
    """Warm answers of several requests at once are the cold ones, and say what was reused (cases R4, R11)."""
    url, made = server
    shared = RNG.integers(3, VOCAB, size=24).tolist()
    requests = [body([*shared, *tail]) for tail in ([5], [6, 7], [8, 9, 10])]
    made.scheduler.prefixes.clear()
    cold = [together(url, [request])[0][0] for request in requests if made.scheduler.prefixes.clear() is None]
    together(url, requests[:2])  # the second one's snapshot is where the two part
    before = made.metrics.cached_tokens._value.get()
    assert [text for text, *_ in together(url, requests)] == cold
    assert made.metrics.cached_tokens._value.get() - before >= 24
