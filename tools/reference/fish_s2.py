"""Run the official Fish S2 Pro language model on a tiny random checkpoint and store its results as test assets.

    python tools/reference/fish_s2.py --source fish-speech --out tests/assets/fish_s2

`--source` is a checkout of github.com/fishaudio/fish-speech at 3dd1f85 (under the Fish Audio Research License; nothing
of it is stored). Runs in an environment of its own (requirements.txt beside this file), and imports only the tests'
checkpoint writer. The format is that of qwen3_tts.py beside it; tests/support/tiny_dual_ar.py defines the contents.
"""

import argparse
import importlib
import json
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
os.environ["TQDM_DISABLE"] = "1"
sys.modules["loralib"] = types.ModuleType("loralib")  # imported, and used for fine-tuning alone

import tiny_fish  # noqa: E402 (the path to it is set just above)
from tiny_checkpoint import digest  # noqa: E402

Facts = dict[str, Any]
Tensors = dict[str, np.ndarray]
FRAMES = 24

LONG = "Hello world, this is the voice that was in the light of the moon."
TURNS = "<|speaker:0|>Hello there, who are you?<|speaker:1|> It's me! [laughing]\n<|speaker:0|>So be it."
MANY = "".join(f"<|speaker:{index % 3}|> This is turn {index}, naïvely — {'spoken ' * 6}here." for index in range(7))
PROMPTS: dict[str, tuple[str, list[str]]] = {
    "plain": (LONG, []),
    "reference": ("What's that? 42 of them!\nÜnïcode, 你好。", ["It's not the time to speak."]),
    "references": (TURNS, ["It's not the time.", "<|speaker:7|>Ok"]),
    "turns": (MANY, []),
    "turns_and_reference": (MANY, ["It's not the time to speak."]),
}
SETTINGS = {
    "server": {"temperature": 0.8, "top_p": 0.8, "top_k": 30},
    "library": {"temperature": 1.0, "top_p": 0.9, "top_k": 30},
    "narrow": {"temperature": 0.5, "top_p": 0.6, "top_k": 6},
    "single": {"temperature": 1.3, "top_p": 0.95, "top_k": 1},
    "wide": {"temperature": 1.5, "top_p": 1.0, "top_k": 1000},
    # The first decision is the end of speech, which the official code ignores in the first frame.
    "first_is_end": {"temperature": 1.5, "top_p": 1.0, "top_k": 1000},
}
ENDING_SCALE = 1.0


class Store:
    """Collects cases and writes them out."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensors] = {}
        self.groups: dict[str, list[Facts]] = {}
        self.digests: dict[str, str] = {}

    def add(self, group: str, name: str, facts: Facts, tensors: Tensors) -> None:
        self.groups.setdefault(group, []).append({"name": name, **facts})
        stored = self.tensors.setdefault(group, {})
        # All ids of the tiny vocabulary fit 16 bits.
        small = {key: value.astype(np.int16) if value.dtype.kind == "i" else value for key, value in tensors.items()}
        stored.update({f"{name}/{key}": np.ascontiguousarray(value) for key, value in small.items()})

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for group, tensors in self.tensors.items():
            save_file(tensors, folder / f"{group}.safetensors")
        document = {"digests": self.digests, "groups": self.groups}
        text = json.dumps(document, ensure_ascii=False, indent=1)
        (folder / "scenarios.json").write_text(text + "\n", encoding="utf-8")


class Official:
    """The official model at an end scale, loaded through the released layout and checked tensor by tensor."""

    def __init__(self, store: Store) -> None:
        self.inference, self._store = importlib.import_module("fish_speech.models.text2semantic.inference"), store
        # Whole conversations would be printed.
        self.inference.Conversation.visualize = lambda *_, **__: None
        self._models: dict[float, Any] = {}

    def get(self, end_scale: float = 0.25) -> Any:
        if end_scale not in self._models:
            expected = tiny_fish.state_dict(end_scale)
            with tempfile.TemporaryDirectory() as folder:
                tiny_fish.write_checkpoint(folder, end_scale=end_scale)
                model, _ = self.inference.init_model(folder, "cpu", torch.float32)
            _check_loaded(model, expected)
            self._store.digests[str(end_scale)] = digest(expected)
            self._models[end_scale] = model
        return self._models[end_scale]

    def prompts(
        self, model: Any, text: str, references: list[str], codes: list[np.ndarray], made: int
    ) -> list[Tensors]:
        """The prompt that `generate_long` would prefill for each batch of turns, if each were answered by `made`
        frames."""
        batches: list[Tensors] = []

        def answer(*, prompt: torch.Tensor, **_: Any) -> torch.Tensor:
            frames = random_codes(len(batches) + 100, made)
            batches.append({"columns": prompt.T.numpy(), "frames": frames})
            columns = np.concatenate((frames[:, :1] + model.config.semantic_begin_id, frames), axis=1)
            end = np.zeros((1, columns.shape[1]), np.int64)
            return torch.cat((prompt, torch.from_numpy(np.concatenate((columns, end))).T), dim=1)

        with mock.patch.object(self.inference, "generate", answer):
            list(
                self.inference.generate_long(
                    model=model,
                    device="cpu",
                    decode_one_token=None,
                    text=text,
                    chunk_length=200,
                    prompt_text=references or None,
                    prompt_tokens=[torch.from_numpy(frames.T) for frames in codes] or None,
                )
            )
        return batches

    def run(
        self, model: Any, columns: np.ndarray, frames: int, draw: Callable[..., torch.Tensor], **settings: float
    ) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
        """Run the model: columns [T, 1 + K], of which the official caller drops the last, and the logits of all
        decisions."""
        slow: list[np.ndarray] = []
        fast: list[np.ndarray] = []
        with (
            mock.patch.object(self.inference, "multinomial_sample_one_no_sync", draw),
            _recorded(model, "forward_generate", lambda result: slow.append(result.logits[0, -1].numpy())),
            _recorded(model, "forward_generate_fast", lambda result: fast.append(result[0, -1].numpy())),
        ):
            made = self.inference.generate(
                model=model,
                prompt=torch.from_numpy(columns.T),
                max_new_tokens=frames,
                audio_masks=None,
                audio_parts=None,
                **settings,
            )
        return made[:, len(columns) :].T.numpy(), slow, fast


@contextmanager
def _recorded(model: Any, name: str, keep: Callable[[Any], None]) -> Iterator[None]:
    original = getattr(model, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        keep(result)
        return result

    with mock.patch.object(model, name, call):
        yield


def _check_loaded(model: Any, expected: Tensors) -> None:
    """Raise unless the model holds exactly the tensors of the files; the official loader does not check."""
    state = dict(model.named_parameters())
    if len(state) != len(expected):
        raise RuntimeError(f"{len(state)} parameters were loaded from {len(expected)} tensors")
    for name, tensor in expected.items():
        own = name.removeprefix("text_model.model.")
        if own.startswith("audio_decoder."):
            rest = own.removeprefix("audio_decoder.")
            own = rest if rest.startswith("codebook_embeddings.") else f"fast_{rest}"
        if not np.array_equal(state[own].detach().numpy(), tensor):
            raise RuntimeError(f"tensor {name} was not loaded as written")


def random_codes(seed: int, frames: int) -> np.ndarray:
    shape = (frames, tiny_fish.NUM_CODEBOOKS)
    return np.random.default_rng(seed).integers(0, tiny_fish.NUM_CODES, shape)


def candidates(model: Any, logits: np.ndarray) -> np.ndarray:
    """The logits of the ids that can be sampled: codes of codebook 0, then end of speech."""
    first, last = model.config.semantic_begin_id, model.config.semantic_end_id
    return np.append(logits[first : last + 1], logits[tiny_fish.config()["eos_token_id"]])


def store_prompts(store: Store, official: Official) -> None:
    model = official.get()
    for name, (text, references) in PROMPTS.items():
        codes = [random_codes(index, 5 + index) for index in range(len(references))]
        batches = official.prompts(model, text, references, codes, made=4)
        tensors = {f"reference_{index}": frames for index, frames in enumerate(codes)}
        for index, batch in enumerate(batches):
            tensors |= {f"columns_{index}": batch["columns"], f"frames_{index}": batch["frames"]}
        store.add("prompts", name, {"text": text, "references": references, "batches": len(batches)}, tensors)


def greedy(probabilities: torch.Tensor) -> torch.Tensor:
    return probabilities.argmax(dim=-1, keepdim=True).to(torch.int)


def add_greedy(store: Store, official: Official, name: str, *, end_scale: float, text: str = "") -> None:
    """Store a greedy run without the last column, as the official caller drops it. Raises if a decision is a near
    tie."""
    prompt = name if name in PROMPTS else "plain"
    model, (whole, references) = official.get(end_scale), PROMPTS[prompt]
    codes = [random_codes(index, 5 + index) for index in range(len(references))]
    columns = official.prompts(model, text or whole, references, codes, made=1)[0]["columns"]
    made, slow, fast = official.run(model, columns, FRAMES + 1, greedy)
    facts = {"prompt": prompt, "text": text or whole, "end_scale": end_scale, "frames": len(made) - 1}
    per_frame = tiny_fish.NUM_CODEBOOKS
    depth = [fast[at : at + per_frame][1:] for at in range(0, len(fast), per_frame)]
    tensors = {
        "columns": columns,
        "made": made[:-1],
        "logits": np.stack([candidates(model, logits) for logits in slow]),
        "depth_logits": np.stack(depth)[:4],
    }
    margins = [np.diff(np.sort(logits)[-2:])[0] for logits in (*tensors["logits"], *np.concatenate(depth))]
    if min(margins) < 2e-5:
        raise RuntimeError(f"{name}: a decision hangs on rounding ({min(margins):.1e}); choose another text")
    store.add("greedy", name, facts, tensors)


def store_greedy(store: Store, official: Official) -> None:
    add_greedy(store, official, "plain", end_scale=0.25)
    add_greedy(store, official, "reference", end_scale=0.25)
    end = tiny_fish.config()["eos_token_id"]
    model = official.get(ENDING_SCALE)
    for words in range(1, 40):
        text = " ".join(["Not", "so", "light"] * words)
        columns = official.prompts(model, text, [], [], made=1)[0]["columns"]
        made = official.run(model, columns, FRAMES + 1, greedy)[0]
        if made[-1, 0] == end and 4 < len(made) <= FRAMES:
            add_greedy(store, official, "ending", end_scale=ENDING_SCALE, text=text)
            return
    raise RuntimeError("no run ends by itself: choose another scale")


def store_sampled(store: Store, official: Official) -> None:
    """Store sampled runs on uniform numbers that the tests generate again from the seed."""
    model, config = official.get(), tiny_fish.config()
    ids = [*range(config["semantic_start_token_id"], config["semantic_end_token_id"] + 1), config["eos_token_id"]]
    columns = official.prompts(model, LONG, [], [], made=1)[0]["columns"]
    for seed, (name, settings) in enumerate(SETTINGS.items()):
        uniforms = tiny_fish.uniforms(seed, 31, is_first_end=name == "first_is_end")
        calls = [0]

        def draw(
            probabilities: torch.Tensor, uniforms: np.ndarray = uniforms, calls: list[int] = calls
        ) -> torch.Tensor:
            frame, step = divmod(calls[0], tiny_fish.NUM_CODEBOOKS + 1)
            calls[0] += 1
            # The official order: codebook 0, its resampling, the others.
            own = torch.from_numpy(uniforms[frame, (0, tiny_fish.NUM_CODEBOOKS, *range(1, 10))[step]])
            drawn = torch.full_like(probabilities, 0.5)
            drawn[ids if step < 2 else slice(None)] = own if step < 2 else own[:-1]
            return (probabilities / -drawn.log()).argmax(dim=-1, keepdim=True).to(torch.int)

        made, slow, _ = official.run(model, columns, 31, draw, **settings)
        replaced = count_replaced(official, slow, made, uniforms, settings)
        facts = {**settings, "seed": seed, "text": LONG, "frames": len(made) - 1, "replaced": replaced}
        store.add("sampled", name, facts, {"made": made[:-1]})


def count_replaced(official: Official, slow: list, made: np.ndarray, uniforms: np.ndarray, settings: Facts) -> int:
    """Number of frames whose codebook 0 was resampled to another code."""
    config = tiny_fish.config()
    ids = [*range(config["semantic_start_token_id"], config["semantic_end_token_id"] + 1), config["eos_token_id"]]
    count = 0
    bias = torch.full((config["text_config"]["vocab_size"],), -torch.inf)
    bias[ids] = 0
    for frame, logits in enumerate(slow):
        probabilities = official.inference.logits_to_probs(
            torch.from_numpy(logits) + bias,
            torch.tensor(settings["temperature"]),
            torch.tensor(settings["top_p"]),
            settings["top_k"],
        )
        drawn = torch.full_like(probabilities, 0.5)
        drawn[ids] = torch.from_numpy(uniforms[frame, 0])
        count += bool((probabilities / -drawn.log()).argmax() != made[frame, 0])
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description="Store what the official Fish S2 Pro language model computes.")
    parser.add_argument("--source", type=Path, required=True, help="a checkout of fishaudio/fish-speech")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write into")
    arguments = parser.parse_args()
    sys.path.insert(0, str(arguments.source))
    torch.set_num_threads(1)
    store = Store()
    official = Official(store)
    store.digests["uniforms"] = digest({"uniforms": tiny_fish.uniforms(0, 2)})
    store_prompts(store, official)
    store_greedy(store, official)
    store_sampled(store, official)
    store.write(arguments.out)


if __name__ == "__main__":
    main()
