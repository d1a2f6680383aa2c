"""Checkpoint folders: released names, shapes and counts; what a wrong file is told; export; dummy weights."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.numpy import load_file, save_file
from tiny_checkpoint import TOPOLOGIES, VARIANTS, state_dicts, write_checkpoint

from builtin_voice.export import export_checkpoint
from sonoro.core.errors import CheckpointError, CheckpointNotFound, TensorMismatch
from sonoro.models import registry
from sonoro.models.qwen3_tts import weights
from sonoro.models.qwen3_tts.config import RELEASED, Configs, read_configs, released_configs
from sonoro.models.qwen3_tts.weights import CODEC_FILE, Modules, unused_shapes
from sonoro.models.shared.model_files import MODEL_FILES
from sonoro.nn import torch_file

CPU = torch.device("cpu")

OFFICIAL_ELEMENTS = {
    "qwen3-tts-0.6b-base": 914_643_008,
    "qwen3-tts-0.6b-customvoice": 905_788_672,
    "qwen3-tts-1.7b-base": 1_928_677_440,
    "qwen3-tts-1.7b-customvoice": 1_916_676_352,
    "qwen3-tts-1.7b-voicedesign": 1_916_676_352,
}
OFFICIAL_PARTS = {
    "talker layers": 1_409_410_048,
    "text embedding": 311_164_928,
    "text projection": 8_392_704,
    "codec embedding": 6_291_456,
    "codec head": 6_291_456,
    "predictor layers": 78_655_744,
    "predictor embeddings": 62_914_560,
    "predictor heads": 31_457_280,
    "predictor projection": 2_098_176,
    "speaker encoder": 12_001_088,
    "codec decoder": 114_323_137,
    "codec encoder": 56_234_304,
}


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Modules:
    return weights.FILES.load(folder, read_configs(folder), device=CPU, dtype=dtype)


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_configuration_has_the_official_number_of_parameters(name: str) -> None:
    shapes = weights.FILES.stored_shapes(released_configs(name))
    counts = {file: sum(math.prod(shape) for shape in stored.values()) for file, stored in shapes.items()}
    assert counts == {MODEL_FILES: OFFICIAL_ELEMENTS[name], CODEC_FILE: 170_557_441}
    assert len(shapes[CODEC_FILE]) == 496
    if name == "qwen3-tts-0.6b-customvoice":
        assert len(shapes[MODEL_FILES]) == 402


def test_the_parts_of_the_largest_have_the_official_sizes() -> None:
    assert (
        weights.FILES.count_parts(weights.FILES.stored_shapes(released_configs("qwen3-tts-1.7b-base")))
        == OFFICIAL_PARTS
    )


def test_names_and_shapes_are_the_released_ones() -> None:
    shapes = weights.FILES.stored_shapes(released_configs("qwen3-tts-0.6b-base"))
    model, codec = shapes[MODEL_FILES], shapes[CODEC_FILE]
    assert model["talker.model.layers.27.self_attn.o_proj.weight"] == (1024, 2048)
    assert model["talker.model.layers.0.self_attn.k_proj.weight"] == (1024, 1024)
    assert model["talker.code_predictor.model.layers.4.mlp.gate_proj.weight"] == (3072, 1024)
    assert model["speaker_encoder.blocks.3.res2net_block.blocks.6.conv.bias"] == (64,)
    assert "talker.code_predictor.small_to_mtp_projection.weight" not in model
    assert codec["decoder.decoder.1.block.2.conv1.conv.weight"] == (768, 768, 7)
    assert codec["encoder.quantizer.acoustic_residual_vector_quantizer.layers.30.codebook.embed_sum"] == (2048, 256)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_tensors_of_every_variant_are_exactly_those_expected(variant: str, topology: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, variant=variant, topology=topology)
    main, codec = state_dicts(variant, topology)
    expected = weights.FILES.stored_shapes(read_configs(tmp_path))
    for tensors, shapes in ((main, expected[MODEL_FILES]), (codec, expected[CODEC_FILE])):
        assert {name: tensor.shape for name, tensor in tensors.items()} == shapes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, variant="base")
    return tmp_path


def test_a_base_model_fine_tuned_to_a_speaker_needs_no_speaker_encoder(folder: Path) -> None:
    """The official recipe (finetuning/sft_12hz.py) keeps its configuration, and drops its tensors."""
    config = json.loads((folder / "config.json").read_text())
    config["tts_model_type"] = "custom_voice"
    config["talker_config"] |= {"spk_id": {"speaker_test": 1064}, "spk_is_dialect": {"speaker_test": False}}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = torch_file.read(folder / MODEL_FILES, "cpu")
    kept = {name: tensor.clone() for name, tensor in tensors.items() if "speaker_encoder" not in name}
    safetensors.torch.save_file(kept, folder / MODEL_FILES)
    loaded = registry.load(folder, device="cpu")
    assert loaded.model.spec.voices == ("speaker_test",)
    assert not loaded.skipped


def test_fused_tensors_hold_their_parts(folder: Path) -> None:
    modules, (main, codec) = load(folder), state_dicts("base")
    layer = "talker.code_predictor.model.layers.1."
    ours = modules.lm.state_dict()
    for fused, parts in (("self_attn.qkv_proj", "self_attn.{}_proj"), ("mlp.gate_up_proj", "mlp.{}_proj")):
        names = "qkv" if "qkv" in fused else ("gate", "up")
        joined = np.concatenate([main[f"{layer}{parts.format(name)}.weight"] for name in names])
        np.testing.assert_array_equal(ours[f"{layer}{fused}.weight"].numpy(), joined)
    layer = "encoder.encoder_transformer.layers.0.self_attn."
    joined = np.concatenate([codec[f"{layer}{name}_proj.weight"] for name in "qkv"])
    np.testing.assert_array_equal(modules.codec.state_dict()[f"{layer}qkv_proj.weight"].numpy(), joined)


def test_only_the_talker_takes_the_model_dtype(folder: Path) -> None:
    modules = load(folder, torch.bfloat16)
    assert {tensor.dtype for tensor in modules.lm.talker.state_dict().values()} == {torch.bfloat16}
    assert modules.lm.speaker_encoder is not None
    assert {tensor.dtype for tensor in modules.lm.speaker_encoder.state_dict().values()} == {torch.float32}
    assert {tensor.dtype for tensor in modules.codec.state_dict().values()} == {torch.float32}


def test_nothing_is_left_on_the_meta_device_or_wants_a_gradient(folder: Path) -> None:
    modules = load(folder)
    for module in (modules.lm, modules.codec):
        assert all(tensor.device == CPU for tensor in (*module.parameters(), *module.buffers()))
        assert not any(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("drop", r"model\.safetensors: tensor 'decoder\.pre_conv\.conv\.bias' \[24\] is missing"),
        ("reshape", r"'decoder\.pre_conv\.conv\.bias' has shape \[23\], expected \[24\]"),
        ("add", r"'decoder\.quantizer\.new' \[3\] is not part of the model"),
        (
            "reshape unused",
            r"'encoder\.quantizer\.\w+\.layers\.0\.codebook\.initialized' has shape \[2\], expected \[1\]",
        ),
    ],
)
def test_a_wrong_tensor_is_named(folder: Path, change: str, message: str) -> None:
    file = folder / CODEC_FILE
    tensors = load_file(file)
    bias, flag = (
        "decoder.pre_conv.conv.bias",
        next(name for name in tensors if name.endswith(".0.codebook.initialized")),
    )
    if change == "drop":
        del tensors[bias]
    elif change == "reshape":
        tensors[bias] = tensors[bias][:-1].copy()
    elif change == "add":
        tensors["decoder.quantizer.new"] = np.zeros(3, np.float32)
    else:
        tensors[flag] = np.ones(2, np.float32)
    save_file(tensors, file)
    with pytest.raises(TensorMismatch, match=message):
        load(folder)


def test_a_truncated_file_and_an_absent_one_are_named(folder: Path) -> None:
    file = folder / MODEL_FILES
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated: tensor '"):
        load(folder)
    file.unlink()
    with pytest.raises(CheckpointNotFound, match=r"model\.safetensors does not exist"):
        load(folder)


def test_export_writes_a_folder_that_loads_to_the_same_tensors(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Bfloat16 and float32 storage are exact here: the checkpoint's talker holds bfloat16 values."""
    modules, copy = load(folder), tmp_path_factory.mktemp("copy")
    copy_configurations(folder, copy)
    export_checkpoint(
        copy,
        modules.lm.talker,
        modules.codec.decoder,
        speaker_encoder=modules.lm.speaker_encoder,
        encoder=modules.codec.encoder,
        dtype=torch.bfloat16,
        codec_dtype=torch.float32,
    )
    unused = set(unused_shapes(read_configs(folder).codec))
    assert set(load_file(copy / CODEC_FILE)) == set(load_file(folder / CODEC_FILE)) - unused
    again = load(copy)
    for ours, theirs in ((modules.lm, again.lm), (modules.codec, again.codec)):
        expected = theirs.state_dict()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in ours.state_dict().items())


def test_a_codec_without_an_encoder_is_exported_and_loaded(tmp_path: Path) -> None:
    whole, small = tmp_path / "whole", tmp_path / "small"
    write_checkpoint(whole)
    copy_configurations(whole, small)
    config = json.loads((small / "speech_tokenizer/config.json").read_text())
    del config["encoder_config"]
    (small / "speech_tokenizer/config.json").write_text(json.dumps(config))
    modules = load(whole)
    export_checkpoint(small, modules.lm.talker, modules.codec.decoder, dtype=torch.float16, codec_dtype=torch.float16)
    assert {tensor.dtype for tensor in load_file(small / CODEC_FILE).values()} == {np.dtype(np.float16)}
    assert load(small).codec.encoder is None


def test_an_export_that_contradicts_its_configuration_is_refused(folder: Path, tmp_path: Path) -> None:
    modules = load(folder)
    with pytest.raises(TensorMismatch, match=r"'encoder\..*is missing"):
        export_checkpoint(
            folder,
            modules.lm.talker,
            modules.codec.decoder,
            speaker_encoder=modules.lm.speaker_encoder,
            dtype=torch.float32,
            codec_dtype=torch.float32,
        )


def copy_configurations(source: Path, target: Path) -> None:
    for file in source.rglob("*.json"):
        copied = target / file.relative_to(source)
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_bytes(file.read_bytes())


def reduced() -> Configs:
    """A released configuration at an eighth of its widths and a quarter of its layers, with all its codebooks."""
    model, generation, codec = released_configs("qwen3-tts-1.7b-customvoice")
    predictor = dataclasses.replace(
        model.talker_config.code_predictor_config, hidden_size=96, intermediate_size=192, num_hidden_layers=2
    )
    talker = dataclasses.replace(
        model.talker_config,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        text_hidden_size=64,
        code_predictor_config=dataclasses.replace(predictor, num_attention_heads=4, num_key_value_heads=2, head_dim=32),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )
    decoder = dataclasses.replace(
        codec.decoder_config, latent_dim=128, decoder_dim=192, hidden_size=64, intermediate_size=128, codebook_dim=64,
        num_attention_heads=4, num_key_value_heads=4, head_dim=16, num_hidden_layers=2,
    )  # fmt: skip
    return Configs(
        dataclasses.replace(model, talker_config=talker),
        generation,
        dataclasses.replace(codec, decoder_config=decoder, encoder_config=None),
    )


def test_dummy_weights_are_random_and_finite_everywhere() -> None:
    modules = weights.FILES.init_dummy(reduced(), 0, device=CPU, dtype=torch.float32)
    for module in (modules.lm, modules.codec):
        for name, tensor in module.state_dict().items():
            assert tensor.isfinite().all(), name
            # A draw rounds to nothing about once in a million.
            assert (tensor == 0).sum() <= 2 + 1e-5 * tensor.numel(), name
            assert tensor.numel() == 1 or tensor.std() > 0, name
    rates = [value for name, value in modules.codec.state_dict().items() if name.endswith((".alpha", ".beta"))]
    # 29 activations' worth of draws: the standard error of their deviation is about 1 percent.
    assert torch.cat(rates).std().item() == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_dummy_codec_is_loud_but_not_clipped(seed: int) -> None:
    modules = weights.FILES.init_dummy(reduced(), seed, device=CPU, dtype=torch.float32)
    frames = torch.randint(0, 2048, (1, 16, 16), generator=torch.Generator().manual_seed(seed))
    pcm = modules.codec.decode(frames)
    assert 0.05 < pcm.square().mean().sqrt() < 0.5
    assert (pcm.abs() >= 1).float().mean() < 0.01
