"""An engine plays a script: pauses exact to the sample, rates, gains and voices, however the audio is streamed."""

import msgspec
import numpy as np
import pytest
from families import TinyFamily, tiny
from sine_engines import Engine
from sine_models import LiveSineModel, ShownSineModel, SineModel

from sonoro.audio.pcm import SILENT
from sonoro.core.config import EngineConfig
from sonoro.core.errors import InvalidRequest
from sonoro.core.types import AudioChunk, Event, Failed, Finished, SpeechRequest
from sonoro.text.script import scripted

__all__ = ["tiny"]

CONFIG = EngineConfig(slots=2, max_positions=512, max_frames=200, prefill_tokens=512)


def events(model: SineModel, text: str, **fields: object) -> list[Event]:
    engine = Engine(model, CONFIG)
    request = SpeechRequest(id="a", text=text, with_words=True, **fields)
    engine.submit(model.spec.resolve(scripted(request, model.spec)))
    made = []
    while engine.has_work:
        made += engine.tick()
    assert not any(isinstance(event, Failed) for event in made), made
    return made


def audio(made: list[Event]) -> np.ndarray:
    return np.frombuffer(b"".join(event.pcm for event in made if isinstance(event, AudioChunk)), "<i2")


def silences(samples: np.ndarray) -> list[int]:
    """The lengths of silences above 10 ms."""
    audible = np.flatnonzero(np.abs(samples.astype(int)) > SILENT)
    gaps = np.diff([-1, *audible, len(samples)]) - 1
    return [int(gap) for gap in gaps if gap > 80]


class QuietSineModel(ShownSineModel):
    """Is silent for the first and the last three frames of a segment."""

    def frame(self, state, slots):
        super().frame(state, slots)
        for slot in slots.tolist():
            at = int(state.length[slot]) - 1
            is_quiet = at < 3 or at >= int(state.target[slot]) - 3
            state.frames[slot, at, 1] = 0 if is_quiet else 50


@pytest.mark.parametrize("kind", [ShownSineModel, QuietSineModel])
@pytest.mark.parametrize("is_reproducible", [True, False])
def test_a_pause_is_exact_to_the_sample(kind: type[SineModel], is_reproducible: bool) -> None:
    text = 'Good morning to you<break time="750ms"/>my friends of old<break time="61ms"/>[pause:2.5s]and all!'
    samples = audio(events(kind(), text, is_reproducible=is_reproducible))
    assert [gap for gap in silences(samples) if gap > 300] == [round(0.75 * 8000), round(2.561 * 8000)]


def test_pauses_before_and_after_everything_are_played() -> None:
    samples = audio(events(QuietSineModel(), "[pause:1s]Hello my friend[pause:0.5s]"))
    assert (silences(samples)[0], silences(samples)[-1]) == (8000, 4000)


def test_chunks_of_pauses_say_so_and_their_length() -> None:
    made = events(ShownSineModel(), "Hello there[pause:1s]friend")
    [pause] = [event for event in made if isinstance(event, AudioChunk) and event.pause_s]
    assert (pause.pause_s, pause.pcm) == (1.0, bytes(16000))
    assert [event.index for event in made if isinstance(event, AudioChunk)] == list(range(len(made) - 1))


def test_words_have_the_times_and_places_of_what_was_sent() -> None:
    text = "Good [pause:1s]morning"
    made = events(QuietSineModel(), text)
    words = [word for event in made for word in event.words or ()]
    assert [(word.text, text[word.start : word.end]) for word in words] == [("Good",) * 2, ("morning",) * 2]
    samples = audio(made)
    resumed = np.flatnonzero(np.abs(samples[4000:].astype(int)) > SILENT)
    after_s = (4000 + int(resumed[np.argmax(np.diff(resumed)) + 1])) / 8000
    assert words[1].start_s == pytest.approx(after_s, abs=0.05)
    assert made[-1].characters == len(text)


MARKED = "<speak>Good <mark name='a'/><break time='1s'/><mark name='b'/>morning <mark name='c'/></speak>"


def test_marks_have_the_time_of_the_next_word_or_of_the_end() -> None:
    made = events(QuietSineModel(), MARKED)
    words = [word for event in made for word in event.words or ()]
    marks = {mark.name: mark.time_s for event in made for mark in event.marks}
    assert marks == {"a": words[1].start_s, "b": words[1].start_s, "c": len(audio(made)) / 8000}
    assert [mark.name for mark in made[-1].marks] == ["c"]


def test_marks_without_word_times_have_no_time() -> None:
    made = events(SineModel(), MARKED)
    assert [(mark.name, mark.time_s) for mark in made[-1].marks] == [("a", None), ("b", None), ("c", None)]


def test_marks_in_live_text_have_times_too() -> None:
    text = MARKED.removeprefix("<speak>").removesuffix("</speak>")
    made = live_events(QuietSineModel(), [text[:9], text[9:30], text[30:]], markup="tags")
    words = [word for event in made for word in event.words or ()]
    marks = {mark.name: mark.time_s for event in made for mark in event.marks}
    assert marks == {"a": words[1].start_s, "b": words[1].start_s, "c": len(audio(made)) / 8000}


def test_markup_that_changes_nothing_gives_the_same_audio() -> None:
    plain = audio(events(ShownSineModel(), "Good morning"))
    assert np.array_equal(plain, audio(events(ShownSineModel(), "<speak>Good morning</speak>")))


def test_gain_and_rate_change_their_line_alone() -> None:
    plain = audio(events(ShownSineModel(), "One two three. Four five six."))
    louder = audio(
        events(ShownSineModel(), '<speak><prosody volume="-6dB">One two three. Four five six.</prosody></speak>')
    )
    assert np.abs(louder - plain * 10 ** (-6 / 20)).max() <= 1
    slow = audio(events(ShownSineModel(), '<speak><prosody rate="50%">One two three. Four five six.</prosody></speak>'))
    assert len(slow) == 2 * len(plain)


def test_a_change_of_voice_begins_a_segment_of_that_voice() -> None:
    text = '<speak><voice name="high">Good day to you.</voice><voice name="low">And you.</voice></speak>'
    made = audio(events(ShownSineModel(), text))
    high = audio(events(ShownSineModel(), "Good day to you.", voice="high"))
    assert np.array_equal(made[: len(high)], high)


def test_a_script_without_a_line_is_refused() -> None:
    engine = Engine(model := ShownSineModel(), CONFIG)
    request = scripted(SpeechRequest(id="a", text="<speak/>"), model.spec)
    with pytest.raises(InvalidRequest, match="nothing in it can be spoken"):
        engine.submit(model.spec.resolve(request))


def test_what_was_not_honoured_is_told_at_the_end() -> None:
    made = events(ShownSineModel(), "<speak>Hi <foo/> there</speak>", on_markup="plain")
    assert isinstance(made[-1], Finished)
    assert made[-1].warnings == ("foo (line 1, column 11)",)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made[-1]), type=Finished) == made[-1]


def test_a_pause_is_exact_in_every_family(tiny: TinyFamily) -> None:
    engine = Engine(tiny.load().model, CONFIG)
    rate = engine.spec.sample_rate
    for seed in range(8):
        text = "[pause:500ms]One two[pause:750ms]three four<break time='10ms'/>five[pause:1s]"
        request = SpeechRequest(id="a", text=text, seed=seed)
        engine.submit(engine.spec.resolve(scripted(request, engine.spec)))
        made = []
        while engine.has_work:
            made += engine.tick()
        chunks = [event for event in made if isinstance(event, AudioChunk)]
        assert not any(isinstance(event, Failed) for event in made), made
        pauses = [number for number, chunk in enumerate(chunks) if chunk.pause_s]
        lengths = [round(seconds * rate) for seconds in (0.5, 0.75, 0.01, 1.0)]
        assert [len(chunks[number].pcm) // 2 for number in pauses] == lengths[: len(pauses)]
        for number in pauses:
            assert not np.frombuffer(chunks[number].pcm, "<i2").any()
            before, after = audio(chunks[:number]), audio(chunks[number + 1 :])
            assert number == 0 or abs(int(before[-1])) > SILENT or not before[-100:].any()
            assert not len(after) or abs(int(after[0])) > SILENT
        # A random model need not end by itself: what runs away ends the request.
        if len(pauses) > 1:
            return
    pytest.fail("no request reached its second pause")


def live_events(model: SineModel, pieces: list[str], **fields: object) -> list[Event]:
    """As `events`, with one of `pieces` before each second tick."""
    engine = Engine(model, CONFIG)
    request = SpeechRequest(id="a", text="", is_live=True, with_words=True, **fields)
    engine.submit(model.spec.resolve(request))
    made, left = [], list(pieces)
    while left or engine.has_work:
        if left:
            engine.append("a", left.pop(0))
            if not left:
                engine.end_text("a")
        for _ in range(2):
            made += engine.tick() if engine.has_work else []
    assert not any(isinstance(event, Failed) for event in made), made
    return made


@pytest.mark.parametrize("kind", [ShownSineModel, LiveSineModel])
def test_pauses_in_live_text_are_exact_wherever_it_is_cut(kind: type[SineModel]) -> None:
    text = 'Good morning to you. <break time="750ms"/>My friends of old.[pause:500ms] And all!'
    for size in (1, 2, 5, 17, 100):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        made = live_events(kind(), pieces)
        pauses = [event.pause_s for event in made if isinstance(event, AudioChunk) and event.pause_s]
        assert pauses == [0.75, 0.5]
        assert [gap for gap in silences(audio(made)) if gap > 300] == [6000, 4000]
        assert made[-1].characters == len(text)


def test_live_text_without_markup_sounds_as_with_markup_off() -> None:
    text = "Good morning to you. My friends [of old], a < b, and all!"
    pieces = [text[start : start + 3] for start in range(0, len(text), 3)]
    for kind in (ShownSineModel, LiveSineModel):
        on, off = live_events(kind(), pieces), live_events(kind(), pieces, markup="none")
        assert np.array_equal(audio(on), audio(off))
        words = [[word for event in made for word in event.words or ()] for made in (on, off)]
        assert words[0] == words[1]


def test_voices_change_in_live_text() -> None:
    text = "[voice:high]Good day to you.[voice:low] And you."
    made = audio(live_events(LiveSineModel(), [text[:9], text[9:33], text[33:]], markup="voices"))
    high = audio(live_events(LiveSineModel(), ["Good day to you."], voice="high"))
    assert np.array_equal(made[: len(high)], high)


def test_words_of_live_text_lead_back_to_what_was_sent() -> None:
    text = "Good day. [pause:1s]Hello you."
    made = live_events(QuietSineModel(), [text[:12], text[12:]])
    words = [word for event in made for word in event.words or ()]
    assert [text[word.start : word.end] for word in words] == ["Good", "day", "Hello", "you"]
    assert words[2].start_s - words[1].end_s > 0.95


def test_ssml_in_live_text_is_spoken_once_it_is_whole() -> None:
    text = "<speak>Good <emphasis>day</emphasis>.<break time='1s'/>Hello.</speak>"
    made = live_events(ShownSineModel(), list(text), on_markup="plain")
    assert [gap for gap in silences(audio(made)) if gap > 300] == [8000]
    assert isinstance(made[-1], Finished)
    assert made[-1].warnings == ("emphasis (line 1, column 13)",)


def test_silence_that_was_sent_before_its_pause_came_counts() -> None:
    engine = Engine(model := QuietSineModel(), CONFIG)
    engine.submit(model.spec.resolve(SpeechRequest(id="a", text="Good morning to you. And", is_live=True)))
    made: list[Event] = []
    # The whole first sentence is played before the pause behind it comes.
    for _ in range(30):
        made += engine.tick()
    engine.append("a", " so[pause:750ms]all of you.")
    engine.end_text("a")
    while engine.has_work:
        made += engine.tick()
    assert max(silences(audio(made))) == 6000
