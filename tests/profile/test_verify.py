"""`sonoro verify`: every check of a model, and that each thing that is wrong with one gives another exit code."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from families import FAMILIES
from processes import Run, sonoro
from safetensors.torch import load_file, save_file

from sonoro.core.types import SamplingParams, SpeechRequest
from sonoro.models import registry
from sonoro.ops import dispatch
from sonoro.ops.dispatch import Operation
from sonoro.profile import spoken, verify
from sonoro.runtime.graphs import GraphSet

__all__ = ["sonoro"]

CHECKS = {
    "load": "passed",
    "tensors skipped": "reported",
    "codec": "reported",
    "graph and eager": "passed",
    "frame kernels": "passed",
    "codec kernels": "passed",
    "kernels": "left out",
    "sentences": "passed",
    "bfloat16 and float32": "reported",
    "codec and float32": "reported",
}


@pytest.fixture(scope="module", params=["builtin", *FAMILIES])
def named(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The built-in voice, and the folder of each tiny checkpoint."""
    if request.param == "builtin":
        return "builtin"
    folder = tmp_path_factory.mktemp(request.param)
    FAMILIES[request.param].write(folder)
    return str(folder)


FRAMES = 4


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sentences that end after a few frames, and fewer compared: for what is found in any."""
    monkeypatch.setattr(verify, "SENTENCES", ("Go.", "It is.", "A well."))
    monkeypatch.setattr(verify, "FRAMES", FRAMES)
    monkeypatch.setattr(verify, "CONFIG", replace(verify.CONFIG, max_frames=3 * FRAMES))


@pytest.fixture
def tiny(tmp_path: Path, brief: None) -> str:
    FAMILIES["talker"].write(tmp_path / "tiny")
    return str(tmp_path / "tiny")


def verified(sonoro: Run, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """The exit code, the report, and what was said of what is wrong."""
    code, out, err = sonoro("verify", *arguments, "--device", "cpu", "-o", "report.json")
    report = json.loads(Path("report.json").read_text())
    assert json.loads(out.splitlines()[-1]) == report
    return code, report, err


def outcomes(report: dict[str, Any]) -> dict[str, str]:
    return {row["check"]: row["outcome"] for row in report["rows"]}


def test_a_model_that_is_right_passes(sonoro: Run, named: str, request: pytest.FixtureRequest) -> None:
    """The built-in voice speaks whole sentences; tiny checkpoints say nothing longer than a few frames."""
    if named != "builtin":
        request.getfixturevalue("brief")
    code, report, err = verified(sonoro, named)
    assert (code, err, outcomes(report)) == (0, "", CHECKS)
    assert report["bench"] == "verify"
    assert report["codec"]["dtype"] == "float32"
    assert max(report["spoken_peaks"].values()) > 1
    assert report["first_decision_db"] > 20
    for number in (1, 2, 3):
        samples, _ = soundfile.read(f"report-{number}.wav")
        assert len(samples)
        assert np.isfinite(samples).all()


@pytest.mark.usefixtures("brief")
def test_the_codec_is_judged_in_the_dtype_that_is_asked_for(sonoro: Run, named: str) -> None:
    code, report, _ = verified(sonoro, named, "--codec-dtype", "float16")
    assert code == 0
    assert report["codec"]["dtype"] == report["codec"]["tried"] == "float16"
    assert report["codec"]["tried_db"] >= 40
    assert max(report["codec"]["peaks"].values()) > 1


def test_a_kernel_that_disagrees_is_named(sonoro: Run, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose kernels are the references here, but for one."""

    def wrong(operation: Operation) -> Callable[..., Any]:
        def kernel(*arguments: Any, **options: Any) -> Any:
            return torch.utils._pytree.tree_map(lambda made: made * 1.5, operation.reference(*arguments, **options))

        return kernel

    monkeypatch.setattr(dispatch, "_is_launched", lambda x: True)
    for operation in Operation.known:
        is_wrong = operation.name == "decode_attention"
        monkeypatch.setattr(operation, "kernel", wrong(operation) if is_wrong else operation.reference)
        for name, value in (("is_broken", False), ("disagreement", ""), ("fallbacks", {}), ("difference", None)):
            monkeypatch.setattr(operation, name, value)
    code, report, err = verified(sonoro, tiny)
    assert code == 1
    assert outcomes(report)["kernels"] == "FAILED"
    assert "decode_attention: status=disagrees" in err


@pytest.mark.parametrize(("layer", "value"), [("6.conv", np.nan), ("4.block.4.conv2.conv", np.inf)])
def test_a_sample_that_is_not_finite_is_found(sonoro: Run, tiny: str, layer: str, value: float) -> None:
    file = Path(tiny) / "speech_tokenizer/model.safetensors"
    tensors = load_file(file)
    tensors[f"decoder.decoder.{layer}.bias"].fill_(value)
    save_file(tensors | {"decoder.freqs_cis": torch.ones(3)}, file)
    code, report, err = verified(sonoro, tiny)
    assert report["skipped"] == ["decoder.freqs_cis"]
    assert code == 1
    assert outcomes(report)["sentences"] == "FAILED"
    assert "samples are not finite" in err


@pytest.mark.parametrize("kind", ["frame", "codec"])
def test_a_graph_that_differs_is_found(sonoro: Run, tiny: str, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    class Differing(GraphSet):
        """From graphs the codec is run twice for a launch, or a frame's first launch does nothing."""

        def __init__(self, *given: Any, is_eager: bool, **more: Any) -> None:
            super().__init__(*given, is_eager=is_eager, **more)
            self.wrong = "" if is_eager or self.name != kind else kind

        def run(self, rows: Any) -> Any:
            wrong, self.wrong = self.wrong, ""
            if wrong == "frame":
                return None
            return [super(Differing, self).run(rows) for _ in range(1 + (wrong == "codec"))][-1]

    monkeypatch.setattr(spoken, "GraphSet", Differing)
    code, report, err = verified(sonoro, tiny)
    assert code == 1
    assert outcomes(report)["graph and eager"] == "FAILED"
    assert "dB apart" in err


def test_what_cannot_be_loaded_is_said_in_one_line(sonoro: Run, tmp_path: Path) -> None:
    code, out, err = sonoro("verify", str(tmp_path))
    assert (code, out) == (2, "")
    assert "config.json does not exist" in err


@pytest.fixture
def reference(tmp_path: Path) -> Callable[..., str]:
    """An interpreter whose official package makes what this one makes of the same request, but for what is changed."""

    def make(folder: str, script: str = "", **changes: Any) -> str:
        loaded = registry.load(folder, device="cpu", dtype="float32")
        spec, is_patch = loaded.model.spec, spoken.allocate(loaded, 1).frames.is_floating_point()
        # Fish S2 Pro has no options of its own.
        options = {"min_len": FRAMES} if is_patch else {"subtalker_dosample": False, "non_streaming_mode": False}
        options = {option.name: options[option.name] for option in spec.options if option.name in options}
        asked = SpeechRequest(
            id="official", text=verify.SENTENCES[0], voice=spec.voices[0] if spec.voices else None, options=options,
            max_frames=FRAMES, language="english" if "english" in spec.languages else "auto",
            instructions="A calm voice." if is_patch else None,
            sampling=SamplingParams(temperature=None if is_patch else 0.0),
        )  # fmt: skip
        with torch.inference_mode():
            loaded.model.codec.settle("float32", 1, (1,))
            made = spoken.speak(loaded, [spec.resolve(asked)], FRAMES)
            audio = loaded.model.codec.decode(made.frames)[0]
        results = {"frames": made.frames[0].numpy(), "audio": audio.numpy(), "decision": made.decisions[0][0].numpy()}
        facts = {"positions": made.positions[0], "options": json.dumps(options)}
        np.savez(tmp_path / "made.npz", **(results | facts | changes))
        fake = tmp_path / "python"
        copies = f"import shutil, sys\n{script}\nshutil.copy({str(tmp_path / 'made.npz')!r}, sys.argv[-1])\n"
        fake.write_text(f"#!{sys.executable}\n{copies}")
        fake.chmod(0o755)
        return str(fake)

    return make


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("family", ["talker", "dual_ar", "patches"])
def test_the_official_package_agrees(sonoro: Run, tmp_path: Path, reference: Callable[..., str], family: str) -> None:
    FAMILIES[family].write(tmp_path / family)
    code, report, _ = verified(sonoro, str(tmp_path / family), "--reference", reference(str(tmp_path / family)))
    assert code == 0
    assert outcomes(report)["official package"] == "passed"
    assert report["official"]["equal_frames"] == report["official"]["frames"] == FRAMES


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"frames": np.zeros((FRAMES, 4), dtype=np.int64)}, f"0 of {FRAMES} greedy frames equal"),
        ({"positions": 99}, "and 99 positions"),
        ({"script": "sys.exit('no such package')"}, "the official package failed: no such package"),
    ],
)
def test_the_official_package_disagrees(
    sonoro: Run, tiny: str, reference: Callable[..., str], changed: dict[str, Any], words: str
) -> None:
    code, report, err = verified(sonoro, tiny, "--reference", reference(tiny, **changed))
    assert code == 1
    assert outcomes(report)["official package"] == "FAILED"
    assert words in err


def test_what_has_no_files_has_no_official_package(sonoro: Run, tiny: str) -> None:
    code, report, _ = verified(sonoro, tiny, "--load-format", "dummy", "--reference", "/nowhere/python")
    assert code == 0
    assert outcomes(report)["official package"] == "left out"


def test_float32_that_does_not_fit_is_left_out(sonoro: Run, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_missing_gib", lambda parameters, device: 1.5)
    code, report, _ = verified(sonoro, tiny, "--dtype", "bfloat16")
    assert code == 0
    assert outcomes(report)["bfloat16 and float32"] == "left out"
    assert "float32 needs 1.5 GiB more than are free" in str(report["rows"])
