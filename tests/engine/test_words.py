"""The engine tells when the words of a request are spoken, however its text and audio come: the built-in voice."""

import itertools
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import pytest
from sine_engines import Engine
from sine_models import ShownSineModel, SineModel

from sonoro.core.config import EngineConfig
from sonoro.core.events import Word
from sonoro.core.types import AudioChunk, Event, Failed, Finished, SpeechRequest
from sonoro.models import registry
from sonoro.text import read
from sonoro.text.splitting import Segment, SpokenText, placed
from sonoro.words.heads import MOST_COLUMNS, WordHeads
from sonoro.words.request import RequestWords
from sonoro.words.spans import word_spans
from sonoro.words.tracking import Limits, Pointing

TEXT = "Dr. Smith paid $5 on July 4, 1999. Nobody knew why!"
# Beyond what the voice takes at once: two segments.
LONG = "It was a quarter past nine when the 12 boys, who had waited all morning, came home. " * 3
LAYOUTS = pytest.mark.parametrize("is_first", [True, False], ids=["text first", "text along"])


@pytest.fixture(scope="module")
def engine() -> Engine:
    config = EngineConfig(slots=3, max_positions=1024, max_frames=400, prefill_tokens=1024)
    return Engine(registry.load(None, device="cpu").model, config)


@pytest.fixture(autouse=True)
def _left_empty(engine: Engine) -> Iterator[None]:
    yield
    assert (engine.scheduler.free_slots, engine.waiting) == (3, 0)


@pytest.fixture(scope="module")
def told(engine: Engine) -> dict[str, list[Event]]:
    """What comes of a text in both layouts and of a long one, at once, as a batch takes little longer than one."""
    asked = {"text first": request(TEXT), "text along": request(TEXT, is_first=False), "long": request(LONG)}
    for name, one in asked.items():
        engine.submit(msgspec.structs.replace(one, id=name))
    made: dict[str, list[Event]] = {name: [] for name in asked}
    while engine.has_work:
        for event in engine.tick():
            assert not isinstance(event, Failed), event
            made[event.request_id].append(event)
    return made


def request(text: str, *, is_first: bool = True, **fields: object) -> SpeechRequest:
    options = {"non_streaming_mode": is_first}
    return SpeechRequest(id="a", text=text, with_words=True, options=options, seed=3, **fields)


def events(engine: Engine, asked: SpeechRequest, feed: Sequence[Callable[[], None]] = ()) -> list[Event]:
    """All that comes of a request; each of `feed` is called after another tick."""
    engine.submit(asked)
    made, steps = [], iter(feed)
    while engine.has_work or feed:
        made += engine.tick() if engine.has_work else []
        step = next(steps, None)
        if step is not None:
            step()
        elif not engine.has_work:
            break
    assert not any(isinstance(event, Failed) for event in made), made
    return made


def words_of(made: Sequence[Event]) -> list[Word]:
    told = [event.words for event in made if isinstance(event, AudioChunk | Finished)]
    assert all(words is not None for words in told)
    return [word for words in told for word in words or ()]


def check(text: str, words: Sequence[Word], audio_s: float) -> None:
    """Every word of `text` once, in order, at times that never fall, within the audio."""
    assert [(word.start, word.end) for word in words] == word_spans(text)
    assert all(word.text == text[word.start : word.end] for word in words)
    times = [at_s for word in words for at_s in (word.start_s, word.end_s)]
    assert times == sorted(times)
    assert 0 <= times[0] < 0.4
    assert audio_s - 0.8 < times[-1] <= audio_s
    longest_s = max(after.start_s - word.start_s for word, after in itertools.pairwise(words))
    assert longest_s < 2.0
    assert not any(word.is_estimated for word in words)


def audio_s(made: Sequence[Event]) -> float:
    return sum(len(event.pcm) for event in made if isinstance(event, AudioChunk)) / 2 / 24000


@pytest.mark.parametrize("layout", ["text first", "text along"])
def test_every_word_is_told_while_it_is_spoken(told: dict[str, list[Event]], layout: str) -> None:
    made = told[layout]
    check(TEXT, words_of(made), audio_s(made))
    chunks = [event for event in made if isinstance(event, AudioChunk)]
    heard_s = 0.0
    for chunk in chunks:
        heard_s += len(chunk.pcm) / 2 / 24000
        assert all(word.start_s < heard_s for word in chunk.words or ())
    # How many chunks there are depends on the machine.
    assert sum(bool(chunk.words) for chunk in chunks) >= min(len(chunks) / 2, 4)


def test_words_of_later_segments_go_on_where_the_earlier_ended(told: dict[str, list[Event]]) -> None:
    made = told["long"]
    check(LONG, words_of(made), audio_s(made))


def test_words_of_text_that_arrives_are_those_of_the_text(engine: Engine) -> None:
    pieces = [TEXT[at : at + 5] for at in range(0, len(TEXT), 5)]
    feed = [lambda piece=piece: engine.append("a", piece) for piece in pieces]
    made = events(engine, request("", is_first=False, is_live=True), [*feed, lambda: engine.end_text("a")])
    check(TEXT, words_of(made), audio_s(made))


def test_words_of_audio_that_is_held_back_come_with_it(engine: Engine) -> None:
    made = events(engine, request("Nobody knew why.", attempts=3, is_reproducible=True))
    check("Nobody knew why.", words_of(made), audio_s(made))


def test_none_are_told_to_who_does_not_ask_and_by_a_model_that_shows_none(engine: Engine) -> None:
    plain = events(engine, SpeechRequest(id="a", text="Yes."))
    other = Engine(SineModel(), EngineConfig(slots=2, max_positions=600, max_frames=512))
    shown = events(other, SpeechRequest(id="a", text="Yes.", with_words=True))
    for made in (plain, shown):
        assert all(event.words is None for event in made if isinstance(event, AudioChunk | Finished))


def test_a_request_that_is_cancelled_says_which_words_were_made(engine: Engine) -> None:
    engine.submit(request(LONG))
    made: list[Event] = []
    while not any(event.words for event in made if isinstance(event, AudioChunk)):
        made += engine.tick()
    engine.cancel("a")
    while engine.has_work:
        made += engine.tick()
    words = words_of(made)
    assert [(word.start, word.end) for word in words] == word_spans(LONG)[: len(words)]
    assert 0 < len(words) < len(word_spans(LONG)) / 2


@LAYOUTS
def test_what_went_wrong_is_told_and_spoken_again_with_the_next_seed_while_nobody_hears_it(is_first: bool) -> None:
    """A voice whose every word is held to be a fault, and one of which nothing is."""
    model = registry.load(None, device="cpu").model
    known = model.word_heads

    def with_limits(pointing: Pointing) -> Pointing:
        limits = Limits(end_frames=1e9, dwell_frames=1e9, strayed=-1.0)
        return msgspec.structs.replace(pointing, limits=limits)

    model.word_heads = WordHeads(text_first=with_limits(known.text_first), text_along=with_limits(known.text_along))
    strict = Engine(model, EngineConfig(slots=2, max_positions=1024, max_frames=400, prefill_tokens=1024))
    text = "Nobody knew why."
    made = events(strict, request(text, is_first=is_first, attempts=2, is_reproducible=True))
    caught = made[-1].faults
    assert [(fault.kind, fault.start, fault.end) for fault in caught] == [("straying", 0, len(text))] * 2
    assert [(fault.attempt, fault.spoken_again) for fault in caught] == [(0, True), (1, False)]
    check(text, words_of(made), audio_s(made))
    other = msgspec.structs.replace(request(text, is_first=is_first, is_reproducible=True), seed=4)
    alone = events(strict, other)
    assert len(alone[-1].faults) == 1
    pcm = [b"".join(event.pcm for event in one if isinstance(event, AudioChunk)) for one in (made, alone)]
    assert pcm[0] == pcm[1]


@LAYOUTS
def test_a_reading_that_is_broken_off_says_each_word_once(is_first: bool) -> None:
    """A voice that is held to stand still wherever it takes its time."""
    model = registry.load(None, device="cpu").model
    known, limits = model.word_heads, Limits(end_frames=1e9, dwell_frames=4.0, strayed=1e9)
    pointings = [msgspec.structs.replace(one, limits=limits) for one in (known.text_first, known.text_along)]
    model.word_heads = WordHeads(text_first=pointings[0], text_along=pointings[1])
    slow = Engine(model, EngineConfig(slots=2, max_positions=1024, max_frames=400, prefill_tokens=1024))
    made = events(slow, request(TEXT, is_first=is_first, is_reproducible=True, on_fault="continue", attempts=4))
    assert [(word.start, word.end) for word in words_of(made)] == word_spans(TEXT)
    times = [word.start_s for word in words_of(made)]
    assert times == sorted(times)
    assert times[-1] < audio_s(made)
    outcomes = [fault.outcome for fault in made[-1].faults]
    assert made[-1].reason == "stop"
    assert "continued" in outcomes
    starts = [fault.continued_at for fault in made[-1].faults if fault.continued_at is not None]
    assert starts == sorted(starts)
    assert {*starts} <= {start for start, _ in word_spans(TEXT)}


def test_who_asks_for_attempts_but_not_for_words_is_told_of_faults_alone(engine: Engine) -> None:
    made = events(engine, SpeechRequest(id="a", text="Nobody knew why.", attempts=2, seed=3))
    assert all(event.words is None for event in made if isinstance(event, AudioChunk | Finished))
    assert made[-1].reason == "stop"


def test_a_word_that_is_spelled_out_over_two_segments_is_told_once() -> None:
    model, text = registry.load(None, device="cpu").model, "It cost 123456 dollars."
    spoken = read(text, lowercase=True)
    cut = spoken.text.index("three")
    words, pointing = RequestWords(model, model.spec, text), model.word_heads.text_first
    parts = [spoken.part(0, cut).stripped(), spoken.part(cut, len(spoken.text))]
    for segment in placed(parts, 0, len(text)):
        words.begin(segment, pointing, 0.0)
        tokens = len(model.token_spans(segment.text))
        for frame in range(tokens):
            looked = np.zeros((len(model.word_heads.places), 512), np.float32)
            looked[:, frame] = 1.0
            words.add_attention(looked, frame + 1)
        words.add_audio(np.full(1920 * tokens, 9000, "<i2").tobytes())
        words.end()
    assert [(word.start, word.end) for word in words.timed] == word_spans(text)


def test_a_fault_names_the_text_of_its_segment_as_it_was_written() -> None:
    model, text = registry.load(None, device="cpu").model, "It cost $5 on July 4, 1999. Nobody knew why!"
    spoken = read(text, lowercase=True)
    cut = spoken.text.index("nobody")
    words, written = RequestWords(model, model.spec, text), text.index("Nobody")
    for segment in placed([spoken.part(0, cut).stripped(), spoken.part(cut, len(spoken.text))], 0, len(text)):
        words.begin(segment, model.word_heads.text_first, 0.0)
        words.end()
        words.note_fault(0, spoken_again=False)
    named = [(fault.kind, text[fault.start : fault.end].strip()) for fault in words.faults]
    assert named == [("unreached", text[: written - 1]), ("unreached", text[written:])]


def test_a_segment_may_be_as_long_as_a_slot() -> None:
    """Each of its words has its time, though its tokens are more than the kernel writes at once."""
    text = " ".join(f"w{number:03}" for number in range(130))
    roomy = {"max_positions": 1400, "max_frames": 700, "prefill_tokens": 1400, "segment_letters": len(text)}
    engine = Engine(ShownSineModel(), EngineConfig(slots=1, **roomy))
    told = events(engine, SpeechRequest(id="a", text=text, with_words=True))
    words = [word for event in told for word in event.words or ()]
    assert [word.text for word in words] == text.split()
    # A token and a frame are a character and 10 ms.
    assert [word.start_s for word in words[1:]] == pytest.approx([0.01 * word.start for word in words[1:]], abs=0.03)


def test_words_of_a_segment_of_more_tokens_than_are_watched_have_no_times() -> None:
    model = ShownSineModel()
    text = "word " * (MOST_COLUMNS // 5 + 1)
    words = RequestWords(model, model.spec, text)
    words.begin(Segment(SpokenText(text), 0, len(text)), model.word_heads.text_first, 0.0)
    assert words.columns > MOST_COLUMNS
    for frame in (1, 2):
        words.add_attention(np.ones((1, MOST_COLUMNS), np.float32), frame)
        words.add_audio(np.full(800, 9000, "<i2").tobytes())
    assert words.columns == 0
    words.end()
    assert words.timed == []


def test_who_asks_for_words_hears_the_first_packet_no_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is not read for its words before the first audio has been handed on."""
    model, read = ShownSineModel(), list[str]()
    spans = model.token_spans
    monkeypatch.setattr(model, "token_spans", lambda text: read.append(text) or spans(text))
    words = RequestWords(model, model.spec, "one two")
    words.begin(Segment(SpokenText("one two"), 0, 7), model.word_heads.text_first, 0.0)
    assert words.columns >= 7
    looked = np.eye(1, words.columns, dtype=np.float32)
    words.add_attention(looked, 1)
    words.add_audio(np.full(800, 9000, "<i2").tobytes())
    assert (words.take(), read) == ((), [])
    words.add_attention(looked, 2)
    assert read == ["one two"]
    words.end()
    assert [word.text for word in words.timed] == ["one", "two"]


def test_a_text_whose_words_cannot_be_found_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(model := ShownSineModel(), EngineConfig(slots=2))
    spans = model.token_spans

    def refuse(text: str) -> list[tuple[int, int]]:
        if "two" in text:
            raise ValueError("no spans")
        return spans(text)

    monkeypatch.setattr(model, "token_spans", refuse)
    for name, text in (("a", "one two"), ("b", "three four")):
        engine.submit(SpeechRequest(id=name, text=text, with_words=True))
    made = [event for _ in iter(lambda: engine.has_work, False) for event in engine.tick()]
    ends = {event.request_id: event for event in made if isinstance(event, Failed | Finished)}
    assert isinstance(ends["a"], Failed)
    assert isinstance(ends["b"], Finished)
    assert engine.scheduler.free_slots == 2


def test_a_cancel_whose_words_cannot_be_found_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(model := ShownSineModel(), EngineConfig(slots=2))
    monkeypatch.setattr(model, "token_spans", lambda text: text.index("no such piece"))
    engine.submit(SpeechRequest(id="a", text="one two", with_words=True))
    engine.cancel("a")
    (ended,) = engine.tick()
    assert isinstance(ended, Failed)
    assert engine.is_idle
    assert engine.scheduler.free_slots == 2
