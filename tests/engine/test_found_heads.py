"""Heads that point at the text of a checkpoint without a table: found while nobody speaks, kept, and marked."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoint
from sine_engines import Engine
from sine_models import ShownSineModel
from without_gpu import FunctionPool

from sonoro.core.config import EngineConfig, Tuning
from sonoro.core.events import Word
from sonoro.core.folders import word_heads_folder
from sonoro.core.types import AudioChunk, Event, Finished, SpeechRequest
from sonoro.models import registry
from sonoro.words.heads import WordHeads, read_table

TEXT = "Hello there, you."
GRAPHS: dict[str, Any] = {"frame_batches": (1, 2, 4), "prefill_buckets": (16, 512), "codec_batches": (1, 4)}
CONFIG = EngineConfig(slots=4, max_positions=1024, max_frames=512)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The user's cache, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return word_heads_folder()


def untold() -> ShownSineModel:
    """A model that points at its text, and has no table that says so."""
    model = ShownSineModel()
    model.word_heads = WordHeads()
    return model


def speak(engine: Engine, name: str, text: str = TEXT, **fields: object) -> list[Event]:
    engine.submit(SpeechRequest(id=name, text=text, **fields))
    made: list[Event] = []
    while engine.has_work:
        made += engine.tick()
    return made


def words_of(events: list[Event]) -> list[Word] | None:
    told = [event.words for event in events if event.words is not None]
    return [word for words in told for word in words] if told else None


def be_quiet(engine: Engine) -> int:
    """All that is done in quiet; how many steps it took."""
    steps = 0
    while engine.has_quiet_work:
        if engine.runner.graphs.to_come:
            with engine.runner.active():
                engine.runner.graphs.capture_next()
        else:
            engine.found_heads.search(engine.runner)
        steps += 1
    return steps


@pytest.mark.parametrize("sizes", [{}, GRAPHS], ids=["eager", "graphs"])
def test_heads_are_found_once_words_are_wanted_and_times_are_estimated(
    sizes: dict[str, Any], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sizes:
        monkeypatch.setattr("sonoro.engine.runner.GraphPool", FunctionPool)
    engine = Engine(untold(), dataclasses.replace(CONFIG, **sizes))
    plain = speak(engine, "a")
    assert not engine.has_quiet_work
    assert words_of(speak(engine, "b", with_words=True)) is None
    assert not engine.found_heads.are_known
    launched = sum(engine.runner.graphs.launches["frame"].values())
    assert be_quiet(engine) > 50
    assert engine.found_heads.are_known
    assert sum(engine.runner.graphs.launches["frame"].values()) == launched
    again = speak(engine, "c", with_words=True)
    words = words_of(again)
    assert [(word.text, word.is_estimated) for word in words] == [("Hello", True), ("there", True), ("you", True)]
    assert b"".join(event.pcm for event in again[:-1]) == b"".join(event.pcm for event in plain[:-1])
    # A token and a frame are a character and 10 ms.
    assert [word.start_s for word in words[1:]] == pytest.approx([0.06, 0.13], abs=0.025)
    # The next start knows them: nothing is searched for again.
    assert [file.name for file in cache.iterdir()] == ["of a sine.json"]
    later = Engine(untold(), CONFIG)
    assert words_of(speak(later, "d", with_words=True)) == words
    assert not later.has_quiet_work


@pytest.mark.gpu
def test_graphs_are_captured_anew_once_heads_are_found() -> None:
    model = registry.load(None, device="cuda").model
    known, model.word_heads = model.word_heads, WordHeads()
    engine = Engine(model, dataclasses.replace(CONFIG, slots=2, frame_batches=(1, 2), codec_batches=(1,)))
    # Chunks by rule: the listener's clock would cut them elsewhere, and other shapes round otherwise.
    same: dict[str, Any] = {"seed": 3, "is_reproducible": True}
    plain = speak(engine, "a", **same)
    assert words_of(speak(engine, "b", **same, with_words=True)) is None
    be_quiet(engine)
    assert model.word_heads.places == known.places
    launched = dict(engine.runner.graphs.launches["frame"])
    again = speak(engine, "c", **same, with_words=True)
    assert [word.text for word in words_of(again)] == ["Hello", "there", "you"]
    pcm = [b"".join(event.pcm for event in events if isinstance(event, AudioChunk)) for events in (plain, again)]
    assert pcm[0] == pcm[1]
    assert {how for how, count in engine.runner.graphs.launches["frame"].items() if count > launched[how]} == {"graph"}


def test_nothing_is_searched_for_while_a_request_is_there_and_it_does_not_notice() -> None:
    engine, alone = Engine(untold(), CONFIG), Engine(ShownSineModel(), CONFIG)
    speak(engine, "a", with_words=True)
    for _ in range(7):
        assert engine.has_quiet_work
        engine.found_heads.search(engine.runner)
    engine.submit(SpeechRequest(id="b", text=TEXT, seed=3))
    engine.pause("b")
    for _ in range(3):
        engine.tick()
        assert not engine.has_quiet_work
    engine.resume("b")
    made = []
    while engine.has_work:
        made += engine.tick()
        assert engine.has_work or engine.has_quiet_work
    expected = speak(alone, "b", seed=3)
    assert b"".join(event.pcm for event in made[:-1]) == b"".join(event.pcm for event in expected[:-1])
    be_quiet(engine)
    assert engine.found_heads.are_known


def test_it_can_be_switched_off() -> None:
    engine = Engine(untold(), dataclasses.replace(CONFIG, tuning=Tuning(finds_word_heads=False)))
    assert words_of(speak(engine, "a", with_words=True)) is None
    assert not engine.has_quiet_work


def test_a_search_that_fails_ends_and_words_have_no_times(caplog: pytest.LogCaptureFixture, cache: Path) -> None:
    model = untold()
    model.text_layouts = {"text_first": {"nobody": True}}
    engine = Engine(model, CONFIG)
    speak(engine, "a", with_words=True)
    assert be_quiet(engine) == 1
    assert "word_heads_not_found" in caplog.text
    assert words_of(speak(engine, "b", with_words=True)) is None
    assert not engine.has_quiet_work
    assert not cache.exists()


def test_where_there_is_no_room_to_watch_them_words_have_no_times_until_the_next_start(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    engine = Engine(untold(), CONFIG)
    speak(engine, "a", with_words=True)
    monkeypatch.setattr(engine.runner, "watch", fail)
    be_quiet(engine)
    assert "out of memory" in caplog.text
    assert words_of(speak(engine, "b", with_words=True)) is None
    assert words_of(speak(Engine(untold(), CONFIG), "c", with_words=True))


def test_a_table_that_cannot_be_read_is_none(caplog: pytest.LogCaptureFixture, cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / "of a sine.json").write_text("nothing")
    engine = Engine(untold(), CONFIG)
    assert "of a sine.json" in caplog.text
    assert words_of(speak(engine, "a", with_words=True)) is None


def test_of_random_weights_none_is_found_and_that_is_kept(tmp_path: Path, cache: Path) -> None:
    tiny_checkpoint.write_checkpoint(tmp_path / "tiny")
    model = registry.load(tmp_path / "tiny", device="cpu", dtype="float32").model
    engine = Engine(model, dataclasses.replace(CONFIG, max_frames=64))
    first = speak(engine, "a", "Hello.", with_words=True, max_frames=8)
    be_quiet(engine)
    assert not engine.found_heads.are_known
    again = speak(engine, "b", "Hello.", with_words=True, max_frames=8)
    assert words_of(first) is words_of(again) is None
    assert isinstance(again[-1], Finished)
    [file] = cache.iterdir()
    assert read_table(file) == WordHeads()
    assert not Engine(model, CONFIG).has_quiet_work
