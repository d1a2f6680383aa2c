"""The SnakeBeta table: the shapes are the released codec's, and what cannot run here says so."""

import json
import math
from importlib import resources

import pytest
import torch

from snake import BATCHES, CHUNK_FRAMES, SHAPES, compare


def test_the_shapes_are_those_of_the_released_decoder() -> None:
    text = (resources.files("sonoro.models.qwen3_tts") / "configs" / "speech_tokenizer.json").read_text()
    config = json.loads(text)["decoder_config"]
    width, columns, shapes = config["decoder_dim"], math.prod(config["upsampling_ratios"]), []
    for rate in config["upsample_rates"]:
        shapes.append((width, columns))
        width, columns = width // 2, columns * rate
        shapes += [(width, columns)] * 6
    shapes.append((width, columns))
    assert len(shapes) == 29
    assert {(channels, frame): shapes.count((channels, frame)) for channels, frame in shapes} == {
        (channels, frame): count for channels, frame, count in SHAPES
    }


def check(rows: list[dict], batch: int, ways: tuple[str, ...]) -> None:
    *single, total = [row for row in rows if row["batch"] == batch]
    assert [(row["channels"], row["columns"] // CHUNK_FRAMES, row["count"]) for row in single] == list(SHAPES)
    assert total["count"] == 29
    for name in ways:
        assert total[name] == pytest.approx(sum(row["count"] * row[name] for row in single))
    # 2 x 4 bytes an element, at 1 GB/s.
    elements = sum(channels * columns * count for channels, columns, count in SHAPES) * CHUNK_FRAMES * batch
    assert total["floor_us"] == pytest.approx(8 * elements / 1e9 * 1e6)


def test_a_cpu_runs_the_separate_operations_alone() -> None:
    with torch.inference_mode():
        rows = compare(torch.device("cpu"), 1e9)
    check(rows, 1, ("torch_us",))
    assert len(rows) == len(SHAPES) + 1
    assert all(row["triton_us"] is None and row["compile_us"] is None for row in rows)


@pytest.mark.gpu
def test_a_gpu_runs_the_kernel() -> None:
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
        rows = compare(torch.device("cuda"), 1e9)
    for batch in BATCHES:
        check(rows, batch, ("torch_us", "triton_us"))
        assert rows[-1]["triton_us"] < rows[-1]["torch_us"]
