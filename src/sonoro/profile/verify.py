"""`sonoro verify`: every check of one model on one machine, as a table and a file; to be run first with released
weights.

A failed check does not stop the others."""

import gc
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from torch import nn

from sonoro.audio.files import write_audio
from sonoro.audio.pcm import from_pcm16
from sonoro.compile.compiler import compiling
from sonoro.core.config import EngineConfig
from sonoro.core.errors import EngineError, border
from sonoro.core.types import AudioChunk, Failed, Finished, SpeechRequest
from sonoro.engine.engine import Engine
from sonoro.models import registry
from sonoro.models.base import CodecChoice, LoadedModel
from sonoro.models.shared.codec_choice import LEAST_DB, dtype_name, no_tf32, peaks, snr_db
from sonoro.ops.dispatch import Operation, fallbacks, references_alone
from sonoro.profile import official
from sonoro.profile.report import Report
from sonoro.profile.requests import Subject, speech_request
from sonoro.profile.spoken import CHUNK_FRAMES, SLOTS, Spoken, allocate, speak
from sonoro.profile.timing import on_stream
from sonoro.transport.messages import WorkerSettings

PASSED, FAILED, REPORTED, LEFT_OUT = "passed", "FAILED", "reported", "left out"

SENTENCES = (
    "The birch canoe slid on the smooth planks.",
    "Glue the sheet to the dark blue background.",
    "It is easy to tell the depth of a well.",
)
BATCHES = (1, SLOTS)
"""Batch sizes at which the kernels of a frame are checked."""

FRAMES = 12
"""Frames of each sentence in comparisons."""

SAME_DB = 60.0
"""Least SNR, in dB, of float32 kernels against their references: they sum in other orders."""

FRAME_DB = {torch.bfloat16: 10.0, torch.float32: SAME_DB}
"""Least SNR, in dB, of the first decision. In bfloat16 rounding grows through the layers; a wrong kernel gives 0."""

SHOWN_PEAKS = 5

CONFIG = EngineConfig(
    slots=SLOTS, frame_batches=BATCHES, codec_batches=BATCHES, prefill_buckets=(128,), chunk_frames=(1, CHUNK_FRAMES)
)


@dataclass(frozen=True)
class Verification(Subject):
    """The options of `sonoro verify`."""

    codec_dtype: str = "auto"
    reference: str | None = None


def run(wanted: Verification) -> dict[str, Any]:
    """Run all checks, print and write the report, and return it.
    Raises `EngineError` at the end if a check failed: a kernel disagrees with its reference, a sample is not finite, a
    graph differs from eager, frames differ from the official ones in float32, or a check raised. Errors of loading are
    raised at once."""
    started_s = time.perf_counter()
    quantization = wanted.quantization or "none"
    config = replace(CONFIG, codec_dtype=wanted.codec_dtype, quantization=quantization)
    how: dict[str, Any] = {"device": wanted.device, "load_format": wanted.load_format}
    with compiling(WorkerSettings(model=wanted.model, dtype=wanted.dtype, config=config, **how)):
        loaded = registry.load(wanted.model, dtype=wanted.dtype, quantization=quantization, **how)
    out = wanted.out or Path(f"verify-{loaded.model.spec.name}.json")
    report = _report(wanted, loaded, out)
    checks = _Checks(report, loaded, config, out, started_s)
    spoken = checks.run()
    if loaded.dtype == torch.float32:
        checks.compare_with_official(loaded, wanted)
    other = torch.bfloat16 if loaded.dtype == torch.float32 else torch.float32
    is_wide, parameters = other == torch.float32, sum(loaded.parameters.values())
    device = loaded.device
    del loaded, checks.loaded
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    with checks.kept("bfloat16 and float32"):
        short_gib = _missing_gib(parameters, device) if is_wide else 0.0
        if short_gib > 0:
            checks.note("bfloat16 and float32", LEFT_OUT, f"float32 needs {short_gib:.1f} GiB more than are free")
        elif spoken is not None:
            again = registry.load(wanted.model, dtype=dtype_name(other), quantization=quantization, **how)
            checks.compare(spoken, again)
            if is_wide:
                checks.compare_with_official(again, wanted)
    values = report.finish(f"verify {report.top['model']}")
    failed = [f"{row['check']}: {row['found']}" for row in report.rows if row["outcome"] == FAILED]
    if failed:
        raise EngineError("verify: " + "; ".join(failed))
    return values


def _report(wanted: Verification, loaded: LoadedModel, out: Path) -> Report:
    top = {"bench": "verify", "model": loaded.model.spec.name, "arm": "graph", "dtype": dtype_name(loaded.dtype)}
    is_gpu = loaded.device.type == "cuda"
    report = Report(top, is_gpu=is_gpu, settings=wanted.settings, commit=wanted.commit, out=out)
    report.top["skipped"] = list(loaded.skipped)
    return report


def _missing_gib(parameters: int, device: torch.device) -> float:
    """GiB missing on the card for `parameters` float32 parameters plus a fifth; negative if they fit."""
    if device.type != "cuda":
        return 0.0
    return (4.8 * parameters - torch.cuda.mem_get_info(device)[0]) / 2**30


class _Checks:
    """The checks of one loaded model; each adds one or two rows to `report`."""

    def __init__(self, report: Report, loaded: LoadedModel, config: EngineConfig, out: Path, started_s: float) -> None:
        self.report, self.loaded, self.config, self.out = report, loaded, config, out
        self._before = {operation: operation.failure for operation in Operation.known}
        self._choice: CodecChoice | None = None
        self._noted_s = started_s

    def note(self, check: str, outcome: str, found: str) -> None:
        """Add a row: outcome and finding of a check, and the seconds since the one before."""
        now_s = time.perf_counter()
        self.report.add({"check": check, "outcome": outcome, "found": found, "seconds": now_s - self._noted_s})
        self._noted_s = now_s

    def kept(self, check: str) -> AbstractContextManager[None]:
        """A context for a check: an exception fails it and is not raised."""
        return border(lambda error: self.note(check, FAILED, " ".join(f"{type(error).__name__}: {error}".split())))

    def run(self) -> Spoken | None:
        """Run the checks in the model's dtype; returns the eager results, for `compare`."""
        loaded, spoken = self.loaded, None
        self.note("load", PASSED, f"{sum(loaded.parameters.values()):,} parameters on {loaded.device}")
        names = ", ".join(loaded.skipped[:6]) + ", ..." * (len(loaded.skipped) > 6)
        self.note("tensors skipped", REPORTED, f"{len(loaded.skipped)}" + f": {names}" * bool(names))
        with on_stream(loaded.device), no_tf32():
            with self.kept("codec"):
                self._settle()
            with self.kept("graph and eager"):
                spoken = self._graphs()
            with self.kept("frame kernels"):
                self._frame_kernels(spoken)
            with self.kept("codec kernels"):
                self._codec_kernels(spoken)
            with self.kept("kernels"):
                self._kernels()
        with self.kept("sentences"):
            self._sentences()
        return spoken

    def compare(self, spoken: Spoken, other: LoadedModel) -> None:
        """Compare `spoken` with `other`, the same model in another dtype, on the same requests and frames."""
        # References alone, so that no kernel of that dtype is compiled.
        with on_stream(other.device), no_tf32(), references_alone():
            other.model.codec.settle("float32", 1, (1,))
            again, codec = speak(other, _requests(other), FRAMES), other.model.codec
            ratios = [snr_db(*pair) for pair in zip(spoken.decisions, again.decisions, strict=True)]
            equal = (spoken.frames == again.frames).flatten(2).all(2).long().cumprod(1).sum(1).tolist()
            frame_db = snr_db(spoken.frames[:, :1], again.frames[:, :1])
            found = peaks(cast(nn.Module, codec), lambda: codec.decode(spoken.frames.to(other.device)))
            audio_db = snr_db(spoken.audio, codec.decode(spoken.frames.to(other.device)).cpu())
        self.report.top["first_decision_db"], self.report.top["equal_frames"] = ratios[0], equal
        self.report.top["spoken_peaks"] = {peak.layer: peak.value for peak in found[:SHOWN_PEAKS]}
        pair = f"{self.report.top['dtype']} and {dtype_name(other.dtype)}"
        how = f"first frame {frame_db:.1f} dB" if spoken.frames.is_floating_point() else f"equal frames {equal}"
        what = f"{pair}: first decision {ratios[0]:.1f} dB, {how} of {FRAMES}"
        self.note("bfloat16 and float32", REPORTED, what)
        peak = f"peak of these frames {found[0].value:.4g} in {found[0].layer}"
        self.note("codec and float32", REPORTED, f"the same frames as audio {audio_db:.1f} dB; {peak}")

    def compare_with_official(self, wide: LoadedModel, wanted: Verification) -> None:
        """Compare `wide`, in float32, with the official package: prompts, greedy frames and audio."""
        if wanted.reference is None:
            return
        folder = registry.locate(wanted.model)
        reason = official.why_not(wide)
        if folder is None or wanted.load_format == "dummy":
            reason = "random weights have no files that it could read"
        if reason:
            self.note("official package", LEFT_OUT, reason)
            return
        assert folder is not None
        with self.kept("official package"), on_stream(wide.device), no_tf32(), references_alone():
            wide.model.codec.settle("float32", 1, (1,))
            found = official.compare(wide, folder, wanted.reference, SENTENCES[0], FRAMES)
            self.report.top["official"] = asdict(found)
            what = (
                f"prompt of {found.positions[0]} and {found.positions[1]} positions, first decision "
                f"{found.decision_db:.1f} dB, {found.equal_frames} of {found.frames} greedy frames equal, audio "
                f"{found.audio_db:.1f} dB"
            )
            self.note("official package", PASSED if found.is_same else FAILED, what)

    def _settle(self) -> None:
        """Settle the codec. Float16 with enough headroom but low SNR against float32 means a wrong kernel."""
        choice = self.loaded.model.codec.settle(self.config.codec_dtype, SLOTS, self.config.chunk_frames)
        self._choice = choice
        self.report.top["codec"] = {
            "dtype": dtype_name(choice.dtype),
            "reason": choice.reason,
            "tried": choice.tried,
            "tried_db": choice.tried_db,
            "peaks": {peak.layer: peak.value for peak in choice.peaks[:SHOWN_PEAKS]},
        }
        is_wrong = choice.tried == "float16" and choice.dtype != torch.float16
        self.note("codec", FAILED if is_wrong else REPORTED, str(choice))

    def _graphs(self) -> Spoken:
        """Compare graphs with eager launches, bit for bit, at the same padded size."""
        requests = _requests(self.loaded)
        graph, eager = (speak(self.loaded, requests, FRAMES, is_eager=is_eager) for is_eager in (False, True))
        is_same = torch.equal(graph.frames, eager.frames) and torch.equal(graph.audio, eager.audio)
        bits = "the same bits" if is_same else f"audio {snr_db(graph.audio, eager.audio):.1f} dB apart"
        what = f"{len(SENTENCES)} sentences of {FRAMES} frames, {graph.captured} graphs: {bits}"
        if graph.uncaptured:
            what += f"; not captured: {'; '.join(graph.uncaptured)}"
        self.note("graph and eager", PASSED if is_same and not graph.uncaptured else FAILED, what)
        return eager

    def _frame_kernels(self, spoken: Spoken | None) -> None:
        """Compare the first decision by kernels with that by references, through all layers and a whole prompt."""
        if spoken is None:
            raise EngineError("nothing was spoken to compare")
        with references_alone():
            again = speak(self.loaded, _requests(self.loaded), FRAMES)
        found_db, least_db = snr_db(spoken.decisions[0], again.decisions[0]), FRAME_DB[self.loaded.dtype]
        what = f"first decision {found_db:.1f} dB from that of their references (at least {least_db:g})"
        self.note("frame kernels", PASSED if found_db >= least_db else FAILED, what)

    def _codec_kernels(self, spoken: Spoken | None) -> None:
        """Compare the codec's kernels with their references on the model's frames; all samples must be finite."""
        if spoken is None or self._choice is None:
            raise EngineError("nothing was spoken to check them with")
        codec, frames = self.loaded.model.codec, spoken.frames.to(self.loaded.device)
        audio = codec.decode(frames)
        with references_alone():
            ratio_db = snr_db(audio, codec.decode(frames))
        least_db = LEAST_DB.get(self._choice.dtype, SAME_DB)
        broken = int((~spoken.audio.isfinite()).sum())
        what = f"{ratio_db:.1f} dB from their references (at least {least_db:g}), {broken} samples not finite"
        self.note("codec kernels", PASSED if ratio_db >= least_db and not broken else FAILED, what)

    def _kernels(self) -> None:
        """Compare every kernel of a frame with its reference on these weights; report those that failed earlier too."""
        for operation in Operation.known:
            operation.difference = None  # of an earlier check in this process
        for batch in BATCHES:
            self.loaded.model.check_kernels(allocate(self.loaded, FRAMES), batch)
        checked = {op.name: op.difference for op in Operation.known if op.difference is not None}
        failed = {op.name: op.failure for op in Operation.known if op.failure != self._before.get(op, "")}
        self.report.top["kernels"], self.report.top["fallbacks"] = checked, fallbacks()
        if failed:
            self.note("kernels", FAILED, "; ".join(f"{name}: {why}" for name, why in failed.items()))
        elif checked:
            difference, name = max((difference, name) for name, difference in checked.items())
            agree = f"{len(checked)} agree with their references; furthest {name}, {difference:.2g} of the largest"
            self.note("kernels", PASSED, agree)
        else:
            self.note("kernels", LEFT_OUT, "there is no GPU: the references serve")

    def _sentences(self) -> None:
        """Speak the sentences with an engine, to their ends, and write them to files."""
        engine, spec = Engine(self.loaded.model, self.config), self.loaded.model.spec
        wanted = [msgspec.structs.replace(one, ignore_eos=False, max_frames=None) for one in _requests(self.loaded)]
        for request in wanted:
            engine.submit(request)
        events = []
        while engine.has_work:
            events += engine.tick()
        ends = [event for event in events if isinstance(event, Finished | Failed)]
        problems = [event.facts.message for event in ends if isinstance(event, Failed)]
        if engine.output.broken_samples:
            problems.append(f"{engine.output.broken_samples} samples are not finite")
        lengths_s = []
        for number, request in enumerate(wanted, 1):
            chunks = [event.pcm for event in events if isinstance(event, AudioChunk) and event.request_id == request.id]
            samples = from_pcm16(b"".join(chunks))
            write_audio(self.out.with_name(f"{self.out.stem}-{number}.wav"), samples, spec.sample_rate)
            lengths_s.append(round(len(samples) / spec.sample_rate, 2))
        reasons = [event.reason for event in ends if isinstance(event, Finished)]
        what = f"{lengths_s} s ({', '.join(reasons)}) in {self.out.stem}-1.wav and so on"
        self.note("sentences", FAILED if problems else PASSED, "; ".join([what, *problems]))


def _requests(loaded: LoadedModel) -> list[SpeechRequest]:
    return [speech_request(loaded.model.spec, number, text, FRAMES) for number, text in enumerate(SENTENCES)]
