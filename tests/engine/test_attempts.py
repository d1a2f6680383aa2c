"""Segments that run away and are spoken again, over a model of sine waves that runs away with seeds below 10."""

import dataclasses

import numpy as np
import pytest
from sine_engines import HOP, Engine, audio, config_of, drain, end, speak
from sine_models import SineModel

from sonoro.core.errors import InvalidRequest
from sonoro.core.types import AudioChunk, SpeechRequest

TEXT = "It is the first one of them. And this is another one."
BOUND = 500
"""Frames that a text as short as these may have."""


class FickleModel(SineModel):
    """`run` are the seeds it spoke segments with."""

    def prepare(self, request, segment, index, before, voice):
        prompt = super().prepare(request, segment, index, before, voice)
        runs = request.seed < 10 and ("only" not in segment or index > 0)
        prompt.controls = dataclasses.replace(prompt.controls, ignore_eos=prompt.controls.ignore_eos or runs)
        self.run.append(request.seed)
        return prompt


def engine_of(**changes):
    model = FickleModel()
    model.run = []
    return Engine(model, config_of(**changes)), model


def say(engine, *requests):
    for one in requests:
        engine.submit(one)
    return drain(engine)


def test_what_runs_away_is_spoken_again_with_the_next_seed() -> None:
    engine, model = engine_of()
    events = say(engine, SpeechRequest(id="a", text="Hello there.", seed=8, attempts=3))
    finished, (expected, _) = end(events, "a"), speak(SpeechRequest(id="a", text="Hello there.", seed=10))
    assert model.run == [8, 9, 10]
    assert (finished.reason, finished.frames) == ("stop", 12)
    np.testing.assert_array_equal(audio(events, "a"), expected)


def test_the_last_attempt_is_what_it_is() -> None:
    engine, model = engine_of()
    events = say(engine, SpeechRequest(id="a", text="Hello there.", seed=1, attempts=3))
    assert model.run == [1, 2, 3]
    assert (end(events, "a").reason, end(events, "a").frames, len(audio(events, "a"))) == (
        "runaway",
        BOUND,
        BOUND * HOP,
    )


def test_audio_comes_with_the_end_of_its_segment() -> None:
    """The second one runs away, and is spoken again by itself."""
    engine, model = engine_of(segment_letters=30)
    engine.submit(SpeechRequest(id="a", text="It is only this one. Later it runs away.", seed=9, attempts=2))
    bursts = []
    while engine.has_work:
        if chunks := [event for event in engine.tick() if isinstance(event, AudioChunk)]:
            bursts.append((len(chunks) > 1, sum(len(chunk.pcm) for chunk in chunks) // 2 // HOP))
    assert bursts == [(True, 20), (True, 19)]
    assert model.run == [9, 9, 10]


def test_others_are_streamed_meanwhile_and_say_what_they_say_alone() -> None:
    requests = [
        SpeechRequest(id=str(seed), text=TEXT, seed=seed, attempts=1 + seed % 3) for seed in (12, 7, 8, 11, 9, 13)
    ]
    together = say(engine_of()[0], *requests)
    for one in requests:
        alone = say(engine_of()[0], one)
        assert end(together, one.id).reason == end(alone, one.id).reason
        assert end(together, one.id).frames == end(alone, one.id).frames
        np.testing.assert_array_equal(audio(together, one.id), audio(alone, one.id))


def test_one_that_is_cancelled_or_limited_is_not_spoken_again() -> None:
    engine, model = engine_of()
    engine.submit(SpeechRequest(id="a", text="Hello there.", attempts=3))
    for _ in range(20):
        assert engine.tick() == []
    engine.cancel("a")
    events = drain(engine)
    assert (end(events, "a").reason, end(events, "a").frames, end(events, "a").characters) == ("cancelled", 0, 0)
    assert end(say(engine, SpeechRequest(id="b", text="Hello.", attempts=3, max_frames=50)), "b").reason == "length"
    whole = SpeechRequest(id="c", text="Hello.", attempts=3, ignore_eos=True)
    assert end(say(engine, whole), "c").reason == "runaway"
    assert model.run == [0, 0, 0]


@pytest.mark.parametrize(("fields", "reason"), [
    ({"attempts": 0}, "attempts: 0"), ({"attempts": 11}, "attempts: 11"),
    ({"attempts": 2, "is_live": True}, "attempts: 2 .*live text is spoken as it comes"),
])  # fmt: skip
def test_attempts_that_cannot_be_are_refused(fields: dict, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        SpeechRequest(id="a", text="Hello.", **fields)
