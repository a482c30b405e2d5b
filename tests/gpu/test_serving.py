"""Batched rounds on CUDA against each sequence alone: dense and hybrid, unequal lengths and counts, joining and leaving; the
server over real graphs."""

from __future__ import annotations

import httpx
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from dspine.common.protocols import DraftRequest, Engine  # noqa: E402
from dspine_cuda.drafter import load_drafter  # noqa: E402
from dspine_cuda.runtime import RUNTIME  # noqa: E402
from dspine_cuda.serving import support  # noqa: E402
from tests.helpers.drafters import drafter_folder  # noqa: E402
from tests.helpers.hybrids import save_hybrid  # noqa: E402
from tests.helpers.models import VOCAB, save_tiny  # noqa: E402
from tests.serving.batches import PROMPTS, PrimedBatcher, primed_loops, run_batched, texts_alone  # noqa: E402

FAMILIES = ("llama", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
WIDTH = 9


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """(target, drafter, batcher) in float32."""
    folder = tmp_path_factory.mktemp(request.param)
    (save_tiny if request.param == "llama" else save_hybrid)(folder / "t", request.param)
    target = RUNTIME.load_target(folder / "t", device="cuda", dtype="float32")
    drafter = load_drafter(drafter_folder(folder / "d", "dspine", WIDTH, target.head_weight(), 5, head_dim=16), target)
    return target, drafter, support(target, drafter).batcher


def filled(target):
    caches = [target.make_cache(96) for _ in PROMPTS]
    for cache, prompt in zip(caches, PROMPTS, strict=True):
        target.prefill(cache, torch.tensor([prompt], device="cuda"), chunk=16)
    return caches


def test_rows_and_states_are_those_alone(pair):
    """Within float32 rounding (another number of rows is another sum); counts of 0 leave states as they are."""
    target, drafter, batcher = pair
    together, alone = filled(target), filled(target)
    rng = np.random.default_rng(1)
    for widths, counts in (((1, 9, 3, 2), (1, 4, 0, 2)), ((4, 4, 4, 4), (2, 1, 4, 3)), ((8, 8, 8, 8), (8, 8, 8, 8))):
        blocks = [torch.tensor(rng.integers(3, VOCAB, (1, w)), dtype=torch.int32, device="cuda") for w in widths]
        got = batcher.verify(together, blocks)
        before = [getattr(cache, "states", torch.zeros(1)).clone() for cache in together]
        batcher.commit(together, got, counts)
        for i, (cache, block, count) in enumerate(zip(alone, blocks, counts, strict=True)):
            wanted = target.finish(cache, target.begin(cache, block), block.shape[1])
            target.commit(cache, wanted, count)
            assert torch.allclose(got[i].logits, wanted.logits, atol=2e-3, rtol=1e-3)
            assert torch.allclose(got[i].features, wanted.features, atol=2e-3, rtol=1e-3)
            if hasattr(cache, "states"):
                assert torch.allclose(together[i].states, cache.states, atol=1e-4, rtol=1e-3)
                assert torch.allclose(together[i].windows, cache.windows, atol=1e-4, rtol=1e-3)
                assert count or torch.equal(together[i].states, before[i])
            assert together[i].length == cache.length
            together[i].check_integrity()
    drafts = [drafter.make_cache(96) for _ in PROMPTS]
    for draft, verification in zip(drafts, got, strict=True):
        drafter.commit(draft, verification.features)
    made = batcher.propose(drafts, [7, 8, 9, 10], [DraftRequest()] * 4)
    for i, draft in enumerate(drafts):
        one = drafter.propose(draft, torch.tensor([7 + i], dtype=torch.int32, device="cuda"), DraftRequest())
        assert bool(one.finite.all()) and bool(made[i].finite.all())


@pytest.mark.parametrize(
    ("joins", "leaves"), [((), {}), ((0, 3, 5, 0), {}), ((0, 0, 2, 6), {1: 3, 0: 6})], ids=["together", "joining", "cancelled"]
)
def test_texts_are_those_alone(pair, joins, leaves):
    """Tier 2: a near tie may fall another way; on these models texts agree for most of their tokens, and rounds commit what
    they accepted."""
    target, drafter, batcher = pair
    alone = texts_alone(target)
    loops, primed = primed_loops(target, drafter, alone)
    engine = Engine(target, primed, None, "torch", "", "", None)
    run_batched(engine, PrimedBatcher(batcher, primed), loops, joins, leaves)
    same = sum(loop.output == text[: len(loop.output)] for loop, text in zip(loops, alone, strict=True))
    assert same >= 3
    assert all(loop.stats.accepted_tokens > 0 for loop in loops)


def test_server_over_graphs(tmp_path):
    """`--graphs on --max-concurrency 1` from the folder to the answer: the eager server's text, and it says how it ran."""
    pytest.importorskip("fastapi", reason="fastapi is not installed (dspine[server])")
    pytest.importorskip("uvicorn", reason="uvicorn is not installed (dspine[server])")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from dspine.common.generation import load
    from dspine.common.serving.scheduler import SchedulerSettings
    from dspine.common.serving.server import Server
    from dspine.common.serving.settings import ServerSettings
    from tests.serving.toys import running

    save_tiny(tmp_path / "t", "qwen3")
    raw = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="w0", eos_token="w2").save_pretrained(tmp_path / "t")
    head = RUNTIME.load_target(tmp_path / "t", device="cpu", dtype="float32").head_weight()
    drafter_folder(tmp_path / "d", "dspine", WIDTH, head, 5, head_dim=16)
    texts = {}
    for graphs in ("off", "on"):

        def make(graphs=graphs):
            return load(RUNTIME, str(tmp_path / "t"), str(tmp_path / "d"), device="cuda", dtype="float32", graphs=graphs)

        settings = ServerSettings(names=("tiny",), max_context=256, scheduler=SchedulerSettings(max_concurrency=1))
        server = Server(make, settings)
        assert server.summary()["graphs"] is (graphs == "on")
        body = {"model": "tiny", "prompt": PROMPTS[1], "temperature": 0, "ignore_eos": True, "max_tokens": 32}
        with running(server) as url:
            for _ in range(2):
                answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300).json()
        texts[graphs] = answer["choices"][0]["text"]
        assert answer["usage"]["speculative"].get("rounds_by", "").startswith("graphs") is (graphs == "on")
    assert texts["on"].split()[:8] == texts["off"].split()[:8]
