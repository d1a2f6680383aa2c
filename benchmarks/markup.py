"""CPU time to read the markup and lexicons of texts, and the memory after many requests with lexicons of their own.

    python benchmarks/markup.py --out results.json

Times are of the process's CPU, the best of several rounds; memory is resident, after a tenth of the requests and after
all. No engine runs.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import random
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sonoro.bench.machine import processor
from sonoro.core.errors import InvalidRequest
from sonoro.core.types import ModelSpec, SamplingParams, SpeechRequest
from sonoro.text.script import Lexicon, lexicon_of, scripted
from sonoro.text.script.live_lexicon import LiveLexicons

SPEC = ModelSpec(
    name="none",
    sample_rate=24000,
    hop=1920,
    max_frames=1000,
    voice_modes=("named",),
    voices=("nora", "hugh"),
    languages=("auto", "english"),
    sampling=SamplingParams(),
)
PROSE = "The birch canoe slid on the smooth planks, and it takes heat to bring out the odor of old beer. "
LONG = 4096
PLAIN = {
    "prose": PROSE,
    "prose with brackets": f"See [1] and [note] in a < b, c > d. {PROSE}",
    "Markdown": "See [the guide](https://example.com/a/b/c) for `code`. ",
    "HTML": "<p>A <b>bold</b> word.</p>",
    "< alone": "<",
    "[ alone": "[",
    "a backslash alone": "\\",
    "breaks never closed": 'x <break time="1s" ',
    "pauses never closed": "x [pause:1 ",
    "phonemes never closed": "[a](/x",
}
PARAGRAPHS = f'<p>{PROSE * 5}<sub alias="world wide web">W3C</sub> {PROSE * 4}</p><break time="1s"/>'
LAID_OUT = PARAGRAPHS.replace(". ", ".\n    ").replace("smooth", "“smooth”").replace("><", ">\n  <")
MARKED = {
    "one break in 200 characters": f'{PROSE}<break time="1s"/>{PROSE}',
    "two pauses in 200 characters": f"{PROSE[:60]}[pause:1s]{PROSE}[pause:500ms]{PROSE[:20]}",
    "SSML of 200 characters": f'<speak>{PROSE}<break time="1s"/>{PROSE}</speak>',
    "one break in 4,000 characters": f'{PROSE * 20}<break time="1s"/>{PROSE * 20}',
    "SSML of 4,000 characters": f"<speak>{PROSE * 40}</speak>",
    "the same with 12 elements": f"<speak>{PARAGRAPHS * 4}</speak>",
    "the same on 41 lines, with curly quotes": f"<speak>\n{LAID_OUT * 4}</speak>",
    "200 breaks": 'x<break time="1s"/>' * 200,
    "SSML of 400 sentences": f"<speak>{'<s>Hi</s>' * 400}</speak>",
}


def least_ms(work: Callable[[], object], rounds: int, least_s: float = 0.001) -> float:
    """The least CPU time of a call, over `rounds` of at least `least_s`."""
    calls, best = 1, float("inf")
    for _ in range(rounds):
        while True:
            begun_s = time.process_time()
            for _ in range(calls):
                work()
            if (took_s := time.process_time() - begun_s) >= least_s:
                break
            calls *= 2
        best = min(best, took_s / calls)
    return 1000 * best


def reads(text: str, lexicons: Sequence[Lexicon] = ()) -> Callable[[], object]:
    request = SpeechRequest(id="", text=text, on_markup="plain")

    def work() -> None:
        with contextlib.suppress(InvalidRequest):  # more pauses than ten minutes
            scripted(request, SPEC, lexicons)

    return work


def rows(rounds: int) -> list[dict[str, Any]]:
    """The time of each text: without markup, with markup, and with lexicons."""
    chance = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    large = lexicon_of({"".join(chance.choices(letters, k=chance.randint(4, 12))): "x" for _ in range(20_000)})
    small = lexicon_of({"SQL": "sequel", "W3C": "world wide web"})
    texts = [("plain", name, f"x{text * LONG}"[:LONG], ()) for name, text in PLAIN.items()]
    texts += [("marked", name, text, ()) for name, text in MARKED.items()]
    texts += [("lexicon of 2 rules", "prose", (PROSE * LONG)[:LONG], (small,))]
    texts += [("lexicon of 20,000 rules", "prose", (PROSE * LONG)[:LONG], (large,))]
    made = []
    for part, name, text, lexicons in texts:
        took_ms = round(least_ms(reads(text, lexicons), rounds), 4)
        tags = len(re.findall(r"<[a-z]|\[pause", text)) if part == "marked" else 0
        made.append({"part": part, "text": name, "characters": len(text), "tags": tags, "cpu_ms": took_ms})
        print(f"{part:24} {name:40} {len(text):5} {tags:4} {took_ms:9.4f} ms", flush=True)
    return made


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return round(pages * 4096 / 2**20, 1)


def memory(requests: int) -> dict[str, Any]:
    """The resident memory after a tenth of `requests`, each with 50 rules of its own, whole and live, and after all."""
    chance, told = random.Random(0), {}
    for number in range(1, requests + 1):
        rules = {f"word{chance.randrange(10**6)}": "other" for _ in range(50)}
        lexicon = lexicon_of({**rules, "SQL": "sequel"})
        text = f'SQL number {number}.<break time="1s"/>And SQL.'
        assert scripted(SpeechRequest(id="", text=text), SPEC, [lexicon]).script is not None
        live = LiveLexicons([lexicon], "auto")
        assert sum(len(said) for _, said in [*map(live.append, text), live.end()]) == 2
        if number in (requests // 10, requests):
            gc.collect()
            told[f"mib_after_{number}"] = resident_mib()
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    settings = {"rounds": options.rounds, "requests": options.requests}
    results = {"settings": settings, "machine": processor(), "rows": rows(options.rounds)}
    results["memory"] = memory(options.requests)
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
