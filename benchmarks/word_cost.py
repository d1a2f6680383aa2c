"""Cost of word times: a model with watched heads in two layers against the same model with none.

    python benchmarks/word_cost.py --model qwen3-tts-1.7b-customvoice --load-format dummy --out results

`frame`: one frame from its graph, with all that the host reads of it, at each batch size and context; the prompt fills
the context, so a longer one has more text to watch. `engine`: clients in a closed loop, the time to their first packet
and all they are spoken; `chosen` watches for requests that ask for nothing, `asked` tells all of them their words, and
`again` is another engine like `none`: its cost is noise. All arms live side by side in one process and run in turn,
`--rounds` times, each time another first; figures are medians of the rounds, `cost` is that of a round's arms over one
another. Writes words-cost-<model>.json and ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from arms import TEXT, speak
from sonoro.core.config import EngineConfig, Tuning
from sonoro.core.errors import ConfigError
from sonoro.engine.engine import Engine
from sonoro.models import registry
from sonoro.models.base import LoadedModel
from sonoro.models.shared.codec_choice import dtype_name
from sonoro.models.words import ShowsWords
from sonoro.profile.frame import GRAPH_REPEATS, WARM_UPS, Script, TimedBatch
from sonoro.profile.report import Report
from sonoro.words.heads import WordHeads
from sonoro.words.tracking import Pointing


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="as sonoro serve takes it; the built-in voice if none")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--parts", nargs="+", choices=("frame", "engine"), default=None)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--context", type=int, nargs="+", default=[192, 512], help="positions attended to")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--frames", type=int, default=40, help="of a request")
    parser.add_argument("--requests", type=int, default=4, help="of each client in a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--commit", help="what is run, where there is no checkout to ask")
    parser.add_argument("--out", type=Path, default=Path("results"))
    return parser.parse_args(argv)


def two_layers(model: ShowsWords) -> WordHeads:
    """One head in each of two layers, a third from either end of the stack."""
    layers, heads = model.attention_heads
    first = Pointing(layer=layers // 3, head=0)
    return WordHeads(text_first=first, text_along=Pointing(layer=layers - 1 - layers // 3, head=heads - 1))


def costs(measured: dict[str, list[float]], name: str) -> dict[str, Any]:
    """Median times of the arms, and the cost of each over `none` in percent: median, minimum and maximum over
    rounds."""
    row: dict[str, Any] = {f"{arm}_{name}": statistics.median(values) for arm, values in measured.items()}
    for arm, values in measured.items():
        if arm != "none":
            found = [100 * (one / none - 1) for one, none in zip(values, measured["none"], strict=True)]
            row[f"{arm}_cost_percent"] = statistics.median(found)
            row[f"{arm}_cost_range"] = {"least": min(found), "most": max(found)}
    return row


def kernels_of(call: Callable[[], Any], device: torch.device) -> int | None:
    """Number of kernels that `call` launches; None without a GPU."""
    if device.type != "cuda":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize(device)
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def time_frames(loaded: LoadedModel, heads: dict[str, WordHeads], args: argparse.Namespace, report: Report) -> None:
    """Time frames: adds a row for each context and batch size."""
    model, is_eager = loaded.model, loaded.device.type != "cuda"
    assert isinstance(model, ShowsWords)
    stepped = args.rounds * (GRAPH_REPEATS + WARM_UPS) + 2
    for context, batch in itertools.product(args.context, args.batch):
        script, arms = Script.of(model, context, stepped), {}
        for arm, watched in heads.items():
            model.word_heads = watched
            arms[arm] = TimedBatch(loaded, script, batch, is_eager=is_eager)
        measured: dict[str, list[float]] = {arm: [] for arm in arms}
        for _, (arm, timed) in itertools.product(range(args.rounds), arms.items()):
            measured[arm].append(timed.graph_ms())
        row = {"part": "frame", "batch": batch, "context": context, "text": len(model.token_spans(script.text))}
        kernels = {arm: kernels_of(timed.step, loaded.device) for arm, timed in arms.items()}
        report.add(row | costs(measured, "ms") | {"kernels": kernels})
        del arms, timed
        gc.collect()
        if not is_eager:
            torch.cuda.empty_cache()


def time_engines(loaded: LoadedModel, heads: dict[str, WordHeads], args: argparse.Namespace, report: Report) -> None:
    """Time engines: adds a row for each number of clients."""
    model, slots, numbers = loaded.model, max(args.concurrency), itertools.count()
    assert isinstance(model, ShowsWords)
    config = EngineConfig(slots=slots, max_positions=512, max_frames=256, prefill_tokens=2048)
    # As many pages as all slots can use: two engines share the card.
    config = EngineConfig(
        slots=slots,
        max_positions=512,
        max_frames=256,
        pages=slots * config.pages_per_slot,
        frame_batches=tuple(sorted(set(args.concurrency))),
        codec_batches=tuple(sorted(set(args.concurrency))),
        tuning=Tuning(finds_word_heads=False),
    )
    arms: dict[str, tuple[Engine, bool]] = {}
    for arm, watched in {"none": heads["none"], "again": heads["none"], "chosen": heads["chosen"]}.items():
        model.word_heads = watched
        arms[arm] = (Engine(model, config), False)
    model.word_heads = heads["chosen"]
    arms["asked"] = (arms["chosen"][0], True)
    for clients in args.concurrency:
        first: dict[str, list[float]] = {arm: [] for arm in arms}
        whole: dict[str, list[float]] = {arm: [] for arm in arms}
        for turn, at in itertools.product(range(args.rounds + 1), range(len(arms))):
            arm = [*arms][(turn + at) % len(arms)]
            engine, asked = arms[arm]
            found = speak(engine, numbers, clients, args.requests, TEXT, args.frames, with_words=asked)
            if turn:  # the first warms up
                first[arm].append(found["first_audio_p50_ms"])
                whole[arm].append(found["latency_mean_ms"])
        for name, measured in (("first packet", first), ("request", whole)):
            report.add({"part": name, "concurrency": clients} | costs(measured, "ms"))


PARTS = {"frame": time_frames, "engine": time_engines}


def main(argv: Sequence[str] = sys.argv[1:]) -> int:
    args = arguments(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    loaded = registry.load(args.model, device=args.device, load_format=args.load_format)
    model = loaded.model
    if not isinstance(model, ShowsWords):
        raise ConfigError("model", model.spec.name, "it cannot show what its attention looks at")
    heads = {"none": WordHeads(), "chosen": two_layers(model)}
    settings = {key: value for key, value in vars(args).items() if key not in ("out", "commit")}
    stream = torch.cuda.Stream(loaded.device) if loaded.device.type == "cuda" else None
    if stream is not None:
        torch.cuda.synchronize(loaded.device)  # the weights were made on another stream
    report = Report(
        {"bench": "word_cost", "model": model.spec.name, "dtype": dtype_name(loaded.dtype)},
        is_gpu=stream is not None,
        settings=settings | {"heads": [f"layer {layer} head {head}" for layer, head in heads["chosen"].places]},
        commit=args.commit,
        out=args.out / f"words-cost-{model.spec.name}.json",
    )
    with torch.inference_mode(), torch.cuda.stream(stream):
        model.codec.settle("auto", 4, (1, 4, 12))
        for part in args.parts or PARTS:
            PARTS[part](loaded, heads, args, report)
    report.finish(f"{model.spec.name}: what watching two layers costs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
