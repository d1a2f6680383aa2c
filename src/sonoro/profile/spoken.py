"""Run a model without an engine, from graphs or eagerly, to compare frames and audio."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sonoro.core.types import SpeechRequest
from sonoro.models.base import Capacity, CloningModel, LoadedModel, Pages, Prompt
from sonoro.runtime.graphs import GraphPool, GraphSet
from sonoro.runtime.ring import upload

SLOTS, CHUNK_FRAMES = 4, 4
"""Padded batch size of a launch, and frames per codec launch: those of an engine of that many slots."""

_POSITIONS, _PAGE_POSITIONS, _TOKENS, _BUCKET = 2048, 32, 2048, 128


class Spoken(NamedTuple):
    """Results of a batch, on the CPU: frames [B, T, ...], audio [B, S], and the logits [B, V] of every decision of the
    first frame (eager runs only).
    `positions`: length of each prompt. `captured`: number of graphs used; `uncaptured`: errors of failed captures."""

    frames: Tensor
    audio: Tensor
    decisions: list[Tensor]
    positions: list[int]
    captured: int
    uncaptured: tuple[str, ...]


def allocate(loaded: LoadedModel, frames: int, text_ids: int = 1) -> Any:
    """State of `SLOTS` slots of `frames` frames and `text_ids` pending ids, with page tables as wide as an engine's."""
    pages = SLOTS * _POSITIONS // _PAGE_POSITIONS
    return loaded.model.allocate(Capacity(SLOTS, _POSITIONS, frames, text_ids, _PAGE_POSITIONS, pages, _TOKENS))


def speak(loaded: LoadedModel, requests: Sequence[SpeechRequest], frames: int, *, is_eager: bool = True) -> Spoken:
    """Run `frames` frames of up to `SLOTS` requests in one batch. Synchronises.
    Call it in inference mode, on a stream that can be captured. `is_eager` uses no graphs, and runs prompts and first
    frame once more to record the decisions."""
    model, slots, width = loaded.model, list(range(len(requests))), _POSITIONS // _PAGE_POSITIONS
    prompts = _prompts(loaded, requests)
    state = allocate(loaded, frames, max(1, *(prompt.text_ids for prompt in prompts)))
    history = model.codec.allocate(SLOTS)
    chunk = torch.zeros_like(state.frames[:, :CHUNK_FRAMES])
    pages = [Pages(range(slot * width, (slot + 1) * width)) for slot in slots]

    def decode(batch: Tensor) -> Tensor:
        return model.codec.decode(chunk[batch], batch, history)

    admit, prefill, frame, codec = sets = _graph_sets(loaded, state, decode, is_eager=is_eager)
    model.codec.reset(history, torch.arange(SLOTS + 1, device=loaded.device))

    def begin() -> None:
        tokens = model.stage(state, prompts, slots, pages)
        admit.run(slots)
        prefill.run(range(tokens))

    decisions: list[Tensor] = []
    if is_eager:
        begin()
        model.frame(state, upload(slots, torch.int64, loaded.device), decisions)
    begin()
    for _ in range(frames):
        frame.run(slots)
    audio = []
    for start in range(0, frames, CHUNK_FRAMES):
        chunk.copy_(state.frames[:, start : start + CHUNK_FRAMES])
        audio.append(codec.run(slots)[: len(slots)].cpu())
    captured = [size for graphs in sets for size in graphs.captured]
    return Spoken(
        state.frames[: len(slots), :frames].cpu(),
        torch.cat(audio, dim=1),
        [decision.float().cpu() for decision in decisions],
        [prompt.positions for prompt in prompts],
        sum(not size.error for size in captured),
        tuple(size.error for size in captured if size.error),
    )


def _graph_sets(
    loaded: LoadedModel, state: Any, decode: Callable[[Tensor], Tensor], *, is_eager: bool
) -> tuple[GraphSet, ...]:
    """The captured launches of `state`: admission, prefill, frame, and `decode` of the codec."""
    model, graphs = loaded.model, functools.partial(GraphSet, device=loaded.device, pool=GraphPool(), is_eager=is_eager)
    sets = (
        graphs("admit", functools.partial(model.admit, state), (SLOTS,), SLOTS),
        graphs("prefill", functools.partial(model.prefill, state), (_BUCKET,), _TOKENS),
        graphs("frame", functools.partial(model.frame, state), (SLOTS,), SLOTS),
        graphs("codec", decode, (SLOTS,), SLOTS),
    )
    for one in sets:
        one.capture()
    return sets


def _prompts(loaded: LoadedModel, requests: Sequence[SpeechRequest]) -> list[Prompt]:
    model = loaded.model
    voices = [
        model.encode_voice(one.references) if one.references and isinstance(model, CloningModel) else None
        for one in requests
    ]
    return [model.prepare(one, one.text, 0, [], voice) for one, voice in zip(requests, voices, strict=True)]
