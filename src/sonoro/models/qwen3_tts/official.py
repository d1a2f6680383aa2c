"""What the official package makes of a request, for `sonoro verify --reference`: run by an interpreter that has it.

    python official.py FOLDER ASKED.json MADE.npz

`sonoro.profile.official` says what is asked and made. Knows nothing of sonoro, which that interpreter lacks; the
recipes in tools/reference are made of the same parts. Where it is only imported, the official package is not needed.
"""

from __future__ import annotations

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

__all__ = ["Run", "main", "official_package", "recorded"]

OPTIONS = {"subtalker_dosample": False, "non_streaming_mode": False}
"""What a request must say to be spoken as it is here."""


@dataclass
class Run:
    """What the official model consumed and computed for a batch: prompt and trailing text [n, H] and codes [T, K] by
    row, logits [B, V] of the talker by step, and of the predictor by step and then group."""

    prompts: list[np.ndarray] = field(default_factory=list)
    trails: list[np.ndarray] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)
    depth_logits: list[np.ndarray] = field(default_factory=list)
    codes: list[np.ndarray] = field(default_factory=list)


def official_package() -> Any:
    """The package `qwen_tts`, without what it imports for its 25 Hz tokenizer alone."""
    for stub in ("sox", "onnxruntime", "torchaudio", "torchaudio.compliance", "torchaudio.compliance.kaldi"):
        sys.modules[stub] = types.ModuleType(stub)
        sys.modules[stub].__spec__ = ModuleSpec(stub, None)
    return importlib.import_module("qwen_tts")


@contextmanager
def recorded(official: Any, run: Run) -> Iterator[None]:
    """Fill `run` from the calls of the talker within the block."""
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
    """Speak what is asked, greedily, and write what came of it."""
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
