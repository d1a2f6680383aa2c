"""An engine over a model whose frames are read as they are made, and how many rows of each prompt are run."""

import copy
from typing import Any

import torch
from listening import drain, end
from resolving import Engine
from torch import Tensor

from sonoro.core.config import EngineConfig
from sonoro.core.types import Finished, SpeechRequest
from sonoro.models.base import Pages, SpeechModel

PAGE = 32


class Watched:
    """An engine over `model`: the frames that were made for each (seed, segment), and what each launch staged."""

    def __init__(self, model: SpeechModel, **changes: object) -> None:
        self.frames: dict[tuple[int, int], Tensor] = {}
        self.positions: list[int] = []
        self.rows: list[int] = []
        self.shared: list[list[int]] = []
        self._model, self._said = model, dict[int, tuple[int, int]]()
        # A copy has all members of the model: protocols do not see what `__getattr__` finds.
        watched: Any = copy.copy(model)
        watched.allocate, watched.stage = self.allocate, self.stage
        values = {"slots": 3, "max_positions": 1536, "max_frames": 64, "segment_letters": 200}
        self.engine = Engine(watched, EngineConfig(**values | changes), lambda: 0.0)  # type: ignore[arg-type]

    def allocate(self, capacity: Any) -> Any:
        self.state = self._model.allocate(capacity)
        return self.state

    def stage(self, state: Any, prompts: Any, slots: Any, pages: list[Pages]) -> int:
        for slot, prompt, (numbers, cached) in zip(slots, prompts, pages, strict=True):
            self._said[slot] = prompt.controls.seed, prompt.controls.segment
            self.positions.append(prompt.positions)
            self.shared.append(list(numbers[: cached // PAGE]))
        self.rows.append(self._model.stage(state, prompts, slots, pages))
        return self.rows[-1]

    def tick(self) -> list[Any]:
        events = self.engine.tick()
        if self.state.done.is_cuda:
            torch.cuda.synchronize()
        for slot, said in self._said.items():
            length = int(self.state.length[slot])
            # One that was cancelled is emptied.
            if length > len(self.frames.get(said, ())):
                self.frames[said] = self.state.frames[slot, :length].cpu().clone()
        return events

    def say(self, *requests: SpeechRequest) -> list[Any]:
        events = []
        for one in requests:
            self.engine.submit(one)
        while self.engine.has_work:
            events += self.tick()
        return events + drain(self.engine)


def alone(model: SpeechModel, one: SpeechRequest) -> dict[tuple[int, int], Tensor]:
    """What an engine that keeps nothing makes of `one`."""
    watched = Watched(model, prefix_cache_bytes=0)
    assert isinstance(end(watched.say(one), one.id), Finished)
    assert not any(watched.shared)
    return watched.frames
