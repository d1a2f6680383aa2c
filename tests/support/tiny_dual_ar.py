"""The tiny Fish S2 Pro, loaded without a checkpoint folder: the model, prompts and the codec."""

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import msgspec
import tiny_fish
import torch
from parity import Case, begin, load
from tiny_fish import TINY_CODEC, TRANSFORMER, write_codec
from torch import Tensor

from sonoro.core.types import SamplingParams
from sonoro.models.base import Voice
from sonoro.models.fish_s2 import codec_weights, weights
from sonoro.models.fish_s2.backbone import DualAR
from sonoro.models.fish_s2.codec import CodecConfig
from sonoro.models.fish_s2.config import ModelConfig
from sonoro.models.fish_s2.prompt import ConversationBuilder, FishVoice
from sonoro.models.fish_s2.state import prefill, stage
from sonoro.models.shared.prompts import RowPrompt
from sonoro.models.shared.slots import DepthState, admit_staged
from sonoro.nn.configs import build
from sonoro.nn.tokenizer import TextTokenizer
from sonoro.runtime.sampling import Controls


def cases(group: str, root: Path) -> dict[str, Case]:
    """What the official code computed, as tools/reference/fish_s2.py wrote it beside the folder `root`.

    prompts: text, references, batches; reference_{i} [R, K], columns_{b} [P, 1 + K], frames_{b} [4, K] that answered.
    greedy: prompt (a case of `prompts`), text, end_scale, frames. columns [P, 1 + K], made [T, 1 + K], logits
    [n, C + 1] of what can be decided, depth_logits [4, K - 1, C] of the first frames.
    sampled: temperature, top_p, top_k, seed, text, frames, replaced. made [T, 1 + K] on `tiny_fish.uniforms`.
    """
    return load(group, root.parent / "fish_s2")


def tiny_config() -> ModelConfig:
    return build(ModelConfig, tiny_fish.config(), "tiny")


def tiny_dual_ar(dtype: torch.dtype = torch.float32, end_scale: float = 0.25) -> DualAR:
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode(False):
        tiny_fish.write_checkpoint(folder, end_scale=end_scale)
        return weights.FILES.load(Path(folder), tiny_config(), device=torch.device("cpu"), dtype=dtype).lm


@functools.cache
def builder() -> ConversationBuilder:
    with tempfile.TemporaryDirectory() as folder:
        tiny_fish.write_checkpoint(folder)
        return ConversationBuilder(tiny_config(), TextTokenizer.from_folder(Path(folder)))


def controls(
    *,
    temperature: float = 0.8,
    top_k: int = 30,
    top_p: float = 0.8,
    seed: int = 0,
    segment: int = 0,
    max_frames: int = 12,
    ignore_eos: bool = False,
) -> Controls:
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=1.0)
    return Controls(sampling, seed, segment, max_frames, ignore_eos)


def voice_of(case: Case) -> Voice | None:
    """The voice of a stored prompt, if it has references."""
    texts = case.facts["references"]
    if not texts:
        return None
    frames = [torch.from_numpy(case.tensors[f"reference_{index}"]).long() for index in range(len(texts))]
    return Voice(data=FishVoice(tuple(texts), torch.cat(frames)))


def random_prompt(key: int, wanted: Controls) -> RowPrompt:
    """Some text after some earlier turn; different for every `key`."""
    make = torch.Generator().manual_seed(key)
    frames = torch.randint(tiny_fish.NUM_CODES, (1 + key % 5, tiny_fish.NUM_CODEBOOKS), generator=make)
    return builder().build(f"Number {key} is this.", wanted, [("Hello.", frames)] if key % 2 else [])


def begin_rows(lm: DualAR, state: DepthState, prompts: Sequence[RowPrompt], slots: Tensor) -> None:
    """Bring rows `slots` to the first frame of `prompts`."""
    begin(
        SimpleNamespace(stage=stage, admit=admit_staged, prefill=functools.partial(prefill, lm)), state, prompts, slots
    )


CPU = torch.device("cpu")
CONFIG = msgspec.convert(TINY_CODEC, CodecConfig)
TILED = TINY_CODEC | {
    "transformer": TRANSFORMER | {"intermediate": 32, "heads": 2, "kv_heads": 2, "head_width": 32, "window": 20},
    "decoder_dim": 128,
}
"""Sizes that the kernels take."""


def make_codec(config=TINY_CODEC, dtype=torch.float64, snake_std=0.3):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / codec_weights.CODEC_FILE
        write_codec(file, config=config, snake_std=snake_std)
        codec = codec_weights.FILE.load(file, msgspec.convert(config, CodecConfig), device=CPU, dtype=torch.float32)
    codec = codec.to(dtype)
    codec.finalize()
    return codec
