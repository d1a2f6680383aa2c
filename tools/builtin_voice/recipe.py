"""The learning half of the built-in voice, in stages that each leave one result in the work folder.

encoder     learns the codes, beside the synthesis if that still runs: encoder.pt
codec       learns to speak from them: codec.pt
encode      the whole corpus as codes: codes.pt
talker      trains talker and code predictor: talker.pt
checkpoint  both as a folder in the released layout

`python -m builtin_voice` runs them after the data half; README.md says how.
"""

from __future__ import annotations

import itertools
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
from torch.nn.utils.rnn import pad_sequence

from builtin_voice import settings
from builtin_voice.codec_training import train_codec, train_encoder
from builtin_voice.flite import PAUSE, PHONES
from builtin_voice.shards import Utterance, load, written
from builtin_voice.spectra import SpeechSpectra
from builtin_voice.talker_training import Layout, Utterances, train_talker
from builtin_voice.tokenizer import read
from builtin_voice.training import Log, Run, Unfinished, save
from builtin_voice.voice_codec import CONTEXT_FRAMES, VoiceCodec
from sonoro.models.qwen3_tts.backbone import Talker
from sonoro.models.qwen3_tts.config import CodecConfig, ModelConfig
from sonoro.models.qwen3_tts.prompt import TextTokenizer
from sonoro.models.qwen3_tts.weights import export_checkpoint
from sonoro.nn.configs import build

LONGEST_FRAMES = 170
ENCODED_SAMPLES = 24_000 * 600
"""Samples of one encoding batch, silence before and padding not counted."""


def wait_for_shards(folder: Path, hours: float, deadline_s: float, is_whole: Callable[[], bool]) -> None:
    """Until the first shards of `folder`, none missing between them, are `hours` long, or the corpus `is_whole`.

    Raises `Unfinished` if the deadline passes first."""
    while True:
        # Asked before looking: a shard may come in between.
        were_all, shards = is_whole(), written(folder)
        first = itertools.takewhile(shards.__contains__, itertools.count())
        total = sum(row.samples for shard in first for row in shards[shard])
        if were_all or total >= hours * 3600 * settings.SAMPLE_RATE:
            return
        if time.monotonic() > deadline_s:
            raise Unfinished(f"{total / 3600 / settings.SAMPLE_RATE:.1f} of {hours:g} hours for the codec")
        time.sleep(2)


def audio_of(folder: Path, device: torch.device, hours: float | None = None) -> tuple[Tensor, list[Utterance]]:
    """Shards end to end as one int16 tensor on `device`, and their utterances with `start` counted in it."""
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
    """Which of `PHONES` is heard in every sample of `utterances`, end to end: [S] uint8."""
    numbers = {name: number for number, name in enumerate(PHONES)}
    named = np.array([numbers[name] for row in utterances for name in row.phones], dtype=np.uint8)
    lengths = np.concatenate([np.diff(row.ends, prepend=0) for row in utterances])
    return torch.from_numpy(np.repeat(named, lengths)).to(device)


def random_places(
    utterances: list[Utterance], samples: int, margin: int, device: torch.device
) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Draws where to cut B crops from `utterances`: positions [B, margin + samples + margin], and which of them there
    are: what is between the margins begins anywhere in an utterance, or with it if it is short."""
    starts, lengths = (
        torch.tensor([getattr(row, name) for row in utterances], device=device) for name in ("start", "samples")
    )
    upto, total = lengths.cumsum(0), sum(row.samples for row in utterances)
    within = torch.arange(-margin, samples + margin, device=device)

    def draw(batch: int) -> tuple[Tensor, Tensor]:
        # An utterance is as likely as it is long.
        picks = torch.searchsorted(upto, torch.randint(total, (batch,), device=device), right=True)
        room = lengths[picks] - samples
        offset = (torch.rand(batch, device=device) * (room + 1).clamp(min=1)).long()
        first, after = starts[picks][:, None], (starts + lengths)[picks][:, None]
        at = first + offset[:, None] + within
        return at.clamp(0, total - 1), (at >= first) & (at < after)

    return draw


def sound_at(audio: Tensor, at: Tensor, is_there: Tensor) -> Tensor:
    """Samples `at` of `audio` [S] int16 as float32 in [-1, 1]; silence where there are none."""
    return torch.where(is_there, audio[at].float() / 32768, 0.0)


@torch.inference_mode()
def encode_corpus(codec: VoiceCodec, audio: Tensor, utterances: list[Utterance], shift: int = 0) -> list[Tensor]:
    """Codes [T, K] uint8 of every utterance after `shift` samples of silence, T = ceil(samples / hop), in order."""
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
        padded = -(-(longest + shift) // settings.HOP) * settings.HOP
        batch = torch.zeros(len(rows), padded, device=audio.device)
        for index, row in enumerate(rows):
            batch[index, shift : shift + row.samples] = audio[row.start : row.start + row.samples].float() / 32768
        made = codec.codes(batch).to(torch.uint8).cpu()
        for index, row in enumerate(rows):
            codes[order[start + index]] = made[index, : -(-(row.samples + shift) // settings.HOP)].clone()
        start = stop
    return codes


def logger(path: Path) -> Log:
    """Prints each record and appends it to `path` as a JSON line, with the seconds since the stage began."""
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
    """Draws B crops with their context, [B, S] float32, and the phone in the middle of each column between, [B, N]."""
    phones, margin = phones_of(utterances, audio.device), CONTEXT_FRAMES * settings.HOP
    places = random_places(utterances, frames * settings.HOP, margin, audio.device)
    middles = slice(margin + SpeechSpectra.column // 2, -margin, SpeechSpectra.column)

    def draw(batch: int) -> tuple[Tensor, Tensor]:
        at, is_there = places(batch)
        heard = torch.where(is_there[:, middles], phones[at[:, middles]], PHONES.index(PAUSE))
        return sound_at(audio, at, is_there), heard.long()

    return draw


@contextmanager
def kernels_tried() -> Iterator[None]:
    """Within, shapes stay the same: the kernels that cuDNN finds by trying take far less time than those it guesses."""
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = False


def run_encoder(work: Path, device: torch.device, deadline_s: float, is_whole: Callable[[], bool]) -> None:
    """`is_whole` tells whether all of the corpus has been read aloud; it may raise why that will never be."""
    training = settings.EncoderTraining()
    wait_for_shards(work / "audio", settings.CODEC_HOURS, deadline_s, is_whole)
    crops = labelled_crops(*audio_of(work / "audio", device, settings.CODEC_HOURS), training.crop_frames)
    run = Run(deadline_s, logger(work / "encoder.jsonl"), work / "encoder-state.pt")
    with kernels_tried():
        codec = train_encoder(new_codec_config(), crops, training, device, run)
    save(codec.state_dict(), work / "encoder.pt")
    run.state.unlink(missing_ok=True)


def run_codec(work: Path, device: torch.device, deadline_s: float) -> None:
    training = settings.CodecTraining()
    audio, utterances = audio_of(work / "audio", device, settings.CODEC_HOURS)
    places = random_places(utterances, training.crop_frames * settings.HOP, CONTEXT_FRAMES * settings.HOP, device)
    run = Run(deadline_s, logger(work / "codec.jsonl"), work / "codec-state.pt")
    codec = load_codec(work / "encoder.pt", device)
    with kernels_tried():
        codec = train_codec(codec, lambda batch: sound_at(audio, *places(batch)), training, settings.SAMPLE_RATE, run)
    save(codec.state_dict(), work / "codec.pt")
    run.state.unlink(missing_ok=True)


def load_codec(path: Path, device: torch.device) -> VoiceCodec:
    codec = VoiceCodec(new_codec_config()).to(device)
    codec.load_state_dict(torch.load(path, map_location=device, weights_only=True))
    return codec.eval()


def run_encode(work: Path, device: torch.device) -> None:
    shifts = settings.TalkerTraining().shifts
    audio, utterances = audio_of(work / "audio", device)
    codec = load_codec(work / "encoder.pt", device)
    codes = [
        row for part in range(shifts) for row in encode_corpus(codec, audio, utterances, part * settings.HOP // shifts)
    ]
    tokenizer = TextTokenizer.from_folder(work / "tokenizer")
    texts = [torch.tensor(tokenizer.encode(row.text), dtype=torch.int16) for row in utterances]
    save_codes(work / "codes.pt", texts, codes, [row.voice for row in utterances])
    print(json.dumps({"utterances": len(codes), "frames": sum(len(row) for row in codes)}), flush=True)


def save_codes(path: Path, texts: list[Tensor], codes: list[Tensor], voices: list[str]) -> None:
    """Each list end to end, with its lengths: half a million small tensors take a minute to read."""
    lengths = {"text_lengths": [len(row) for row in texts], "code_lengths": [len(row) for row in codes]}
    save({"texts": torch.cat(texts), "codes": torch.cat(codes), "voices": voices} | lengths, path)


def utterances_on(
    device: torch.device, work: Path, config: ModelConfig, held_out: int
) -> tuple[Utterances, Utterances]:
    """The encoded corpus on `device`, utterances over `LONGEST_FRAMES` left out, in two parts: what to train on, in
    every encoding, and the last `held_out` texts, in the first encoding alone."""
    stored = torch.load(work / "codes.pt", weights_only=True)
    stored["texts"] = stored["texts"].split(stored["text_lengths"])
    stored["codes"] = stored["codes"].split(stored["code_lengths"])
    count = len(stored["texts"])
    fitting = [row for row, codes in enumerate(stored["codes"]) if len(codes) <= LONGEST_FRAMES]
    first_held_out = count - held_out
    return (
        _gather(stored, [row for row in fitting if row % count < first_held_out], device, config),
        _gather(stored, [row for row in fitting if first_held_out <= row < count], device, config),
    )


def _gather(stored: dict, rows: list[int], device: torch.device, config: ModelConfig) -> Utterances:
    names = {teacher: name for name, teacher in settings.voices().items()}
    count = len(stored["texts"])
    texts, codes = [stored["texts"][row % count] for row in rows], [stored["codes"][row] for row in rows]
    speakers = [config.talker_config.spk_id[names[stored["voices"][row % count]]] for row in rows]
    return Utterances(
        text=pad_sequence(texts, batch_first=True).to(device),
        text_lengths=torch.tensor([len(row) for row in texts], device=device),
        codes=pad_sequence(codes, batch_first=True).to(device),
        frame_lengths=torch.tensor([len(row) for row in codes], device=device),
        speaker=torch.tensor(speakers, device=device),
    )


def run_talker(work: Path, device: torch.device, deadline_s: float) -> None:
    training = settings.TalkerTraining()
    _, config = model_config(work / "tokenizer")
    data, held_out = utterances_on(device, work, config, training.held_out)
    torch.manual_seed(training.seed)
    talker = Talker(config.talker_config).to(device)
    for name, parameter in talker.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02 if "embedding" in name else parameter.shape[-1] ** -0.5 * 0.7)
    layout = Layout(config, TextTokenizer.from_folder(work / "tokenizer").encode("\n")[0])
    run = Run(deadline_s, logger(work / "talker.jsonl"), work / "talker-state.pt")
    held_out = held_out.take(torch.arange(held_out.text.shape[0], device=device))
    trained = train_talker(talker, data, held_out, layout, training=training, run=run)
    save(trained.state_dict(), work / "talker.pt")
    run.state.unlink(missing_ok=True)


def run_checkpoint(work: Path) -> None:
    """The trained talker and decoder as a folder that can be loaded."""
    values, config = model_config(work / "tokenizer")
    talker = Talker(config.talker_config)
    talker.load_state_dict(torch.load(work / "talker.pt", map_location="cpu", weights_only=True))
    codec = load_codec(work / "codec.pt", torch.device("cpu"))
    partial = work / "checkpoint.partial"
    write_checkpoint(partial, values, talker, codec, work / "tokenizer")
    partial.rename(work / "checkpoint")


def write_checkpoint(folder: Path, values: dict, talker: Talker, codec: VoiceCodec, tokenizer: Path) -> None:
    """The released layout: configuration, tokenizer, both weight files in 16 bits."""
    (folder / "speech_tokenizer").mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("config.json", values),
        ("generation_config.json", settings.generation_config()),
        ("speech_tokenizer/config.json", settings.codec_config()),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    export_checkpoint(folder, talker, codec.released_decoder(), dtype=torch.bfloat16, codec_dtype=torch.float16)
