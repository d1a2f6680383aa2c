"""Run a request with the official code, for `sonoro verify --reference`, in an interpreter that has it.

    python official.py FOLDER ASKED.json MADE.npz

`sonoro.profile.official` defines both files. Must not import sonoro, which that interpreter lacks; the official code
(fish_speech, under the Fish Audio Research License) is imported on use."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch


def main() -> None:
    """Run the request ASKED.json greedily, and write prompt length, first logits, frames and audio to MADE.npz."""
    folder, asked_file, made_file = sys.argv[1:]
    asked = json.loads(Path(asked_file).read_text(encoding="utf-8"))
    official: Any = importlib.import_module("fish_speech.models.text2semantic.inference")
    model, decode = official.init_model(folder, asked["device"], torch.float32)
    step, positions, decisions = model.forward_generate, list[int](), list[torch.Tensor]()

    def recorded(tokens: torch.Tensor, *args: Any, **options: Any) -> Any:
        result = step(tokens, *args, **options)
        positions.append(tokens.shape[-1])
        decisions.append(result.logits[0, -1].float().cpu())
        return result

    with (
        mock.patch.object(official.Conversation, "visualize"),
        mock.patch.object(official, "multinomial_sample_one_no_sync", lambda p: p.argmax(dim=-1, keepdim=True).int()),
        mock.patch.object(model, "forward_generate", recorded),
    ):
        made = official.generate_long(
            model=model,
            device=asked["device"],
            decode_one_token=decode,
            text=asked["text"],
            # The official caller drops the last frame.
            max_new_tokens=asked["frames"] + 1,
        )
        codes = next(response.codes for response in made if response.action == "sample")
    codec = official.load_codec_model(str(Path(folder) / "codec.pth"), asked["device"], torch.float32)
    end = model.tokenizer.get_token_id(official.IM_END_TOKEN)
    ids = [*range(model.config.semantic_begin_id, model.config.semantic_end_id + 1), end]
    np.savez(
        made_file,
        options=json.dumps({}),
        positions=positions[0],
        decision=decisions[0][ids].numpy(),
        frames=codes.T.cpu().numpy().astype(np.int64),
        audio=official.decode_to_audio(codes, codec).float().cpu().numpy(),
    )


if __name__ == "__main__":
    main()
