"""Requests whose text arrives while they are spoken: the same audio as of the whole text, and an end in any case."""

import itertools
import random

import msgspec
import numpy as np
import pytest
from sine_engines import Engine, assert_empty, audio, config_of, drain, end, reference, speak
from sine_models import LiveSineModel, VoicedSineModel

from sonoro.core.config import EngineConfig
from sonoro.core.errors import EngineBusy, InvalidRequest
from sonoro.core.types import Event, Failed, Finished, SpeechRequest
from sonoro.engine import prompts

TEXT = "A text that comes in pieces."
LONG = "A first sentence that is spoken. A second one, with a clause, comes after it! And is this a third? It is."


def live_engine(ticks_late: int = 1, model: VoicedSineModel | None = None, **changes: object) -> Engine:
    return Engine(model or LiveSineModel(), config_of(**changes), ticks_late=ticks_late)


def pieces_of(text: str, seed: int) -> list[str]:
    """`text` cut anywhere, empty pieces included."""
    draw = random.Random(seed)
    cuts = sorted(draw.randint(0, len(text)) for _ in range(draw.randint(0, 12)))
    return [text[start:stop] for start, stop in itertools.pairwise([0, *cuts, len(text)])]


def settle(engine: Engine) -> list[Event]:
    """Tick as long as there is something to do, as if no text ever came again."""
    return list(itertools.chain.from_iterable(engine.tick() for _ in iter(lambda: engine.has_work, False)))


def speak_live(engine: Engine, pieces: list[str], ticks: int = 2, **fields: object) -> list[Event]:
    """The events of a live request alone: `ticks` of the engine, if it has work, after each piece."""
    engine.submit(SpeechRequest(id="a", text=pieces[0], is_live=True, **fields))
    events: list[Event] = []
    for piece in pieces[1:]:
        events += [event for _ in range(ticks) if engine.has_work for event in engine.tick()]
        engine.append("a", piece)
    engine.end_text("a")
    return events + drain(engine)


@pytest.mark.parametrize("ticks_late", [0, 1])
@pytest.mark.parametrize("ticks", [0, 1, 3, 50])
def test_any_split_gives_the_audio_of_the_whole_text(ticks: int, ticks_late: int) -> None:
    whole, finished = speak(SpeechRequest(id="a", text=TEXT, seed=3), live_engine())
    for seed in range(12):
        events = speak_live(live_engine(ticks_late), pieces_of(f"  {TEXT} \n", seed), ticks, seed=3)
        np.testing.assert_array_equal(audio(events, "a"), whole)
        ended = end(events, "a")
        assert (ended.reason, ended.frames, ended.characters) == ("stop", finished.frames, len(TEXT) + 4)


@pytest.mark.parametrize("codec_wait", [0, 9])
@pytest.mark.parametrize("chunk_frames", [(1,), (3,), (2, 5), (1, 2, 4, 12)], ids=str)
def test_a_row_without_text_says_what_it_has_and_then_rests(chunk_frames: tuple[int, ...], codec_wait: int) -> None:
    engine = live_engine(chunk_frames=chunk_frames, codec_wait=codec_wait)
    engine.submit(SpeechRequest(id="a", text="Half a t", is_live=True))
    events = settle(engine)
    # The eighth letter is held back; frame n needs n letters after the first, which the prompt holds.
    made = len("Half a ")
    heard = len(audio(events, "a")) // 80
    assert made - chunk_frames[0] < heard <= made
    assert engine.scheduler.free_slots == 2
    engine.append("a", "ext.")
    engine.end_text("a")
    events += drain(engine)
    np.testing.assert_array_equal(audio(events, "a"), speak(SpeechRequest(id="a", text="Half a text."))[0])


def test_rows_without_text_stand_aside_for_those_that_run() -> None:
    engine = live_engine(slots=3)
    texts = {"a": "Comes slowly, in pieces.", "b": "Comes slowly as well, but not as this."}
    for name in texts:
        engine.submit(SpeechRequest(id=name, text="", is_live=True))
    engine.submit(SpeechRequest(id="whole", text="Here from the beginning."))
    events, rest = [], dict(texts)
    while any(rest.values()):
        for name, size in (("a", 3), ("b", 5)):
            engine.append(name, rest[name][:size])
            rest[name] = rest[name][size:]
        events += [event for _ in range(2) for event in engine.tick()]
    for name in texts:
        engine.end_text(name)
    events += drain(engine)
    for name, text in (texts | {"whole": "Here from the beginning."}).items():
        np.testing.assert_array_equal(audio(events, name), speak(SpeechRequest(id=name, text=text))[0])


def test_text_that_fits_no_segment_goes_on_in_the_next() -> None:
    sentences = [f"{word} sentence of some length here." for word in ("First", "Second", "Third")]
    text = " ".join(sentences)
    whole, finished = speak(SpeechRequest(id="a", text=text, seed=7), Engine(VoicedSineModel(), config_of()))
    assert finished.reason == "stop"

    class ForgetfulModel(VoicedSineModel):
        """Hears nothing of earlier segments, as the live one."""

        def prepare(self, request, segment, index, before, voice):
            return super().prepare(request, segment, index, [], voice)

    whole, finished = speak(SpeechRequest(id="a", text=text, seed=7), Engine(ForgetfulModel(), config_of()))
    for seed, ticks in itertools.product(range(6), (0, 2, 100)):
        events = speak_live(live_engine(), pieces_of(text, seed), ticks, seed=7)
        assert end(events, "a").characters == len(text)
        np.testing.assert_array_equal(audio(events, "a"), whole)


@pytest.mark.parametrize("text", ["word " * 60, "字" * 60, "x" * 200, "Hm? " * 50, LONG * 3])
def test_text_of_any_shape_is_spoken_to_its_end(text: str) -> None:
    letters = len("".join(text.split()))
    for seed, ticks in itertools.product(range(3), (0, 1, 100)):
        events = speak_live(live_engine(), pieces_of(text, seed), ticks)
        ended = end(events, "a")
        assert (ended.reason, ended.characters) == ("stop", len(text))
        # A frame for each character, and none for the white space that is cut off between segments.
        assert letters <= ended.frames <= len(text)


def test_a_model_that_needs_whole_text_speaks_each_sentence_when_it_is_complete() -> None:
    engine = live_engine(model=VoicedSineModel())
    engine.submit(SpeechRequest(id="a", text="", is_live=True))
    assert not engine.has_work
    engine.append("a", "A first sentence that is spoken. ")
    assert not engine.has_work
    assert engine.scheduler.free_slots == 3
    engine.append("a", "A")
    events = settle(engine)
    # Between two segments it waits without a slot.
    assert (engine.scheduler.free_slots, engine.waiting) == (3, 1)
    assert len(audio(events, "a")) == 80 * len("A first sentence that is spoken.")
    engine.append("a", " second one. And a")
    events += settle(engine)
    engine.append("a", " third")
    assert not engine.has_work
    engine.end_text("a")
    events += drain(engine)
    ended = end(events, "a")
    frames = sum(map(len, ("A first sentence that is spoken.", "A second one.", "And a third")))
    assert (ended.reason, ended.frames) == ("stop", frames)


def test_sentences_are_the_same_segments_however_they_come() -> None:
    answers = [
        audio(speak_live(live_engine(model=VoicedSineModel()), pieces_of(LONG, seed), 3), "a") for seed in range(8)
    ]
    assert all(np.array_equal(answer, answers[0]) for answer in answers)
    # White space is cut off at three sentence ends, and within the one sentence that a segment cannot hold.
    assert len(answers[0]) == 80 * (len(LONG) - 4)


def test_a_voice_that_is_continued_in_context_needs_whole_sentences() -> None:
    engine = live_engine()
    engine.submit(SpeechRequest(id="a", text="Not yet a sentence", references=(reference("prompt"),), is_live=True))
    assert not engine.has_work
    engine.end_text("a")
    events = drain(engine)
    whole = speak(SpeechRequest(id="a", text="Not yet a sentence", references=(reference("prompt"),)))[0]
    np.testing.assert_array_equal(audio(events, "a"), whole)


@pytest.mark.parametrize("text", ["", "  \n", "...", "☃ …", " - "])
@pytest.mark.parametrize("model", [LiveSineModel, VoicedSineModel])
def test_text_without_anything_to_speak_is_refused_at_its_end(text: str, model: type[VoicedSineModel]) -> None:
    engine = live_engine(model=model())
    engine.submit(SpeechRequest(id="a", text="", is_live=True))
    engine.append("a", text)
    assert not engine.has_work
    engine.end_text("a")
    failed = end(drain(engine), "a")
    assert isinstance(failed, Failed)
    assert (failed.facts.code, failed.facts.field) == ("invalid_request", "text")
    assert "nothing in it can be spoken" in failed.facts.message


def failure(engine: Engine, *texts: str) -> Failed:
    for text in texts:
        engine.append("a", text)
    failed = end(drain(engine), "a")
    assert isinstance(failed, Failed)
    return failed


def test_text_after_its_end_and_too_much_of_it_fail_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "_MAX_LIVE_CHARACTERS", 50)
    engine = live_engine()
    request = SpeechRequest(id="a", text="", is_live=True)
    engine.submit(request)
    engine.append("a", "Hello there.")
    engine.end_text("a")
    engine.end_text("a")
    assert "the text was already ended" in failure(engine, "More.").facts.message
    engine.submit(request)
    assert "at most 50 characters" in failure(engine, "word " * 10, "!").facts.message
    with pytest.raises(InvalidRequest, match="characters for a live request"):
        engine.submit(msgspec.structs.replace(request, text="x" * 51))
    engine.submit(SpeechRequest(id="a", text="Whole."))
    engine.end_text("a")
    assert "only a live request" in failure(engine, "More.").facts.message
    engine.append("a", "nobody")
    engine.end_text("a")
    assert not engine.has_work
    assert_empty(engine)


def test_more_ids_than_a_slot_holds_fail_the_request_and_free_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineConfig, "max_text", 16)
    engine = live_engine()
    engine.submit(SpeechRequest(id="a", text="Hello", is_live=True))
    settle(engine)
    assert "at most 16" in failure(engine, " to everybody out there").facts.message


@pytest.mark.parametrize(
    ("text", "expected"), [("Hi ☠ there", "it exploded late"), ("It is unspeakable! ", "must be speakable")]
)
def test_what_raises_ends_its_request_alone(text: str, expected: str) -> None:
    engine = live_engine()
    engine.submit(SpeechRequest(id="b", text="Goes on by itself."))
    engine.submit(SpeechRequest(id="a", text="Hi " if "☠" in text else "", is_live=True))
    events = engine.tick()
    engine.append("a", text)
    events += drain(engine)
    assert expected in end(events, "a").facts.message
    np.testing.assert_array_equal(audio(events, "b"), speak(SpeechRequest(id="b", text="Goes on by itself."))[0])


def test_it_can_be_cancelled_in_every_state_and_says_how_far_it_came() -> None:
    def cancelled(engine: Engine, events: list[Event]) -> Finished:
        engine.cancel("a")
        events += drain(engine)
        ended = end(events, "a")
        assert ended.reason == "cancelled"
        assert ended.frames * 80 == len(audio(events, "a"))
        return ended

    def begun(text: str, **changes: object) -> Engine:
        engine = live_engine(**changes)
        engine.submit(SpeechRequest(id="a", text=text, is_live=True))
        return engine

    assert cancelled(begun(""), []).characters == 0
    assert cancelled(begun("Hello there"), []).characters == 0
    engine = begun("Hello there")
    events = engine.tick() + engine.tick()
    # Two frames of 10 ms: not a letter of ordinary speech, of which there are 15 a second.
    assert cancelled(engine, events).characters == 0
    engine = begun("Hello there")
    assert cancelled(engine, settle(engine)).characters == int(10 * 0.01 * 15)
    engine = begun("Hello there")
    engine.end_text("a")
    assert cancelled(engine, engine.tick()).frames == 0
    engine = begun("One is spoken. Two ", model=VoicedSineModel())
    events = settle(engine)
    assert cancelled(engine, events).characters == len("One is spoken. ")
    # While it waits for a slot.
    engine = live_engine(slots=1)
    engine.submit(SpeechRequest(id="b", text="Somebody else."))
    engine.submit(SpeechRequest(id="a", text="Hello there", is_live=True))
    events = engine.tick()
    engine.append("a", " and more")
    assert cancelled(engine, events).frames == 0


def test_a_pause_outlasts_text_and_text_outlasts_a_pause() -> None:
    engine = live_engine()
    engine.submit(SpeechRequest(id="a", text="Comes ", is_live=True))
    events = settle(engine)
    engine.pause("a")
    engine.append("a", "in pieces.")
    engine.end_text("a")
    assert not engine.has_work
    engine.resume("a")
    events += drain(engine)
    np.testing.assert_array_equal(audio(events, "a"), speak(SpeechRequest(id="a", text="Comes in pieces."))[0])


def test_a_limit_counts_as_for_whole_text() -> None:
    for limit in (1, 7, len(TEXT), 300):
        for ignore_eos in (False, True):
            fields = {"max_frames": limit, "ignore_eos": ignore_eos}
            whole, finished = speak(SpeechRequest(id="a", text=TEXT, **fields), live_engine())
            events = speak_live(live_engine(), pieces_of(TEXT, 1), 3, **fields)
            ended = end(events, "a")
            if finished.reason == "length" and ended.frames < limit:
                raise AssertionError
            assert (ended.reason, ended.frames) == (finished.reason, finished.frames)
            np.testing.assert_array_equal(audio(events, "a"), whole)


@pytest.mark.parametrize("ticks_late", [0, 1])
def test_once_its_text_is_known_a_runaway_is_bounded_by_it(ticks_late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = 500  # 5 s of 10 ms each: the least that a text is allowed
    monkeypatch.setattr(prompts, "_LIVE_MAX_S", 5.12)
    engine = live_engine(ticks_late)
    events = speak_live(engine, ["Hello ", "there."], 3, ignore_eos=True)
    ended = end(events, "a")
    assert (ended.reason, ended.frames, ended.characters) == ("runaway", bound, len("Hello there."))
    whole = speak(SpeechRequest(id="a", text="Hello there.", ignore_eos=True))[0]
    np.testing.assert_array_equal(audio(events, "a"), whole)


def test_text_goes_on_after_a_segment_that_the_model_ended_before_its_text() -> None:
    class HastyModel(LiveSineModel):
        """Ends its first segment with the third frame."""

        def frame(self, state, slots):
            super().frame(state, slots)
            state.done[slots] |= (state.length[slots] == 3) & (state.pitch[slots] == 0)

    engine = live_engine(model=HastyModel())
    engine.submit(SpeechRequest(id="a", text="Over soon. ", is_live=True))
    events = settle(engine)
    assert (len(audio(events, "a")), engine.scheduler.free_slots, engine.waiting) == (3 * 80, 3, 1)
    engine.append("a", "And on it goes.")
    engine.end_text("a")
    events += drain(engine)
    ended = end(events, "a")
    assert (ended.reason, ended.frames, ended.characters) == ("stop", 3 + len("And on it goes."), 26)


def test_what_is_left_of_a_large_piece_is_cut_when_its_turn_comes() -> None:
    class CountingModel(LiveSineModel):
        begun = 0

        def live_text(self, request, voice):
            self.begun += 1
            return super().live_text(request, voice)

    model = CountingModel()
    engine = live_engine(model=model)
    engine.submit(SpeechRequest(id="a", text="word " * 10_000, is_live=True))
    assert model.begun == 1
    engine.cancel("a")
    assert end(drain(engine), "a").characters == 0


def test_those_who_wait_for_text_count_as_waiting() -> None:
    engine = live_engine(slots=1, max_queued=1)
    for name in "ab":
        engine.submit(SpeechRequest(id=name, text="", is_live=True))
    assert engine.waiting == 2
    with pytest.raises(EngineBusy):
        engine.submit(SpeechRequest(id="c", text="Hello."))
    engine.cancel("a")
    engine.submit(SpeechRequest(id="c", text="Hello."))
    engine.cancel("b")
    assert end(drain(engine), "c").reason == "stop"


@pytest.mark.parametrize("padding", [{}, {"frame_batches": (1, 2, 4, 8), "codec_batches": (1, 4, 8)}], ids=str)
def test_hundreds_that_come_and_go_leave_nothing_behind(padding: dict) -> None:
    count, engine, draw = 400, live_engine(slots=8, pages=70, max_queued=100, **padding), random.Random(11)
    coming: dict[str, list[str]] = {}
    texts: dict[str, str] = {}
    events: dict[str, list[Event]] = {}
    number = 0
    while number < count or coming:
        if number < count and draw.random() < 0.4 and len(coming) < 20:
            name, text = str(number), draw.choice([TEXT, "Short.", LONG[:70], "Hm, " * draw.randint(1, 9)])
            pieces = pieces_of(text, number)
            voice = draw.choice(["low", "high"])
            engine.submit(SpeechRequest(id=name, text=pieces[0], voice=voice, seed=number % 50, is_live=True))
            coming[name], texts[name], events[name] = pieces[1:], text, []
            number += 1
        for name in draw.sample(sorted(coming), min(len(coming), 3)):
            if coming[name]:
                engine.append(name, coming[name].pop(0))
            else:
                engine.end_text(name)
            if draw.random() < 0.02:
                engine.cancel(name)
            draw.choice([engine.pause, engine.resume])(name)
        if draw.random() < 0.2:
            for name in coming:
                engine.resume(name)
        if engine.has_work:
            for event in engine.tick():
                events[event.request_id].append(event)
                if isinstance(event, Finished | Failed):
                    del coming[event.request_id]
    assert drain(engine) == []
    reasons = [end(mine, name).reason for name, mine in events.items()]
    assert set(reasons) == {"stop", "cancelled"}
    assert 5 < reasons.count("cancelled") < count // 2
    for name, mine in events.items():
        ended = end(mine, name)
        assert ended.frames * 80 == len(audio(mine, name))
        if ended.reason == "stop":
            assert ended.characters == len(texts[name])
