"""Every family in small: its checkpoint, prompts and requests of all the kinds it knows, its codec in half precision.

A new family is an entry of `FAMILIES`.
"""

import copy
import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoint
import tiny_dual_ar
import tiny_fish
import tiny_pocket
import tiny_pocket_lm
import tiny_talker
import tiny_vox
import tiny_vox_lm
import torch
from tiny_talker import FRAMES

from sonoro.core.types import Reference, SamplingParams, SpeechRequest
from sonoro.models.base import LoadedModel, Prompt
from sonoro.models.fish_s2.model import FAMILY as FISH_S2
from sonoro.models.pocket_tts.model import FAMILY as POCKET_TTS
from sonoro.models.qwen3_tts.model import FAMILY as QWEN3_TTS
from sonoro.models.shared.codec_choice import HALF_LIMIT
from sonoro.models.shared.loading import Family
from sonoro.models.voxcpm2.model import FAMILY as VOXCPM2
from sonoro.nn.causal import CausalConv1d
from sonoro.nn.elu import EluUnit
from sonoro.nn.vocoder import ResidualUnit
from sonoro.runtime.sampling import Controls

GREEDY = SamplingParams(temperature=0)


@dataclass(frozen=True, eq=False)
class TinyFamily:
    """A family whose checkpoint `write` writes into a folder.

    `kinds` are ways of drawing, as what `controls` takes, for prompts that `random_prompt` makes (number, controls);
    what it draws decides when they end. `decided` are the shapes of what a frame records, but for the batch. `requests`
    are fields of requests that only this family knows.
    """

    family: Family
    write: Callable[[Path], None]
    random_prompt: Callable[[int, Controls], Prompt]
    controls: Callable[..., Controls]
    kinds: tuple[dict[str, Any], ...]
    decided: tuple[tuple[int, ...], ...]
    requests: tuple[dict[str, Any], ...]

    def load(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> LoadedModel:
        """The tiny model, a copy of its own. On the device meta it has shapes alone."""
        with torch.inference_mode(False):
            return copy.deepcopy(_load_once(self, dtype, device))

    def prompt(self, key: int, **wanted: Any) -> Prompt:
        """Prompt number `key`, drawn as the keywords of `controls` say."""
        return self.random_prompt(key, self.controls(**wanted))

    def prompts_of_all_kinds(self) -> list[Prompt]:
        """Of different lengths, with and without an end."""
        return [self.prompt(20 + index, **kind) for index, kind in enumerate(self.kinds)]

    def requests_of_all_kinds(self) -> list[SpeechRequest]:
        """Of one segment and of several, to the end and to a limit, with all that this family knows besides."""
        fields = (
            {"text": "Hello you, this is the one.", "max_frames": 20},
            {"text": "Not so long.", "max_frames": 5},
            {"text": "One of them comes first. Another one goes on after that. And so on.", "max_frames": 24},
            {"text": "Goes on.", "ignore_eos": True, "max_frames": 16},
            *self.requests,
        )
        return [SpeechRequest(**{"id": str(number), "seed": number} | own) for number, own in enumerate(fields)]


@functools.cache
def _load_once(family: TinyFamily, dtype: torch.dtype, device: str) -> LoadedModel:
    with tempfile.TemporaryDirectory() as folder:
        family.write(Path(folder))
        return family.family.from_folder(Path(folder), "tiny", torch.device(device), dtype)


def noise(rate_hz: int, seconds: float, **fields: Any) -> Reference:
    """A recording of noise."""
    samples = 0.1 * np.random.default_rng(0).standard_normal(int(rate_hz * seconds))
    return Reference(pcm=samples.astype("<f4").tobytes(), sample_rate=rate_hz, **fields)


FAMILIES = {
    "talker": TinyFamily(
        QWEN3_TTS,
        tiny_checkpoint.write_checkpoint,
        tiny_talker.random_prompt,
        tiny_talker.controls,
        kinds=(
            {"seed": 1, "max_frames": 14},
            {"temperature": 0, "max_frames": 11},
            {"seed": 3, "segment": 2, "max_frames": 17, "top_k": 0, "top_p": 0.8, "ignore_eos": True},
            {
                "seed": 4,
                "max_frames": 9,
                "top_k": 5,
                "repetition_penalty": 1.8,
                "subtalker_top_p": 0.6,
                "subtalker_top_k": 0,
            },
            {"seed": 2**62 + 5, "temperature": 1.4, "max_frames": 13, "top_k": 200, "subtalker_dosample": False},
        ),
        decided=((1088,), (64,), (64,), (64,)),
        requests=(
            {
                "text": "Greedy.",
                "sampling": GREEDY,
                "options": {"subtalker_dosample": False},
                "max_frames": 9,
            },
            {"text": "A token a frame.", "options": {"non_streaming_mode": False}, "voice": "ryan", "max_frames": 20},
        ),
    ),
    "dual_ar": TinyFamily(
        FISH_S2,
        functools.partial(tiny_fish.write_checkpoint, end_scale=1.0),
        tiny_dual_ar.random_prompt,
        tiny_dual_ar.controls,
        kinds=(
            {"seed": 1, "max_frames": 14},
            {"temperature": 0, "max_frames": 11},
            {"seed": 3, "segment": 2, "max_frames": 17, "top_k": 0, "top_p": 1.0, "ignore_eos": True},
            {"seed": 4, "max_frames": 9, "top_k": 5},
            {"seed": 2**62 + 5, "temperature": 1.4, "max_frames": 13, "top_k": 200},
        ),
        decided=((65,), *[(64,)] * 9),
        requests=(
            {"text": "Greedy.", "sampling": GREEDY, "max_frames": 9},
            {
                "text": f"<|speaker:0|>One of them. {'word ' * 18}<|speaker:1|> Another one. {'word ' * 18}",
                "max_frames": 32,
            },
            {
                "text": "And like this.",
                "references": (noise(44100, 0.5, text="<|speaker:0|>It's me."),),
                "max_frames": 12,
            },
        ),
    ),
    "patches": TinyFamily(
        VOXCPM2,
        tiny_vox.write_checkpoint,
        tiny_vox_lm.random_prompt,
        tiny_vox_lm.controls,
        kinds=(
            {"seed": 1, "max_frames": 14, "min_len": tiny_vox_lm.NEVER},
            {"seed": 2, "max_frames": 11, "min_len": 4, "cfg": 1.0},
            {"seed": 3, "segment": 2, "max_frames": 17, "ignore_eos": True, "steps": 4},
            {"seed": 4, "max_frames": 9, "cfg": 3.5, "steps": 2},
            {"seed": 2**62 + 5, "max_frames": 13, "min_len": 0, "steps": 7},
        ),
        decided=((48,), (48,), (2,), (4, 8)),
        requests=(
            {"text": "Quick.", "options": {"solver_steps": 3}, "max_frames": 9},
            {"text": "It is.", "instructions": "A calm voice", "max_frames": 12},
            {"text": "And like this.", "references": (noise(16000, 0.5, text="One."),), "max_frames": 12},
            {"text": "Of you.", "references": (noise(16000, 0.5, use="reference"),), "options": {"cfg_value": 1.0}},
        ),
    ),
    "latents": TinyFamily(
        POCKET_TTS,
        functools.partial(tiny_pocket.write_checkpoint, voices=("alba", "anna")),
        tiny_pocket_lm.random_prompt,
        tiny_pocket_lm.controls,
        kinds=(
            {"seed": 1, "max_frames": 14},
            {"seed": 2, "max_frames": 20, "threshold": -tiny_pocket_lm.NEVER, "after": 4},
            {"seed": 3, "segment": 2, "max_frames": 17, "ignore_eos": True, "temperature": 0.9},
            {"temperature": 0, "max_frames": 9},
            {"seed": 2**62 + 5, "max_frames": 13, "threshold": -6.0, "after": 0},
        ),
        decided=((64,), (2,), (1, 8)),
        requests=(
            {"text": "Quick.", "voice": "anna", "options": {"eos_threshold": -100.0}, "max_frames": 12},
            {"text": "It is.", "sampling": SamplingParams(temperature=0.8), "max_frames": 12},
            {"text": "And like this.", "references": (noise(24000, 0.5, text="One."),), "max_frames": 12},
            {"text": f"One of them, {'number ' * 40}. Another one.", "options": {"frames_after_eos": 0}},
        ),
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest) -> TinyFamily:
    """Every family in turn, for tests that import it."""
    return FAMILIES[request.param]


def draw(codec, rows, frames=FRAMES, seed=0):
    generator, example = torch.Generator().manual_seed(seed), codec.decoder.example(1, 1)
    if example.is_floating_point():
        return torch.randn(rows, frames, *example.shape[2:], generator=generator, dtype=torch.float64)
    books, size = codec.decoder.codes
    return torch.randint(0, size, (rows, frames, books), generator=generator)


def settled(codec, wanted, device="cpu"):
    """`codec` moved, and settled at sizes that streaming tests use."""
    codec.move(torch.device(device))
    codec.model_dtype = torch.bfloat16
    return codec.settle(wanted, 3, [1, 2, 5])


def scaled(codec, by):
    """`codec` with the weights of its last residual unit scaled `by` so much, and its last convolution scaled back: its
    audio stays the same."""
    unit, last = _last_layers(codec)
    with torch.no_grad():
        unit.conv2.conv.weight *= by
        unit.conv2.conv.bias *= by
        last.weight /= by
    codec.finalize()
    return codec


def scale_beyond(codec, passing=0.0067):
    """By how much to have `codec` scaled so that `passing` of its stream is beyond float16."""
    seen = []
    watch = _last_layers(codec)[0].conv2.register_forward_hook(lambda *of: seen.append(of[2].detach().abs().flatten()))
    codec.decode(draw(codec, 4))
    watch.remove()
    sizes = seen[0].sort().values
    return float(HALF_LIMIT / sizes[int(len(sizes) * (1 - passing))])


def _last_layers(codec):
    """The last residual unit, and the last convolution."""
    units = [module for module in codec.decoder.modules() if isinstance(module, (ResidualUnit, EluUnit))]
    return units[-1], [module for module in codec.decoder.modules() if isinstance(module, CausalConv1d)][-1].conv
