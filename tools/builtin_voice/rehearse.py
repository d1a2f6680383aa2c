"""A one-minute smoke test of the GPU stages: every training at full size, compiled and captured, on noise instead of
speech, and the teacher on the last GPU. Prints the times of steps; says nothing about quality.

`python -m builtin_voice.rehearse WORK --prepared PREPARED --seconds 75`
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path

import numpy as np
import torch

from builtin_voice import recipe, settings, shards, tokenizer
from builtin_voice.__main__ import RESULTS, gpus_there, python, start
from builtin_voice.talker_training import Layout, Lesson, Plan
from builtin_voice.training import set_rate
from sonoro.models.qwen3_tts.backbone import Talker

_TEXT = "the quick brown fox jumps over the lazy dog, and the assistant reads about it."


def lay_out(work: Path, *, utterances: int = 40, encoded: int = 4000) -> None:
    """Write shards of noise, a tokenizer if there is none, and random codes of `encoded` texts of all lengths."""
    rng, voices = np.random.default_rng(0), list(settings.voices().values())
    (work / "audio").mkdir(parents=True, exist_ok=True)
    rows, audio, begin = [], [], 0
    for number in range(utterances):
        samples = int(rng.integers(24_000, 240_000))
        ends = np.linspace(0, samples, 20).astype(int).tolist()[1:]
        phones = list("ðəkwɪkbɹaʊnfɑksʤʌmp"[: len(ends)])
        rows.append(shards.Utterance(0, begin, samples, _TEXT, voices[number % len(voices)], phones, ends))
        audio.append((rng.standard_normal(samples) * 3000).astype(np.int16))
        begin += samples
    shards.write(work / "audio", rows, audio)
    if not (work / "tokenizer").exists():
        tokenizer.write(work / "tokenizer", *tokenizer.train([_TEXT] * 4, 40))
    frames, words = rng.integers(3, 380, encoded), rng.integers(1, 90, encoded)
    stored = {
        "texts": torch.from_numpy(rng.integers(0, 256, words.sum()).astype(np.int16)),
        "text_lengths": torch.from_numpy(words),
        "codes": torch.from_numpy(
            rng.integers(0, settings.CODEBOOK_SIZE, (frames.sum(), settings.CODEBOOKS)).astype(np.int16)
        ),
        "code_lengths": torch.from_numpy(frames),
        "voices": [voices[number % len(voices)] for number in range(encoded)],
    }
    torch.save(stored, work / "codes.pt")


def profile(work: Path, device: torch.device, *, steps: int = 10) -> str:
    """A table of kernel times over `steps` captured training steps of the talker, all of one width."""
    training = settings.TalkerTraining()
    _, config = recipe.model_config(work / "tokenizer")
    layout = Layout(config, 0, device)
    data, _ = recipe.utterances_on(device, work, layout, 8)
    lesson = Lesson(Talker(config.talker_config).to(device), data, layout, training)
    set_rate(lesson.optimizer, 1e-5)
    batch = Plan((data.text_lengths + data.frame_lengths).cpu() + 10, training).batch(0)
    is_cuda = device.type == "cuda"
    for _ in range(4 if is_cuda else 0):
        lesson(batch)
    kind = torch.profiler.ProfilerActivity.CUDA if is_cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profiled:
        for _ in range(steps):
            lesson(batch)
        if is_cuda:
            torch.cuda.synchronize()
    by = "self_device_time_total" if is_cuda else "self_cpu_time_total"
    return f"{steps} steps, {len(batch.picks)} x {batch.width} rows\n" + profiled.key_averages().table(
        sort_by=by, row_limit=30, max_name_column_width=90
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--prepared", type=Path, required=True)
    parser.add_argument("--phonemes", type=Path, help="what the teacher reads; left out, it does not")
    parser.add_argument("--seconds", type=float, default=75.0)
    parser.add_argument("--profile", action="store_true", help="what the talker's kernels take, and nothing else")
    options = parser.parse_args()
    work, gpus, began_s = options.work, gpus_there(), time.monotonic()
    lay_out(work)
    if options.profile:
        print(profile(work, torch.device("cuda" if torch.cuda.is_available() else "cpu")))
        return

    children: dict[str, subprocess.Popen[bytes]] = {}

    def learn(name: str, gpu: str, seconds: float) -> None:
        options_of = ["--prepared", options.prepared, "--stage", name, "--fit", "--until", began_s + seconds]
        children[name] = start(python("__main__", work, *options_of), gpu)

    learn("talker", gpus[-1], options.seconds)
    learn("encoder", gpus[0], options.seconds / 3)
    children["encoder"].wait()
    learn("codec", gpus[0], options.seconds)
    if options.phonemes:
        corpus = [options.phonemes, options.prepared / "kokoro.npz", work / "spoken", "--limit", 2048]
        children["teacher"] = start(python("kokoro.synthesize", *corpus), gpus[-1])
    codes = {name: child.wait() for name, child in children.items()}
    recipe.run_checkpoint(work)
    report: dict[str, object] = {"exit_codes": codes}
    for name in sorted(set(RESULTS) & set(codes)):
        records = [json.loads(line) for line in (work / f"{name}.jsonl").read_text("ascii").splitlines()]
        first, last = records[max(0, len(records) - 2)], records[-1]
        step_s = (last["seconds"] - first["seconds"]) / max(1, last["step"] - first["step"])
        report[name] = last | {"ms_a_step": round(1000 * step_s, 1)}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
