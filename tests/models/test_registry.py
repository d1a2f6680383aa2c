"""Names to models: every way of naming one, what is said of it unloaded, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from parity import begin, capacity
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors
from tiny_checkpoint import write_checkpoint

from sonoro.core.errors import CheckpointError, CheckpointNotFound, ConfigError, TensorMismatch
from sonoro.core.types import SamplingParams, SpeechRequest
from sonoro.models import registry
from sonoro.models.base import SpeechModel

ATTENTION_AND_CODEC = {
    # 114,688 bytes a position (28 layers, keys and values, 8 heads of 128, 2 bytes), 12.5 positions a second.
    "qwen3": ("speech_tokenizer/model.safetensors", 170_557_441, 1_433_600),
    # 147,456 bytes a position (36 layers), 21.533 positions a second.
    "fish": ("codec.pth", 391_430_530, 3_175_200),
    # 36,864 bytes a position (28 and 8 layers, 2 heads of 128), 6.25 positions a second.
    "voxcpm2": ("audiovae.pth", 94_213_954, 230_400),
}
"""By family: the codec's file and the numbers in it, and the bytes of keys and values of a second."""

HUB_ID = "someone/Tiny-Speech.v1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny-speech"
    write_checkpoint(folder, topology="0.6b")
    return folder


def test_a_folder_is_loaded_as_it_is(folder: Path) -> None:
    loaded = registry.load(folder, device="cpu")
    assert loaded.model.spec.name == "tiny-speech"
    assert (loaded.device, loaded.dtype) == (torch.device("cpu"), torch.float32)
    stored = {**load_file(folder / "speech_tokenizer/model.safetensors")}
    decoder = sum(tensor.size for name, tensor in stored.items() if name.startswith("decoder."))
    assert loaded.parameters["codec decoder"] == decoder
    assert registry.load(str(folder), device="cpu").parameters == loaded.parameters


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16"])
def test_the_dtype_is_the_one_asked_for(folder: Path, dtype: torch.dtype | str) -> None:
    assert registry.load(folder, device="cpu", dtype=dtype).dtype == torch.bfloat16


@pytest.mark.parametrize("name", [name for name in registry.names()[1:] if not name.startswith("pocket-")])
def test_a_released_configuration_is_described_without_its_weights(name: str) -> None:
    described = registry.describe(name, device="cpu", dtype="bfloat16")
    assert described.spec.name == name
    assert sum(described.parameters.values()) == sum(described.files.values())
    codec, numbers, per_second_bytes = ATTENTION_AND_CODEC[name.split("-", maxsplit=1)[0]]
    assert described.files[codec] == numbers
    # The main file in two bytes each, the codec in four, less the tensors that nothing reads (5 percent of the codec).
    stored = 2 * described.files["model.safetensors"] + 4 * numbers
    assert 0.95 * stored < described.memory_bytes["weights"] < 1.03 * stored
    assert described.memory_bytes["attention, per second of audio"] == per_second_bytes


def test_a_described_folder_is_checked(folder: Path) -> None:
    described = registry.describe(folder)
    stored = load_file(folder / "speech_tokenizer/model.safetensors")
    assert described.files["speech_tokenizer/model.safetensors"] == sum(math.prod(t.shape) for t in stored.values())
    assert described.configuration["variant"] == "custom_voice"
    config = json.loads((folder / "config.json").read_text())
    config["talker_config"]["intermediate_size"] = 50
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(TensorMismatch, match=r"expected \[50, 32\]"):
        registry.describe(folder)


def widen(folder: Path) -> None:
    """Give the configuration in `folder` 256 codes instead of 64, its control ids after them."""
    config, codec = folder / "config.json", folder / "speech_tokenizer/config.json"
    model, sound = json.loads(config.read_text()), json.loads(codec.read_text())
    talker = model["talker_config"]
    talker["vocab_size"] = 256 + 1024
    talker["code_predictor_config"]["vocab_size"] = 256
    for key in [key for key in talker if key.startswith("codec_") and key != "codec_language_id"]:
        talker[key] += 192
    sound["decoder_config"]["codebook_size"] = sound["encoder_config"]["codebook_size"] = 256
    config.write_text(json.dumps(model))
    codec.write_text(json.dumps(sound))


def frames_of(model: SpeechModel, count: int) -> torch.Tensor:
    """The first `count` frames [T, K] of a text, at the checkpoint's own sampling settings."""
    whole = model.spec.resolve(SpeechRequest(id="1", text="Hello you", max_frames=count, ignore_eos=True))
    assert whole.sampling == SamplingParams(temperature=0.9, top_k=50, top_p=1.0, repetition_penalty=1.05)
    with torch.inference_mode():
        state = model.allocate(capacity(1, 128, count, 32))
        slots = torch.tensor([0])
        begin(model, state, [model.prepare(whole, whole.text, 0, [], None)], slots)
        for _ in range(count):
            model.frame(state, slots)
        assert int(state.length[0]) == count
        return state.frames[0].clone()


def test_random_weights_speak_with_varied_codes(folder: Path) -> None:
    """64 frames hold at least 20 codes of each codebook."""
    widen(folder)
    frames = frames_of(registry.load(folder, device="cpu", load_format="dummy").model, 64)
    assert all(len(codes.unique()) >= 20 for codes in frames.T)


def test_random_weights_need_a_configuration_alone(folder: Path) -> None:
    for file in (*folder.rglob("*.safetensors"), folder / "vocab.json", folder / "merges.txt"):
        file.unlink()
    with pytest.raises(CheckpointNotFound):
        registry.load(folder, device="cpu")
    first, again = (registry.load(folder, device="cpu", load_format="dummy").model for _ in range(2))
    frames = frames_of(first, 20)
    assert torch.equal(frames, frames_of(again, 20))
    assert torch.equal(first.codec.decode(frames[None]), again.codec.decode(frames[None]))


def test_a_configuration_without_weights_names_its_repository() -> None:
    with pytest.raises(CheckpointNotFound, match=r"qwen3-tts-1\.7b-base.*Qwen/Qwen3-TTS-12Hz-1\.7B-Base.*dummy"):
        registry.load("qwen3-tts-1.7b-base", device="cpu")


@pytest.mark.parametrize("model", ["no-such-model", "./no/such/folder", Path("nowhere")])
def test_an_unknown_name_lists_the_known_ones(model: str | Path) -> None:
    with pytest.raises(
        CheckpointNotFound, match=r"no folder .*builtin.*Qwen/Qwen3-TTS-12Hz.*qwen3-tts-1\.7b-voicedesign"
    ):
        registry.load(model, device="cpu")


def test_a_name_no_file_can_have_is_refused() -> None:
    with pytest.raises(CheckpointNotFound, match=r"no folder 'aaa.*(too long|known models)"):
        registry.load("a" * 300, device="cpu")


def test_a_home_that_nobody_has_is_no_folder() -> None:
    with pytest.raises(CheckpointNotFound, match=r"no folder '~nobody-of-that-name/model': .*home"):
        registry.load("~nobody-of-that-name/model", device="cpu")


def test_an_empty_name_is_not_the_current_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=r"model: '' is not allowed.*builtin"):
        registry.load("", device="cpu")
    assert registry.describe(".", device="cpu").spec.name == "tiny-speech"


def test_what_is_no_checkpoint_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"config\.json does not exist"):
        registry.load(tmp_path, device="cpu")
    config = tmp_path / "config.json"
    config.write_text("[]")
    with pytest.raises(CheckpointNotFound, match="is not a folder"):
        registry.load(config, device="cpu")
    with pytest.raises(CheckpointError, match="model_type is None; known: qwen3_tts"):
        registry.load(tmp_path, device="cpu")
    config.write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="model_type is 'llama'"):
        registry.load(tmp_path, device="cpu")
    config.write_text("{")
    with pytest.raises(CheckpointError, match="not a readable JSON file"):
        registry.load(tmp_path, device="cpu")


class Hub:
    """Stands in for the hub: one repository, whose files are a folder here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[list[str]] = []

    def __call__(self, hub_id: str, *, allow_patterns: list[str]) -> str:
        self.asked.append(allow_patterns)
        if hub_id != HUB_ID:
            raise LocalEntryNotFoundError("Cannot reach the hub.\nMore words.")
        return str(self.folder)


@pytest.fixture
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(folder)
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub)
    return hub


def test_a_hub_id_is_downloaded_once_it_is_known_to_be_of_use(hub: Hub) -> None:
    assert registry.load(HUB_ID, device="cpu").model.spec.name == "Tiny-Speech.v1"
    assert hub.asked == [["config.json"], ["*.json", "merges.txt", "*.safetensors"]]


def test_other_formats_are_downloaded_where_there_is_no_safetensors_file(hub: Hub) -> None:
    file = hub.folder / "model.safetensors"
    torch.save(load_tensors(file), hub.folder / "pytorch_model.bin")
    file.unlink()
    assert registry.load(HUB_ID, device="cpu").skipped == ()
    assert hub.asked[1:] == [
        ["*.json", "merges.txt", "*.safetensors"],
        ["*.json", "merges.txt", "*.safetensors", "*.bin", "*.pth"],
    ]


def test_random_weights_download_no_others(hub: Hub) -> None:
    registry.load(HUB_ID, device="cpu", load_format="dummy")
    assert hub.asked[-1] == ["*.json", "merges.txt"]


def test_a_repository_of_another_kind_is_refused_before_its_weights(hub: Hub) -> None:
    (hub.folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="model_type is 'llama'"):
        registry.load(HUB_ID, device="cpu")
    assert hub.asked == [["config.json"]]


def test_a_hub_that_does_not_answer_is_named_with_its_reason(hub: Hub) -> None:
    with pytest.raises(CheckpointNotFound, match=r"no folder 'someone/else', and the hub .*: Cannot reach the hub\.$"):
        registry.load("someone/else", device="cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "tpu"}, "device: 'tpu' is not allowed; it must be auto, cpu, cuda or cuda:N"),
        ({"device": "cuda:x"}, "device: 'cuda:x'"),
        ({"device": "cuda:99"}, "device: 'cuda:99' is not allowed; this machine has"),
        ({"dtype": "float16"}, "dtype: 'float16' is not allowed; it must be bfloat16 or float32"),
        ({"dtype": torch.int8}, "dtype: 'torch.int8'"),
        ({"load_format": "zeros"}, "load_format: 'zeros' is not allowed; it must be auto or dummy"),
    ],
)
def test_a_bad_setting_is_refused(folder: Path, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        registry.load(folder, **{"device": "cpu"} | arguments)
