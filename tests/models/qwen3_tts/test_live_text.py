"""Text that comes in pieces: the ids, the codes and the audio of the whole text for any split."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections import ChainMap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from marked_texts import HTML, MARKDOWN
from parity import begin, capacity
from sine_engines import Engine, audio, drain, end
from tiny_checkpoint import vocabulary, write_checkpoint
from tiny_talker import tiny_config
from tokenizers import models

from sonoro.core.config import EngineConfig
from sonoro.core.options import VoiceDescription
from sonoro.core.types import Event, Reference, SpeechRequest, TextFormat
from sonoro.models import registry
from sonoro.models.qwen3_tts.live_text import LiveSegment, LiveTokens
from sonoro.models.qwen3_tts.model import FAMILY
from sonoro.models.qwen3_tts.prompt import PromptBuilder, TextTokenizer
from sonoro.text import read
from sonoro.text.live_feed import LiveFeed

ALPHABETS = (
    "the world is speaking I'll we've it's don't HE'S 'twas ",
    "Aé\u0301\u0327\u0323o\u0308 e\u0302=\u0338 <\u0338.,!?",
    "你好，世界。今天 天气かが\u3099ハ\u309a한\u1112\u1161\u11ab\u1100\u1161각",
    "🙂👩\u200d👩\u200d👧🇫🇷 \ufe0f☃ 1½٣५ 12,000.5",
    " \t\n\r\u00a0\u2003\u3000\x1c\x1f\x85\u2028'\"",
    "\u09c7\u09be\u0bc6\u0bbe \u0dd9\u0dcf\u0ddf\U000110a5\U000110ba \U00016d63\U00016d67ſ'ſ \u212b\u2126\u0344",
)
SPOKEN = ChainMap(*json.loads((Path(__file__).parents[2] / "assets" / "english.json").read_text("utf-8")).values())
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


JOINED = (
    "a zip code 10001 here",
    "about 1,200 sq ft of it",
    "as part ii of it, and chapter xi too",
    "the Main St is long, the Main St Apt 5 is not",
    "in World War II and the XIX century so it was",
    "first of it\n## Getting started with it\nOpen the box of it.",
    "your otp is ab9453, it was 2h 15m, and the code: is 4071",
    "the card that ends so expires 09/27, he took 5/23 as it was in ten overs",
    "from 10 May: $1,200, or 7% of it; the pages: 3, ext 5",
    "Ann: so it is said\nBob: it was said\nCy: that is it, and $x = y + the sum of$ it",
    "he took just 42:15 for it and ran the 10k of it, on the 10th of march 2020 as scored of 3/10",
    "the y = an old price - 5 of it, call 988, or 911 for it, the vin ab9453 and the record of 42:15",
    "see [the user guide now](https://a.com) for it, or so",
    "see [the user guide of it](https://example.com/a 'a title of it') for more, or [this is it",
)
"""Rules that read words together: live text must not be given up between them."""


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
    for text in (*TEXTS, *SPOKEN, *JOINED, *random_english(1500, 3)):
        spoken = read(text, lowercase=True).text
        whole = [*english.tokenizer.encode(spoken), english.config.tts_eos_token_id] if spoken else []
        for pieces in splits(text, draw):
            segment = LiveSegment(english)
            ids = [one for piece in pieces for one in segment.feed(piece)] + segment.finish()
            assert ids == whole, (text, pieces)


def test_numbers_as_a_voice_says_them_are_the_tokens_of_the_whole(english: PromptBuilder) -> None:
    described = {"nora": VoiceDescription(locale="en-US"), "hugh": VoiceDescription(locale="en-GB")}
    prompts = PromptBuilder(dataclasses.replace(english.config, spk_description=described), english.tokenizer)
    draw = random.Random(5)
    for text in ("it was 101, 2005 and 100 and 5 of it", "the 103rd of 1,234,567.", "100 3/4 of it, or 110"):
        for voice, facts in described.items():
            spoken = read(text, lowercase=True, locale=facts.locale).text
            assert (spoken == read(text, lowercase=True).text) == (voice == "hugh")
            for pieces in splits(text, draw):
                segment = LiveSegment(prompts, "auto", voice)
                ids = [one for piece in pieces for one in segment.feed(piece)] + segment.finish()
                assert ids == [*prompts.tokenizer.encode(spoken), prompts.config.tts_eos_token_id], (text, pieces)


TOLD_APART = {"read:past": "red", "use:noun": "youss", "close:verb": "cloze", "live:adjective": "lyve"}
AROUND = "they have never it last night to the of was so we will please some people music window and then i saw here"


def test_words_that_are_told_apart_by_their_context_are_the_tokens_of_the_whole(english: PromptBuilder) -> None:
    prompts = PromptBuilder(dataclasses.replace(english.config, heteronyms=TOLD_APART), english.tokenizer)
    draw = random.Random(11)
    for _ in range(300):
        words = draw.choices([*AROUND.split(), "read", "use", "close", "live", "read.", "use,"], k=draw.randint(2, 24))
        text = " ".join(words)
        spoken = read(text, lowercase=True, heteronyms=TOLD_APART).text
        whole = [*prompts.tokenizer.encode(spoken), prompts.config.tts_eos_token_id]
        for pieces in splits(text, draw):
            segment = LiveSegment(prompts)
            ids = [one for piece in pieces for one in segment.feed(piece)] + segment.finish()
            assert ids == whole, (text, pieces)


def test_a_text_that_is_cut_off_is_cut_between_words(english: PromptBuilder) -> None:
    """The ids that were released, then those of the words; all words are spoken, in two segments."""

    def encode(text: str) -> list[int]:
        spoken = read(text, lowercase=True).text
        return [*english.tokenizer.encode(spoken), english.config.tts_eos_token_id]

    for text in ("The old house by the lake was sold for 5 in May, and see Dr. Smith about it now.", *JOINED):
        for size in range(len(text)):
            feed = LiveFeed(lambda: LiveSegment(english), lambda _: [], "en", 400, 1000)
            feed.append(text[:size])
            feed.advance(0)
            released = [one for segment in feed.segments for one in segment.ids or ()]
            if not released:
                continue
            feed.cut_off(0)
            (first,) = feed.segments
            assert first.is_whole
            assert first.ids is not None
            assert first.ids[: len(released)] == released
            assert first.ids == encode(text[: first.end])
            assert text[first.end - 1].isspace()
            feed.append(text[size:])
            feed.end()
            feed.advance(1)
            assert [segment.ids for segment in feed.segments[1:]] == [encode(text[first.end :])]


SAYING = "Hello world, I speak in this voice; is it the one that you know?"


@pytest.fixture(scope="module", params=["custom_voice", "base"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("live") / request.param
    write_checkpoint(folder, variant=request.param)
    return request.param, folder


TONE = Reference(
    pcm=(0.1 * np.random.default_rng(0).standard_normal(24000)).astype("<f4").tobytes(),
    sample_rate=24000,
    use="reference",
)


def fields_of(variant: str) -> dict[str, Any]:
    """A request of this variant with drawn codes, in the layout that takes a token a frame."""
    options = {"non_streaming_mode": False}
    return {"seed": 5, "options": options, "references": (TONE,) if variant == "base" else ()}


ON_GPU = pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu)


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), ("cpu", torch.float64), ON_GPU], ids=str)
def test_codes_are_those_of_the_whole_text(checkpoint: tuple[str, Path], device: str, dtype: torch.dtype) -> None:
    """Bit for bit: the same rows of the same sizes run, whenever the ids come."""
    variant, folder = checkpoint
    model, frames = FAMILY.from_folder(folder, "tiny", torch.device(device), dtype).model, 60
    whole = model.spec.resolve(
        SpeechRequest(id="a", text=SAYING, max_frames=frames, ignore_eos=True, **fields_of(variant))
    )
    with torch.inference_mode():
        voice = model.encode_voice([TONE]) if variant == "base" else None
        state, slots = model.allocate(capacity(3, 96, frames, 80)), torch.tensor([1], device=device)
        begin(model, state, [model.prepare(whole, SAYING, 0, [], voice)], slots)
        for _ in range(frames):
            model.frame(state, slots)
        expected = state.frames[1].clone()
        for seed in range(4):
            text = model.live_text(whole, voice)
            arriving, known, made = iter([*SAYING, None]), [], 0
            while not known:
                known += text.feed(next(arriving))
            prompt = model.prepare_live(whole, known, 0, voice)
            begin(model, state, [prompt], slots)
            draw, pending, is_whole = random.Random(seed), prompt.text_ids, False
            while made < frames:
                for piece in itertools.islice(arriving, draw.randint(1, 9)):
                    is_whole = piece is None
                    ids = text.finish() if is_whole else text.feed(piece)
                    if ids:
                        model.append_text(state, [1], [pending], [ids])
                        pending += len(ids)
                while made < frames and (is_whole or made <= pending):
                    model.frame(state, slots)
                    made += 1
            assert torch.equal(state.frames[1], expected)


def live_answer(engine: Engine, pieces: list[str], draw: random.Random, **fields: Any) -> list[Event]:
    """The events of a live request alone, whose text comes in `pieces` with some ticks between."""
    engine.submit(SpeechRequest(id="a", text="", is_live=True, **fields))
    events: list[Event] = []
    for piece in pieces:
        engine.append("a", piece)
        events += [event for _ in range(draw.randint(0, 20)) if engine.has_work for event in engine.tick()]
    engine.end_text("a")
    return events + drain(engine)


def assert_same_audio(events: list[Event], expected: list[Event]) -> None:
    """Chunks of other lengths round differently: by one step of 16 bits at most."""
    assert end(events, "a").frames == end(expected, "a").frames
    np.testing.assert_allclose(audio(events, "a"), audio(expected, "a"), atol=1.01 / 32768, rtol=0)


def test_the_engine_says_of_pieces_what_it_says_of_the_whole(checkpoint: tuple[str, Path]) -> None:
    variant, folder = checkpoint
    engine = Engine(registry.load(folder, device="cpu").model, EngineConfig(slots=2))
    fields, draw = fields_of(variant), random.Random(3)
    engine.submit(SpeechRequest(id="a", text=SAYING, max_frames=90, **fields))
    expected = drain(engine)
    for pieces in (pieces for _ in range(3) for pieces in splits(f" {SAYING}\n", draw)):
        assert_same_audio(live_answer(engine, pieces, draw, max_frames=90, **fields), expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_pieces_are_bit_for_bit_the_whole_where_chunks_are_too(checkpoint: tuple[str, Path], device: str) -> None:
    variant, folder = checkpoint
    engine = Engine(registry.load(folder, device=device).model, EngineConfig(slots=2, chunk_frames=(1,)))
    fields, draw = fields_of(variant), random.Random(4)
    engine.submit(SpeechRequest(id="a", text=SAYING, max_frames=90, **fields))
    expected = drain(engine)
    for pieces in splits(SAYING, draw):
        events = live_answer(engine, pieces, draw, max_frames=90, **fields)
        np.testing.assert_array_equal(audio(events, "a"), audio(expected, "a"))


def test_a_token_is_spoken_before_the_next_has_come(checkpoint: tuple[str, Path]) -> None:
    variant, folder = checkpoint
    engine = Engine(registry.load(folder, device="cpu").model, EngineConfig(slots=2))
    engine.submit(SpeechRequest(id="a", text="", is_live=True, ignore_eos=True, **fields_of(variant)))
    assert not engine.has_work
    frames, hop = [], engine.spec.hop
    for word in ("Hello ", "you ", "and the ", "end"):
        engine.append("a", word)
        events = []
        while engine.has_work:
            events += engine.tick()
        frames.append(sum(len(event.pcm) for event in events) // 2 // hop)
    # Every id gives a frame; "end" is held back.
    encode = TextTokenizer.from_folder(folder).encode
    counts = [len(encode(text)) for text in ("Hello", " you", " and the")]
    assert frames == [counts[0], *counts[1:], 0]
    engine.cancel("a")
    assert end(drain(engine), "a").reason == "cancelled"


@pytest.mark.parametrize("kind", ["non_streaming", "in_context"])
def test_a_layout_that_needs_all_text_is_spoken_by_sentences(kind: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, variant="base")
    engine = Engine(registry.load(tmp_path, device="cpu").model, EngineConfig(slots=2))
    fields: dict[str, Any] = {"references": (TONE,), "max_frames": 20}
    if kind == "non_streaming":
        fields["options"] = {"non_streaming_mode": True}
    else:
        fields["references"] = (msgspec.structs.replace(TONE, text="hm", use="prompt"),)
    engine.submit(SpeechRequest(id="whole", text="Hello world.", **fields))
    expected = drain(engine)
    engine.submit(SpeechRequest(id="a", text="Hello world.", is_live=True, **fields))
    assert not engine.has_work
    engine.end_text("a")
    events = drain(engine)
    np.testing.assert_allclose(audio(events, "a"), audio(expected, "whole"), atol=1.01 / 32768, rtol=0)


def test_live_text_comes_a_token_a_frame_unless_the_caller_says_otherwise(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    model = registry.load(tmp_path, device="cpu").model
    for is_live, options, expected in (
        (False, {}, True),
        (True, {}, False),
        (True, {"non_streaming_mode": True}, True),
    ):
        resolved = model.spec.resolve(SpeechRequest(id="a", text="Hi", is_live=is_live, options=options))
        assert resolved.options["non_streaming_mode"] is expected
        assert (model.live_text(resolved, None) is None) is expected


@pytest.mark.parametrize("text_format", ["auto", "plain", "markdown", "html"])
def test_live_text_is_read_in_its_format(english: PromptBuilder, text_format: TextFormat) -> None:
    draw = random.Random(9)
    for text in ("*one* of it <b>two</b> of it &amp; so", MARKDOWN, HTML):
        spoken = read(text, text_format, lowercase=True).text
        for pieces in splits(text, draw):
            segment = LiveSegment(english, text_format)
            ids = [one for piece in pieces for one in segment.feed(piece)] + segment.finish()
            assert ids == [*english.tokenizer.encode(spoken), english.config.tts_eos_token_id], pieces
