"""The shipped voice says the same codes on every path: alone, in a batch of 16, streamed and whole, graph and eager."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from parity import begin, capacity

from builtin_voice.judged import read_harvard
from sonoro import TTS
from sonoro.api import Audio
from sonoro.core.config import EngineConfig
from sonoro.core.types import SpeechRequest
from sonoro.models import registry

SENTENCES = read_harvard()[:20]
VOICES = registry.describe(None).spec.voices
CONFIG = EngineConfig(slots=16)
AT_LEAST = 19
SAME_DB = 30
"""Other codes leave nothing of the waveform; rounding in half precision leaves 50 dB."""


def requests() -> list[dict[str, object]]:
    return [{"text": text, "voice": VOICES[index % len(VOICES)], "seed": index} for index, text in enumerate(SENTENCES)]


def is_same(ours: np.ndarray, theirs: np.ndarray) -> bool:
    if len(ours) != len(theirs):
        return False
    noise = np.square(ours - theirs).mean()
    return bool(noise == 0 or 10 * np.log10(np.square(theirs).mean() / noise) > SAME_DB)


def count_same(found: list[np.ndarray], expected: list[Audio]) -> int:
    return sum(is_same(ours, theirs.samples) for ours, theirs in zip(found, expected, strict=True))


def streamed(speech: TTS) -> list[np.ndarray]:
    return [
        np.concatenate([piece.samples for piece in speech.stream(**request)])  # type: ignore[arg-type]
        for request in requests()
    ]


def batched(speech: TTS) -> list[np.ndarray]:
    return [audio.samples for audio in speech.generate_batch(requests())]


@pytest.mark.slow
def test_paths_on_a_cpu_say_the_same() -> None:
    speech = TTS(device="cpu", config=CONFIG)
    alone = [speech.generate(**request) for request in requests()]  # type: ignore[arg-type]
    assert [audio.finish_reason for audio in alone] == ["stop"] * 20
    counts = {"batch": count_same(batched(speech), alone), "streamed": count_same(streamed(speech), alone)}
    print(counts)
    assert min(counts.values()) >= AT_LEAST


@pytest.mark.gpu
def test_paths_on_a_gpu_say_the_same() -> None:
    """In float32, as on a CPU: in bfloat16 another batch size is another reading."""
    on_cpu = TTS(device="cpu", config=CONFIG)
    expected = [on_cpu.generate(**request) for request in requests()]  # type: ignore[arg-type]
    counts = {}
    for arm, is_eager in (("graph", False), ("eager", True)):
        speech = TTS(device="cuda", dtype="float32", config=dataclasses.replace(CONFIG, is_eager=is_eager))
        counts[f"{arm} alone"] = count_same([speech.generate(**request).samples for request in requests()], expected)  # type: ignore[arg-type]
        counts[f"{arm} batch"] = count_same(batched(speech), expected)
        counts[f"{arm} streamed"] = count_same(streamed(speech), expected)
    print(counts)
    assert min(counts.values()) >= AT_LEAST


@pytest.mark.gpu
def test_graph_and_eager_launches_read_alike_in_half_precision() -> None:
    arms = [TTS(device="cuda", config=dataclasses.replace(CONFIG, is_eager=is_eager)) for is_eager in (False, True)]
    whole = [[speech.generate(**request) for request in requests()[:8]] for speech in arms]  # type: ignore[arg-type]
    assert [audio.finish_reason for audio in whole[0]] == ["stop"] * 8
    assert count_same([audio.samples for audio in whole[0]], whole[1]) == 8


@pytest.mark.gpu
@pytest.mark.parametrize("chunks", [(1,), (1, 2, 4, 12), (12,)])
def test_half_precision_streams_what_float32_decodes_whole(chunks: tuple[int, ...]) -> None:
    """Its own codes, decoded in chunks on a GPU and whole on a CPU: 40 dB is where rounding is no longer heard."""
    speaker = registry.load(None, device="cpu").model
    request = speaker.spec.resolve(SpeechRequest(id="x", text=SENTENCES[3], max_frames=48, seed=1))
    with torch.inference_mode():
        state = speaker.allocate(capacity(1, 256, 48, 128))
        begin(speaker, state, [speaker.prepare(request, request.text, 0, [], None)], [0])
        for _ in range(48):
            speaker.frame(state, torch.tensor([0]))
        frames = state.frames[:1, : int(state.length[0])]
        whole = speaker.codec.decode(frames)[0].numpy()
        codec = registry.load(None, device="cuda").model.codec
        assert codec.settle("auto", 1, [1, 2, 4]).dtype == torch.float16
        history, slots = codec.allocate(1), torch.zeros(1, dtype=torch.int64, device="cuda")
        lengths = itertools.accumulate(itertools.cycle(chunks))
        edges = [0, *itertools.takewhile(lambda edge: edge < frames.shape[1], lengths), frames.shape[1]]
        pieces = [codec.decode(frames[:, a:b].cuda(), slots, history)[0].cpu() for a, b in itertools.pairwise(edges)]
    streamed = torch.cat(pieces).float().numpy()
    ratio_db = 10 * np.log10(np.square(whole).mean() / np.square(streamed - whole).mean())
    print(f"chunks {chunks}: {ratio_db:.1f} dB")
    assert ratio_db >= 40
