"""Run the official VoxCPM2 language models and flow on a tiny random checkpoint and store their results.

    python tools/reference/voxcpm2.py --out tests/assets/voxcpm2

Needs voxcpm==2.0.3 (Apache License 2.0; nothing of it is stored) in an environment of its own (requirements.txt beside
this file). Imports only the tests' checkpoint writer. The format is that of qwen3_tts.py beside it;
tests/support/tiny_vox_lm.py defines the contents.
"""

import argparse
import contextlib
import io
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

os.environ |= {"TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}

import numpy as np
import torch
import transformers  # noqa: F401 (looks for torchaudio before there is a stand-in)
from safetensors.numpy import save_file
from tokenizers import Tokenizer

# Imported by the package, but used by an earlier model alone.
sys.modules["torchaudio"] = types.ModuleType("torchaudio")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import tiny_vox  # noqa: E402
from tiny_checkpoint import digest  # noqa: E402
from voxcpm.model import voxcpm2 as official  # noqa: E402

Facts = dict[str, Any]
Tensors = dict[str, np.ndarray]

FRAMES = 8
TEXTS = {
    "english": "Hello world, this is the voice that was in the light.",
    "chinese": "你好，世界！请这是测试 mixed 文本。",
    "controlled": "(A soft, slow voice)你好 world.",
}
MODES: dict[str, tuple[str, str, int, int]] = {
    "zero_shot": ("english", "", 0, 0),
    "zero_shot_chinese": ("chinese", "", 0, 0),
    "zero_shot_controlled": ("controlled", "", 0, 0),
    "continuation": ("english", "It's not the time to speak.", 5, 0),
    "continuation_chinese": ("chinese", "你", 3, 0),
    "reference": ("english", "", 0, 6),
    "reference_controlled": ("controlled", "", 0, 4),
    "both": ("english", "It's not the time.", 4, 7),
}
"""By name: the text, the transcript, and the numbers of patches to continue and to imitate."""

RUNS = ("zero_shot", "continuation", "reference", "both")


class Words:
    """A stand-in tokenizer with the methods that the official wrapper calls."""

    def __init__(self) -> None:
        self.own = Tokenizer.from_str(json.dumps(tiny_vox.tokenizer()))
        self.vocab = self.own.get_vocab()

    def tokenize(self, text: str) -> list[str]:
        return self.own.encode(text, add_special_tokens=False).tokens

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int]:
        return [self.vocab.get(token, 0) for token in tokens]


class Store:
    """Collects cases and writes them out."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensors] = {}
        self.groups: dict[str, list[Facts]] = {}
        self.digests: dict[str, str] = {}

    def add(self, group: str, name: str, facts: Facts, tensors: Tensors) -> None:
        self.groups.setdefault(group, []).append({"name": name, **facts})
        stored = self.tensors.setdefault(group, {})
        stored.update({f"{name}/{key}": np.ascontiguousarray(value) for key, value in tensors.items()})

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for group, tensors in self.tensors.items():
            save_file(tensors, folder / f"{group}.safetensors")
        text = json.dumps({"digests": self.digests, "groups": self.groups}, ensure_ascii=False, indent=1)
        (folder / "scenarios.json").write_text(text + "\n", encoding="utf-8")


def load(store: Store, stop: str, dtype: str = "float32") -> Any:
    """The official model with the tiny weights; raises if one was not loaded."""
    values = tiny_vox.config() | {"dtype": dtype}
    vae = official.AudioVAEV2(official.AudioVAEConfigV2(**values["audio_vae_config"]))
    with contextlib.redirect_stderr(io.StringIO()):
        model = official.VoxCPM2Model(official.VoxCPMConfig(**values), Words(), vae)
    tensors = tiny_vox.state_dict(stop)
    store.digests[stop] = digest(tensors)
    left = model.load_state_dict({name: torch.from_numpy(value) for name, value in tensors.items()}, strict=False)
    if left.unexpected_keys or any(not name.startswith("audio_vae.") for name in left.missing_keys):
        raise RuntimeError(f"not loaded: {left}")
    model = model.to(getattr(torch, dtype)).eval()
    model.audio_vae = model.audio_vae.float()
    return model


def prompt_of(name: str) -> tuple[str, Facts | None, Tensors]:
    """The text of a mode, the official prompt cache of its recordings, and the recordings."""
    text, transcript, continued, sounded_like = MODES[name]
    cache: Facts = {}
    made: Tensors = {}
    if sounded_like:
        made["reference"] = tiny_vox.recording(sounded_like, sounded_like)
        cache["ref_audio_feat"] = torch.from_numpy(made["reference"])
    if continued:
        made["prompt"] = tiny_vox.recording(continued, continued)
        cache |= {"prompt_text": transcript, "audio_feat": torch.from_numpy(made["prompt"])}
    modes = {(True, True): "ref_continuation", (True, False): "reference", (False, True): "continuation"}
    if cache:
        cache["mode"] = modes[bool(sounded_like), bool(continued)]
    return TEXTS[text], cache or None, made


def given(model: Any, text: str, cache: Facts | None) -> tuple[Tensors, int]:
    """The official inputs for `text`: ids, masks and patches of its prompt, and the limit on frames."""
    asked: list[Any] = []

    def inference(*args: Any, **settings: Any) -> Iterator[Any]:
        asked.append((args, settings))
        patches = torch.zeros(1, tiny_vox.LATENTS, tiny_vox.PATCH)
        yield patches, patches, 0

    with mock.patch.object(model, "_inference", inference):
        model.generate_with_prompt_cache(text, cache)
    ((ids, text_mask, patches, audio_mask), settings) = asked[0]
    rows = {"ids": ids, "text_mask": text_mask, "audio_mask": audio_mask, "patches": patches}
    return {key: value[0].numpy() for key, value in rows.items()}, settings["max_len"]


def store_prompts(store: Store, model: Any) -> None:
    for name in MODES:
        text, cache, made = prompt_of(name)
        rows, limit = given(model, text, cache)
        facts = {"text": text, "transcript": MODES[name][1], "limit": limit, "earlier": []}
        store.add("prompts", name, facts, made | {key: rows[key] for key in rows if key != "patches"})
    for name in ("zero_shot", "continuation", "both"):
        text, cache, made = prompt_of(name)
        earlier = ["你好，世界！", "这是测试。"]
        for index, said in enumerate(earlier):
            made[f"earlier_{index}"] = tiny_vox.recording(20 + index, 3 + index)
            cache = model.merge_prompt_cache(cache, said, torch.from_numpy(made[f"earlier_{index}"]))
        rows, limit = given(model, text, cache)
        facts = {"text": text, "transcript": MODES[name][1], "limit": limit, "earlier": earlier}
        store.add("prompts", f"{name}_chained", facts, made | {key: rows[key] for key in rows if key != "patches"})


@torch.inference_mode()
def store_modules(store: Store, model: Any) -> None:
    """Store the results of each module: on patches, on mixed text and audio tokens, of one call and of whole solver
    runs."""
    draw = torch.Generator().manual_seed(0)
    patches = torch.randn(7, tiny_vox.PATCH, tiny_vox.LATENTS, generator=draw)
    width = tiny_vox.config()["lm_config"]["hidden_size"]
    hidden = torch.randn(9, width, generator=draw)
    tensors = {"patches": patches, "hidden": hidden}
    tensors["encoded"] = model.feat_encoder(patches[None])[0]
    tensors["quantised"] = model.fsq_layer(hidden)
    tensors["stop"] = model.stop_head(model.stop_actn(model.stop_proj(hidden)))
    tensors["base"] = model.base_lm(inputs_embeds=hidden[None], is_causal=True)[0][0]
    tensors["residual"] = model.residual_lm(inputs_embeds=hidden[None], is_causal=True)[0][0]
    store.add("modules", "parts", {}, {key: value.numpy() for key, value in tensors.items()})
    dit = model.feat_decoder
    mu = torch.randn(3, 2 * tiny_vox.config()["dit_config"]["hidden_dim"], generator=draw)
    cond, noise = (torch.randn(3, tiny_vox.PATCH, tiny_vox.LATENTS, generator=draw) for _ in range(2))
    time = torch.tensor([0.9531, 0.3, 0.0])
    velocity = dit.estimator(noise.mT, mu, time, cond.mT, torch.zeros(3)).mT
    flow = {"mu": mu, "cond": cond, "noise": noise, "time": time, "velocity": velocity}
    store.add("modules", "call", {}, {key: value.numpy() for key, value in flow.items()})
    for steps, cfg in ((2, 2.0), (3, 1.0), (6, 3.0), (10, 1.0), (10, 2.0), (10, 3.5)):
        with mock.patch.object(torch, "randn", return_value=noise.mT.contiguous()):
            made = dit(mu=mu, n_timesteps=steps, patch_size=tiny_vox.PATCH, cond=cond.mT.contiguous(), cfg_value=cfg)
        store.add("modules", f"sampler_{steps}_{cfg}", {"steps": steps, "cfg": cfg}, {"made": made.mT.numpy()})


@torch.inference_mode()
def store_times(store: Store, dtype: str) -> None:
    """Store times, step sizes and time embeddings of the calls for every number of steps, in `dtype`, as float32."""
    dit = load(store, "random", dtype).feat_decoder
    for steps in range(2, 11):
        times: list[torch.Tensor] = []
        tokens: list[torch.Tensor] = []
        with (
            recorded(dit.estimator, lambda args, _, times=times: times.append(args[2][0])),
            recorded(dit.estimator.decoder, lambda args, _, tokens=tokens: tokens.append(args[0][0, 2])),
        ):
            sizes = torch.stack([size_of_call(dit, getattr(torch, dtype), steps, call) for call in range(steps - 1)])
        calls = slice(steps - 1)
        made = {"times": torch.stack(times[calls]), "tokens": torch.stack(tokens[calls]), "sizes": sizes}
        store.add("times", f"{dtype}_{steps}", {}, {key: value.float().numpy() for key, value in made.items()})


def size_of_call(dit: Any, dtype: torch.dtype, steps: int, chosen: int) -> torch.Tensor:
    """Step size of a call: the result from zero noise with velocity one in this call and zero in all others."""
    calls: list[int] = []

    def velocity(_: Any, __: Any, result: torch.Tensor) -> torch.Tensor:
        calls.append(len(calls))
        return torch.full_like(result, float(calls[-1] == chosen))

    shape, hook = (1, tiny_vox.LATENTS, tiny_vox.PATCH), dit.estimator.register_forward_hook(velocity)
    mu, nothing = torch.zeros(1, 64, dtype=dtype), torch.zeros(shape, dtype=dtype)
    with mock.patch.object(torch, "randn", return_value=nothing):
        made = dit(mu=mu, n_timesteps=steps, patch_size=tiny_vox.PATCH, cond=nothing, cfg_value=1.0)
    hook.remove()
    return -made[0, 0, 0]


@contextmanager
def recorded(module: Any, keep: Callable[[Any, Any], None]) -> Iterator[None]:
    hook = module.register_forward_hook(lambda _, args, result: keep(args, result))
    yield
    hook.remove()


def run(model: Any, name: str, frames: int, seed: int, **settings: Any) -> Tensors:
    """A run on stored noise: the inputs of each patch, and the patches."""
    text, cache, _ = prompt_of(name)
    drawn = iter(torch.from_numpy(tiny_vox.noise(seed, frames)))
    made: dict[str, list[torch.Tensor]] = {"hidden": [], "residual": [], "stop": []}
    with (
        mock.patch.object(torch, "randn", side_effect=lambda *_, **__: next(drawn).T[None].contiguous()),
        recorded(model.lm_to_dit_proj, lambda args, _: made["hidden"].append(args[0][0])),
        recorded(model.res_to_dit_proj, lambda args, _: made["residual"].append(args[0][0])),
        recorded(model.stop_head, lambda _, result: made["stop"].append(result[0])),
    ):
        _, _, patches = model.generate_with_prompt_cache(text, cache, max_len=frames, **settings)
    return {key: torch.stack(value).numpy() for key, value in made.items()} | {"patches": patches.float().numpy()}


def store_runs(store: Store, model: Any) -> None:
    """Store runs of fixed length, and the lengths of runs that end by themselves."""
    for seed, name in enumerate(RUNS):
        steps = 10 if seed < 2 else 6
        tensors = run(model, name, FRAMES, seed, inference_timesteps=steps, min_len=FRAMES)
        store.add("runs", name, {"prompt": name, "seed": seed, "steps": steps, "cfg": 2.0}, tensors)
        if len(tensors["patches"]) != FRAMES:
            raise RuntimeError(f"{name}: {len(tensors['patches'])} patches")
    always = load(store, "always")
    for least in (0, 1, 2, 5):
        add_end(store, always, "always", least, 9)
    if not any(add_end(store, model, "random", 2, seed) for seed in range(200)):
        raise RuntimeError("no run ends by itself: choose another text")


def add_end(store: Store, model: Any, stop: str, least: int, seed: int) -> bool:
    """Store the length of a run if it ends by itself, later than at its minimum; a run that must end is always
    stored."""
    tensors = run(model, "zero_shot", 30, seed, min_len=least, inference_timesteps=3)
    count = len(tensors["patches"])
    if stop == "random" and not least + 4 < count < 30:
        return False
    facts = {"prompt": "zero_shot", "seed": seed, "steps": 3, "cfg": 2.0, "min_len": least, "stop": stop}
    store.add("ends", f"{stop}_{least}", facts | {"frames": count}, {"stop": tensors["stop"]})
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description="Store what the official VoxCPM2 language models and flow compute.")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write into")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    store = Store()
    model = load(store, "random")
    store.digests["noise"] = digest({"noise": tiny_vox.noise(0, 2), "recording": tiny_vox.recording(0, 2)})
    store_prompts(store, model)
    store_modules(store, model)
    store_times(store, "float32")
    store_times(store, "bfloat16")
    store_runs(store, model)
    store.write(arguments.out)


if __name__ == "__main__":
    main()
