"""Run a request with the official package, for `sonoro verify --reference`, in an interpreter that has it.

    python official.py FOLDER ASKED.json MADE.npz

`sonoro.profile.official` defines both files. Must not import sonoro, which that interpreter lacks; the official package
is imported on use."""

import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import yaml

_FADE_SAMPLES = 120


def _load(official: Any, folder: Path) -> Any:
    """The official model of `folder`: its configuration, or the package's own, with the files in it."""
    file = folder / "config.yaml"
    given = file if file.is_file() else official.CONFIGS_DIR / f"{folder.resolve().name}.yaml"
    values = yaml.safe_load(given.read_text(encoding="utf-8"))
    table = values["flow_lm"]["lookup_table"]
    table["tokenizer_path"] = str(
        next(folder.glob("tokenizer.json" if table["tokenizer"] == "tokenizers" else "*.model"))
    )
    values["weights_path"] = str(folder / "model.safetensors")
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as written:
        yaml.safe_dump(values, written)
        written.flush()
        return official.TTSModel.load_model(config=written.name).eval()


@torch.no_grad()
def main() -> None:
    """Run the request ASKED.json from its noise, and write what `sonoro.profile.official` compares to MADE.npz."""
    folder, asked_file, made_file = map(Path, sys.argv[1:])
    asked = json.loads(asked_file.read_text(encoding="utf-8"))
    official: Any = importlib.import_module("pocket_tts.models.tts_model")
    model = _load(official, folder)
    lm, left, hidden = model.flow_lm, list[torch.Tensor](), list[torch.Tensor]()
    lm.out_eos.register_forward_hook(lambda _, given, __: hidden.append(given[0][0]))

    def normal(tensor: torch.Tensor, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
        return tensor.copy_(left.pop(0) * std) if left else tensor.zero_()

    ends = model.append_terminal_punctuation, model.capitalize_first_letter, model.replace_characters
    spaces, semicolons = model.pad_with_spaces_for_short_inputs, model.remove_semicolons
    text, _ = official.prepare_text_prompt(asked["text"], spaces, semicolons, *ends)
    with mock.patch.object(torch.nn.init, "normal_", normal):
        state = model.get_state_for_audio_prompt(folder / "embeddings" / f"{asked['voice']}.safetensors")
        ids = lm.conditioner.prepare(text)
        positions = model._flow_lm_current_end(state) + ids.shape[1]
        model._expand_kv_cache(state, positions + asked["frames"])
        step = model._run_flow_lm_and_increment_step
        step(state, text_tokens=ids)
        hidden.clear()
        left += torch.tensor(asked["noise"])
        latents = [torch.full((1, 1, lm.ldim), torch.nan)]
        for _ in range(asked["frames"]):
            latents.append(step(state, backbone_input_latents=latents[-1])[0])
    frames = torch.cat(latents[1:], dim=1) * lm.emb_std + lm.emb_mean
    columns = asked["frames"] * int(model.mimi.encoder_frame_rate / model.mimi.frame_rate)
    audio = model.mimi.decode_from_latent(frames, official.init_states(model.mimi, 1, columns))[0, 0]
    audio[:_FADE_SAMPLES] *= torch.linspace(0, 1, _FADE_SAMPLES)
    options = json.dumps({"eos_threshold": 100.0})
    made = {"decision": hidden[0].flatten(), "frames": frames[0, :, None], "audio": audio}
    arrays = {name: tensor.numpy() for name, tensor in made.items()}
    np.savez(made_file, allow_pickle=False, options=options, positions=positions + 1, **arrays)


if __name__ == "__main__":
    main()
