"""Run the official Pocket TTS package on tiny random checkpoints and store its results.

    python tools/reference/pocket_tts.py --out tests/assets/pocket_tts

Needs pocket-tts==4.0.1 (MIT; nothing of it is stored) in an environment of its own (requirements.txt beside this file).
Imports only the tests' checkpoint writer. The format is that of qwen3_tts.py beside it;
tests/support/tiny_pocket_lm.py defines the contents.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import yaml

# This file has the name of the package.
sys.path.remove(str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import tiny_pocket
from pocket_tts.data.audio_utils import end_on_pause
from pocket_tts.models.model_state import export_model_state
from pocket_tts.models.text_chunking import prepare_text_prompt, split_into_best_sentences
from pocket_tts.models.tts_model import TTSModel
from pocket_tts.modules.stateful_module import increment_steps, init_states
from safetensors.numpy import save_file
from safetensors.torch import load_file
from tiny_checkpoint import digest

Facts = dict[str, Any]

TEXT = "The quick brown fox, hello world"
WORDS = tiny_pocket._WORDS.split()
LONG = f"{' '.join(WORDS)}, {' '.join(WORDS[:30])}. {' '.join(WORDS[:9])}; {' '.join(WORDS[:5])}"
TEXTS = (
    "hello world", "Hello world", "hello, ", "yes (no)", '"hi?", she said', "one two three four five;", "yes…",
    "a  b   c\n\nd", "it’s 3.14 today. now go", "one. two! three? four... five", "hello -",
    "In 1999. 3 boxes. It is 4.", "ßa. ünder - the «fox» (or \"dog\") – is—here…", "Not. " * 30, LONG,
)  # fmt: skip
GERMAN = {'"': "", "„": "", "“": "", "«": "", "»": "", "(": "", ")": "", "–": ",", "—": ",", "’": "'"}
ENGLISH = {"’": "'", "‘": "'"}


def load(folder: Path, variant: str) -> Any:
    """The official model of a tiny checkpoint, as its loader makes it of a community's configuration."""
    tiny_pocket.write_checkpoint(folder, variant)
    values = tiny_pocket.config(variant)
    table = values["flow_lm"]["lookup_table"]
    table["tokenizer_path"] = str(folder / table["tokenizer_path"])
    values["weights_path"] = str(folder / "model.safetensors")
    (folder / "community.yaml").write_text(yaml.safe_dump(values))
    model = TTSModel.load_model(config=str(folder / "community.yaml"))
    return model.eval()


class Noise:
    """Stands for `torch.nn.init.normal_`: the noise of one frame after another; zeros for a prefill's, which is thrown
    away."""

    def __init__(self) -> None:
        self.left: list[torch.Tensor] = []

    def __call__(self, tensor: torch.Tensor, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
        return tensor.copy_(self.left.pop(0)[None] * std) if self.left else tensor.zero_()


@torch.no_grad()
def run(folder: Path, variant: str) -> tuple[Facts, dict[str, np.ndarray]]:
    """The voice of a recording, frames from given noise, and their audio."""
    model = load(folder, variant)
    lm, mimi, noise, out = model.flow_lm, model.mimi, Noise(), dict[str, torch.Tensor]()
    logits: list[torch.Tensor] = []
    lm.out_eos.register_forward_hook(lambda _, given, made: logits.append(torch.cat((made, given[0]), -1)))
    with mock.patch.object(torch.nn.init, "normal_", noise):
        sound = torch.from_numpy(tiny_pocket.sound())[None]
        trimmed = end_on_pause(sound, 24000)
        out["latents"] = mimi.encode_to_latent(trimmed[None])[0]
        state = model.get_state_for_audio_prompt(sound)
        export_model_state(state, folder / "state.safetensors")
        for name, tensor in load_file(folder / "state.safetensors").items():
            out[name.replace("/", "|")] = tensor
        text, _ = prepare_text_prompt(
            TEXT, model.pad_with_spaces_for_short_inputs, False, replace_characters=model.replace_characters
        )
        ids = lm.conditioner.prepare(text)
        out["ids"] = ids[0].int()
        model._expand_kv_cache(state, model._flow_lm_current_end(state) + ids.shape[1] + tiny_pocket.FRAMES)
        model._run_flow_lm_and_increment_step(state, text_tokens=ids)
        logits.clear()
        noise.left = list(torch.from_numpy(tiny_pocket.noise(variant)))
        latents = [torch.full((1, 1, lm.ldim), torch.nan)]
        for _ in range(tiny_pocket.FRAMES):
            latents.append(model._run_flow_lm_and_increment_step(state, backbone_input_latents=latents[-1])[0])
        out["frames"] = torch.cat(latents[1:], dim=1)[0]
        found = torch.cat(logits)
        out["logits"], out["hidden"] = found[:, 0], found[::20, 1:]
        normal = torch.cat(latents[1 : 1 + tiny_pocket.AUDIO_FRAMES], dim=1) * lm.emb_std + lm.emb_mean
        out["audio"] = decode(mimi, normal)
        # What the official loop keeps, from the same noise: with its end, and faded in.
        noise.left = [torch.zeros(lm.ldim), *torch.from_numpy(tiny_pocket.noise(variant))]
        spoken = model.generate_audio(model.get_state_for_audio_prompt(folder / "state.safetensors"), TEXT)
        # The first noise is the prompt's own.
    facts = {"text": TEXT, "prepared": text, "frames_spoken": len(spoken) // tiny_pocket.HOP}
    return facts, {name: tensor.numpy() for name, tensor in out.items()}


def decode(mimi: Any, latents: torch.Tensor) -> torch.Tensor:
    """The audio [S] of `latents` [1, T, D], one by one."""
    steps = int(mimi.encoder_frame_rate / mimi.frame_rate)
    state, made = init_states(mimi, 1, latents.shape[1] * steps), []
    for one in latents.split(1, dim=1):
        made.append(mimi.decode_from_latent(one, state))
        increment_steps(mimi, state, steps)
    return torch.cat(made, -1)[0, 0]


def texts(tokenizer: Any) -> list[Facts]:
    """Texts as they are prepared, and their chunks, by rules of several languages."""
    made = []
    for text in TEXTS:
        for padded, semicolons, table in ((True, False, ENGLISH), (False, True, GERMAN), (False, False, {})):
            prepared, frames = prepare_text_prompt(text, padded, semicolons, replace_characters=table)
            chunks = split_into_best_sentences(tokenizer, text, 50, padded, semicolons, replace_characters=table)
            rules = {"pad_with_spaces_for_short_inputs": padded, "remove_semicolons": semicolons}
            rules["replace_characters"] = table
            ids = [tokenizer(chunk)[0].tolist() for chunk in chunks]
            made.append({"name": str(len(made)), "text": text, "rules": rules, "prepared": prepared, "guess": frames})
            made[-1] |= {"chunks": chunks, "ids": ids}
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    target = parser.parse_args().out
    target.mkdir(parents=True, exist_ok=True)
    groups: dict[str, list[Facts]] = {"runs": []}
    tensors: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for variant in tiny_pocket.VARIANTS:
            facts, made = run(Path(scratch) / variant, variant)
            groups["runs"].append({"name": variant, **facts})
            tensors |= {f"{variant}/{name}": np.ascontiguousarray(value) for name, value in made.items()}
        official = TTSModel.load_model(config=str(Path(scratch) / "lsd" / "community.yaml"))
        groups["texts"] = texts(official.flow_lm.conditioner.tokenizer)
    save_file(tensors, target / "runs.safetensors")
    digests = {variant: digest(tiny_pocket.state_dict(variant)) for variant in tiny_pocket.VARIANTS}
    document = json.dumps({"digests": digests, "groups": groups}, ensure_ascii=False, indent=1)
    (target / "scenarios.json").write_text(document + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
