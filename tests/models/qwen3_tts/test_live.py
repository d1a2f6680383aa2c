"""Text that comes in pieces: the ids, the codes and the audio of the whole text for any split."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator

import pytest
from tokenizers import models

from sonoro.core.normalize import normalize_english
from sonoro.models.qwen3_tts.live import LiveSegment, LiveTokens
from sonoro.models.qwen3_tts.prompt import PromptBuilder, TextTokenizer
from tiny_checkpoint import vocabulary
from tiny_talker import tiny_config

ALPHABETS = (
    "the world is speaking I'll we've it's don't HE'S 'twas ",
    "Aé\u0301\u0327\u0323o\u0308 e\u0302=\u0338 <\u0338.,!?",
    "你好，世界。今天 天气かが\u3099ハ\u309a한\u1112\u1161\u11ab\u1100\u1161각",
    "🙂👩\u200d👩\u200d👧🇫🇷 \ufe0f☃ 1½٣५ 12,000.5",
    " \t\n\r\u00a0\u2003\u3000\x1c\x1f\x85\u2028'\"",
    "\u09c7\u09be\u0bc6\u0bbe \u0dd9\u0dcf\u0ddf\U000110a5\U000110ba \U00016d63\U00016d67ſ'ſ \u212b\u2126\u0344",
)
TEXTS = (
    "Hello there, I'll say it's 5 o'clock.",
    "<|im_start|>assistant\n<|im_end|> <tts_pad> is only text",
    "  \n leading and trailing \n\n",
    "tabs\tand  two   three    spaces \n \n lines\r\n\r\nmore!\n",
    "'s 't 're 'R 'RE 'v 'l 'll x'll",
    "",
    " \n ",
)


@pytest.fixture(scope="module")
def tokenizers() -> list[TextTokenizer]:
    vocab, merges, _ = vocabulary()
    return [TextTokenizer(models.BPE(vocab=vocab, merges=merges)), TextTokenizer.stand_in()]


def splits(text: str, draw: random.Random) -> Iterator[list[str]]:
    """`text` letter by letter, and cut anywhere."""
    yield list(text)
    cuts = sorted(draw.randint(0, len(text)) for _ in range(draw.randint(0, 6)))
    yield [text[start:stop] for start, stop in itertools.pairwise([0, *cuts, len(text)])]


def random_texts(count: int, seed: int) -> Iterator[str]:
    draw = random.Random(seed)
    for _ in range(count):
        alphabets = draw.sample(ALPHABETS, draw.randint(1, 3))
        yield "".join(draw.choice(draw.choice(alphabets)) for _ in range(draw.randint(0, 40)))
    for _ in range(count // 4):
        codes = (draw.choice((draw.randrange(0x3000), draw.randrange(0x11_0000))) for _ in range(draw.randint(1, 20)))
        yield "".join(chr(code) for code in codes if not 0xD800 <= code <= 0xDFFF)


def test_any_split_gives_the_tokens_of_the_whole(tokenizers: list[TextTokenizer]) -> None:
    draw = random.Random(0)
    for text in (*TEXTS, *random_texts(3000, 1)):
        for tokenizer in tokenizers:
            whole = tokenizer.encode(text.strip())
            for pieces in splits(text, draw):
                tokens = LiveTokens(tokenizer)
                ids = [one for piece in pieces for one in tokens.feed(piece)] + tokens.finish()
                assert ids == whole, (text, pieces)


def test_a_word_is_released_with_the_space_after_it(tokenizers: list[TextTokenizer]) -> None:
    tokenizer = tokenizers[0]
    tokens = LiveTokens(tokenizer)
    assert tokens.feed("Hello") == []
    assert tokens.feed(" ") == tokenizer.encode("Hello")
    assert tokens.feed("world, ") == tokenizer.encode(" world,")
    assert tokens.feed("it") == []
    assert tokens.finish() == tokenizer.encode(" it")


ENGLISH = """
the quick brown fox walked home a an I Mr Mrs. Dr Dr. St. Smith Main etc. e.g. i.e. vs. approx. Jan. no. No. 5
12 1999 2024 $5 £3.50 $1,000 million bn k m km kg ft km/h °C % 3:30 15:00 5:05 p.m. pm am a.m. a m p M AM 1/2
3/4 2nd 21st 90s 1990s 's don't 'tis dogs' rock-n-roll well-known - -- — – ... … . , ! ? ; : ( ) [ ] & @ + = #
U.S. USA BBC UFOs CEO's www.example.com https://a.b/c x@y.org 555-1234 2024-05-06 1.2.3 10-20 -5 *  bullet
café Zoë naïve ﬁne ② ☃ 你好 über o'clock hundred thousand dollars meters s st nd th to oh
"""


def random_english(count: int, seed: int) -> Iterator[str]:
    draw, known = random.Random(seed), ENGLISH.split()
    for _ in range(count):
        words = [draw.choice(known[:6] if draw.random() < 0.4 else known) for _ in range(draw.randint(1, 14))]
        yield "".join(word + draw.choice((" ", " ", " ", " ", "", "  ", "\n", "\n\n", ". ", ", ")) for word in words)


@pytest.fixture(scope="module")
def english() -> PromptBuilder:
    vocab, merges, _ = vocabulary()
    config = dataclasses.replace(tiny_config(), text_normalizer="english")
    return PromptBuilder(config, TextTokenizer(models.BPE(vocab=vocab, merges=merges)))


def test_a_text_to_be_spelled_out_gives_the_tokens_of_the_whole(english: PromptBuilder) -> None:
    draw = random.Random(2)
    for text in (*TEXTS, *random_english(1500, 3)):
        spoken = normalize_english(text, lowercase=True).text
        whole = [*english.tokenizer.encode(spoken), english.config.tts_eos_token_id] if spoken else []
        for pieces in splits(text, draw):
            segment = LiveSegment(english)
            ids = [one for piece in pieces for one in segment.feed(piece)] + segment.finish()
            assert ids == whole, (text, pieces)
