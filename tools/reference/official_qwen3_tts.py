"""Load the official Qwen3-TTS package from tiny checkpoints, and record its generation.

Runs only in the environment of requirements.txt, beside this file. Imports only the tests' checkpoint writer and the
recorder of `sonoro verify`.
"""

import importlib.metadata
import importlib.util
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import tiny_checkpoint  # noqa: E402 (the path to it is set just above)

_spec = importlib.util.spec_from_file_location("official", ROOT / "src/sonoro/models/qwen3_tts/official.py")
assert _spec is not None
assert _spec.loader is not None
_watching = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _watching
_spec.loader.exec_module(_watching)
Run, recorded = _watching.Run, _watching.recorded
Qwen3TTSModel = _watching.official_package().Qwen3TTSModel

Tensors = dict[str, np.ndarray]
Facts = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """One utterance. `ref_frames` > 0 asks for in-context cloning with that many random reference frames."""

    name: str
    variant: str
    topology: str
    text: str
    language: str = "english"
    speaker: str | None = None
    instruct: str | None = None
    ref_text: str | None = None
    ref_frames: int = 0

    @property
    def mode(self) -> str:
        return self.variant if self.variant != "base" else "in_context" if self.ref_frames else "x_vector"


class Store:
    """Collects cases and writes them out."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensors] = {}
        self.facts: dict[str, list[Facts]] = {}
        self.digests: dict[str, list[str]] = {}

    def add(self, group: str, name: str, facts: Facts, tensors: Tensors) -> None:
        self.facts.setdefault(group, []).append({"name": name, **facts})
        target = self.tensors.setdefault(group, {})
        target.update({f"{name}/{key}": np.ascontiguousarray(value) for key, value in tensors.items()})

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for group, tensors in self.tensors.items():
            if tensors:
                save_file(tensors, folder / f"{group}.safetensors")
        packages = ("qwen-tts", "transformers", "torch", "numpy")
        versions = {package: importlib.metadata.version(package) for package in packages}
        document = {"versions": versions, "digests": self.digests, "groups": self.facts}
        text = json.dumps(document, ensure_ascii=False, indent=1)
        (folder / "scenarios.json").write_text(text + "\n", encoding="utf-8")


class Official:
    """Cache of official models by variant, topology and spread of Snake parameters, loaded from the released layout."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.models: dict[tuple[str, str, float], Qwen3TTSModel] = {}

    def get(self, variant: str, topology: str, snake_std: float = 0.1) -> Qwen3TTSModel:
        key = (variant, topology, snake_std)
        if key not in self.models:
            self.models[key] = self._load(*key)
        return self.models[key]

    def _load(self, variant: str, topology: str, snake_std: float) -> Qwen3TTSModel:
        with tempfile.TemporaryDirectory() as folder:
            tiny_checkpoint.write_checkpoint(folder, variant=variant, topology=topology, snake_std=snake_std)
            official = Qwen3TTSModel.from_pretrained(folder, dtype=torch.float32)
        main, codec = tiny_checkpoint.state_dicts(variant, topology, snake_std=snake_std)
        check_loaded(official.model, main)
        check_loaded(official.model.speech_tokenizer.model, codec)
        label = f"{variant}/{topology}/{snake_std}"
        self.store.digests[label] = [tiny_checkpoint.digest(tensors) for tensors in (main, codec)]
        official.model.eval()
        official.model.speech_tokenizer.model.eval()
        return official


def check_loaded(model: torch.nn.Module, expected: Tensors) -> None:
    """Raise unless the model holds exactly the tensors of the file, by name and value."""
    state = model.state_dict()
    if state.keys() != expected.keys():
        raise RuntimeError(f"tensor names differ: {sorted(state.keys() ^ expected.keys())}")
    for name, tensor in state.items():
        if not np.array_equal(tensor.numpy(), expected[name]):
            raise RuntimeError(f"tensor {name} was not loaded as written")


def reference_tensors(request: Request) -> Tensors:
    """Random reference codes [R, K] int64 and x-vector [H] float32 of a Base request."""
    if request.variant != "base":
        return {}
    random = np.random.default_rng(len(request.text) + request.ref_frames)
    tensors: Tensors = {"x_vector": random.standard_normal(32).astype(np.float32)}
    if request.ref_frames:
        shape = (request.ref_frames, tiny_checkpoint.NUM_GROUPS)
        tensors["ref_codes"] = random.integers(0, tiny_checkpoint.NUM_CODES, shape)
    return tensors


def token_ids(official: Qwen3TTSModel, request: Request) -> dict[str, list[int] | None]:
    """Ids of the official templates around text, instruction and reference transcript."""

    def encode(text: str) -> list[int]:
        ids: list[int] = official._tokenize_texts([text])[0][0].tolist()
        return ids

    return {
        "ids": encode(official._build_assistant_text(request.text)),
        "instruct_ids": encode(official._build_instruct_text(request.instruct)) if request.instruct else None,
        "ref_ids": encode(official._build_ref_text(request.ref_text)) if request.ref_text else None,
    }


def generate(official: Qwen3TTSModel, requests: list[Request], non_streaming: bool, **kwargs: Any) -> Run:
    """One call of the official `generate` over a batch; greedy unless `kwargs` say otherwise."""
    ids = [token_ids(official, request) for request in requests]

    def column(key: str) -> list[torch.Tensor | None]:
        return [None if row[key] is None else torch.tensor([row[key]]) for row in ids]

    arguments: Facts = {"do_sample": False, "subtalker_dosample": False, **kwargs}
    if requests[0].variant == "base":
        references = [reference_tensors(request) for request in requests]
        codes = [torch.from_numpy(tensors["ref_codes"]) if "ref_codes" in tensors else None for tensors in references]
        arguments["ref_ids"] = column("ref_ids")
        arguments["voice_clone_prompt"] = {
            "ref_code": codes,
            "ref_spk_embedding": [torch.from_numpy(tensors["x_vector"]) for tensors in references],
            "x_vector_only_mode": [code is None for code in codes],
            "icl_mode": [code is not None for code in codes],
        }
    run = Run()
    with recorded(official, run):
        codes_out, _ = official.model.generate(
            input_ids=column("ids"),
            instruct_ids=column("instruct_ids"),
            languages=[request.language for request in requests],
            speakers=[request.speaker for request in requests],
            non_streaming_mode=non_streaming,
            **arguments,
        )
    run.codes = [codes.numpy() for codes in codes_out]
    return run
