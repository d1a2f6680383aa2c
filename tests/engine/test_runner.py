"""The runner: what it launches, what it holds, and that graphs change nothing."""

import numpy as np
import pytest
import torch
from families import TinyFamily, tiny
from sine_engines import Clock, Engine, audio, config_of, drain, end, engine_of, speak
from sine_models import SineModel
from without_gpu import FunctionPool

from sonoro.core.config import EngineConfig
from sonoro.core.types import SpeechRequest
from sonoro.engine.runner import Runner
from sonoro.models.base import PackingModel

__all__ = ["tiny"]


def test_without_a_gpu_rows_are_padded_only_to_sizes_that_are_named() -> None:
    named = {"frame_batches": (2, 3), "codec_batches": (1, 3), "prefill_buckets": (64,)}
    for changes in ({}, named):
        config = Runner(SineModel(), config_of(**changes)).config
        assert {name: getattr(config, name) for name in named} == dict.fromkeys(named, ()) | changes


def test_kernels_are_checked_at_every_batch_size_before_anybody_speaks() -> None:
    checked = []

    class Watched(SineModel):
        def check_kernels(self, state, batch):
            super().check_kernels(state, batch)
            checked.append(batch)

    Runner(Watched(), config_of(frame_batches=(1, 2, 3)))
    assert checked == [1, 2, 3]


def test_pages_are_as_many_as_the_slots_can_use_or_as_asked() -> None:
    # 600 positions are 19 pages of 32.
    assert Runner(SineModel(), config_of()).pages == 3 * 19
    runner = Runner(SineModel(), config_of(pages=20))
    assert runner.pages == 20
    assert "20 pages of 2048 bytes" in runner.graphs.report


def test_launches_are_counted_by_kind() -> None:
    engine = Engine(SineModel(), config_of(chunk_frames=(1, 4)), Clock(), ticks_late=1)
    for number in range(2):
        engine.submit(SpeechRequest(id=str(number), text="Hello there.", max_frames=9))
    drain(engine)
    counts = engine.runner.graphs.launches
    assert all(kind["graph"] == 0 for kind in counts.values())
    # Both rows run together: one prefill, nine frames, and audio of 1, 1, 4 and 3 frames.
    assert {name: kind["eager"] for name, kind in counts.items()} == {"admit": 1, "prefill": 1, "frame": 9, "codec": 4}


def test_a_prompt_whose_rows_do_not_fit_a_bucket_runs_at_its_own_length() -> None:
    seen = []

    class Watched(SineModel):
        def prefill(self, state, tokens):
            seen.append(len(tokens))
            super().prefill(state, tokens)

    engine = Engine(Watched(), config_of(prefill_buckets=(8, 16)), ticks_late=1)
    for text in ("Short", "Some more words", "Many more words than the buckets"):
        engine.submit(SpeechRequest(id="a", text=text, max_frames=2))
        drain(engine)
    assert seen == [8, 16, 32]


SIZES = {"frame_batches": (1, 2, 3), "prefill_buckets": (16, 64, 256), "codec_batches": (1, 2, 3)}


def test_an_engine_that_is_ready_early_speaks_alike_until_all_is_captured_and_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sonoro.engine.runner.GraphPool", FunctionPool)
    requests = [SpeechRequest(id=str(number), text="Hello there.", max_frames=9 + number) for number in range(3)]
    expected = [speak(request, engine_of(**SIZES))[0] for request in requests]
    engine, whole = engine_of(**SIZES, is_ready_early=True), engine_of(**SIZES)
    assert whole.runner.graphs.to_come == 0
    # Of 1, 2 and 3: 2 of frames and admissions, 64 of prompts, 2 of the first chunk, and 1 and 2 of the others.
    assert engine.runner.graphs.to_come == 2 + 1 + 1 + 2 * (len(engine.config.chunk_frames) - 1)
    to_come = [engine.runner.graphs.to_come]
    while to_come[-1]:
        for request in requests:
            engine.submit(request)
        events = drain(engine)
        for request, samples in zip(requests, expected, strict=True):
            np.testing.assert_array_equal(audio(events, request.id), samples)
        assert engine.is_idle
        with engine.runner.active():
            engine.runner.graphs.capture_next()
        to_come.append(engine.runner.graphs.to_come)
    assert to_come == [*range(to_come[0], -1, -1)]
    # What admits sines refuses slots that nothing is staged for, as those are that a graph is captured on.
    assert not any(counts["eager"] for kind, counts in engine.runner.graphs.launches.items() if kind != "admit")


def test_kernels_of_a_size_are_checked_before_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    events = []

    class Watched(SineModel):
        def check_kernels(self, state, batch):
            super().check_kernels(state, batch)
            events.append(("checked", batch))

        def frame(self, state, slots):
            super().frame(state, slots)
            events.append(("captured", len(slots)))

    monkeypatch.setattr("sonoro.engine.runner.GraphPool", FunctionPool)
    runner = Runner(Watched(), config_of(**SIZES, is_ready_early=True))
    assert events == [("checked", 1), ("checked", 3), ("captured", 3), ("captured", 1)]
    while runner.graphs.to_come:
        with runner.active():
            runner.graphs.capture_next()
    assert events[4:] == [("checked", 2), ("captured", 2)]


@pytest.mark.parametrize("chunk_frames", [(1,), (3,), (1, 2, 4, 12)], ids=str)
def test_chunks_of_a_live_engine_are_the_whole_decode(chunk_frames: tuple[int, ...], tiny: TinyFamily) -> None:
    model = tiny.load().model
    decode, given = model.codec.decode, []

    def watched(frames: torch.Tensor, slots: torch.Tensor | None = None, history: object = None) -> torch.Tensor:
        given.append(frames.clone())
        return decode(frames, slots, history)

    model.codec.decode = watched  # type: ignore[method-assign]
    # In torch, and as it runs on a CPU, where a model may have compiled code.
    for is_eager in (True, False):
        engine = Engine(model, EngineConfig(slots=1, chunk_frames=chunk_frames, is_eager=is_eager), Clock())
        engine.submit(SpeechRequest(id="a", text="Hello there.", seed=3, max_frames=40, ignore_eos=True))
        events = drain(engine)
        assert end(events, "a").frames == 40
        whole = decode(torch.cat(given, dim=1)[:, :40])[0]
        assert whole.std() > 0
        # Float32 rounds differently in chunks of other lengths; one step of PCM16 is 3e-5.
        np.testing.assert_allclose(audio(events, "a"), whole, atol=1e-4, rtol=0)


@pytest.mark.gpu
def test_an_engine_serves_on_without_a_size_that_cannot_be_captured(
    tiny: TinyFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = []
    for unlucky in (0, 2):
        model = tiny.load(device="cuda").model
        step = model.frame

        def frame(state: object, slots: torch.Tensor, *, step=step, unlucky=unlucky) -> None:  # type: ignore[no-untyped-def]
            if len(slots) == unlucky and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("it cannot be captured")
            step(state, slots)

        monkeypatch.setattr(model, "frame", frame)
        engine = Engine(model, EngineConfig(slots=4), Clock())
        for number in range(2):
            engine.submit(
                SpeechRequest(id=str(number), text="Hello there.", seed=number, max_frames=9, ignore_eos=True)
            )
        events = drain(engine)
        answers.append([audio(events, str(number)) for number in range(2)])
        counts = {"graph": 0 if unlucky else 9, "reference_graph": 0, "compiled": 0, "eager": 9 if unlucky else 0}
        assert engine.runner.graphs.launches["frame"] == counts
        assert engine.runner.graphs.launches["codec"]["eager"] == 0
    np.testing.assert_array_equal(*answers)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_live_engine_says_the_same_with_graphs_and_without(dtype: torch.dtype, tiny: TinyFamily) -> None:
    """On a clock that stands still, so that both make the same batches."""
    answers = []
    for is_eager in (False, True):
        loaded = tiny.load(dtype, "cuda")
        engine = Engine(loaded.model, EngineConfig(slots=4, segment_letters=24, is_eager=is_eager), Clock())
        for number in range(10):
            text = ["Hello there.", "One sentence. Then another one.", "Hm."][number % 3]
            engine.submit(SpeechRequest(id=str(number), text=text, seed=number, max_frames=10 + 3 * number))
        events = drain(engine)
        assert all(end(events, str(number)).reason in ("stop", "length") for number in range(10))
        answers.append([audio(events, str(number)) for number in range(10)])
        kinds = {
            name: counts["eager" if is_eager else "graph"] for name, counts in engine.runner.graphs.launches.items()
        }
        # Prompts may all run within decode steps.
        is_packing = isinstance(loaded.model, PackingModel)
        assert all(count or (is_packing and name == "prefill") for name, count in kinds.items()), kinds
        assert sum(map(sum, (counts.values() for counts in engine.runner.graphs.launches.values()))) == sum(
            kinds.values()
        )
    for graph, eager in zip(*answers, strict=True):
        np.testing.assert_array_equal(graph, eager)
