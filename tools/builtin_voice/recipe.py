"""The training stages of the built-in voice, each with one result in the work folder.

encoder     trains the codec's encoder and codebooks: encoder.pt
codec       trains its decoder: codec.pt
encode      encodes the whole corpus to codes: codes.pt
talker      trains talker and code predictor: talker.pt
checkpoint  writes both in the released layout

`python -m builtin_voice` runs them after the data stages; README.md says how.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from builtin_voice import settings
from builtin_voice.codec_training import train_codec, train_encoder
from builtin_voice.critic import Critic
from builtin_voice.export import export_checkpoint
from builtin_voice.phones import PAUSE, class_of
from builtin_voice.shards import Utterance, load
from builtin_voice.spectra import SpeechSpectra
from builtin_voice.talker_training import Layout, Utterances, train_talker
from builtin_voice.tokenizer import parts_of, read, take_apart
from builtin_voice.training import Log, Run, save
from builtin_voice.voice_codec import CONTEXT_FRAMES, VoiceCodec
from sonoro.models.qwen3_tts.backbone import Talker
from sonoro.models.qwen3_tts.config import CodecConfig, ModelConfig
from sonoro.models.qwen3_tts.prompt import TextTokenizer
from sonoro.nn.configs import build

LONGEST_FRAMES = 400
ENCODED_SAMPLES = 24_000 * 600
"""Samples of one encoding batch, without leading silence and padding."""


def hours_in(folder: Path) -> float:
    """Hours of audio in the complete shards of `folder`."""
    samples = sum(index.with_suffix(".npy").stat().st_size // 2 for index in folder.glob("shard-*.jsonl"))
    return samples / 3600 / settings.SAMPLE_RATE


def audio_of(folder: Path, device: torch.device, hours: float | None = None) -> tuple[Tensor, list[Utterance]]:
    """All shards concatenated as one int16 tensor on `device`, and their utterances with `start` relative to it."""
    shards, utterances = load(folder)
    pieces, moved, offset = [], [], 0
    by_shard: dict[int, list[Utterance]] = {}
    for utterance in utterances:
        by_shard.setdefault(utterance.shard, []).append(utterance)
    for shard, rows in by_shard.items():
        if hours is not None and offset >= hours * 3600 * settings.SAMPLE_RATE:
            break
        pieces.append(torch.from_numpy(shards[shard].copy()).to(device))
        moved += [replace(row, start=row.start + offset) for row in rows]
        offset += len(shards[shard])
    return torch.cat(pieces), moved


def phones_of(utterances: list[Utterance], device: torch.device) -> Tensor:
    """The phone class of every sample of `utterances`, concatenated: [S] uint8."""
    named = np.array([class_of(name) for row in utterances for name in row.phones], dtype=np.uint8)
    lengths = np.concatenate([np.diff(row.ends, prepend=0) for row in utterances])
    return torch.from_numpy(np.repeat(named, lengths)).to(device)


def random_places(
    utterances: list[Utterance], samples: int, margin: int, device: torch.device
) -> Callable[[int], tuple[Tensor, Tensor]]:
    """A function that samples B crops from `utterances`: sample positions [B, margin + samples + margin], and which of
    them exist. The part between the margins starts anywhere in an utterance, or at its start if it is short."""
    starts, lengths = (
        torch.tensor([getattr(row, name) for row in utterances], device=device) for name in ("start", "samples")
    )
    upto, total = lengths.cumsum(0), sum(row.samples for row in utterances)
    within = torch.arange(-margin, samples + margin, device=device)

    def draw(batch: int) -> tuple[Tensor, Tensor]:
        # The probability of an utterance is proportional to its length.
        picks = torch.searchsorted(upto, torch.randint(total, (batch,), device=device), right=True)
        room = lengths[picks] - samples
        offset = (torch.rand(batch, device=device) * (room + 1).clamp(min=1)).long()
        first, after = starts[picks][:, None], (starts + lengths)[picks][:, None]
        at = first + offset[:, None] + within
        return at.clamp(0, total - 1), (at >= first) & (at < after)

    return draw


def sound_at(audio: Tensor, at: Tensor, is_there: Tensor) -> Tensor:
    """The samples of `audio` [S] int16 at positions `at`, as float32 in [-1, 1]; zero where not `is_there`."""
    return torch.where(is_there, audio[at].float() / 32768, 0.0)


@torch.inference_mode()
def encode_corpus(codec: VoiceCodec, audio: Tensor, utterances: list[Utterance], shift: int = 0) -> list[Tensor]:
    """Codes [T, K] int16 of every utterance after `shift` samples of silence, T = ceil(samples / hop), in order."""
    order = sorted(range(len(utterances)), key=lambda row: utterances[row].samples)
    codes: list[Tensor] = [torch.empty(0)] * len(utterances)
    start = 0
    while start < len(order):
        longest = utterances[order[start]].samples
        stop = start
        while stop < len(order) and (stop + 1 - start) * utterances[order[stop]].samples <= ENCODED_SAMPLES:
            longest = utterances[order[stop]].samples
            stop += 1
        stop = max(stop, start + 1)
        rows = [utterances[index] for index in order[start:stop]]
        starts, samples = (torch.tensor([getattr(row, name) for row in rows]) for name in ("start", "samples"))
        within = torch.arange(-(-(longest + shift) // settings.HOP) * settings.HOP, device=audio.device) - shift
        is_there = (within >= 0) & (within < samples.to(audio.device)[:, None])
        at = starts.to(audio.device)[:, None] + within
        made = codec.codes(sound_at(audio, at.clamp(0, len(audio) - 1), is_there)).to(torch.int16).cpu()
        for index, frames in enumerate((-(-(samples + shift) // settings.HOP)).tolist()):
            codes[order[start + index]] = made[index, :frames].clone()
        start = stop
    return codes


def logger(path: Path) -> Log:
    """A function that prints each record and appends it to `path` as a JSON line, with the stage's elapsed seconds."""
    began = time.monotonic()

    def log(record: dict[str, float]) -> None:
        rounded = {name: round(value, 4) for name, value in record.items()}
        line = json.dumps({"seconds": round(time.monotonic() - began, 1)} | rounded)
        print(line, flush=True)
        with path.open("a", encoding="ascii") as file:
            file.write(line + "\n")

    return log


def model_config(tokenizer_folder: Path) -> tuple[dict, ModelConfig]:
    """config.json for the vocabulary of that folder, as written and as read."""
    tokenizer = read(tokenizer_folder)
    values = settings.model_config(tokenizer.get_vocab_size(), tokenizer.get_vocab())
    return values, build(ModelConfig, values, "config.json")


def new_codec_config() -> CodecConfig:
    return build(CodecConfig, settings.codec_config(), "codec")


def labelled_crops(audio: Tensor, utterances: list[Utterance], frames: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """A function that samples B crops with context, [B, S] float32, and the phone at the middle of each column, [B,
    N]."""
    phones, margin = phones_of(utterances, audio.device), CONTEXT_FRAMES * settings.HOP
    places = random_places(utterances, frames * settings.HOP, margin, audio.device)
    middles = slice(margin + SpeechSpectra.column // 2, -margin, SpeechSpectra.column)

    def draw(batch: int) -> tuple[Tensor, Tensor]:
        at, is_there = places(batch)
        heard = torch.where(is_there[:, middles], phones[at[:, middles]], class_of(PAUSE))
        return sound_at(audio, at, is_there), heard.long()

    return draw


@contextmanager
def kernels_tried() -> Iterator[None]:
    """A context with cuDNN autotuning, for constant shapes: tuned kernels are far faster than its heuristics."""
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = False


def run_encoder(work: Path, device: torch.device, run: Run) -> None:
    training = settings.EncoderTraining()
    crops = labelled_crops(*audio_of(work / "audio", device, settings.CODEC_HOURS), training.crop_frames)
    with kernels_tried():
        codec = train_encoder(new_codec_config(), crops, training, device, run)
    save(codec.state_dict(), work / "encoder.pt")
    run.state.unlink(missing_ok=True)


def run_codec(work: Path, device: torch.device, run: Run) -> None:
    """Train the decoder, from the snapshot codec-start.pt of an earlier run if there is one, with or without critic."""
    training = settings.CodecTraining()
    audio, utterances = audio_of(work / "audio", device, settings.DECODER_HOURS)
    places = random_places(utterances, training.crop_frames * settings.HOP, CONTEXT_FRAMES * settings.HOP, device)
    codec, critic = load_codec(work / "encoder.pt", device), Critic()
    if (start := work / "codec-start.pt").exists():
        learned = torch.load(start, map_location=device, weights_only=True)
        codec.load_state_dict(learned["codec"], strict=False)
        if "critic" in learned:
            critic.load_state_dict(learned["critic"])
        training = training.further()
    with kernels_tried():
        codec = train_codec(
            codec, lambda batch: sound_at(audio, *places(batch)), training, settings.SAMPLE_RATE, run, critic=critic
        )
    save(codec.state_dict(), work / "codec.pt")
    run.state.unlink(missing_ok=True)


def load_codec(path: Path, device: torch.device) -> VoiceCodec:
    codec = VoiceCodec(new_codec_config()).to(device)
    codec.load_state_dict(torch.load(path, map_location=device, weights_only=True))
    return codec.eval()


def run_encode(work: Path, device: torch.device) -> None:
    training = settings.TalkerTraining()
    audio, utterances = audio_of(work / "audio", device)
    codec = load_codec(work / "encoder.pt", device)
    codes = [
        row
        for part in range(training.shifts)
        for row in encode_corpus(codec, audio, utterances, part * settings.HOP // training.shifts)
    ]
    encode, parts = TextTokenizer.from_folder(work / "tokenizer").encode, parts_of(work / "tokenizer")
    # As `ModelConfig.text_normalizer` does: the teacher's texts are normalised except for capitals.
    texts = [encode(row.text.lower()) for row in utterances]
    lengths, rng = np.array([len(row) for row in texts]), np.random.default_rng(training.seed)
    whole = np.array([token for row in texts for token in row])
    spelled = [(whole, lengths)]
    spelled += [take_apart(whole, lengths, parts, training.apart, rng) for _ in range(1, training.shifts)]
    stored = {
        "texts": torch.from_numpy(np.concatenate([ids for ids, _ in spelled]).astype(np.int16)),
        "text_lengths": torch.from_numpy(np.concatenate([lengths for _, lengths in spelled])),
        "codes": torch.cat(codes),
        "code_lengths": torch.tensor([len(row) for row in codes]),
        "voices": [row.voice for row in utterances],
    }
    # Concatenated: half a million small tensors take a minute to read.
    save(stored, work / "codes.pt")
    print(json.dumps({"utterances": len(codes), "frames": len(stored["codes"])}), flush=True)


def utterances_on(device: torch.device, work: Path, layout: Layout, held_out: int) -> tuple[Utterances, Utterances]:
    """The encoded corpus on `device`, without utterances over `LONGEST_FRAMES`: the training set, in every encoding,
    and the last `held_out` texts, in the first encoding only."""
    stored = torch.load(work / "codes.pt", weights_only=True)
    count = len(stored["voices"])
    row = torch.arange(len(stored["code_lengths"]))
    fits, first_held_out = stored["code_lengths"] <= LONGEST_FRAMES, count - held_out
    parts = (fits & (row % count < first_held_out), fits & (first_held_out <= row) & (row < count))
    ids = layout.config.talker_config.spk_id
    speakers = {taught_by: ids[name] for name, taught_by in settings.voices().items()}
    speaker = torch.tensor([speakers[voice] for voice in stored["voices"]])

    def gather(rows: Tensor) -> Utterances:
        text, text_lengths = _padded(stored["texts"], stored["text_lengths"], rows, device)
        codes, frame_lengths = _padded(stored["codes"], stored["code_lengths"], rows, device)
        return Utterances(text, text_lengths, codes, frame_lengths, speaker[rows % count].to(device))

    training, judged = (gather(part.nonzero()[:, 0]) for part in parts)
    return training, judged


def _padded(values: Tensor, lengths: Tensor, rows: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """The sequences `rows` of the concatenated `values` [S, ...], on `device`, zero-padded, and their lengths."""
    starts = (lengths.cumsum(0) - lengths)[rows].to(device)
    lengths = lengths[rows].to(device)
    column = torch.arange(int(lengths.max()), device=device)
    is_there = column < lengths[:, None]
    found = values.to(device)[(starts[:, None] + column).masked_fill(~is_there, 0)]
    return found.masked_fill(~is_there.view(*is_there.shape, *[1] * (values.ndim - 1)), 0), lengths


def run_talker(work: Path, device: torch.device, run: Run) -> None:
    """Train the talker, from the snapshot talker-start.pt of an earlier run if there is one."""
    training = settings.TalkerTraining()
    _, config = model_config(work / "tokenizer")
    layout = Layout(config, TextTokenizer.from_folder(work / "tokenizer").encode("\n")[0], device)
    data, held_out = utterances_on(device, work, layout, training.held_out)
    torch.manual_seed(training.seed)
    talker = Talker(config.talker_config).to(device)
    for name, parameter in talker.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02 if "embedding" in name else parameter.shape[-1] ** -0.5 * 0.7)
    if (start := work / "talker-start.pt").exists():
        talker.load_state_dict(torch.load(start, map_location=device, weights_only=True)["talker"])
        training = training.further()
    held_out = held_out.take(torch.arange(held_out.text.shape[0], device=device))
    trained = train_talker(talker, data, held_out, layout, training=training, run=run)
    save(trained.state_dict(), work / "talker.pt")
    run.state.unlink(missing_ok=True)


def run_checkpoint(work: Path) -> None:
    """Write the trained talker and decoder as a checkpoint folder."""
    values, config = model_config(work / "tokenizer")
    talker = Talker(config.talker_config)
    talker.load_state_dict(torch.load(work / "talker.pt", map_location="cpu", weights_only=True))
    codec = load_codec(work / "codec.pt", torch.device("cpu"))
    partial = work / "checkpoint.partial"
    write_checkpoint(partial, values, talker, codec, work / "tokenizer")
    partial.rename(work / "checkpoint")


def write_checkpoint(folder: Path, values: dict, talker: Talker, codec: VoiceCodec, tokenizer: Path) -> None:
    """Write the released layout: configuration, tokenizer, and weights in 8 and 16 bits."""
    (folder / "speech_tokenizer").mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("config.json", values),
        ("generation_config.json", settings.generation_config()),
        ("speech_tokenizer/config.json", settings.codec_config()),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    export_checkpoint(
        folder,
        talker,
        codec.released_decoder(),
        dtype=torch.float16,
        codec_dtype=torch.float16,
        is_in_8_bits=settings.is_in_8_bits,
        shard_bytes=settings.SHARD_BYTES,
    )
