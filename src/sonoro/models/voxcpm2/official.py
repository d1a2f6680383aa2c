"""Run a request with the official package, for `sonoro verify --reference`, in an interpreter that has it.

    python official.py FOLDER ASKED.json MADE.npz

`sonoro.profile.official` defines both files. Must not import sonoro, which that interpreter lacks; the official package
is imported on use."""

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch


def main() -> None:
    """Run the request ASKED.json from its noise, and write what `sonoro.profile.official` compares to MADE.npz."""
    folder, asked_file, made_file = sys.argv[1:]
    asked = json.loads(Path(asked_file).read_text(encoding="utf-8"))
    importlib.import_module("transformers")  # looks for torchaudio before there is a stand-in
    # Imported by the package, but used by an earlier model alone.
    sys.modules["torchaudio"] = types.ModuleType("torchaudio")
    official: Any = importlib.import_module("voxcpm.model.voxcpm2")
    with mock.patch.object(official, "get_dtype", return_value=torch.float32):
        model = official.VoxCPM2Model.from_local(folder, optimize=False, device=asked["device"])
    noise = iter(torch.tensor(asked["noise"], device=asked["device"]))
    positions, decisions = list[int](), list[torch.Tensor]()
    hooks = [
        model.base_lm.register_forward_pre_hook(
            lambda _, __, kwargs: positions.append(kwargs["inputs_embeds"].shape[1]), with_kwargs=True
        ),
        model.lm_to_dit_proj.register_forward_hook(lambda _, args, __: decisions.append(args[0][0].cpu())),
    ]
    text = f"({asked['instructions']}){asked['text']}" if asked["instructions"] else asked["text"]
    frames = asked["frames"]
    with mock.patch.object(torch, "randn", side_effect=lambda *_, **__: next(noise).T[None].contiguous()):
        audio, _, patches = model.generate_with_prompt_cache(text, None, max_len=frames, min_len=frames)
    for hook in hooks:
        hook.remove()
    np.savez(
        made_file,
        options=json.dumps({"min_len": frames}),
        positions=positions[0],
        decision=decisions[0].numpy(),
        frames=patches.float().cpu().numpy(),
        audio=audio.float().cpu().numpy().ravel(),
    )


if __name__ == "__main__":
    main()
