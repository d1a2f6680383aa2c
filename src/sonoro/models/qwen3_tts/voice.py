"""Encode reference audio to a voice: mel front end, x-vector network, codec frames for in-context use; save and load
voices.

Parameters have the names of the released files under `speaker_encoder`."""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sonoro.audio.pcm import resample
from sonoro.audio.references import check_duration
from sonoro.core.errors import InvalidReference, TensorMismatch
from sonoro.core.types import Reference
from sonoro.models.base import Codec, SavedVoice, Voice
from sonoro.models.shared.streaming import PRIMED
from sonoro.nn.history import SavedRow

from .codec import Qwen3Codec
from .config import SpeakerEncoderConfig
from .prompt import ClonedVoice

FFT_SAMPLES = 1024
MEL_HOP_SAMPLES = 256

_HISTORY = "history."


@lru_cache
def mel_filterbank(
    sample_rate: int, fft_samples: int, bands: int, low_hz: float, high_hz: float
) -> npt.NDArray[np.float32]:
    """Triangular mel filters [bands, fft_samples // 2 + 1] from `low_hz` to `high_hz`, each of unit area.
    Slaney's mel scale: linear up to 1 kHz, 27 bands per factor of 6.4 above."""
    step_hz, knee_hz, log_step = 200 / 3, 1000.0, math.log(6.4) / 27
    knee = knee_hz / step_hz

    def mel(hz: float) -> float:
        return hz / step_hz if hz < knee_hz else knee + math.log(hz / knee_hz) / log_step

    mels = np.linspace(mel(low_hz), mel(high_hz), bands + 2)
    edges_hz = np.where(mels < knee, mels * step_hz, knee_hz * np.exp(log_step * (mels - knee)))
    bins_hz = np.linspace(0.0, sample_rate / 2, fft_samples // 2 + 1)
    low, centre, high = edges_hz[:-2, None], edges_hz[1:-1, None], edges_hz[2:, None]
    triangles = np.minimum((bins_hz - low) / (centre - low), (high - bins_hz) / (high - centre)).clip(min=0)
    filters: npt.NDArray[np.float32] = (triangles * 2 / (high - low)).astype(np.float32)
    return filters


def log_mel(audio: Tensor, sample_rate: int, bands: int) -> Tensor:
    """Natural log of mel magnitudes [bands, S // 256] of mono `audio` [S] float32, floored at 1e-5."""
    padded = F.pad(audio[None], ((FFT_SAMPLES - MEL_HOP_SAMPLES) // 2,) * 2, mode="reflect")
    window = torch.hann_window(FFT_SAMPLES, device=audio.device)
    spectrum = torch.stft(padded, FFT_SAMPLES, MEL_HOP_SAMPLES, window=window, center=False, return_complex=True)[0]
    magnitude = (spectrum.real.square() + spectrum.imag.square() + 1e-9).sqrt()
    filters = torch.from_numpy(mel_filterbank(sample_rate, FFT_SAMPLES, bands, 0.0, sample_rate / 2)).to(audio.device)
    return (filters @ magnitude).clamp(min=1e-5).log()


class _TimeDelay(nn.Module):
    """TDNN layer: convolution with reflect padding to the same length, then ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, kernel, dilation=dilation, padding="same", padding_mode="reflect")

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x))


class _Res2Net(nn.Module):
    """Res2Net block: each channel group but the first is convolved after adding the previous group's output."""

    def __init__(self, channels: int, scale: int, kernel: int, dilation: int) -> None:
        super().__init__()
        width = channels // scale
        self.blocks = nn.ModuleList(_TimeDelay(width, width, kernel, dilation) for _ in range(scale - 1))

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = x.chunk(len(self.blocks) + 1, dim=1)
        outputs = [first]
        for index, (block, part) in enumerate(zip(self.blocks, rest, strict=True)):
            outputs.append(block(part if index == 0 else part + outputs[-1]))
        return torch.cat(outputs, dim=1)


class _SqueezeExcitation(nn.Module):
    """Squeeze-and-excitation: scales channels by a gate computed from their means over time."""

    def __init__(self, channels: int, narrow: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(channels, narrow, 1)
        self.conv2 = nn.Conv1d(narrow, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate: Tensor = self.conv2(F.relu(self.conv1(x.mean(dim=2, keepdim=True)))).sigmoid()
        return x * gate


class _SqueezeRes2Net(nn.Module):
    def __init__(self, inputs: int, channels: int, kernel: int, dilation: int, config: SpeakerEncoderConfig) -> None:
        super().__init__()
        assert inputs == channels, "the skip has no projection"
        self.tdnn1 = _TimeDelay(inputs, channels)
        self.res2net_block = _Res2Net(channels, config.enc_res2net_scale, kernel, dilation)
        self.tdnn2 = _TimeDelay(channels, channels)
        self.se_block = _SqueezeExcitation(channels, config.enc_se_channels)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.se_block(self.tdnn2(self.res2net_block(self.tdnn1(x))))
        return x + change


class _AttentivePooling(nn.Module):
    """Attentive statistics pooling: weighted mean and standard deviation over time, [B, C, T] to [B, 2C, 1]. The
    attention also sees the unweighted statistics."""

    def __init__(self, channels: int, narrow: int) -> None:
        super().__init__()
        self.tdnn = _TimeDelay(3 * channels, narrow)
        self.conv = nn.Conv1d(narrow, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        overall = _statistics(x, torch.full_like(x, 1 / x.shape[2]))
        context = torch.cat([x, *(part.expand_as(x) for part in overall)], dim=1)
        weights = self.conv(self.tdnn(context).tanh()).softmax(dim=2)
        return torch.cat(_statistics(x, weights), dim=1)


def _statistics(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    mean = (weights * x).sum(dim=2, keepdim=True)
    variance = (weights * (x - mean).square()).sum(dim=2, keepdim=True)
    return mean, variance.clamp(min=1e-12).sqrt()


class SpeakerEncoder(nn.Module):
    """Log-mel frames [B, mel_dim, T] to x-vectors [B, enc_dim], not normalised.
    ECAPA-TDNN; follows QwenLM/Qwen3-TTS modeling_qwen3_tts.py `Qwen3TTSSpeakerEncoder`. Padding changes the result:
    clips of a batch must have equal lengths."""

    def __init__(self, config: SpeakerEncoderConfig) -> None:
        super().__init__()
        first, *middle, last = zip(config.enc_channels, config.enc_kernel_sizes, config.enc_dilations, strict=True)
        widths = config.enc_channels[:-1]
        blocks = [_SqueezeRes2Net(inputs, *shape, config) for inputs, shape in zip(widths, middle, strict=False)]
        self.blocks = nn.ModuleList([_TimeDelay(config.mel_dim, *first), *blocks])
        self.mfa = _TimeDelay(sum(widths[1:]), *last)
        self.asp = _AttentivePooling(last[0], config.enc_attention_channels)
        self.fc = nn.Conv1d(2 * last[0], config.enc_dim, 1)

    def forward(self, mel: Tensor) -> Tensor:
        first, *blocks = self.blocks
        x, outputs = first(mel), list[Tensor]()
        for block in blocks:
            x = block(x)
            outputs.append(x)
        x_vectors: Tensor = self.fc(self.asp(self.mfa(torch.cat(outputs, dim=1)))).squeeze(2)
        return x_vectors


@torch.no_grad()
def encode_voice(
    references: Sequence[Reference], encoder: SpeakerEncoder, config: SpeakerEncoderConfig, codec: Codec
) -> Voice:
    """Encode one reference: its x-vector and, for in-context use, its codec frames, on the CPU.
    Raises `InvalidReference` unless there is exactly one reference of 0.5 s to 60 s."""
    if len(references) != 1:
        raise InvalidReference("references", len(references), "this model speaks as exactly one reference")
    reference = references[0]
    check_duration(reference.duration_s)
    weight = encoder.fc.weight
    samples = resample(reference.samples, reference.sample_rate, config.sample_rate)
    mel = log_mel(torch.tensor(samples).to(weight.device), config.sample_rate, config.mel_dim)
    x_vector = encoder(mel[None].to(weight.dtype))[0].float()
    if reference.use == "reference":
        return Voice(data=ClonedVoice(x_vector))
    samples = resample(reference.samples, reference.sample_rate, codec.sample_rate)
    # Prompts are built on the CPU, and must not wait for the device.
    frames = codec.encode(torch.tensor(samples).to(weight.device)).cpu()
    return Voice(data=ClonedVoice(x_vector, reference.text), reference_frames=frames)


def save_voice(voice: Voice) -> SavedVoice:
    """The tensors `x_vector`, `frames`, `history.<layer>` and `seen` of `voice`; one with frames must be primed."""
    tensors = {"x_vector": voice.data.x_vector}
    if voice.reference_frames is None:
        return SavedVoice(tensors, {})
    row: SavedRow = voice.primed[PRIMED]
    tensors |= {"frames": voice.reference_frames, "seen": row.seen}
    tensors |= {_HISTORY + key: columns for key, columns in row.columns.items()}
    return SavedVoice(tensors, {"transcript": voice.data.transcript})


def load_voice(saved: SavedVoice, x_vector_size: int, codec: Qwen3Codec, device: torch.device) -> Voice:
    """Restore a saved voice: codec history on the codec's device, x-vector on `device`, frames on the CPU.
    Raises `TensorMismatch` if a tensor does not fit this codec."""
    tensors, transcript = dict(saved.tensors), saved.facts.get("transcript")
    config, weight = codec.decoder.config, codec.decoder.pre_conv.conv.weight
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"x_vector": ((x_vector_size,), torch.float32)}
    if "frames" in tensors:
        count = tensors["frames"].shape[0] if tensors["frames"].ndim else 0
        expected |= {"frames": ((count, config.num_quantizers), torch.int64), "seen": ((1,), torch.int64)}
        for key, (length, width) in codec.decoder.layout.items():
            expected[_HISTORY + key] = ((1, length, width), weight.dtype)
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    if wrong := sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)):
        has, wants = found.get(wrong[0], "missing"), expected.get(wrong[0], "unknown")
        raise TensorMismatch(f"{wrong[0]} of the voice is {has}; this model needs {wants}")
    if broken := sorted(name for name, tensor in tensors.items() if not tensor.isfinite().all()):
        raise TensorMismatch(f"{broken[0]} of the voice holds numbers that are not finite")
    x_vector = tensors["x_vector"].to(device)
    if "frames" not in tensors:
        return Voice(data=ClonedVoice(x_vector))
    frames = tensors["frames"].cpu()
    if not len(frames) or frames.min() < 0 or frames.max() >= config.codebook_size:
        raise TensorMismatch(f"frames of the voice must be codes from 0 to {config.codebook_size - 1}")
    if not transcript or int(tensors["seen"]) != len(frames):
        raise TensorMismatch(f"a voice of {len(frames)} frames must have a transcript, and the same count in `seen`")
    columns = {key: tensors[_HISTORY + key].to(weight.device) for key in codec.decoder.layout}
    row = SavedRow(columns, tensors["seen"].to(weight.device))
    return Voice(data=ClonedVoice(x_vector, transcript), reference_frames=frames, primed={PRIMED: row})
