"""Caches between requests: conversations, prompt cache files; every kind of cache, dense and hybrid."""

from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np
import pytest

from dspine.common.decoding import DecodingLoop, DecodingParams
from dspine.common.errors import CheckpointError, DSpineError
from dspine.common.memory import CacheOptions, cache_parts, draft_context_bytes
from dspine.common.selection.policies import StaticPolicy
from dspine.common.sessions import Session
from dspine_mlx import draft_cache, kv
from dspine_mlx.drafter import load_drafter
from dspine_mlx.prefixes import MlxPrefixes, support
from dspine_mlx.prompt_cache import load_prompt_cache, save_prompt_cache
from tests.mlx.hybrids import hybrid_config, hybrid_target
from tests.mlx.toys import VOCAB, drafter_folder, toy_config, toy_target

KINDS = {
    "dense": lambda: toy_target("qwen3"),
    "8 bits": lambda: with_options(toy_target("qwen3", head_dim=64), kv_bits=8),
    "limited": lambda: with_options(toy_target("qwen3"), max_kv_size=24),
    "sliding": lambda: toy_target("llama", layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=9),
    "sliding drafter": lambda: toy_target("qwen3"),
    "hybrid": lambda: hybrid_target("qwen3_5_moe"),
    "hybrid, 8 bits": lambda: with_options(hybrid_target("qwen3_5", head_dim=64), kv_bits=8),
}


def with_options(target, **options):
    target.use_cache_options(CacheOptions(**options))
    return target


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """(target, drafter) by kind, made when first asked for."""
    made = {}

    def pair(kind):
        if kind not in made:
            target = KINDS[kind]()
            folder = tmp_path_factory.mktemp("drafter")
            changes = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9} if "drafter" in kind else {}
            folder = drafter_folder(folder / "d", "dspine", 5, target.head_weight(), **changes)
            made[kind] = target, load_drafter(folder, target)
        return made[kind]

    return pair


@pytest.fixture(autouse=True)
def small_slack(monkeypatch):
    monkeypatch.setattr(kv, "SLACK", 6)
    monkeypatch.setattr(draft_cache, "STEP", 8)


def ask(pair, session, prompt, count=10, stop_after=None, **options):
    """One request: (loop, tokens); ended after `stop_after` of them, as Ctrl-C does."""
    params = DecodingParams(max_tokens=count, break_even=0.0, prefill_chunk=7, **options)
    loop = DecodingLoop(*pair, prompt, params, StaticPolicy())
    events = session.run(loop)
    tokens = []
    for event in events:
        tokens.append(event.token)
        if len(tokens) == stop_after:
            break
    events.close()
    return loop, tokens


def cold(pair, prompt, count=10):
    return ask(pair, Session(None), prompt, count)


def words(seed, count):
    return np.random.default_rng(seed).integers(3, VOCAB - 2, count).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_turns_go_on_from_their_caches(kind, pairs):
    """R4, R11: text, drafts and rounds of a cold run; everything but the new message comes from the caches."""
    pair = pairs(kind)
    session, text = Session(MlxPrefixes()), []
    for turn in range(4):
        text += words(turn, 5)
        loop, tokens = ask(pair, session, text)
        again, expected = cold(pair, text)
        assert tokens == expected and loop.stats.rounds == again.stats.rounds
        assert loop.stats.accepted_tokens == again.stats.accepted_tokens
        assert loop.stats.cached_tokens == (0 if turn == 0 else len(text) - 5 - 1)
        text += tokens
    assert len(session.tokens) == len(text) - 1


TURNS = 30
CARDS = {
    "dense": (toy_config("qwen3", head_dim=64), CacheOptions()),
    "8 bits": (toy_config("qwen3", head_dim=64), CacheOptions(kv_bits=8)),
    "hybrid": (hybrid_config("qwen3_5_moe"), CacheOptions()),
    "hybrid, 8 bits": (hybrid_config("qwen3_5", head_dim=64), CacheOptions(kv_bits=8)),
}


def rows_of(layer):
    """Rows of a K/V buffer, room included."""
    keys = layer.keys[0] if isinstance(layer.keys, list | tuple) else layer.keys
    return keys.shape[2]


@pytest.fixture
def exact_buffers():
    """MLX's allocator without buffers kept for reuse: one a little larger than asked for would be counted whole."""
    before = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(before)


@pytest.mark.parametrize("kind", CARDS)
def test_m2_thirty_turns_hold_what_the_formula_says(kind, tmp_path, monkeypatch, exact_buffers):
    """Turns that run out and turns that are stopped in the middle: after each, K/V of the tokens with at most 256 rows of room,
    states and windows, the drafter's context, and nothing else. The formula is the one that plans memory before loading."""
    monkeypatch.setattr(draft_cache, "STEP", 256)
    card, options = CARDS[kind]
    target = with_options(toy_target("qwen3", head_dim=64), **vars(options)) if "hybrid" not in kind else None
    if target is None:
        family = card["model_type"]
        target = with_options(hybrid_target(family, head_dim=card["text_config"]["head_dim"]), **vars(options))
    drafter = load_drafter(drafter_folder(tmp_path / "d", "dspine", 5, target.head_weight()), target)
    pair, session, text = (target, drafter), Session(MlxPrefixes()), []
    ask(pair, Session(None), words(99, 40))  # tables and weights that are made when first used
    gc.collect()
    base = mx.get_active_memory()
    for turn in range(TURNS):
        text += words(turn, 6)
        loop, tokens = ask(pair, session, text, 6, stop_after=3 if turn % 3 == 1 else None)
        text += tokens
        del loop  # it holds the draft that was queued when it was stopped
        mx.eval(session.cache.export(len(session.tokens))[0], session.draft_cache._keys, session.draft_cache._values)
        gc.collect()
        size, held = len(session.tokens), session.nbytes
        rows = {rows_of(layer) for layer in session.cache.layers}
        assert len(rows) == 1 and size <= max(rows) <= size + 256 + drafter.config.block_size
        draft_rows = session.draft_cache._keys[0].shape[2]
        assert size <= draft_rows <= size + 256 + drafter.config.block_size
        formula = sum(part for _, part in cache_parts(card, max(rows), 4, options))
        formula += draft_context_bytes(drafter.config, draft_rows - drafter.config.block_size, 4)
        assert held == formula, (turn, held, formula)
        assert abs(mx.get_active_memory() - base - formula) <= 0.02 * formula, (turn, mx.get_active_memory() - base, formula)


@pytest.mark.parametrize("kind", KINDS)
def test_another_continuation_is_a_cold_run(kind, pairs):
    """The new prompt leaves the old text in its middle: cut where caches can be cut, read anew where not."""
    pair, session = pairs(kind), Session(MlxPrefixes())
    first = words(1, 30)
    ask(pair, session, first, 12)
    other = first[:20] + words(2, 9)
    loop, tokens = ask(pair, session, other)
    assert tokens == cold(pair, other)[1]
    assert loop.stats.cached_tokens == (20 if kind in ("dense", "8 bits") else 0), "cut where every layer can be"
    assert ask(pair, session, words(3, 12))[1] == cold(pair, words(3, 12))[1]


def test_m3_sliding_layers_of_a_drafter_hold_their_window(pairs):
    """However long the text: window, block, and a step."""
    pair = pairs("sliding drafter")
    session, text = Session(MlxPrefixes()), words(1, 8)
    for turn in range(6):
        text += ask(pair, session, text, 20)[1] + words(turn, 3)
    sliding, full = (session.draft_cache._keys[layer].shape[2] for layer in (0, 1))
    assert sliding <= 8 + 7 + 2 * 5 + 8 < 100 < full


def test_a_stopped_answer_keeps_what_was_committed(pairs):
    """R11: stopped inside a round's tokens; the stored length is what was really consumed."""
    for kind in ("dense", "hybrid"):
        pair, session = pairs(kind), Session(MlxPrefixes())
        text = words(4, 9)
        loop, shown = ask(pair, session, text, 20, stop_after=4)
        assert len(session.tokens) == loop.committed == session.cache.length == session.draft_cache.length
        text = text + shown + words(5, 4)
        loop, tokens = ask(pair, session, text)
        assert tokens == cold(pair, text)[1]


def test_a_broken_step_leaves_nothing(pairs, monkeypatch):
    pair, session = pairs("dense"), Session(MlxPrefixes())
    text = words(6, 9)
    ask(pair, session, text)
    with monkeypatch.context() as patch:
        patch.setattr(pair[0], "commit", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            ask(pair, session, text + words(7, 3))
    assert session.cache is None and len(session.tokens) == 0
    assert ask(pair, session, text)[1] == cold(pair, text)[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_stopped_between_two_pieces(kind, pairs):
    """Ctrl-C while a prompt is read: the caches hold the pieces that were, and what comes next is a cold run's."""
    pair, session = pairs(kind), Session(MlxPrefixes())
    text = words(4, 9)
    text += ask(pair, session, text)[1]
    seen = []

    def progress(done, total):
        seen.append(done)
        if len(seen) == 2:
            raise InterruptedError

    params = DecodingParams(max_tokens=4, break_even=0.0, prefill_chunk=7)
    loop = DecodingLoop(*pair, text + words(15, 40), params, StaticPolicy())
    with pytest.raises(InterruptedError):
        list(session.run(loop, progress))
    assert len(session.tokens) == seen[-1] == session.cache.length == session.draft_cache.length < len(text) + 40
    for rest in (words(16, 5), words(15, 40)):
        assert ask(pair, session, text + rest)[1] == cold(pair, text + rest)[1]


def test_drafts_off_and_on_again(pairs):
    """A turn without drafts leaves no drafter context: the next one with drafts reads anew (R4)."""
    target, drafter = pairs("dense")
    session, text = Session(MlxPrefixes()), words(8, 9)
    text += ask((target, None), session, text)[1]
    plain, _ = ask((target, None), session, text + [5])
    assert plain.stats.cached_tokens == len(text) - 1
    loop, tokens = ask((target, drafter), session, text + [5, 6])
    assert loop.stats.cached_tokens == 0 and tokens == cold((target, drafter), text + [5, 6])[1]


def test_prefixes_for_the_server(pairs):
    pair = target, drafter = pairs("dense")
    ops = support(target, drafter).prefixes
    loop, _ = ask(pair, Session(None), words(9, 30))
    saved = ops.save(loop.cache, loop.draft_cache, 25)
    arrays = [*saved.target.values(), *saved.draft.values()]
    assert sum(x.nbytes for x in arrays) == ops.nbytes(loop.cache, loop.draft_cache, 25)
    fresh = DecodingLoop(*pair, words(9, 30), DecodingParams(max_tokens=10, break_even=0.0), StaticPolicy())
    ops.load(saved, fresh.cache, fresh.draft_cache, 21)
    fresh.reuse(21)
    assert [event.token for event in fresh.run()] == cold(pair, words(9, 30))[1]


@pytest.mark.parametrize("kind", ["hybrid", "limited", "sliding", "sliding drafter"])
def test_snapshots_for_the_server(kind, pairs):
    """States and windows after exactly the saved tokens; a sequence that goes on leaves the snapshot alone."""
    pair = pairs(kind)
    ops = support(*pair).prefixes
    assert ops.cuts is False and support(*pairs("dense")).prefixes.cuts is True
    prompt, params = words(9, 30), DecodingParams(max_tokens=10, break_even=0.0, prefill_chunk=7)
    loop = DecodingLoop(*pair, prompt, params, StaticPolicy())
    while loop.committed < 21:
        loop.step()
    saved = ops.save(loop.cache, loop.draft_cache, 21)
    expected = [event.token for event in loop.run()]
    for _ in range(2):
        fresh = DecodingLoop(*pair, prompt, params, StaticPolicy())
        ops.load(saved, fresh.cache, fresh.draft_cache, 21)
        fresh.reuse(21)
        assert [event.token for event in fresh.run()] == expected == cold(pair, prompt)[1]


# -- files -------------------------------------------------------------------------------------------------------------------


def saved_file(pair, path, prompt):
    session = Session(MlxPrefixes())
    ask(pair, session, prompt, 1)
    save_prompt_cache(path, *pair, session, {"text": "x", "raw": True})
    return session


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_exact(kind, pairs, tmp_path):
    """Saved and loaded bit for bit; what follows is what follows a cold run of the whole text."""
    pair, path, prompt = pairs(kind), tmp_path / "prompt", words(10, 33)
    session = saved_file(pair, path, prompt)
    for _ in range(2):  # a file is not used up
        tokens, cache, draft_cache, about = load_prompt_cache(path, *pair)
        assert tokens.tolist() == prompt and about == {"text": "x", "raw": True}
        for ours, theirs in (
            (cache.export(33)[0], session.cache.export(33)[0]),
            (draft_cache.export(33), session.draft_cache.export(33)),
        ):
            assert ours.keys() == theirs.keys() and ours
            assert all(np.array(mx.array_equal(ours[name], theirs[name])) for name in ours)
        again = Session(MlxPrefixes())
        again.tokens, again.cache, again.draft_cache = tokens, cache, draft_cache
        loop, got = ask(pair, again, prompt + words(11, 4), 12)
        assert loop.stats.cached_tokens == 33 and got == cold(pair, prompt + words(11, 4), 12)[1]
    assert [p.name for p in tmp_path.iterdir()] == ["prompt"], "nothing is left beside the file"


def test_files_of_something_else_are_refused(pairs, tmp_path):
    pair = target, drafter = pairs("dense")
    path = tmp_path / "prompt"
    saved_file(pair, path, words(12, 9))
    other = toy_target("qwen3", seed=5)
    for wrong, message in (
        (other, "another model: other weights"),
        (toy_target("llama"), "model type qwen3 there, llama here"),
        (with_options(toy_target("qwen3"), max_kv_size=24), "made with other settings: max_kv_size None there, 24 here; give"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_prompt_cache(path, wrong, None)
    folder = drafter_folder(tmp_path / "d", "dspine", 5, target.head_weight(), seed=9)
    with pytest.raises(CheckpointError, match="another drafter: other weights"):
        load_prompt_cache(path, target, load_drafter(folder, target))
    assert load_prompt_cache(path, target, None)[2] is None
    plain = tmp_path / "plain"
    saved_file((target, None), plain, words(12, 9))
    with pytest.raises(CheckpointError, match="made without a drafter"):
        load_prompt_cache(plain, *pair)


def test_files_that_are_none(pairs, tmp_path):
    pair = pairs("dense")
    with pytest.raises(DSpineError, match="does not exist"):
        load_prompt_cache(tmp_path / "absent", *pair)
    (tmp_path / "text").write_text("hello")
    with pytest.raises(CheckpointError, match="is no prompt cache"):
        load_prompt_cache(tmp_path / "text", *pair)
    mx.save_safetensors(str(tmp_path / "other.safetensors"), {"0.0": mx.zeros(3)}, {"0": "KVCache"})
    with pytest.raises(CheckpointError, match="mlx_lm's own files are another format"):
        load_prompt_cache(tmp_path / "other.safetensors", *pair)
    whole = tmp_path / "whole"
    saved_file(pair, whole, words(13, 9))
    (tmp_path / "half").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    with pytest.raises(CheckpointError, match="is no prompt cache"):
        load_prompt_cache(tmp_path / "half", *pair)
    with pytest.raises(DSpineError, match="is no file"):
        load_prompt_cache(tmp_path, *pair)


def test_files_that_are_not_what_was_written_are_refused(pairs, tmp_path):
    """Whatever is changed in arrays, tokens or metadata: states of another shape would be read out of bounds, missing ones
    would start from zero."""
    pair, whole, other = pairs("hybrid"), tmp_path / "whole", tmp_path / "other.safetensors"
    saved_file(pair, whole, words(13, 9))
    arrays, described = mx.load(str(whole), format="safetensors", return_metadata=True)
    bit = arrays["target.states"].view(mx.uint32)
    changes = [
        {"target.states": None},
        {"target.states": arrays["target.states"][:1]},
        {"target.states": mx.where(mx.arange(bit.size).reshape(bit.shape) == 5, bit ^ 1, bit).view(mx.float32)},
        {"target.kv.0.keys": arrays["target.kv.0.keys"][..., :3]},
        {"draft.keys.0": None},
        {"tokens": arrays["tokens"][:4]},
        {"tokens": arrays["tokens"].astype(mx.float32)},
        {"tokens": None},
        {"surplus": mx.zeros(3)},
    ]
    for change in changes:
        kept = {name: array for name, array in (arrays | change).items() if array is not None}
        mx.save_safetensors(str(other), kept, described)
        with pytest.raises(CheckpointError, match="is damaged: its checksum is another"):
            load_prompt_cache(other, *pair)
    for name in ("about", "target", "facts", "checksum"):
        for text in ({name: "[]"}, {name: None}):
            left = {key: value for key, value in (described | text).items() if value is not None}
            mx.save_safetensors(str(other), arrays, left)
            with pytest.raises(CheckpointError, match="is damaged"):
                load_prompt_cache(other, *pair)
    mx.save_safetensors(str(other), arrays, described)
    assert load_prompt_cache(other, *pair)[3] == {"text": "x", "raw": True}


def test_a_file_that_cannot_be_written_leaves_the_old_one(pairs, tmp_path, monkeypatch):
    pair, path = pairs("dense"), tmp_path / "prompt"
    saved_file(pair, path, words(12, 9))
    before = path.read_bytes()

    def full(*_):
        raise RuntimeError("[write] Unable to write 8 bytes to file.")

    monkeypatch.setattr(mx, "save_safetensors", full)
    with pytest.raises(DSpineError, match=r"cannot write the prompt cache .*prompt: \[write\] Unable to write"):
        saved_file(pair, path, words(14, 9))
    assert path.read_bytes() == before and [item.name for item in tmp_path.iterdir()] == ["prompt"]
