"""The voice's small tokenizer: byte-level BPE trained on the corpus, written in the released file layout.

Ids: 256 bytes, the merges, "assistant" (one token, as the prompt template needs it), then the added special tokens. Its
input is in lower case.
"""

from __future__ import annotations

import argparse
import gzip
import json
import lzma
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from builtin_voice.shards import load

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ROLE = "assistant"
SPECIALS = ("<|im_start|>", "<|im_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>")


def read_texts(path: Path) -> list[str]:
    """The texts of a corpus (JSON lines in gzip or xz), in lower case."""
    opener = lzma.open if path.suffix == ".xz" else gzip.open
    with opener(path, "rt", encoding="utf-8") as file:
        return [json.loads(line)["text"].lower() for line in file]


def _pipeline(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def train(texts: Iterable[str], merges: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Train on `texts`; returns vocabulary and merges: 256 bytes, `merges` merges, and those that make ROLE one
    token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = _pipeline(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=256 + merges, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary: dict[str, int] = model["vocab"]
    pairs = [(left, right) for left, right in model["merges"]]
    while len(pieces := tokenizer.encode(ROLE).tokens) > 1:
        # Lowest priority, so that these merges apply only where no trained merge does.
        pairs.append((pieces[0], pieces[1]))
        vocabulary[pieces[0] + pieces[1]] = len(vocabulary)
        tokenizer = _pipeline(models.BPE(vocab=vocabulary, merges=pairs))
    return vocabulary, pairs


def write(folder: Path, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> None:
    """Write vocab.json, merges.txt and tokenizer_config.json in the released layout."""
    folder.mkdir(parents=True, exist_ok=True)
    by_id = dict(sorted(vocabulary.items(), key=lambda entry: entry[1]))
    (folder / "vocab.json").write_text(json.dumps(by_id, ensure_ascii=False, separators=(",", ":")), "utf-8")
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", "utf-8")
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    config = {
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(len(vocabulary) + i): {"content": token, **flags} for i, token in enumerate(SPECIALS)
        },
        "additional_special_tokens": list(SPECIALS),
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 32768,
        "pad_token": "<tts_pad>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def read(folder: Path) -> Tokenizer:
    """Read the tokenizer that `write` wrote, with its special tokens."""
    tokenizer = _pipeline(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    added = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))["added_tokens_decoder"]
    tokenizer.add_special_tokens([AddedToken(added[key]["content"], special=True) for key in sorted(added, key=int)])
    return tokenizer


def parts_of(folder: Path) -> np.ndarray:
    """The two ids that each id of the vocabulary was merged from, [V, 2]; -1 for ids that are no merge."""
    vocabulary = json.loads((folder / "vocab.json").read_text("utf-8"))
    parts = np.full((len(vocabulary) + len(SPECIALS), 2), -1, dtype=np.int64)
    for line in (folder / "merges.txt").read_text("utf-8").splitlines()[1:]:
        left, right = line.split(" ")
        parts[vocabulary[left + right]] = vocabulary[left], vocabulary[right]
    return parts


def take_apart(
    ids: np.ndarray, lengths: np.ndarray, parts: np.ndarray, share: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Split a `share` of the merged tokens in the concatenated texts `ids` [S] of `lengths` [N] into their two parts
    (`parts_of`), half of those again, and so on (BPE dropout); returns ids and lengths."""
    owner = np.repeat(np.arange(len(lengths)), lengths)
    is_open = np.full(len(ids), True)
    while True:
        chosen = is_open & (parts[ids, 0] >= 0) & (rng.random(len(ids)) < share)
        if not chosen.any():
            return ids, np.bincount(owner, minlength=len(lengths))
        first = np.flatnonzero(np.repeat(chosen, 1 + chosen))[::2]
        left, right = parts[ids[chosen]].T
        owner, ids, is_open = (np.repeat(row, 1 + chosen) for row in (owner, ids, chosen))
        ids[first], ids[first + 1], share = left, right, 0.5


def rate(tokenizer: Tokenizer, texts: list[str], seconds: list[float]) -> dict[str, float]:
    """Tokens per spoken second over all texts, and the mean and 95th percentile over texts."""
    counts = [len(encoding.ids) for encoding in tokenizer.encode_batch(texts)]
    rates = sorted(count / second for count, second in zip(counts, seconds, strict=True))
    return {
        "tokens_per_s": sum(counts) / sum(seconds),
        "mean": sum(rates) / len(rates),
        "p95": rates[int(0.95 * len(rates))],
        "max": rates[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--merges", type=int, default=2500)
    parser.add_argument("--audio", type=Path, help="synthesised folder; prints the tokens per spoken second over it")
    options = parser.parse_args()
    write(options.output, *train(read_texts(options.corpus), options.merges))
    tokenizer = read(options.output)
    report: dict[str, float] = {"vocabulary": tokenizer.get_vocab_size(with_added_tokens=True)}
    if options.audio:
        shards, utterances = load(options.audio)
        assert shards
        seconds = [utterance.samples / 24000 for utterance in utterances]
        report |= rate(tokenizer, [utterance.text for utterance in utterances], seconds)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
