"""What becomes of segments that go wrong as the attention says: over a model that goes wrong with seeds below 10."""

import pytest
from sine_engines import HOP, Engine, audio, config_of, drain, end
from sine_models import ErringModel

from sonoro.core.errors import InvalidRequest
from sonoro.core.events import Fault
from sonoro.core.types import AudioChunk, Failed, SpeechRequest
from sonoro.text import splitting as text_module
from sonoro.words.spans import word_spans

TEXT = "It is the first one of them."
THE = TEXT.index("the")
FRAMES = len(TEXT)


def say(fault, engine=None, **fields):
    engine = engine or Engine(ErringModel(fault), config_of())
    asked = {"id": "a", "text": TEXT, "seed": 9, "with_words": True, "is_reproducible": True} | fields
    engine.submit(SpeechRequest(**asked))
    made = drain(engine)
    words = [word for event in made for word in event.words or ()]
    return made, end(made, "a"), words


@pytest.mark.parametrize("fault", ["dwelling", "straying", "unreached"])
def test_a_segment_that_is_heard_ends_at_its_last_good_word_and_goes_on_from_there(fault: str) -> None:
    made, finished, words = say(fault, on_fault="continue")
    assert finished.reason == "stop"
    assert finished.faults == (Fault(kind=fault, start=0, end=FRAMES, continued_at=THE),)
    assert [(word.start, word.end) for word in words] == word_spans(TEXT)
    assert [word.start_s for word in words] == sorted(word.start_s for word in words)
    # Some of the word that is spoken again may have been sent before it was known to be wrong.
    rest = FRAMES - THE
    assert THE + rest <= finished.frames < THE + rest + 8
    assert len(audio(made, "a")) == finished.frames * HOP


def test_what_goes_on_after_the_last_word_is_broken_off_and_the_next_segment_follows() -> None:
    text = TEXT + " That is all there is."
    _, finished, words = say("ending", text=text, on_fault="continue", seed=9)
    (fault, second) = finished.faults
    assert (fault.kind, fault.start, fault.continued_at) == ("ending", 0, fault.end)
    assert (second.kind, text[second.start : second.end]) == ("ending", "That is all there is.")
    assert [(word.start, word.end) for word in words] == word_spans(text)
    assert len(text) + 5 <= finished.frames < len(text) + 20
    assert finished.reason == "stop"


def test_of_several_sentences_the_next_attempt_speaks_half() -> None:
    """The second half is wrong as well, with the seed of the first attempt, and is spoken again by itself."""
    last = "That is all there is."
    text = f"{TEXT} {last}"
    engine = Engine(ErringModel("unreached"), config_of(segment_letters=200))
    made, finished, words = say("unreached", engine, text=text, on_fault="retry", attempts=2)
    named = [(fault.kind, text[fault.start : fault.end], fault.outcome) for fault in finished.faults]
    assert named == [("unreached", text, "spoken_again"), ("unreached", last, "spoken_again")]
    assert finished.reason == "stop"
    assert [(word.start, word.end) for word in words] == word_spans(text)
    assert finished.frames == len(TEXT) + len(last)
    assert len(audio(made, "a")) == finished.frames * HOP


def test_words_that_no_attempt_reached_are_spoken_alone() -> None:
    """Both attempts end before "the"; nothing of their audio is cut."""
    made, finished, words = say("unreached", on_fault="retry", attempts=2, seed=8)
    first, second = finished.faults
    assert (first.kind, first.attempt, first.outcome) == ("unreached", 0, "spoken_again")
    assert second == Fault(kind="unreached", start=0, end=FRAMES, attempt=1, continued_at=THE)
    assert finished.reason == "stop"
    assert [(word.start, word.end) for word in words] == word_spans(TEXT)
    assert [word.start_s for word in words] == sorted(word.start_s for word in words)
    assert finished.frames == 8 + FRAMES - THE
    assert len(audio(made, "a")) == finished.frames * HOP


def test_a_fault_in_words_that_are_spoken_alone_is_one_of_the_last_attempt() -> None:
    _, finished, _ = say("unreached", on_fault="retry", attempts=2, seed=7)
    told = [(one.attempt, TEXT[one.start : one.end], one.outcome) for one in finished.faults]
    rest = TEXT[THE:]
    assert told == [(0, TEXT, "spoken_again"), (1, TEXT, "continued"), (1, rest, "marked")]


LAST = "That is all there is."


def unreached(runs, **changes):
    """What is told of `TEXT` and `LAST`, whose attempts with seeds below 10 end at frame 8, and with `runs` do not."""
    fields = {"on_fault": "retry", "attempts": 2, "seed": 8, "text": f"{TEXT} {LAST}"} | changes
    made, finished, words = say("unreached", Engine(ErringModel("unreached", runs), config_of()), **fields)
    assert len(audio(made, "a")) == finished.frames * HOP
    told = [(one.kind, one.attempt, fields["text"][one.start : one.end], one.outcome) for one in finished.faults]
    return finished, told, words


@pytest.mark.parametrize("limits", [{}, {"max_frames": 60}])
def test_of_words_that_run_away_when_they_are_spoken_alone_nothing_is_sent_and_the_text_goes_on(limits: dict) -> None:
    """The seed of the last sentence is that of the first attempt: it errs, and its second attempt as well."""
    finished, told, words = unreached({10}, **limits)
    (reach, alone), rest = (TEXT[:THE], TEXT[THE:]), LAST[LAST.index("all") :]
    assert told[:3] == [
        ("unreached", 0, TEXT, "spoken_again"),
        ("unreached", 1, TEXT, "continued"),
        ("unreached", 1, alone, "marked"),
    ]
    assert told[-1] == ("unreached", 1, rest, "marked")
    assert (finished.reason, finished.characters) == ("stop", len(TEXT) + 1 + len(LAST))
    marked, _, _ = unreached({10}, on_fault="mark", attempts=1)
    assert finished.frames == marked.frames == 2 * 8
    assert [word.text for word in words] == [*reach.split(), *LAST[: -len(rest)].split()]


def test_what_runs_away_after_an_attempt_that_ended_is_marked_and_the_text_goes_on() -> None:
    finished, told, words = unreached({10}, seed=9)
    text = f"{TEXT} {LAST}"
    assert told[:2] == [("unreached", 0, TEXT, "spoken_again"), ("ending", 1, TEXT, "marked")]
    # The last sentence runs away in its last attempt as well; what comes last is told as it is.
    assert told[2:] == [("unreached", 0, LAST, "spoken_again"), ("ending", 1, LAST, "marked")]
    assert (finished.reason, finished.characters) == ("runaway", len(text))
    assert [(word.start, word.end) for word in words] == word_spans(text)
    assert unreached({9, 10}, seed=9)[1] == []
    finished, told, _ = unreached({10}, seed=9, max_frames=60)
    assert (finished.reason, [outcome for *_, outcome in told]) == ("length", ["spoken_again"])


def test_no_later_prompt_includes_what_ran_away() -> None:
    class Recalling(ErringModel):
        before = ()

        def prepare(self, request, segment, index, before, voice):
            self.asked, self.before = segment, [said.text for said in before]
            return super().prepare(request, segment, index, before, voice)

    for seed, recalled in ((8, [TEXT[:THE]]), (9, [])):
        model = Recalling("unreached", {10})
        say("", Engine(model, config_of()), text=f"{TEXT} {LAST}", on_fault="retry", attempts=2, seed=seed)
        assert model.asked in LAST
        assert [said for said in model.before if said in TEXT] == recalled


def test_a_segment_that_cannot_be_cut_fails_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_):
        raise AssertionError("the sentence splitter lost text")

    engine = Engine(ErringModel("unreached"), config_of(segment_letters=200))
    engine.submit(SpeechRequest(id="b", text=TEXT, seed=10))
    engine.submit(SpeechRequest(id="a", text=TEXT, seed=9, on_fault="retry", attempts=2))
    monkeypatch.setattr(text_module, "_sentences", fail)
    made = drain(engine)
    (failed,) = [event for event in made if isinstance(event, Failed)]
    assert failed.request_id == "a"
    assert end(made, "b").reason == "stop"


def test_a_limit_of_the_caller_is_no_fault() -> None:
    _, finished, words = say("none", seed=10, max_frames=15, on_fault="continue")
    _, marked, _ = say("none", seed=10, max_frames=15)
    assert (finished.reason, finished.faults) == (marked.reason, marked.faults) == ("length", ())
    assert finished.frames == marked.frames
    assert words


def test_the_last_words_of_a_segment_come_with_the_last_of_its_audio() -> None:
    made, _, _ = say("none", seed=10, text=TEXT + " That is all there is.")
    sent, told = 0, []
    for event in made:
        if isinstance(event, AudioChunk) and sent < FRAMES * HOP:
            sent += len(event.pcm) // 2
            told += [(word.start, word.end) for word in event.words or ()]
    assert sent == FRAMES * HOP
    assert told == word_spans(TEXT)


def test_its_audio_is_sent_as_it_is_made() -> None:
    engine = Engine(ErringModel(""), config_of())
    engine.submit(SpeechRequest(id="a", text=TEXT, seed=10, with_words=True, on_fault="continue"))
    ticks = 0
    while not any(isinstance(event, AudioChunk) for event in engine.tick()):
        ticks += 1
    assert ticks < FRAMES / 2
    drain(engine)


def test_the_last_attempt_is_marked() -> None:
    _, finished, _ = say("dwelling", on_fault="continue", seed=8)
    assert [(one.attempt, one.continued_at) for one in finished.faults] == [(0, THE), (1, None)]
    assert finished.reason == "stop"
    _, finished, _ = say("dwelling", on_fault="continue", seed=8, attempts=3)
    assert [fault.outcome for fault in finished.faults] == ["continued", "continued"]
    assert [fault.attempt for fault in finished.faults] == [0, 1]


@pytest.mark.parametrize(("fields", "outcomes"), [
    ({}, ["marked"]), ({"on_fault": "mark", "attempts": 2}, ["marked"]), ({"on_fault": "retry"}, ["spoken_again"]),
    ({"attempts": 2}, ["spoken_again"]), ({"on_fault": "continue", "max_frames": FRAMES + 30}, ["continued"]),
])  # fmt: skip
def test_what_is_done_is_what_is_asked_for(fields: dict, outcomes: list[str]) -> None:
    made, finished, words = say("dwelling", **fields)
    assert [fault.outcome for fault in finished.faults] == outcomes
    assert [(word.start, word.end) for word in words] == word_spans(TEXT)
    assert len(audio(made, "a")) == finished.frames * HOP


def test_a_good_reading_is_the_same_whatever_is_asked_for() -> None:
    said = [say("dwelling", seed=10, on_fault=how) for how in ("mark", "retry", "continue")]
    assert [audio(made, "a").tolist() for made, *_ in said] == [audio(said[0][0], "a").tolist()] * 3
    assert not any(finished.faults for _, finished, _ in said)


def test_one_that_is_broken_off_leaves_the_others_as_they_are() -> None:
    engine = Engine(ErringModel("dwelling"), config_of())
    requests = [
        SpeechRequest(id=str(seed), text=TEXT, seed=seed, with_words=True, is_reproducible=True, on_fault="continue")
        for seed in (8, 9, 10, 11)
    ]
    for one in requests:
        engine.submit(one)
    together = drain(engine)
    for one in requests:
        made, finished, _ = say("dwelling", on_fault="continue", seed=one.seed)
        assert end(together, one.id).faults == finished.faults
        assert audio(together, one.id).tolist() == audio(made, "a").tolist()


@pytest.mark.parametrize(("fields", "reason"), [
    ({"on_fault": "stop"}, "on_fault: 'stop' .*one of mark, retry, continue"),
    ({"on_fault": "retry", "attempts": 1}, "attempts: 1 .*at least 2"),
    ({"on_fault": "continue", "is_live": True}, "on_fault: 'continue' .*live text is spoken as it comes"),
])  # fmt: skip
def test_what_cannot_be_asked_for_is_refused(fields: dict, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        SpeechRequest(id="a", text="Hello.", **fields)
