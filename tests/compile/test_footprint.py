"""What an engine takes, told from its configuration: against what is allocated, and what is refused on small cards."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from families import TinyFamily, tiny
from sine_models import SineModel

from sonoro import engine_process
from sonoro.compile.footprint import Footprint, footprint, refuse_what_does_not_fit
from sonoro.core.config import EngineConfig, Tuning
from sonoro.core.errors import ConfigError
from sonoro.engine.device_state import capacity_of, graph_bytes, packed_batches
from sonoro.engine.runner import Runner
from sonoro.models import registry
from sonoro.ops.device import TYPICAL, Card, card
from sonoro.transport.messages import WorkerSettings

__all__ = ["tiny"]

GIB = 2**30
CONFIG = EngineConfig(slots=4, max_positions=256, max_frames=64, prefill_tokens=512, codec_dtype="float32")


@pytest.fixture(scope="module", autouse=True)
def _computed_once() -> Iterator[None]:
    """Tests of several cards look for what would fit among the same models and configurations."""
    found: dict[str, Footprint] = {}

    def kept(*asked: Any) -> Footprint:
        if (key := repr(asked)) not in found:
            found[key] = footprint(*asked)
        return found[key]

    with mock.patch("sonoro.compile.footprint.footprint", kept):
        yield


def nbytes(module: torch.nn.Module) -> int:
    tensors = [*module.parameters(), *module.buffers()]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def test_what_is_told_is_what_is_allocated(tiny: TinyFamily, tmp_path: Path) -> None:
    """On a CPU, where weights are laid out anew but take as much."""
    tiny.write(tmp_path)
    found, config = footprint(str(tmp_path), CONFIG), CONFIG.resolve()
    # Loaded anew: tensors of a copied model share no storage.
    model = registry.load(str(tmp_path), device="cpu", dtype="bfloat16").model
    capacity = capacity_of(config, config.slots * config.pages_per_slot)
    page_bytes = model.position_bytes * config.page_positions
    assert found.kv_cache == (capacity.pages + 1) * page_bytes
    assert found.least_pages == (config.pages_per_slot + 1) * page_bytes
    assert found.codec >= nbytes(model.codec)
    # The history is that of a codec in float32, as it was asked for.
    history = model.codec.allocate(config.slots)
    assert found.codec_histories == sum(one.nbytes for one in (*history.columns.values(), history.seen))
    assert found.slots > 0
    assert found.graphs > 0
    assert sum(found.parts.values()) == 2 * found.total


def test_graphs_of_a_codec_with_a_stream_of_its_own_are_counted() -> None:
    """Its own admit slots; a device of its own counts its own."""
    own, shared, apart = (
        graph_bytes(
            SineModel(), EngineConfig(slots=4, tuning=Tuning(codec_overlap=overlap), codec_device=device).resolve()
        )
        for overlap, device in ((256, ""), (0, ""), (256, "cuda:1"))
    )
    batches = len(EngineConfig(slots=4).resolve().frame_batches)
    assert own - shared == batches * 16 * 2**20
    assert apart == shared


def test_graphs_of_prompts_of_text_alone_are_counted() -> None:
    class TextModel(SineModel):
        """Has a cheaper prefill for prompts of text only."""

        prefill_text = SineModel.prefill

        def is_text_alone(self, prompts: list, pages: list) -> bool:
            return True

    config = EngineConfig(slots=4).resolve()
    more = graph_bytes(TextModel(), config) - graph_bytes(SineModel(), config)
    assert more == len(config.prefill_buckets) * 16 * 2**20


def test_steps_with_prompts_are_those_that_fill_a_gpu_and_the_largest() -> None:
    assert [packed_batches(EngineConfig(slots=slots).resolve()) for slots in (1, 64, 256, 384, 600)] == [
        [1],
        [64],
        [256],
        [256, 384],
        [256, 512, 600],
    ]


def test_weights_in_8_bits_slots_and_positions_are_counted(tiny: TinyFamily, tmp_path: Path) -> None:
    tiny.write(tmp_path)

    def told(**changes: object) -> Footprint:
        return footprint(str(tmp_path), EngineConfig(**{"slots": 4, "max_frames": 64, "max_positions": 256} | changes))

    plain, eight, more, longer = told(), told(quantization="fp8"), told(slots=8), told(max_positions=512)
    assert eight.weights < plain.weights
    assert (eight.kv_cache, eight.slots, eight.codec) == (plain.kv_cache, plain.slots, plain.codec)
    assert more.weights == longer.weights == plain.weights
    page = plain.least_pages // 9
    assert (more.kv_cache - plain.kv_cache, longer.least_pages - plain.least_pages) == (4 * 8 * page, 8 * page)
    assert more.slots > plain.slots
    assert more.codec_histories / plain.codec_histories == pytest.approx(9 / 5, rel=0.01)


def test_copies_for_large_batches_are_counted() -> None:
    """The 1.7B's depth model: 157 MB."""
    few, many = (
        footprint("qwen3-tts-1.7b-customvoice", EngineConfig(slots=slots, quantization="int8")) for slots in (16, 17)
    )
    assert many.weights - few.weights == 2 * 5 * 15 * 2**20


def test_the_floor_of_a_large_batch_counts_those_copies() -> None:
    """They are read once a pass, of which a frame has 15, in place of the weights in 8 bits."""
    how: dict[str, Any] = {"dtype": "bfloat16", "load_format": "dummy", "quantization": "int8"}
    model = registry.load("qwen3-tts-1.7b-customvoice", device=torch.device("meta"), **how).model
    with torch.inference_mode():
        model.allocate(capacity_of(EngineConfig(slots=17).resolve(), 1))
    few, many = (model.frame_bytes(batch, 0) for batch in (16, 17))
    assert many - few == 15 * 5 * 15 * 2**20


PROMISED = [
    ("qwen3-tts-1.7b-customvoice", "none", 6.5e9),
    ("qwen3-tts-1.7b-customvoice", "int8", 4.5e9),
    ("qwen3-tts-1.7b-customvoice", "fp8", 4.5e9),
    ("fish-s2-pro", "int8", 9e9),
    ("voxcpm2", "fp8", 6e9),
]
"""Bytes that an engine of four slots takes at most, at its peak, without the CUDA context."""


PEAK = """
import json, sys, torch
from sonoro.core.config import EngineConfig, Tuning
from sonoro.runtime.phases import Phases
from sonoro.engine.engine import Engine
from sonoro.models import registry

class Peaks(Phases):
    def end(self, name):
        peaks[name] = [torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()]
        torch.cuda.reset_peak_memory_stats()

(model, quantization), peaks, phases = sys.argv[1:], {}, Peaks()
loaded = registry.load(model, device="cuda", load_format="dummy", quantization=quantization)
phases.end("weights")
engine = Engine(loaded.model, EngineConfig(slots=4, quantization=quantization), phases=phases)
engine.voices.encoder.warm_up()
phases.end("voices")
print(json.dumps(peaks))
"""


@pytest.mark.gpu
@pytest.mark.parametrize(("model", "quantization", "limit_bytes"), PROMISED)
def test_four_slots_take_on_a_gpu_what_was_told(model: str, quantization: str, limit_bytes: float) -> None:
    """In a process of its own: what other tests keep is not counted. In each phase of a start, loading included."""
    process = subprocess.run(
        [sys.executable, "-c", PEAK, model, quantization], stdout=subprocess.PIPE, text=True, check=True
    )
    reserved_and_allocated = json.loads(process.stdout.splitlines()[-1])
    told = footprint(model, EngineConfig(slots=4, quantization=quantization)).total
    found = max(reserved for reserved, _ in reserved_and_allocated.values())
    print(model, quantization, reserved_and_allocated, told)
    assert found < limit_bytes, (reserved_and_allocated, told)
    assert found < 1.2 * told, (reserved_and_allocated, told)


@pytest.mark.parametrize(("model", "quantization", "limit_bytes"), [*PROMISED[:2], *PROMISED[3:]])
def test_four_slots_take_what_was_promised(model: str, quantization: str, limit_bytes: float) -> None:
    found = footprint(model, EngineConfig(slots=4, quantization=quantization))
    assert 0.4 * limit_bytes < found.total < limit_bytes


def test_a_card_that_is_too_small_is_told_what_would_fit() -> None:
    model, config = "qwen3-tts-1.7b-customvoice", EngineConfig(slots=16)
    # A made-up card of 4.75 GiB, of which nine tenths may be used: not enough in bfloat16 at any number of slots.
    with pytest.raises(ConfigError, match=r"memory_fraction.*are needed for slots=16 quantization=none") as refusal:
        refuse_what_does_not_fit(model, config, replace(TYPICAL[8, 6], name="RTX Small"), 19 * GIB // 4)
    # It has no units for fp8.
    assert str(refusal.value).endswith("RTX Small has; what would fit: slots=16 quantization=int8")
    with pytest.raises(ConfigError, match="what would fit: slots=16 quantization=int8 or slots=16 quantization=fp8"):
        refuse_what_does_not_fit(model, config, TYPICAL[8, 9], 19 * GIB // 4)
    # What fits is not refused, nor is anything looked at on a large card.
    refuse_what_does_not_fit(model, config, TYPICAL[8, 6], 24 * GIB)
    refuse_what_does_not_fit("no such model", config, TYPICAL[9, 0], 141 * GIB)


def test_a_fraction_makes_a_large_card_small() -> None:
    model, small = "voxcpm2", EngineConfig(slots=4, memory_fraction=0.01)
    needed = footprint(model, small).least
    refuse_what_does_not_fit(model, small, TYPICAL[9, 0], 101 * needed)
    with pytest.raises(ConfigError, match=r"what would fit: slots=4 quantization=fp8$"):
        refuse_what_does_not_fit(model, small, TYPICAL[9, 0], 70 * needed)
    # Without units for fp8 there is bfloat16 alone.
    with pytest.raises(ConfigError, match="nothing would fit"):
        refuse_what_does_not_fit(model, small, TYPICAL[8, 6], 70 * needed)


def test_shared_memory_is_capped_by_configuration(tiny: TinyFamily) -> None:
    model, config = tiny.load().model, EngineConfig(slots=2, max_positions=256, max_frames=64)
    for limit in (101_376, 65_536):
        Runner(model, EngineConfig(slots=2, max_positions=256, max_frames=64, max_shared_bytes=limit))
        assert card(torch.device("cpu")).shared_bytes == limit
    Runner(model, config)
    assert card(torch.device("cpu")).shared_bytes == Card().shared_bytes
    with pytest.raises(ConfigError, match="max_shared_bytes"):
        EngineConfig(max_shared_bytes=5)


def test_a_start_on_a_small_gpu_looks_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(engine_process, "card", lambda device: replace(TYPICAL[8, 9], name="RTX Small"))
    monkeypatch.setattr(engine_process, "device_memory", lambda device: (4 * GIB, 0))
    with pytest.raises(ConfigError, match=r"RTX Small.*what would fit: slots=4 quantization=fp8$"):
        engine_process.check_memory(WorkerSettings(model="voxcpm2", config=EngineConfig(slots=4)))
    # Other factories, and a CPU, have no such limit.
    engine_process.check_memory(WorkerSettings(model="voxcpm2", config=EngineConfig(slots=4), device="cpu"))
    engine_process.check_memory(WorkerSettings(model="voxcpm2", config=EngineConfig(slots=4), factory="other:load"))
