"""Real runtimes behind the server, on tiny folders: load on the worker's thread, serve, equal the Python API (case V1)."""

from __future__ import annotations

import importlib.util
import threading

import httpx
import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: it makes the tiny model")

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspine.common.generation import generate, load
from dspine.common.runtimes import choose_runtime
from dspine.common.serving.scheduler import SchedulerSettings
from dspine.common.serving.server import Server
from dspine.common.serving.settings import ServerSettings
from tests.helpers.drafters import drafter_folder
from tests.helpers.models import VOCAB, save_tiny
from tests.serving.toys import running

BACKENDS = [
    "torch",
    pytest.param(
        "mlx", marks=pytest.mark.skipif(importlib.util.find_spec("mlx") is None, reason="mlx is not installed (dspine[mlx])")
    ),
]
PROMPTS = [" ".join(f"w{n}" for n in np.random.default_rng(i).integers(3, VOCAB, size=12)) for i in range(3)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    model = save_tiny(root / "target", "llama")
    raw = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="w0", eos_token="w2").save_pretrained(root / "target")
    head = model.lm_head.weight.detach().numpy().astype(np.float32)
    return root / "target", drafter_folder(root / "draft", "dspine", 6, head, 5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_answers_equal_the_python_api(folders, backend):
    target, drafter = folders
    runtime, reason = choose_runtime(backend)
    loaded_on = []

    def load_engine():
        loaded_on.append(threading.current_thread().name)
        return load(runtime, str(target), str(drafter), device="cpu", dtype="float32", backend_reason=reason)

    settings = ServerSettings(
        names=("tiny",), scheduler=SchedulerSettings(max_concurrency=3, prefix_grain=4, prefill_chunk=8), default_max_tokens=12
    )
    server = Server(load_engine, settings)
    engine = load(runtime, str(target), str(drafter), device="cpu", dtype="float32")
    wanted = [generate(engine, prompt, raw=True, max_tokens=12, ignore_eos=True).text for prompt in PROMPTS]
    assert loaded_on == ["dspine-worker"]
    assert server.scheduler.batches is (server.scheduler.support.batcher is not None)
    keeps = server.scheduler.support.prefixes is not None
    assert keeps or backend != "torch"
    with running(server) as url:
        body = {"model": "tiny", "prompt": PROMPTS, "temperature": 0, "ignore_eos": True}
        for _ in range(2):  # the second time from kept prefixes, where the runtime keeps them
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()
            assert [choice["text"] for choice in answer["choices"]] == wanted
        assert (answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) is keeps
        single = httpx.post(f"{url}/v1/completions", json=body | {"prompt": PROMPTS[0]}, timeout=120).json()
        assert single["usage"]["speculative"]["drafted"] > 0  # a batch drafts where that pays, one alone always
        score = httpx.post(f"{url}/v1/completions", json=body | {"logprobs": 2}, timeout=120).json()
        for choice in score["choices"]:
            values = choice["logprobs"]["token_logprobs"]
            assert len(values) == 12 and all(value <= 0 for value in values)
            assert [max(top.values()) for top in choice["logprobs"]["top_logprobs"]] == pytest.approx(values, abs=1e-4)
