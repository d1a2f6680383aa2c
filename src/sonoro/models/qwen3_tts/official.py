"""Run a request with the official package, for `sonoro verify --reference`, in an interpreter that has it.

    python official.py FOLDER ASKED.json MADE.npz

`sonoro.profile.official` defines both files. Must not import sonoro, which that interpreter lacks; the official package
is imported on use, so that tools/reference can import this module."""

import importlib
import json
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import torch

OPTIONS = {"subtalker_dosample": False, "non_streaming_mode": False}
"""Request options under which sonoro does the same."""


@dataclass
class Run:
    """Inputs and outputs of the official model for a batch: by request the prompt and trailing text [n, H] and the
    codes [T, K]; by step the talker's logits [B, V]; by step, then codebook, the predictor's logits [B, V]."""

    prompts: list[np.ndarray] = field(default_factory=list)
    trails: list[np.ndarray] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)
    depth_logits: list[np.ndarray] = field(default_factory=list)
    codes: list[np.ndarray] = field(default_factory=list)


def official_package() -> Any:
    """Import the package `qwen_tts`, with stubs for the dependencies of its 25 Hz tokenizer."""
    for stub in ("sox", "onnxruntime", "torchaudio", "torchaudio.compliance", "torchaudio.compliance.kaldi"):
        sys.modules[stub] = types.ModuleType(stub)
        sys.modules[stub].__spec__ = ModuleSpec(stub, None)
    return importlib.import_module("qwen_tts")


@contextmanager
def recorded(official: Any, run: Run) -> Iterator[None]:
    """A context in which calls of the talker are recorded in `run`."""
    talker = official.model.talker

    def before_talker(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
        if kwargs["inputs_embeds"] is not None and kwargs["inputs_embeds"].shape[1] > 1:
            masks = kwargs["attention_mask"].bool()
            run.prompts = [_array(rows[mask]) for rows, mask in zip(kwargs["inputs_embeds"], masks, strict=True)]
            run.trails = [_array(rows) for rows in kwargs["trailing_text_hidden"]]

    def after_head(_: Any, __: Any, output: torch.Tensor) -> None:
        run.logits.append(_array(output[:, -1]))

    def after_depth_head(_: Any, __: Any, output: torch.Tensor) -> None:
        run.depth_logits.append(_array(output[:, -1]))

    hooks = [
        talker.register_forward_pre_hook(before_talker, with_kwargs=True),
        talker.codec_head.register_forward_hook(after_head),
        *(head.register_forward_hook(after_depth_head) for head in talker.code_predictor.lm_head),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()


def main() -> None:
    """Run the request ASKED.json greedily, and write prompt length, first logits, frames and audio to MADE.npz."""
    folder, asked_file, made_file = sys.argv[1:]
    asked = json.loads(Path(asked_file).read_text(encoding="utf-8"))
    package, device = official_package(), asked["device"]
    official = package.Qwen3TTSModel.from_pretrained(folder, dtype=torch.float32, device_map=device)

    def ids(text: str) -> torch.Tensor:
        return official._tokenize_texts([text])[0].view(1, -1).to(device)

    instructions = asked["instructions"]
    run = Run()
    with recorded(official, run), torch.inference_mode():
        codes, _ = official.model.generate(
            input_ids=[ids(official._build_assistant_text(asked["text"]))],
            instruct_ids=[ids(official._build_instruct_text(instructions)) if instructions else None],
            languages=[asked["language"]],
            speakers=[asked["voice"]],
            non_streaming_mode=OPTIONS["non_streaming_mode"],
            do_sample=False,
            subtalker_dosample=False,
            repetition_penalty=asked["repetition_penalty"],
            max_new_tokens=asked["frames"] + 1,
        )
        (audio,), _ = official.model.speech_tokenizer.decode([{"audio_codes": codes[0]}])
    np.savez(
        made_file,
        options=json.dumps(OPTIONS),
        positions=len(run.prompts[0]),
        decision=run.logits[0][0],
        frames=_array(codes[0]),
        audio=np.asarray(audio, dtype=np.float32),
    )


if __name__ == "__main__":
    main()
