"""Accuracy of the last word heard that an interrupted agent is told, against forced alignment.

`python benchmarks/interruptions.py speak TEXTS --first 0 --count 25 --raw FILE.jsonl` serves the built-in voice, and
sends texts of two lines word by word, as a language model writes them: once whole, for the aligner, and once until a
`response.cancel` at a random moment. `report FILE.jsonl ... --out RESULT.json` computes the figures. Needs the extra
`align`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from websockets.asyncio.client import connect

from two_steps import Steps, add_lines, finish, read_lines  # type: ignore[import-not-found]
from words import LAYOUTS, Aligner, found_words  # type: ignore[import-not-found]

WORDS_A_SECOND = 12
EARLIEST_S, BEFORE_END_S = 0.3, 0.1
START_S = 300


class Spoken(NamedTuple):
    """One utterance: its audio, the event that ended it, the seconds heard by then, and the words received."""

    samples: np.ndarray
    rate: int
    event: dict[str, Any]
    heard_s: float
    words: list[dict[str, Any]]


@contextlib.contextmanager
def served(model: str | None) -> Iterator[str]:
    """A context with a ready server of `model` on a free port: its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "sonoro", "serve", *([model] if model else []), "--device", "cpu"]
    process = subprocess.Popen([*command, "--port", str(port), "--slots", "2"], stdout=subprocess.DEVNULL)
    try:
        until_s = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
                break
            if process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"the server did not start: {process.returncode}")
            time.sleep(0.5)
        yield f"ws://127.0.0.1:{port}/v1/audio/speech/stream"
    finally:
        process.terminate()
        process.wait()


async def utter(address: str, text: str, settings: dict[str, Any], cancel_s: float | None = None) -> Spoken:
    """Speak `text` as live text, word by word; cancel it `cancel_s` seconds after the first audio, if given."""
    async with connect(address, compression=None, max_size=None) as connection:

        async def say(**message: Any) -> None:
            await connection.send(json.dumps(message))

        async def write() -> None:
            for piece in re.findall(r"\S+\s*", text):
                await say(type="input.text", text=piece)
                await asyncio.sleep(1 / WORDS_A_SECOND)
            await say(type="input.done")

        async def cancel(after_s: float) -> float:
            """Cancel after `after_s` seconds; returns the seconds of audio heard."""
            await asyncio.sleep(after_s)
            writing.cancel()
            heard_s = received_s() - max(0.0, plays_until_s - time.perf_counter())
            await say(type="response.cancel")
            return heard_s

        def received_s() -> float:
            return sum(map(len, pcm)) / 2 / rate

        pcm: list[bytes] = []
        words: list[dict[str, Any]] = []
        rate, plays_until_s = 0, 0.0
        cancelling: asyncio.Task[float] | None = None
        await say(type="session.config", timestamps=["word"], **settings)
        writing = asyncio.create_task(write())
        try:
            async for message in connection:
                if isinstance(message, bytes):
                    pcm.append(message)
                    # After an underrun playback resumes now.
                    plays_until_s = max(plays_until_s, time.perf_counter()) + len(message) / 2 / rate
                    if cancel_s is not None and cancelling is None:
                        cancelling = asyncio.create_task(cancel(cancel_s))
                    continue
                event = json.loads(message)
                if event["type"] == "error":
                    raise RuntimeError(str(event["error"]))
                words += event.get("words") or []
                if event["type"] == "audio.start":
                    rate = event["sample_rate"]
                if event["type"] in ("audio.done", "response.cancelled"):
                    samples = np.frombuffer(b"".join(pcm), "<i2").astype(np.float32) / 32768
                    # If all audio came before the cancel, the client knows its words.
                    heard_s = 0.0 if cancelling is None else await cancelling
                    return Spoken(samples, rate, event, heard_s, words)
        finally:
            writing.cancel()
    raise RuntimeError("the server closed the connection")


async def interrupt(address: str, aligner: Aligner, number: int, text: str, layout: str) -> dict[str, Any]:
    """Interrupt one text; returns the last word told and the one aligned, as indices of words (None before the
    first)."""
    settings = {"seed": number, "non_streaming_mode": LAYOUTS[layout]}
    whole = await utter(address, text, settings)
    written, found = found_words(aligner, text, whole.samples, whole.rate)
    facts: dict[str, Any] = {"number": number, "layout": layout, "text": text, "is_aligned": found is not None}
    if found is None:
        return facts
    chance = random.Random(f"{number} {layout}")
    at_s = chance.uniform(EARLIEST_S, len(whole.samples) / whole.rate - BEFORE_END_S)
    cut = await utter(address, text, settings, at_s)
    shared = len(cut.samples)
    was_cancelled = cut.event["type"] == "response.cancelled"
    heard = [word for word in cut.words if word["start_s"] < cut.heard_s]
    told = cut.event.get("last_word") if was_cancelled else heard[-1] if heard else None
    starts = [word.start for word in written]
    last = max((at for at, times in enumerate(found) if times[0] < cut.heard_s), default=None)
    return facts | {
        "was_cancelled": was_cancelled,
        "at_s": round(at_s, 3),
        "heard_s": round(cut.heard_s, 3),
        "sent_s": round(shared / cut.rate, 3),
        # Both runs must have the same speech, up to rounding, or the aligner's times do not apply.
        "differs_by": float(abs(cut.samples - whole.samples[:shared]).max(initial=0.0)) if shared else 0.0,
        "told": None if told is None else starts.index(told["start"]) if told["start"] in starts else -99,
        "found": last,
        "told_start_s": None if told is None else told["start_s"],
        "found_start_s": None if last is None else round(found[last][0], 3),
    }


def speak(options: argparse.Namespace) -> None:
    """Interrupt some texts, and append the results to the file; texts that are in it are skipped."""
    lines = [line.strip() for line in options.texts.read_text(encoding="utf-8").splitlines() if line.strip()]
    texts = [" ".join(pair) for pair in zip(lines[::2], lines[1::2], strict=False)]
    done = {(row["number"], row["layout"]) for row in read_lines([options.raw])}
    numbers = range(len(texts))[options.first :][: options.count]
    wanted = [(number, layout) for number in numbers for layout in LAYOUTS if (number, layout) not in done]
    aligner = Aligner()
    with served(options.model) as address:
        for number, layout in wanted:
            add_lines(options.raw, [asyncio.run(interrupt(address, aligner, number, texts[number], layout))])


def figures(layout: str, rows: list[dict[str, Any]], most: int) -> dict[str, Any]:
    """How many of the first `most` interruptions in one layout told the aligned word, or a neighbour."""
    aligned = [row for row in rows if row["layout"] == layout and row["is_aligned"]]
    cut = aligned[:most]
    apart = [abs((-1 if row["told"] is None else row["told"]) - (-1 if row["found"] is None else row["found"]))
             for row in cut]  # fmt: skip
    return {
        "layout": layout,
        "texts": sum(row["layout"] == layout for row in rows),
        "aligned": len(aligned),
        "interruptions": len(cut),
        "before_all_was_sent": sum(row["was_cancelled"] for row in cut),
        "same_speech": sum(row["differs_by"] < 1e-3 for row in cut),
        "same_word": sum(each == 0 for each in apart),
        "same_or_neighbour": sum(each <= 1 for each in apart),
        "misses": [row for row, each in zip(cut, apart, strict=True) if each > 1],
    }


def report(options: argparse.Namespace) -> None:
    """Write the results of all raw lines."""
    rows = sorted(read_lines(options.raw), key=lambda row: row["number"])
    settings = {"texts": "everyday.txt, harvard.txt", "words_a_second": WORDS_A_SECOND, "aligner": "pocketsphinx"}
    found = [figures(layout, rows, options.most) for layout in LAYOUTS]
    finish(options, "interruptions", settings=settings, rows=found)


def main() -> None:
    """Run the step given on the command line."""
    steps = Steps(__doc__, report, speak=speak)
    steps.making.add_argument("texts", type=Path)
    steps.making.add_argument("--model")
    steps.take_some(20)
    steps.reporting.add_argument("--most", type=int, default=100)
    steps.run()


if __name__ == "__main__":
    main()
