"""A conversation on torch: caches handed on from turn to turn through the server's prefix operations."""

from __future__ import annotations

import numpy as np

from dspine.common.decoding import DecodingLoop, DecodingParams
from dspine.common.selection.policies import StaticPolicy
from dspine.common.sessions import Session
from dspine_cuda.drafter import load_drafter
from dspine_cuda.runtime import RUNTIME
from dspine_cuda.targets.load import load_target
from tests.helpers.drafters import drafter_folder
from tests.helpers.models import VOCAB, one_thread, save_tiny


def ask(pair, session, prompt, count=10):
    loop = DecodingLoop(*pair, prompt, DecodingParams(max_tokens=count, break_even=0.0, prefill_chunk=7), StaticPolicy())
    return loop, [event.token for event in session.run(loop)]


def test_turns_go_on_from_their_caches(tmp_path):
    with one_thread():
        save_tiny(tmp_path / "target", "qwen3")
        target = load_target(tmp_path / "target", device="cpu", dtype="float32")
        drafter = load_drafter(drafter_folder(tmp_path / "d", "dspine", 5, target.head_weight(), 5), target)
        session, text = Session(RUNTIME.serving(target, drafter).prefixes), []
        for turn in range(4):
            text += np.random.default_rng(turn).integers(3, VOCAB - 2, 5).tolist()
            loop, tokens = ask((target, drafter), session, text)
            again, expected = ask((target, drafter), Session(None), text)
            assert tokens == expected and loop.stats.accepted_tokens == again.stats.accepted_tokens
            assert loop.stats.cached_tokens == (0 if turn == 0 else len(text) - 5 - 1) and again.stats.cached_tokens == 0
            text += tokens
        other = [*text[:12], 7, 8]
        loop, tokens = ask((target, drafter), session, other)
        assert loop.stats.cached_tokens == 12 and tokens == ask((target, drafter), Session(None), other)[1]
