"""Finds the attention heads that follow the text: the model speaks a few sentences while all heads are watched.

`calibrate` does so at once. For a served model without a table of heads, `FoundHeads` does so after the first request
for words, in the engine's thread while it is idle, a frame at a time: a new request waits for one frame at most. Word
times from found heads are marked as estimated. How heads are judged is in `words.calibration`."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from sonoro.core.config import EngineConfig
from sonoro.core.errors import ConfigError, border
from sonoro.core.folders import word_heads_folder
from sonoro.core.types import SpeechRequest
from sonoro.engine.runner import Runner
from sonoro.models.base import Capacity, Pages, SpeechModel
from sonoro.models.words import ShowsWords
from sonoro.runtime.kernels import to_pcm16
from sonoro.runtime.ring import upload
from sonoro.text.splitting import frames_bound, joined
from sonoro.words.calibration import TEXTS, Candidate, Reading, candidates, choose, judge
from sonoro.words.heads import WordHeads, read_table, write_heads
from sonoro.words.spans import spoken_words, word_spans
from sonoro.words.tracking import AHEAD, Pointing

logger = logging.getLogger(__name__)

_MOST_FRAMES, _PAGE_POSITIONS = 300, 32


@dataclass(frozen=True)
class Calibration:
    """The table of heads that was found, and, by layout, the ratings of all candidates."""

    heads: WordHeads
    judged: dict[str, list[Candidate]]


def calibrate(model: SpeechModel, *, voice: str | None = None, texts: Sequence[str] = TEXTS) -> Calibration:
    """Find the attention heads of `model` that follow the text, and set them as its `word_heads`.
    Call it before making an engine of `model`. With random weights it finds none. Raises `ConfigError` for a model that
    cannot show its attention, and what the model raises for the texts."""
    if not isinstance(model, ShowsWords):
        raise ConfigError("model", model.spec.name, "it cannot show what its attention looks at")
    model.codec.settle("auto", len(texts), (1,))
    search = HeadSearch(model, voice=voice, texts=texts)
    while (found := search.step()) is None:
        pass
    model.word_heads = found.heads
    return found


def watch_some_head(model: Any) -> None:
    """Have `model` watch a head if it can and has none: as an engine does once heads are found."""
    if isinstance(model, ShowsWords) and not model.word_heads.places:
        model.word_heads = WordHeads(text_first=Pointing(layer=0, head=0))


class FoundHeads:
    """The search for the word heads of `model`, advanced by `search` once they are `wanted`.
    The constructor sets heads of an earlier search in the model, so make it before any `allocate`. It searches only if
    `config.tuning.finds_word_heads`."""

    def __init__(self, model: SpeechModel, config: EngineConfig) -> None:
        self.wanted = False
        """Whether a request has asked for words."""
        self.is_sought = False
        """Whether the heads are unknown and may be searched for."""
        self._model: SpeechModel = model
        self._search: HeadSearch | None = None
        self._file = word_heads_folder() / f"{model.fingerprint}.json"
        if config.tuning.finds_word_heads and isinstance(model, ShowsWords) and not model.word_heads.places:
            self.is_sought = not self._file.is_file()
            with border(self._note):
                model.word_heads = WordHeads() if self.is_sought else read_table(self._file)

    @property
    def are_known(self) -> bool:
        """Whether the model watches heads that follow the text, and so gives word times."""
        return isinstance(self._model, ShowsWords) and bool(self._model.word_heads.places)

    @property
    def have_limits(self) -> bool:
        """Whether the attention of the model's heads says what was not spoken as written."""
        return isinstance(self._model, ShowsWords) and self._model.word_heads.have_limits

    def search(self, runner: Runner) -> None:
        """Run one step of the search, about as long as an eager frame; the last step has `runner` watch the heads.
        An error ends the search without heads: words then have no times. Call it only while the engine `has_quiet_work`
        and no graph is left to capture."""
        assert self.is_sought
        assert self.wanted
        model, found, self.is_sought = self._model, None, False
        assert isinstance(model, ShowsWords)
        with border(self._note), runner.active():
            self._search = self._search or HeadSearch(model, device=runner.codec_device)
            found = self._search.step()
            self.is_sought = found is None
        if not self.is_sought:
            self._search = None
        if found is None:
            return
        with border(self._note):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_heads(self._file, found.heads)
        if not found.heads.places:
            return
        model.word_heads = found.heads
        with border(self._lose):
            runner.watch()

    def _note(self, error: Exception) -> None:
        logger.warning("event=word_heads_not_found model=%r error=%r", self._model.spec.name, error)

    def _lose(self, error: Exception) -> None:
        logger.warning("event=word_heads_not_watched error=%r", error)
        assert isinstance(self._model, ShowsWords)
        self._model.word_heads = WordHeads()


class HeadSearch:
    """A search for the attention heads of `model` that follow its text.
    `model` is a `SpeechModel` that `ShowsWords`, its codec settled, on `device` if that differs. The search holds
    a small per-slot state of its own until it ends. A `step` makes one frame of all `texts`, or judges one head, and
    takes about as long as an eager frame."""

    def __init__(
        self, model: Any, voice: str | None = None, texts: Sequence[str] = TEXTS, device: torch.device | None = None
    ) -> None:
        layers, heads = model.attention_heads
        self._model, self._voice, self._texts, self._codec_device = model, voice, texts, device
        self._watched = tuple((layer, head) for layer in range(layers) for head in range(heads))
        self._layouts = list(model.text_layouts)
        self._speaking: _Speaking | None = None
        self._readings: list[Reading] = []
        self._to_judge: list[int] = []
        self._judged: dict[str, list[Candidate]] = {layout: [] for layout in self._layouts}

    def step(self) -> Calibration | None:
        """Advance the search; return its result at the end, else None. Synchronises; raises what the model raises."""
        with torch.inference_mode():
            layout, spec = self._layouts[0], self._model.spec
            if self._speaking is None:
                self._speaking = _Speaking(self._model, self._requests(layout), self._watched)
            elif not self._speaking.is_over:
                self._speaking.step()
            elif not self._readings:
                self._readings = self._speaking.readings(self._codec_device, along=layout == "text_along")
                self._to_judge = candidates(self._readings, len(self._watched))
            elif self._to_judge:
                number = self._to_judge.pop()
                found = judge(self._readings, self._watched[number], number, spec.frame_s, spec.sample_rate)
                self._judged[layout].append(found)
            else:
                self._speaking, self._readings = None, []
                del self._layouts[0]
                return None if self._layouts else self._end()
            return None

    def _requests(self, layout: str) -> list[SpeechRequest]:
        options = dict(self._model.text_layouts[layout])
        return [
            self._model.spec.resolve(
                SpeechRequest(id=f"{layout}-{number}", text=text, voice=self._voice, seed=number, options=options)
            )
            for number, text in enumerate(self._texts)
        ]

    def _end(self) -> Calibration:
        chosen: dict[str, Pointing | None] = {}
        for layout, judged in self._judged.items():
            judged.sort(key=lambda one: (one.points, one.mass), reverse=True)
            chosen[layout] = choose(judged, along=layout == "text_along")
        heads = WordHeads(text_first=chosen.get("text_first"), text_along=chosen.get("text_along"))
        logger.info("event=calibrated model=%r heads=%s", self._model.spec.name, heads.places)
        return Calibration(heads, self._judged)


@dataclass
class _Spoken:
    """A text being spoken: `tokens` tokens from position `start` of its prompt on; `seen` [H, W] for each frame."""

    prompt: Any
    start: int
    words: list[Any]
    tokens: int
    seen: list[npt.NDArray[np.float32]] = field(default_factory=list)
    is_over: bool = False


class _Speaking:
    """Speaks requests of one layout, each in a slot of an own state, and watches the (layer, head) pairs `places`."""

    def __init__(self, model: Any, requests: Sequence[SpeechRequest], places: tuple[tuple[int, int], ...]) -> None:
        self._model, self._spoken = model, [_begun(model, request) for request in requests]
        prompts = [one.prompt for one in self._spoken]
        slots = range(len(prompts))
        most = max(prompt.positions + prompt.controls.max_frames for prompt in prompts)
        pages = -(-most // _PAGE_POSITIONS)
        capacity = Capacity(
            slots=len(prompts),
            max_positions=most,
            max_frames=max(prompt.controls.max_frames for prompt in prompts),
            max_text=max(1, *(prompt.text_ids for prompt in prompts)),
            page_positions=_PAGE_POSITIONS,
            pages=len(prompts) * pages,
            max_tokens=sum(prompt.positions for prompt in prompts),
        )
        serving, model.word_heads = model.word_heads, WordHeads(candidates=places)
        try:
            self._state = model.allocate(capacity)
        finally:
            model.word_heads = serving
        device = self._state.done.device
        self._slots = upload(list(slots), torch.int64, device)
        own = [Pages(range(slot * pages, (slot + 1) * pages)) for slot in slots]
        tokens = model.stage(self._state, prompts, slots, own)
        model.admit(self._state, self._slots)
        model.prefill(self._state, torch.arange(tokens, device=device))

    @property
    def is_over(self) -> bool:
        """Whether all texts have been spoken."""
        return all(one.is_over for one in self._spoken)

    def step(self) -> None:
        """Make one frame of every text. Synchronises."""
        state = self._state
        self._model.frame(state, self._slots)
        attention = self._model.attention(state)[: len(self._spoken)].cpu().numpy()
        length, done = state.length.tolist(), state.done.tolist()
        for slot, one in enumerate(self._spoken):
            if length[slot] > len(one.seen):
                one.seen.append(attention[slot, :, one.start : one.start + one.tokens + AHEAD].copy())
            one.is_over = done[slot] or length[slot] >= one.prompt.controls.max_frames

    def readings(self, codec_device: torch.device | None, *, along: bool) -> list[Reading]:
        """A `Reading` of each text that has frames, with its audio decoded on `codec_device`."""
        made = []
        for slot, one in enumerate(self._spoken):
            if not one.seen:
                continue
            frames = self._state.frames[slot : slot + 1, : len(one.seen)].to(codec_device or self._state.frames.device)
            with torch.cuda.device_of(frames):  # where Triton launches
                pcm = to_pcm16(self._model.codec.decode(frames))
            made.append(Reading(one.words, one.tokens, pcm.cpu().numpy().tobytes(), np.stack(one.seen), along))
        return made


def _begun(model: Any, request: SpeechRequest) -> _Spoken:
    """The `_Spoken` of a resolved `request` as one segment."""
    spec, text = model.spec, request.text
    segment = joined(model.segments(text, request.language, request.text_format, request.voice), " ")
    tokens = model.token_spans(segment.text)
    words = spoken_words(word_spans(text), segment.text, segment.origins, tokens)
    most = min(frames_bound(segment.text, spec.frame_s), spec.max_frames, _MOST_FRAMES)
    limited = msgspec.structs.replace(request, max_frames=most)
    prompt = model.prepare(limited, segment.text, 0, (), None)
    return _Spoken(prompt, model.text_start(prompt), words, len(tokens))
