"""Quality of 8-bit weights: a speech gate for the built-in voice, and logits at full size.

`PYTHONPATH=src:tools python benchmarks/quantization.py gate --format int8 --judges FOLDER --journal FILE --out FILE`
speaks the same texts with the same seeds in both formats, evaluates them with the judges of `builtin_voice.evaluate`,
and compares them pairwise. The journal lets it resume. Exits with 1 if the gate fails.
`PYTHONPATH=src python benchmarks/quantization.py logits MODEL --format int8 --out FILE` compares the logits of random
weights at full size, from the same state before every frame: of the first codebook, or, of a model whose frames are
patches of latents, of going on and stopping, the one distribution it has. Its patches are compared too, without a
limit. With `--e4m3-rows` fp8 weights meet rows in E4M3 at every batch size; without it where plans say so.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from sonoro import TTS
from sonoro.bench.machine import commit_of_checkout
from sonoro.core.config import EngineConfig
from sonoro.models import registry
from sonoro.models.base import Capacity, Pages
from sonoro.nn.linear import Linear
from sonoro.profile.requests import speech_request

MOST_WORD_ERRORS, MOST_P808 = 0.005, 0.03
"""Limits on the loss, at the bound of the 95% interval: half a point of word error rate, .03 of P808."""

LIMITS = {"int8": (25.0, 0.05), "fp8": (16.0, 0.15)}
"""By format: least SNR of logits in dB, and most total variation of sampling probabilities, both means over frames. Set
before any measurement, from rounding alone: with normal weights 41 (int8) and 32 dB (fp8) per product.
"""

_Z = 1.96
_PAGE = 32


class Interval(NamedTuple):
    """A mean with its 95% interval."""

    mean: float
    low: float
    high: float


class Compared(NamedTuple):
    """Readings of a text in both formats, `plain` and `made` (8 bits): word errors, P808 or None, runaway,
    repetition."""

    text: str
    words: int
    errors: tuple[int, int]
    p808: tuple[float, float] | None
    runaway: tuple[bool, bool]
    repeats: tuple[bool, bool]


def paired(clusters: list[str], differences: list[float], weights: list[float]) -> Interval:
    """The ratio of the sums of `differences` and `weights`, with a 95% interval for clustered data (linearised ratio).

    Readings of one text with several seeds are one cluster.
    """
    total = sum(weights)
    mean = sum(differences) / total
    apart: dict[str, float] = {}
    for cluster, difference, weight in zip(clusters, differences, weights, strict=True):
        apart[cluster] = apart.get(cluster, 0.0) + difference - mean * weight
    count = len(apart)
    if count < 2:
        return Interval(mean, -math.inf, math.inf)
    error = math.sqrt(count / (count - 1) * sum(value**2 for value in apart.values())) / total
    return Interval(mean, mean - _Z * error, mean + _Z * error)


def verdict(readings: list[Compared]) -> dict[str, Any]:
    """The figures of the gate, and whether it `holds`."""
    scored = [reading for reading in readings if reading.p808 is not None]
    errors = paired(
        [reading.text for reading in readings],
        [reading.errors[1] - reading.errors[0] for reading in readings],
        [reading.words for reading in readings],
    )
    scores = [reading.p808 for reading in scored if reading.p808 is not None]
    sound = paired([reading.text for reading in scored], [made - plain for plain, made in scores], [1.0] * len(scored))
    counts = {
        name: [sum(getattr(reading, name)[arm] for reading in readings) for arm in (0, 1)]
        for name in ("runaway", "repeats")
    }
    words = sum(reading.words for reading in readings)
    reasons = {
        "word errors": errors.high > MOST_WORD_ERRORS,
        "p808": sound.low < -MOST_P808,
        **{name: made > plain for name, (plain, made) in counts.items()},
    }
    return {
        "readings": len(readings),
        "texts": len({reading.text for reading in readings}),
        "wer": [round(sum(reading.errors[arm] for reading in readings) / words, 5) for arm in (0, 1)],
        "wer_difference": [round(value, 5) for value in errors],
        "p808": [round(float(np.mean([score[arm] for score in scores])), 4) for arm in (0, 1)],
        "p808_difference": [round(value, 4) for value in sound],
        **counts,
        "fails": [name for name, is_failed in reasons.items() if is_failed],
        "holds": not any(reasons.values()),
    }


def rounding(options: argparse.Namespace) -> AbstractContextManager[Any]:
    """A context in which fp8 weights meet rows in E4M3 wherever `options` ask for it, or where plans say so."""
    if not options.e4m3_rows:
        return nullcontext()

    def takes_e4m3(layer: Linear, x: Tensor) -> bool:
        layer.row_terms = max(1, layer.row_terms)
        return layer.weight.dtype == torch.float8_e4m3fn

    return mock.patch.object(Linear, "takes_e4m3", takes_e4m3)


def every_format() -> AbstractContextManager[Any]:
    """A context in which every family loads in every format: those that are refused can be measured too."""
    families = tuple(dataclasses.replace(family, quantizations=tuple(LIMITS)) for family in registry.FAMILIES)
    return mock.patch.object(registry, "FAMILIES", families)


def gate(options: argparse.Namespace) -> dict[str, Any]:
    """Speak, judge and compare; returns the results."""
    # Imported here: only the gate needs the judges' packages.
    from builtin_voice import evaluate, settings  # noqa: PLC0415
    from builtin_voice.judges import INVENTED_WORDS, JUDGE  # noqa: PLC0415
    from builtin_voice.mixed import is_runaway, mixed_texts  # noqa: PLC0415
    from builtin_voice.readings import Ears, Job, Journal, Reading, Scored  # noqa: PLC0415
    from builtin_voice.word_errors import spelled_words, word_errors  # noqa: PLC0415

    sentences, mixed = evaluate.read_harvard()[: options.sentences], mixed_texts()[: options.texts]
    teacher = evaluate.read_teacher()["mixed"]["durations_s"]
    checkpoint = evaluate.fingerprint(options.model)
    read: dict[str, list[Reading]] = {}
    with Ears(options.processes, Journal(options.journal, JUDGE), partial(evaluate.listen, options.judges)) as ears:
        for quantization in ("none", options.format):
            config = EngineConfig(slots=evaluate.BATCH, quantization=quantization)
            with TTS(options.model, device=options.device, dtype=options.dtype, config=config) as speech:
                rows = " e4m3" if options.e4m3_rows and quantization != "none" else ""
                reader = f"{checkpoint} {options.device} {options.dtype or ''} {quantization}{rows}"
                voices = {voice: taught for voice, taught in settings.voices().items() if voice in speech.voices}
                subject = evaluate.Subject(speech, reader, voices, 0, {})
                names = list(voices)
                wanted = [
                    (seed, numbered)
                    for seeds, texts in ((options.seeds, sentences), (options.mixed_seeds, mixed))
                    for seed in range(seeds)
                    for numbered in enumerate(texts)
                ]
                jobs = [
                    Job(reader, "gate", names[(index + seed) % len(names)], 1000 * seed + index, text, Scored.P808)
                    for seed, (index, text) in wanted
                ]
                read[quantization] = ears.read(jobs, partial(evaluate.PATHS["batch"], subject), quantization)
    lengths = [None] * (options.seeds * len(sentences)) + teacher[: len(mixed)] * options.mixed_seeds

    def ran_away(reading: Reading, length_s: float | None) -> bool:
        return reading.reason != "stop" or (length_s is not None and is_runaway(reading.duration_s, length_s))

    readings = [
        Compared(
            job.text,
            len(spelled_words(job.text)),
            (word_errors(job.text, plain.heard.words), word_errors(job.text, made.heard.words)),
            None if plain.heard.p808 is None or made.heard.p808 is None else (plain.heard.p808, made.heard.p808),
            (ran_away(plain, length_s), ran_away(made, length_s)),
            (plain.heard.extra >= INVENTED_WORDS, made.heard.extra >= INVENTED_WORDS),
        )
        for job, length_s, plain, made in zip(jobs, lengths, read["none"], read[options.format], strict=True)
    ]
    header = evaluate.header(argparse.Namespace(**vars(options), seed=0, sampling=[]))
    commit = options.commit or header["commit"]
    head = {**header, "commit": commit, "bench": "quantization gate", "format": options.format}
    seeds = {"seeds": options.seeds, "mixed_seeds": options.mixed_seeds}
    return {**head, "e4m3_rows": options.e4m3_rows, **seeds, **verdict(readings)}


def compare_logits(plain: Tensor, made: Tensor) -> tuple[float, float]:
    """Compare logits [B, V]: SNR in dB without their means, and total variation of the softmax at temperature 1,
    averaged over the batch."""
    plain, made = plain.double(), made.double()
    variation = (plain.softmax(-1) - made.softmax(-1)).abs().sum(-1) / 2
    return _snr_db(*(x - x.mean(dim=-1, keepdim=True) for x in (plain, made - plain))), float(variation.mean())


def _snr_db(signal: Tensor, noise: Tensor) -> float:
    """At most 100 dB: a frame without any difference must not make up for others in a mean."""
    power = float(signal.square().sum())
    return 10 * math.log10(power / max(float(noise.square().sum()), 1e-10 * power))


def _decided(state: Any, record: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Of what a frame records: the logits [B, V] of its first decision, and its patches [B, P, D] if it has any."""
    if not state.frames.is_floating_point():
        return record[0], None
    *_, stop, patches = record
    return stop, patches


def _tensors(state: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a per-slot state except KV caches: what is handed from step to step."""
    for entry in dataclasses.fields(state):
        value = getattr(state, entry.name)
        if isinstance(value, Tensor):
            yield entry.name, value


@torch.inference_mode()
def logits(options: argparse.Namespace) -> dict[str, Any]:
    """Compare logits frame by frame, both models starting from the plain one's state but with their own KV caches."""
    how = {"device": options.device, "dtype": options.dtype, "load_format": options.load_format}
    with every_format():
        models = [registry.load(options.model, **how, quantization=name).model for name in ("none", options.format)]
    spec, slots = models[0].spec, options.batch
    positions = 512
    pages = slots * positions // _PAGE
    capacity = Capacity(slots, positions, options.frames + 1, 256, _PAGE, pages, slots * positions)
    states = [model.allocate(capacity) for model in models]
    device = states[0].done.device
    numbers = torch.arange(slots, device=device)
    for model, state in zip(models, states, strict=True):
        prompts = []
        for number in range(slots):
            text = f"This is sentence number {number}, which is as good as any other."
            request = speech_request(spec, number, text, options.frames)
            voice = model.encode_voice(request.references) if request.references else None
            prompts.append(model.prepare(request, request.text, 0, [], voice))
        own = [list(range(slot, pages, slots)) for slot in range(slots)]
        tokens = model.stage(state, prompts, list(range(slots)), [Pages(one) for one in own])
        model.admit(state, numbers)
        model.prefill(state, torch.arange(tokens, device=device))
    rows: list[tuple[float, float]] = []
    patches_db: list[float] = []
    for _ in range(options.frames):
        for (_, source), (_, target) in zip(_tensors(states[0]), _tensors(states[1]), strict=True):
            if source.shape == target.shape:
                target.copy_(source)
        records: list[list[Tensor]] = [[], []]
        for model, state, record in zip(models, states, records, strict=True):
            model.frame(state, numbers, record)
        (plain, patches), (made, made_patches) = map(_decided, states, records)
        rows.append(compare_logits(plain, made))
        if patches is not None and made_patches is not None:
            patches_db.append(_snr_db(patches.double(), made_patches.double() - patches.double()))
    least_db, most = LIMITS[options.format]
    snr_db, variation = (float(np.mean([row[index] for row in rows])) for index in (0, 1))
    return {
        "bench": "quantization logits",
        "model": spec.name,
        "format": options.format,
        "e4m3_rows": options.e4m3_rows,
        "dtype": options.dtype,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "commit": options.commit or commit_of_checkout(),
        "frames": options.frames,
        "batch": slots,
        "snr_db": round(snr_db, 2),
        "least_snr_db": least_db,
        "total_variation": round(variation, 4),
        "most_total_variation": most,
        **({"patches_snr_db": round(float(np.mean(patches_db)), 2)} if patches_db else {}),
        "holds": snr_db >= least_db and variation <= most,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("gate")
    one.add_argument("--model", default="builtin")
    one.add_argument("--judges", type=Path, required=True, help="the folder that prepare_judges.sh filled")
    one.add_argument("--journal", type=Path, help="readings so far, a line each: a run goes on where one stopped")
    one.add_argument("--seeds", type=int, default=5)
    one.add_argument("--sentences", type=int, default=100, help="Harvard sentences, read with every seed")
    one.add_argument("--texts", type=int, default=1000, help="mixed texts")
    one.add_argument("--mixed-seeds", type=int, default=1, help="how often each mixed text is read")
    one.add_argument("--processes", type=int, default=1, help="of judges")
    two = commands.add_parser("logits")
    two.add_argument("model")
    two.add_argument("--load-format", default="dummy")
    two.add_argument("--frames", type=int, default=50)
    two.add_argument("--batch", type=int, default=8)
    runs: list[tuple[argparse.ArgumentParser, Callable[[argparse.Namespace], dict[str, Any]]]]
    runs = [(one, gate), (two, logits)]
    for command, run in runs:
        command.add_argument("--format", choices=sorted(LIMITS), required=True)
        command.add_argument("--e4m3-rows", action="store_true", help="rows in E4M3 at every batch size")
        command.add_argument("--device", default="cuda")
        command.add_argument("--dtype")
        command.add_argument("--out", type=Path)
        command.add_argument("--commit", help="what is run, where there is no checkout")
        command.set_defaults(run=run)
    options = parser.parse_args()
    with rounding(options):
        report = options.run(options)
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report))
    sys.exit(0 if report["holds"] else 1)


if __name__ == "__main__":
    main()
