"""Step 1 (CPU): an 8,192-token tokenizer and the training shards of hybrid-tiny.

    python examples/train_hybrid_tiny/prepare.py --conversations SHARDS --prompts prompts.jsonl --output DATA

`SHARDS` holds npz shards written with SmolLM2's tokenizer (`tokens`, `lengths`, `prompt_lengths`, `greedy`); they are decoded,
their system prompt is dropped, and they are encoded again. Plain text comes from the prompts file (long passages under open
licences) and from the Python standard library's own sources (PSF-2.0).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from dspine.common.embedded import prepare_embedded

VOCAB = 8192
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")  # ids 0..3; <|mask|> occurs in no text
END_OF_TEXT, END_OF_TURN = 0, 2
CONTEXT = 2048
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# The family's own splitting (transformers builds it for model type qwen3_5_moe, whatever tokenizer.json says)
PIECES = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
CLOSED = ("cnn_dailymail", "arena-hard")  # news texts that stay their owners', and users' own words: no plain text from these
SHARD_TOKENS = 3_500_000


def conversation_texts(folder: Path) -> Iterator[tuple[str, str, bool, bool]]:
    """(prompt up to the answer, answer, complete, greedy) of every conversation, in order."""
    tokenizer = Tokenizer.from_file(str(prepare_embedded() / "tokenizer.json"))
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as shard:
            tokens, lengths, prompts, greedy = (shard[n] for n in ("tokens", "lengths", "prompt_lengths", "greedy"))
        ends = np.cumsum(lengths)
        spans = [(end - length, end - length + prompt, end) for end, length, prompt in zip(ends, lengths, prompts, strict=True)]
        heads = tokenizer.decode_batch([tokens[a:b].tolist() for a, b, _ in spans], skip_special_tokens=False)
        bodies = tokenizer.decode_batch([tokens[b:c].tolist() for _, b, c in spans], skip_special_tokens=False)
        for head, body, is_greedy in zip(heads, bodies, greedy, strict=True):
            head = re.sub(r"^<\|im_start\|>system\n.*?<\|im_end\|>\n", "", head, count=1, flags=re.DOTALL)
            complete = body.endswith("<|im_end|>")
            yield head, body.removesuffix("<|im_end|>"), complete, bool(is_greedy)


def plain_texts(prompts: Path) -> Iterator[str]:
    """Long passages of the prompts file, then the standard library (its tests left out)."""
    for line in prompts.read_text(encoding="utf-8").split("\n"):
        if not line:
            continue
        row = json.loads(line)
        text = "\n\n".join(row.get("turns") or [row["messages"][0]["content"]])
        if len(text) > 1100 and not row["source"].startswith(CLOSED):  # shorter ones are prompts of the conversations
            yield text
    library = Path(sysconfig.get_paths()["stdlib"])
    skipped = {
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "site-packages",
        "dist-packages",
        "__pycache__",
        "encodings",
        "pydoc_data",
    }
    for path in sorted(library.rglob("*.py")):
        if not skipped & set(path.relative_to(library).parts) and path.stat().st_size < 200_000:
            yield path.read_text(encoding="utf-8", errors="replace")


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """Byte-level BPE; every digit a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(PIECES, behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        min_frequency=4,
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json, chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def encode_conversations(tokenizer: Tokenizer, rows: list[tuple[str, str, bool, bool]]) -> dict[str, np.ndarray]:
    """Shard arrays; prompt and answer are encoded apart, as generation sees them."""
    heads = tokenizer.encode_batch([row[0] for row in rows])
    bodies = tokenizer.encode_batch([row[1] for row in rows])
    tokens, lengths, prompts = [], [], []
    for head, body, row in zip(heads, bodies, rows, strict=True):
        ids = head.ids + body.ids + ([END_OF_TURN] if row[2] else [])
        tokens.append(np.array(ids, dtype=np.uint16))
        lengths.append(len(ids))
        prompts.append(len(head.ids))
    return {
        "tokens": np.concatenate(tokens),
        "lengths": np.array(lengths, dtype=np.int32),
        "prompt_lengths": np.array(prompts, dtype=np.int32),
        "greedy": np.array([row[3] for row in rows]),
    }


def encode_plain(tokenizer: Tokenizer, texts: list[str]) -> dict[str, np.ndarray]:
    """One shard of plain documents: nothing in it is an answer, so prompt_lengths equals lengths."""
    encoded = [[*item.ids, END_OF_TEXT] for item in tokenizer.encode_batch(texts)]
    lengths = np.array([len(ids) for ids in encoded], dtype=np.int32)
    tokens = np.concatenate([np.array(ids, dtype=np.uint16) for ids in encoded])
    return {"tokens": tokens, "lengths": lengths, "prompt_lengths": lengths, "greedy": np.zeros(len(lengths), dtype=bool)}


def main() -> None:
    """Read, train the tokenizer, write the shards."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--conversations", type=Path, required=True, help="folder of npz shards in SmolLM2's tokens")
    parser.add_argument("--prompts", type=Path, required=True, help="prompts .jsonl")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="conversations to read (for trying it out)")
    options = parser.parse_args()
    rows = [row for row, _ in zip(conversation_texts(options.conversations), range(options.limit or 10**9), strict=False)]
    plain = list(plain_texts(options.prompts))
    sample = (text for index, row in enumerate(rows) if index % 2 == 0 for text in (row[0], row[1]))
    tokenizer = train_tokenizer(text for source in (sample, plain[::2]) for text in source)
    save_tokenizer(tokenizer, options.output / "tokenizer")
    shards = [("text/text_0", encode_plain(tokenizer, plain))]
    conversations = encode_conversations(tokenizer, rows)
    ends = np.cumsum(conversations["lengths"])
    cuts = [0, *np.searchsorted(ends, np.arange(SHARD_TOKENS, int(ends[-1]), SHARD_TOKENS)).tolist(), len(ends)]
    starts = np.concatenate([[0], ends])
    for number, (low, high) in enumerate(zip(cuts[:-1], cuts[1:], strict=True)):
        part = {name: conversations[name][low:high] for name in ("lengths", "prompt_lengths", "greedy")}
        shards.append((f"conversations/part_{number}", {"tokens": conversations["tokens"][starts[low] : starts[high]], **part}))
    for name, arrays in shards:
        path = options.output / f"{name}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, **arrays)
        counts = f"{len(arrays['tokens']):,} tokens in {len(arrays['lengths']):,} documents"
        sys.stderr.write(f"{name}: {counts}, {path.stat().st_size:,} bytes\n")


if __name__ == "__main__":
    main()
