"""What becomes of a faulty or run-away segment, case by case. That whole requests follow it is tested in test_attempts
and test_on_fault."""

from types import SimpleNamespace

import pytest

from sonoro.core.types import SpeechRequest
from sonoro.engine.request import Playback, Progress, Request
from sonoro.engine.retry import Decision, Retry
from sonoro.text.splitting import Segment, SpokenText
from sonoro.words.tracking import Trouble

LIMIT, DOUBTFUL, FRAME_S = 100, 80, 0.08
TEXT = "One is said here. Two is said here."


class Words:
    """The words of a segment with `fault`; `rest` is what a cut leaves over."""

    def __init__(self, fault, rest=None, trouble=None):
        self.fault, self._rest, self.noted, self.dropped = fault, rest, [], False
        self.clock = SimpleNamespace(trouble=lambda is_over: trouble)

    def cut_unreached(self):
        return self._rest

    def break_off(self, trouble):
        return self._rest

    def drop(self):
        self.dropped, self.fault = True, "unreached"

    def note_fault(self, attempt, *, spoken_again):
        self.noted.append((self.fault, attempt, spoken_again))


def request_of(length, fault=None, *, attempt=0, has_words=True, rest=None, trouble=None, **params):
    """A request whose segment has ended after `length` frames, in attempt number `attempt`."""
    fields = {"attempts": 1, "on_fault": "mark", "language": "english"} | params
    prompt = SimpleNamespace(positions=10, text_ids=0, controls=SimpleNamespace(doubtful_frames=DOUBTFUL))
    request = Request(
        SpeechRequest(id="a", text=TEXT, **fields), [Segment(SpokenText(TEXT), 0, len(TEXT))], None, Playback(0.0)
    )
    request.progress = Progress(prompt, LIMIT, length=length, is_done=True, held=[(b"", length)], frames=[object()])
    request.attempt, request.words = attempt, Words(fault, rest, trouble) if has_words else None
    request.retry = Retry(request)
    return request


RETRY2, RETRY3 = {"on_fault": "retry", "attempts": 2}, {"on_fault": "retry", "attempts": 3}
MARK2 = {"on_fault": "mark", "attempts": 2}
CONTINUE = {"on_fault": "continue", "attempts": 2}
CASES = {
    "nothing is wrong": (50, None, {}, Decision.ACCEPT),
    "one attempt: the fault is marked": (50, "straying", {}, Decision.MARK),
    "one attempt: a runaway ends the request": (LIMIT, None, {}, Decision.ACCEPT),
    "ignore_eos: no attempt is faulty": (50, "straying", RETRY2 | {"ignore_eos": True}, Decision.ACCEPT),
    "ignore_eos: a limit is no runaway": (LIMIT, None, RETRY2 | {"ignore_eos": True}, Decision.ACCEPT),
    "a fault is spoken again": (50, "straying", RETRY2, Decision.HALVE),
    "a fault is not spoken again with mark": (50, "straying", MARK2, Decision.MARK),
    "a runaway is spoken again": (LIMIT, None, RETRY2, Decision.SPEAK_AGAIN),
    "a runaway is spoken again with mark": (LIMIT, None, MARK2, Decision.SPEAK_AGAIN),
    "a runaway is spoken again without words": (LIMIT, None, MARK2 | {"has_words": False}, Decision.SPEAK_AGAIN),
    "the caller's limit is no runaway": (LIMIT, None, RETRY2 | {"max_frames": LIMIT}, Decision.ACCEPT),
    "a doubtful length is spoken again": (DOUBTFUL, None, MARK2, Decision.SPEAK_AGAIN),
    "a doubtful length with a fault": (DOUBTFUL, "ending", MARK2, Decision.HALVE),
    "the second of three attempts": (50, "straying", RETRY3 | {"attempt": 1}, Decision.HALVE),
    "the last attempt is cut": (50, "unreached", RETRY3 | {"attempt": 2}, Decision.CUT),
    "the last attempt is marked with mark": (50, "unreached", MARK2 | {"attempt": 1}, Decision.MARK),
    "the last attempt runs away": (LIMIT, None, RETRY2 | {"attempt": 1}, Decision.ACCEPT),
    "words spoken alone are wrong again": (50, "unreached", RETRY2 | {"attempt": 2}, Decision.MARK),
    "words spoken alone run away": (LIMIT, None, RETRY2 | {"attempt": 2}, Decision.ACCEPT),
    "the last piece is marked with continue": (50, "straying", CONTINUE | {"attempt": 1}, Decision.MARK),
    "a runaway is not spoken again with continue": (LIMIT, None, CONTINUE, Decision.ACCEPT),
}


@pytest.mark.parametrize(("length", "fault", "params", "expected"), CASES.values(), ids=CASES)
def test_a_segment_that_ended(length: int, fault: str | None, params: dict, expected: Decision) -> None:
    request = request_of(length, fault, **params)
    assert request.retry.decide() is expected
    is_again = request.retry.settle()
    assert is_again == (expected in (Decision.SPEAK_AGAIN, Decision.HALVE))
    assert request.attempt == params.get("attempt", 0) + is_again
    is_reported = expected not in (Decision.ACCEPT, Decision.SPEAK_AGAIN)
    last = min(params.get("attempt", 0), params.get("attempts", 1) - 1)
    assert (request.words.noted if request.words else []) == [(fault, last, is_again)] * is_reported


AFTER_AN_END = {
    "the last attempt": (1, {}, Decision.MARK_RUNAWAY),
    "the last attempt, at the caller's limit": (1, {"max_frames": LIMIT}, Decision.ACCEPT),
    "words spoken alone": (2, {}, Decision.DROP),
    "words spoken alone, at the caller's limit": (2, {"max_frames": LIMIT}, Decision.DROP),
}


@pytest.mark.parametrize(("attempt", "params", "expected"), AFTER_AN_END.values(), ids=AFTER_AN_END)
def test_a_runaway_after_an_attempt_that_ended(attempt: int, params: dict, expected: Decision) -> None:
    request = request_of(50, "straying", **RETRY2 | params)
    assert request.retry.settle()
    request.segments = [
        Segment(SpokenText(TEXT), 0, len(TEXT)),
        Segment(SpokenText("And more."), len(TEXT), len(TEXT) + 9),
    ]
    request.attempt, request.words.fault = attempt, None
    request.progress = Progress(
        request.progress.prompt, LIMIT, length=LIMIT, is_done=True, held=[(b"", LIMIT)], frames=[object()]
    )
    assert request.retry.has_ended_before
    assert request.retry.decide() is expected
    assert not request.retry.settle()
    is_sent, is_remembered = bool(request.progress.held), bool(request.progress.frames)
    assert is_sent == (not request.words.dropped) == (expected is not Decision.DROP)
    assert is_remembered == (expected is Decision.ACCEPT)
    assert len(request.words.noted) == 1 + (expected is not Decision.ACCEPT)
    assert request.finish_reason == ("length" if expected is Decision.ACCEPT else None)


def test_a_segment_of_several_sentences_is_spoken_again_in_halves() -> None:
    request = request_of(50, "straying", **RETRY2)
    assert request.retry.settle()
    assert [segment.text for segment in request.segments] == ["One is said here.", "Two is said here."]


@pytest.mark.parametrize("rest", [None, Segment(SpokenText("said here."), 22, 35)])
def test_the_words_that_the_last_attempt_did_not_reach_are_the_next_segment(rest: Segment | None) -> None:
    request = request_of(50, "unreached", attempt=1, rest=rest, **RETRY2)
    assert request.retry.may_add_segment
    assert not request.retry.settle()
    assert request.segments[1:] == [rest] * (rest is not None)
    assert request.progress.has_rest == (rest is not None)


PLAYING = {
    "no fault": (None, CONTINUE, Decision.ACCEPT),
    "a fault": (Trouble("straying", 1, 2.0), CONTINUE, Decision.CONTINUE),
    "no attempt is left": (Trouble("straying", 1, 2.0), CONTINUE | {"attempt": 1}, Decision.ACCEPT),
    "other requests play on": (Trouble("straying", 1, 2.0), RETRY2, Decision.ACCEPT),
    "the caller's limit": (Trouble("straying", 1, 2.0), CONTINUE | {"max_frames": LIMIT}, Decision.ACCEPT),
}


@pytest.mark.parametrize(("trouble", "params", "expected"), PLAYING.values(), ids=PLAYING)
def test_a_segment_that_plays(trouble: Trouble | None, params: dict, expected: Decision) -> None:
    rest = Segment(SpokenText("is said here."), 4, 35)
    request = request_of(LIMIT, trouble=trouble, rest=rest, **params)
    request.progress.is_done, request.progress.decoded = False, 10
    assert request.retry.watch(FRAME_S, is_over=False) is expected
    is_broken_off = expected is Decision.CONTINUE
    assert request.progress.is_broken_off == request.progress.is_done == is_broken_off
    assert request.progress.length == (25 if is_broken_off else LIMIT)
    assert request.segments[1:] == [rest] * is_broken_off


def test_audio_that_was_sent_stays_in_a_segment_that_is_broken_off() -> None:
    request = request_of(50, trouble=Trouble("straying", 1, 2.0), **CONTINUE)
    request.progress.decoded = 40
    assert request.retry.watch(FRAME_S, is_over=False) is Decision.CONTINUE
    assert request.progress.length == 40
