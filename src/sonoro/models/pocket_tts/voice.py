"""Voices: the keys and values of a prefix, from a recording or from a file of the official package.

Its files have a state per layer, `transformer.layers.{i}.self_attn/cache` [2, 1, P, heads, D] with `offset` (a number)
or, in older ones, `current_end` (as long as the number); the first ones have the projected latents, `audio_prompt`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sonoro.audio.pcm import Samples, resample
from sonoro.audio.references import check_duration
from sonoro.core.errors import InvalidReference, TensorMismatch
from sonoro.core.types import Reference
from sonoro.models.base import SavedVoice, Voice
from sonoro.models.shared.prompts import StoredPrefix, digest_of, keys_and_values
from sonoro.nn.transformer import split_pairs

from .backbone import FlowLM
from .codec import PocketCodec
from .config import ModelConfig

_STATE = re.compile(r"transformer\.layers\.(\d+)\.self_attn/(cache|offset|pad|current_end)")
_PROMPT, _LATENTS = "audio_prompt", "latents"
_STAND_IN_FRAMES, _DIGITS = 125, 20
_FRAME_S, _FADE_S, _PAUSE_S, _FLOOR_DB = 0.02, 0.02, 0.08, 35.0


@dataclass(frozen=True, eq=False)
class PocketVoice(StoredPrefix):
    """`Voice.data`; `latents` [V, D'] are those of a recording, on the CPU."""

    latents: Tensor | None = None


def voice_of(state: PocketVoice) -> Voice:
    """`state` as a voice. It is listed in `primed` too, for whoever keeps tensors alive."""
    return Voice(state, primed={"keys and values": state})


def of_latents(lm: FlowLM, latents: Tensor) -> PocketVoice:
    """The voice of a recording's `latents` [V, D']."""
    latents = latents.float().cpu()
    rows = lm.embed_voice(latents.to(lm.weight.device))
    return PocketVoice(*keys_and_values(lm.transformer, rows), digest_of(latents), latents)


def stand_in(lm: FlowLM) -> PocketVoice:
    """Ten seconds of random latents, for random weights."""
    shape, generator = (_STAND_IN_FRAMES, lm.config.mimi.inner_dim), torch.Generator().manual_seed(0)
    return of_latents(lm, torch.randn(shape, generator=generator))


def end_on_pause(samples: Samples, sample_rate: int) -> Samples:
    """`samples` [S] without silence at the end, faded out, and with a short pause after it: a model that is given
    speech without an end goes on with it."""
    size = int(_FRAME_S * sample_rate)
    count = len(samples) // size
    if not count:
        return samples
    power = np.square(samples[: count * size].reshape(count, size)).mean(axis=1)
    loudness_db = 20 * np.log10(np.sqrt(power) + 1e-12)
    end = size * (int(np.flatnonzero(loudness_db > loudness_db.max() - _FLOOR_DB)[-1]) + 1)
    fade = min(int(_FADE_S * sample_rate), end)
    faded = samples[end - fade : end] * np.linspace(1, 0, fade, dtype=np.float32)
    return np.concatenate((samples[: end - fade], faded, np.zeros(int(_PAUSE_S * sample_rate), np.float32)))


def encode_voice(lm: FlowLM, codec: PocketCodec, references: Sequence[Reference]) -> Voice:
    """Encode one recording; its transcript is not needed. Raises `InvalidReference` unless there is exactly one, of 0.5
    s to 60 s."""
    if len(references) != 1:
        raise InvalidReference("references", len(references), "this model speaks as exactly one reference")
    reference = references[0]
    check_duration(reference.duration_s)
    samples = resample(reference.samples, reference.sample_rate, codec.sample_rate)
    heard = torch.from_numpy(end_on_pause(samples, codec.sample_rate))
    return voice_of(of_latents(lm, codec.encode(heard.to(lm.weight.device))))


def save_voice(voice: Voice) -> SavedVoice:
    """The `latents` of a recording; of another voice, its `keys` and `values`."""
    state: PocketVoice = voice.data
    if state.latents is not None:
        return SavedVoice({_LATENTS: state.latents}, {})
    return SavedVoice({"keys": state.keys, "values": state.values}, {"digest": str(state.digest)})


def load_voice(lm: FlowLM, saved: SavedVoice) -> Voice:
    """Restore a saved voice, or a state of the official package by its tensors' names. Raises `TensorMismatch` if it
    does not fit `lm`."""
    return voice_of(_loaded(lm, saved.tensors, saved.facts))


def checked(config: ModelConfig, file: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` of `file`. Raises `TensorMismatch`, naming it, if they are the official state of another model."""
    try:
        if any(map(_STATE.fullmatch, tensors)):
            _official(config, tensors)
    except TensorMismatch as error:
        raise TensorMismatch(f"{file}: {error}") from error
    return tensors


def read_voice(lm: FlowLM, file: Path, tensors: Mapping[str, Tensor]) -> PocketVoice:
    """The voice in `file`, whose `tensors` these are. Raises `TensorMismatch`, naming it, if it does not fit `lm`."""
    try:
        return _loaded(lm, tensors, {})
    except TensorMismatch as error:
        raise TensorMismatch(f"{file}: {error}") from error


def _loaded(lm: FlowLM, tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> PocketVoice:
    config, device = lm.config, lm.weight.device
    if tensors.keys() == {_LATENTS}:
        return of_latents(lm, _checked(tensors[_LATENTS], _LATENTS, None, config.mimi.inner_dim))
    if tensors.keys() == {_PROMPT}:
        rows = _checked(tensors[_PROMPT].flatten(0, -2), _PROMPT, None, config.flow_lm.transformer.d_model)
        made = keys_and_values(lm.transformer, rows.to(device, lm.weight.dtype))
        return PocketVoice(*made, digest_of(rows))
    if tensors.keys() == {"keys", "values"}:
        keys, values = tensors["keys"], tensors["values"]
        given = facts.get("digest", "")
        digest = int(given) if given.isdecimal() and len(given) < _DIGITS else 0
    else:
        keys, values = _official(config, tensors)
        digest = digest_of(torch.stack((keys, values)))
        keys = split_pairs(keys.movedim(-1, 0), 1, keys.shape[-1]).movedim(0, -1)
    sizes = config.backbone
    keys = _checked(keys, "keys", sizes.layers, None, sizes.kv_heads, sizes.head_width)
    values = _checked(values, "values", *keys.shape)
    keys, values = (part.to(device, lm.weight.dtype).contiguous() for part in (keys, values))
    return PocketVoice(keys, values, digest)


def _official(config: ModelConfig, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values [layers, P, heads, D] float32 of a state of the official package, as it rotates keys."""
    found: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _STATE.fullmatch(name)
        if match is None:
            raise TensorMismatch(f"tensor {name!r} is not part of a voice")
        found.setdefault(int(match[1]), {})[match[2]] = tensor
    layers, sizes = config.backbone.layers, config.backbone
    if sorted(found) != list(range(layers)):
        raise TensorMismatch(f"the voice has {len(found)} layers; this model has {layers}")
    shape, parts = (sizes.kv_heads, sizes.head_width), []
    for layer in range(layers):
        one = found[layer]
        count, cache = _positions(one), one.get("cache", torch.empty(0))
        if cache.ndim != 5 or cache.shape[:2] != (2, 1) or cache.shape[3:] != shape or not 0 < count <= cache.shape[2]:
            found_as = f"cache of layer {layer} is {list(cache.shape)} for {count} positions"
            needed = f"[2, 1, P, {shape[0]}, {shape[1]}], P at least the number of positions"
            raise TensorMismatch(f"{found_as}; this model needs {needed}")
        # Beyond the live positions there may be NaN.
        parts.append(cache[:, 0, :count].float())
    if len({part.shape[1] for part in parts}) > 1:
        raise TensorMismatch("the layers of the voice have different numbers of positions")
    keys, values = torch.stack(parts).unbind(1)
    return keys, values


def _positions(state: Mapping[str, Tensor]) -> int:
    """The number of live positions of a layer's state; 0 if it tells none."""
    if "pad" in state and state["pad"].any():
        return 0
    if "offset" in state:
        return int(state["offset"].flatten()[0]) if state["offset"].numel() else 0
    return len(state["current_end"]) if "current_end" in state and state["current_end"].ndim else 0


def _checked(tensor: Tensor, name: str, *shape: int | None) -> Tensor:
    """`tensor` as float32. Raises `TensorMismatch` unless it is finite and of `shape`; None is any size but 0."""
    wanted = [own if size is None and own else size for own, size in zip(tensor.shape, shape, strict=False)]
    if tensor.ndim != len(shape) or list(tensor.shape) != wanted or not tensor.is_floating_point():
        needed = ", ".join("N" if size is None else str(size) for size in shape)
        raise TensorMismatch(f"{name} of the voice are {list(tensor.shape)}; this model needs [{needed}]")
    if not tensor.isfinite().all():
        raise TensorMismatch(f"{name} of the voice hold numbers that are not finite")
    return tensor.float()
