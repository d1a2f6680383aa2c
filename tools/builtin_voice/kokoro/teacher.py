"""The teacher: phonemes of many utterances to trimmed 24 kHz speech and phoneme times, in batches.

`builtin_voice.phonemize` makes the phonemes. Needs only PyTorch and NumPy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from builtin_voice.kokoro.convert import read
from builtin_voice.kokoro.layers import mask_of, styled_snake
from builtin_voice.kokoro.model import Kokoro

ACCENTS = {"af_heart": "us", "am_michael": "us", "bf_emma": "gb", "bm_george": "gb"}
"""The accent whose phonemes each voice reads."""
GAINS = {"af_heart": 1.39, "am_michael": 1.54, "bf_emma": 0.99, "bm_george": 1.01}
"""Bring each voice's mean active level to .06 of full scale over six Harvard sentences; their peaks are at most .77."""
MAX_PHONEMES = 510
LEADING_S, TRAILING_S = 0.1, 0.2
LEAD_S = 0.045
"""Time by which the sound precedes its frame."""
SILENT_S = 0.5
"""At both edges of what the model says, by the frames of its phonemes: the mean of 8 readings, .09 the deviation."""
PHONEMES_A_BATCH, FRAMES_A_BATCH = 16_000, 4_000
_WINDOW_S = 0.005
_FADE_S = 0.01
"""At the very end of what the model says, which now and then ends with a click."""


@dataclass(frozen=True)
class Spoken:
    """`samples` [S] int16 at 24 kHz; the symbols spoken, "" for the silence at either end, and the sample before which
    each `ends`: rising, the last one S."""

    samples: np.ndarray
    phones: list[str]
    ends: list[int]


def batches(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """The places of `lengths`, longest first, in groups that hold at most `budget` once padded (or one item)."""
    group: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if group and (len(group) + 1) * lengths[group[0]] > budget:
            yield group
            group = []
        group.append(place)
    if group:
        yield group


def edges(sound: Tensor, lengths: Tensor, sample_rate: int) -> tuple[Tensor, Tensor]:
    """Where in `sound` [B, S], of which `lengths` [B] samples count, the loud part begins and ends [B] int64: the
    windows of 5 ms within 40 dB of the loud ones (the 95th percentile)."""
    window = round(_WINDOW_S * sample_rate)
    level = sound[:, : sound.shape[-1] // window * window].unflatten(-1, (-1, window)).square().mean(-1).sqrt()
    within = mask_of(lengths // window, level.shape[-1])[:, 0].bool()
    top = torch.nanquantile(level.masked_fill(~within, torch.nan), 0.95, dim=-1, keepdim=True)
    loud = ((level > 0.01 * top) & within).int()
    first, last = loud.argmax(-1), loud.shape[-1] - loud.flip(-1).argmax(-1)
    return first * window, last * window


class Teacher:
    """Kokoro-82M with the styles of its voices, on `device`."""

    def __init__(
        self, model: Kokoro, styles: dict[str, np.ndarray], vocabulary: dict[str, int], device: torch.device
    ) -> None:
        self.model, self.device = model.to(device).eval(), device
        self.vocabulary = vocabulary
        self._styles = {name: torch.from_numpy(style).to(device) for name, style in styles.items()}

    @classmethod
    def load(cls, path: Path, device: torch.device | str = "cuda", *, is_compiled: bool = False) -> Teacher:
        """From the file that `kokoro.prepare` wrote. `is_compiled`: norms and snakes, the most of what passes through a
        GPU's memory, become two kernels of Inductor's, which take their time to compile."""
        weights, styles, vocabulary = read(path)
        model = Kokoro(snake=torch.compile(styled_snake, dynamic=True) if is_compiled else styled_snake)
        model.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
        return cls(model, styles, vocabulary, torch.device(device))

    def symbols(self, phonemes: str) -> list[str]:
        """Those of `phonemes` that the model knows. `ValueError` if there are none, or more than it can read."""
        known = [symbol for symbol in phonemes if symbol in self.vocabulary]
        if not 1 <= len(known) <= MAX_PHONEMES:
            raise ValueError(
                f"phonemes: {len(known)} known symbols in {phonemes!r}, and 1 to {MAX_PHONEMES} can be read"
            )
        return known

    @torch.inference_mode()
    def synthesize(self, phonemes: Sequence[str], voices: Sequence[str], *, seed: int | None = 0) -> list[Spoken]:
        """Each of `phonemes` in the voice beside it. `seed` is that of the source's noise; None: without noise."""
        symbols = [self.symbols(line) for line in phonemes]
        ids = [torch.tensor([0, *(self.vocabulary[s] for s in line), 0], device=self.device) for line in symbols]
        styles = [self._styles[voice][len(line) - 1] for line, voice in zip(symbols, voices, strict=True)]
        frames, encoded = self._durations(ids, styles)
        totals = torch.stack([line.sum() for line in frames]).tolist()
        noise = None if seed is None else torch.Generator(self.device).manual_seed(seed)
        spoken: dict[int, Spoken] = {}
        for group in batches(totals, FRAMES_A_BATCH):
            lengths = torch.tensor([len(ids[place]) for place in group])
            padded = pad_sequence([frames[place] for place in group], batch_first=True)
            sound = self.model.sound(
                pad_sequence([ids[place] for place in group], batch_first=True),
                torch.stack([styles[place] for place in group]),
                lengths,
                frames=padded,
                encoded=pad_sequence([encoded[place] for place in group], batch_first=True).transpose(1, 2),
                noise=noise,
            )
            gains = torch.tensor([GAINS.get(voices[place], 1.0) for place in group], device=self.device)
            cut = self._cut(sound * gains[:, None], padded, lengths)
            for place, (samples, ends) in zip(group, cut, strict=True):
                spoken[place] = Spoken(samples, ["", *symbols[place], ""], ends)
        return [spoken[place] for place in range(len(symbols))]

    @torch.inference_mode()
    def foretell_s(self, phonemes: Sequence[str], voices: Sequence[str]) -> list[float]:
        """How long `synthesize` would make each, to about .1 s: the sound is not made, so its edges are not known."""
        symbols = [self.symbols(line) for line in phonemes]
        ids = [torch.tensor([0, *(self.vocabulary[s] for s in line), 0], device=self.device) for line in symbols]
        styles = [self._styles[voice][len(line) - 1] for line, voice in zip(symbols, voices, strict=True)]
        sizes, (frames, _) = self.model.sizes, self._durations(ids, styles)
        frame_s = sizes.frame / sizes.sample_rate
        return [max(int(line[1:-1].sum()) * frame_s - SILENT_S, 0.0) + LEADING_S + TRAILING_S for line in frames]

    def _durations(self, ids: list[Tensor], styles: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Frames [T] int64 of each line, and what its sound needs [T, C]."""
        frames: list[Tensor] = [ids[0]] * len(ids)
        encoded = list(frames)
        for group in batches([len(line) for line in ids], PHONEMES_A_BATCH):
            lengths = torch.tensor([len(ids[place]) for place in group])
            lines = pad_sequence([ids[place] for place in group], batch_first=True)
            found, known = self.model.durations(lines, torch.stack([styles[place] for place in group]), lengths)
            for row, place in enumerate(group):
                length = len(ids[place])
                frames[place], encoded[place] = found[row, :length], known[row, :, :length].T
        return frames, encoded

    def _cut(self, sound: Tensor, frames: Tensor, lengths: Tensor) -> Iterator[tuple[np.ndarray, list[int]]]:
        sizes = self.model.sizes
        first, last = edges(sound, frames.sum(-1) * sizes.frame, sizes.sample_rate)
        whole = (sound.clamp(-1, 1) * 32767).round().short().cpu().numpy()
        before, after = round(LEADING_S * sizes.sample_rate), round(TRAILING_S * sizes.sample_rate)
        fade = np.linspace(1, 0, round(_FADE_S * sizes.sample_rate))
        lead = round(LEAD_S * sizes.sample_rate)
        rows = zip(whole, first.tolist(), last.tolist(), frames.tolist(), lengths.tolist(), strict=True)
        for samples, loud_from, loud_to, durations, length in rows:
            start, end = loud_from - before, loud_to + after
            total = sum(durations) * sizes.frame
            padding = max(0, -start), max(0, end - total)
            samples[total - len(fade) : total] = samples[total - len(fade) : total] * fade
            kept = np.pad(samples[max(0, start) : min(end, total)], padding)
            ends = [at * sizes.frame - lead - start for at in accumulate(durations[:length])]
            yield kept, [*(min(max(at, 0), len(kept)) for at in ends[:-1]), len(kept)]
