"""What the judges share: audio at 16 kHz, and their graphs on one thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import soxr

JUDGE_HZ = 16_000


class Graph(Protocol):
    """What is used of an `onnxruntime.InferenceSession`."""

    def run(self, names: None, inputs: dict[str, np.ndarray]) -> list[np.ndarray]: ...

    def get_outputs(self) -> list[Any]: ...


def to_judge(samples: np.ndarray, sample_rate: int) -> np.ndarray:
    """`samples` [S] float32 in [-1, 1] at 16 kHz."""
    return soxr.resample(samples, sample_rate, JUDGE_HZ).astype(np.float32)


def graph(path: Path) -> Graph:
    """The graph in a file, on one thread of the CPU: processes of their own use the other cores."""
    import onnxruntime  # noqa: PLC0415 - of those who judge alone

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    found: Graph = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return found
