"""A tiny random VoxCPM2 checkpoint and codec in the released folder layout, for tests and for the reference tools.

Needs numpy and torch alone, so the official code's own environment can read it too.
It knows neither our model nor the official one: every name, shape and value is written down here.
"""

import zlib
from pathlib import Path

import numpy as np
import torch
from tiny_checkpoint import Array, Config, Shapes, bfloat16_bits, vocabulary, write_json, write_tensors

TINY_CODEC = {
    "encoder_dim": 8,
    "encoder_rates": [2, 5],
    "latent_dim": 8,
    "decoder_dim": 32,
    "decoder_rates": [5, 3, 2],
    "sr_bin_boundaries": [20000, 30000, 40000],
    "sample_rate": 16000,
    "out_sample_rate": 48000,
}
"""What config.json has as `audio_vae_config`."""

PATCH = 4
ENCODER_HOP, HOP = 40, 120
"""Samples per patch: of what is heard and of what is spoken."""


def _conv(name, weight, rows=None):
    """A convolution with weight norm as it is released; `rows` biases."""
    return {f"{name}.weight_g": (weight[0], 1, 1), f"{name}.weight_v": weight, f"{name}.bias": (rows or weight[0],)}


def _unit(name, channels):
    return {
        f"{name}.block.0.alpha": (1, channels, 1),
        **_conv(f"{name}.block.1", (channels, 1, 7)),
        f"{name}.block.2.alpha": (1, channels, 1),
        **_conv(f"{name}.block.3", (channels, channels, 1)),
    }


def shapes_of(config=TINY_CODEC):
    """Names and shapes of the floats in audiovae.pth, written down from the released one."""
    channels, latent = config["encoder_dim"], config["latent_dim"]
    shapes = _conv("encoder.block.0", (channels, 1, 7))
    for index, rate in enumerate(config["encoder_rates"], start=1):
        block = f"encoder.block.{index}.block"
        for unit in range(3):
            shapes |= _unit(f"{block}.{unit}", channels)
        shapes |= {f"{block}.3.alpha": (1, channels, 1), **_conv(f"{block}.4", (2 * channels, channels, 2 * rate))}
        channels *= 2
    shapes |= _conv("encoder.fc_mu", (latent, channels, 3)) | _conv("encoder.fc_logvar", (latent, channels, 3))
    channels, buckets = config["decoder_dim"], len(config["sr_bin_boundaries"]) + 1
    shapes |= _conv("decoder.model.0", (latent, 1, 7)) | _conv("decoder.model.1", (channels, latent, 1))
    for index, rate in enumerate(config["decoder_rates"], start=2):
        block, half = f"decoder.model.{index}.block", channels // 2
        shapes |= {f"{block}.0.alpha": (1, channels, 1), **_conv(f"{block}.1", (channels, half, 2 * rate), half)}
        for unit in (2, 3, 4):
            shapes |= _unit(f"{block}.{unit}", half)
        for kind in ("scale", "bias"):
            shapes[f"decoder.sr_cond_model.{index}.{kind}_embed.weight"] = (buckets, channels)
        channels = half
    index = len(config["decoder_rates"]) + 2
    return shapes | {
        f"decoder.model.{index}.alpha": (1, channels, 1),
        **_conv(f"decoder.model.{index + 1}", (1, channels, 7)),
    }


def codec_tensors(seed=0, config=TINY_CODEC, snake_std=0.3):
    """Arrays by released name: floats of which nothing is left at 0 or 1, sums near 1, samples below 1; the edges."""
    tensors = {}
    last = f"decoder.model.{len(config['decoder_rates']) + 3}."
    for name, shape in shapes_of(config).items():
        normal = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape)
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "alpha":
            normal = 0.8 + snake_std * np.abs(normal)
        elif leaf == "weight_g":
            size = 0.05 if name.startswith(last) else 0.5 if ".block.3." in name else 0.8
            normal = size * (1 + 0.1 * np.abs(normal))
        elif leaf == "bias":
            normal = 0.1 * normal
        elif leaf == "weight":
            normal = ("scale" in name) + 0.2 * normal
        tensors[name] = normal.astype(np.float32)
    tensors["decoder.sr_bin_boundaries"] = np.array(config["sr_bin_boundaries"], np.int32)
    return tensors


def write_codec(path, seed=0, config=TINY_CODEC, snake_std=0.3):
    """Write audiovae.pth with random tensors, as the released one holds them."""
    tensors = codec_tensors(seed, config, snake_std)
    torch.save({"state_dict": {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}}, path)


PATCH, LATENTS = 4, TINY_CODEC["latent_dim"]
VOCABULARY = 640

_SPECIAL = {"<unk>": 0, "<s>": 1, "</s>": 2} | {
    name: 101 + index
    for index, name in enumerate(
        ["<|audio_start|>", "<|audio_end|>", "<|audio_prompt_start|>", "<|audio_prompt_end|>", "<|background|>"]
    )
}
_CHINESE = "你 好 世 界 测 试 这 是 请 温 柔 你好 ▁你好 世界 测试 ▁请 ▁好"


def tokens() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The vocabulary and its ranked merges: characters that begin at a space's `▁`, bytes for all that is unknown."""
    _, released, _ = vocabulary()
    merges = [(left.replace("Ġ", "▁"), right.replace("Ġ", "▁")) for left, right in released]
    merges += [(word[:-1], word[-1]) for word in _CHINESE.split() if len(word) == 2]
    merges.append(("▁你", "好"))
    merges.insert(0, ("▁", "你"))
    known = dict(_SPECIAL)
    characters = ["▁", *map(chr, range(33, 127))]
    known |= {character: 3 + index for index, character in enumerate(characters)}
    known |= {f"<0x{byte:02X}>": 107 + byte for byte in range(256)}
    for token in [*_CHINESE.split(), *(left + right for left, right in merges)]:
        known.setdefault(token, max(known.values()) + 1)
    assert max(known.values()) < VOCABULARY
    return known, merges


def config() -> Config:
    """config.json. The width of all queries is not that of the model, and the stacks differ in every size they may."""
    factors = [1.0 + 0.1 * index for index in range(8)]
    lm = {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_size": 48,
        "intermediate_size": 96,
        "max_position_embeddings": 4096,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000,
        "kv_channels": 16,
        "rope_scaling": {
            "type": "longrope",
            "long_factor": factors[::-1],
            "short_factor": factors,
            "original_max_position_embeddings": 4096,
        },
        "vocab_size": VOCABULARY,
        "use_mup": False,
        "scale_emb": 12,
        "dim_model_base": 256,
        "scale_depth": 1.4,
    }
    local = {"hidden_dim": 32, "ffn_dim": 64, "num_heads": 4, "num_layers": 2, "kv_channels": 16}
    flow = {"sigma_min": 1e-6, "solver": "euler", "t_scheduler": "log-norm", "inference_cfg_rate": 2.0}
    return {
        "architecture": "voxcpm2",
        "lm_config": lm,
        "patch_size": PATCH,
        "feat_dim": LATENTS,
        "scalar_quantization_latent_dim": 16,
        "scalar_quantization_scale": 9,
        "residual_lm_num_layers": 2,
        "residual_lm_no_rope": True,
        "encoder_config": local,
        "dit_config": {**local, "ffn_dim": 80, "num_heads": 6, "mean_mode": False, "cfm_config": flow},
        "audio_vae_config": dict(TINY_CODEC),
        "max_length": 4096,
        "device": "cpu",
        "dtype": "float32",
    }


def shapes() -> Shapes:
    """The tensors of model.safetensors under their released names."""
    values = config()
    lm, encoder, dit = values["lm_config"], values["encoder_config"], values["dit_config"]
    wide, local, flow, latents = lm["hidden_size"], encoder["hidden_dim"], dit["hidden_dim"], values["feat_dim"]
    found: Shapes = {"base_lm.embed_tokens.weight": (lm["vocab_size"], wide)}
    for prefix, layers, stack in (
        ("base_lm", lm["num_hidden_layers"], (wide, lm["intermediate_size"], lm["num_attention_heads"])),
        ("residual_lm", values["residual_lm_num_layers"], (wide, lm["intermediate_size"], lm["num_attention_heads"])),
        ("feat_encoder.encoder", encoder["num_layers"], (local, encoder["ffn_dim"], encoder["num_heads"])),
        ("feat_decoder.estimator.decoder", dit["num_layers"], (flow, dit["ffn_dim"], dit["num_heads"])),
    ):
        width, inner, heads = stack
        queries, keys = heads * lm["kv_channels"], lm["num_key_value_heads"] * lm["kv_channels"]
        for index in range(layers):
            layer = f"{prefix}.layers.{index}."
            for name, shape in {
                "input_layernorm": (width,),
                "self_attn.q_proj": (queries, width),
                "self_attn.k_proj": (keys, width),
                "self_attn.v_proj": (keys, width),
                "self_attn.o_proj": (width, queries),
                "post_attention_layernorm": (width,),
                "mlp.gate_proj": (inner, width),
                "mlp.up_proj": (inner, width),
                "mlp.down_proj": (width, inner),
            }.items():
                found[f"{layer}{name}.weight"] = shape
        found[f"{prefix}.norm.weight"] = (width,)
    found["feat_encoder.special_token"] = (1, 1, 1, local)
    estimator, bottleneck = "feat_decoder.estimator", values["scalar_quantization_latent_dim"]
    for name, shape in {
        "feat_encoder.in_proj": (local, latents),
        f"{estimator}.in_proj": (flow, latents),
        f"{estimator}.cond_proj": (flow, latents),
        f"{estimator}.out_proj": (latents, flow),
        **{f"{estimator}.{part}time_mlp.linear_{one}": (flow, flow) for part in ("", "delta_") for one in (1, 2)},
        "fsq_layer.in_proj": (bottleneck, wide),
        "fsq_layer.out_proj": (wide, bottleneck),
        "enc_to_lm_proj": (wide, local),
        "lm_to_dit_proj": (flow, wide),
        "res_to_dit_proj": (flow, wide),
        "fusion_concat_proj": (wide, 2 * wide),
        "stop_proj": (wide, wide),
    }.items():
        found[f"{name}.weight"], found[f"{name}.bias"] = shape, shape[:1]
    found["stop_head.weight"] = (2, wide)
    return found


def state_dict(stop: str = "random", seed: int = 0) -> dict[str, Array]:
    """Float32 tensors of the language model, every value exact in bfloat16.

    `stop` says when speech wants to end: after `random` frames, `never`, or `always`.
    """
    tensors = {name: _draw(name, shape, seed) for name, shape in shapes().items()}
    if stop != "random":
        tensors["stop_proj.bias"][:] = 6
        tensors["stop_head.weight"][:] = np.array([[1.0], [-1.0]] if stop == "never" else [[-1.0], [1.0]])
    return {name: (bfloat16_bits(tensor).astype(np.uint32) << 16).view(np.float32) for name, tensor in tensors.items()}


def write_checkpoint(folder: str | Path, *, stop: str = "random", seed: int = 0) -> None:
    """Write a whole checkpoint: bfloat16 model, codec, tokenizer, config.json."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: bfloat16_bits(tensor) for name, tensor in state_dict(stop, seed).items()}
    write_tensors(folder / "model.safetensors", "BF16", stored)
    write_json(folder / "config.json", config())
    write_json(folder / "tokenizer.json", tokenizer())
    write_codec(folder / "audiovae.pth", seed)


def noise(seed: int, frames: int) -> Array:
    """What a stored run begins its patches with: [frames, P, D] float32."""
    return np.random.default_rng(seed).standard_normal((frames, PATCH, LATENTS), dtype=np.float32)


def recording(seed: int, patches: int) -> Array:
    """Patches [N, P, D] float32, as an encoder might make them of a recording."""
    return np.random.default_rng([seed, 1]).standard_normal((patches, PATCH, LATENTS), dtype=np.float32)


def tokenizer() -> Config:
    """tokenizer.json, as the released one is made: text begins with a space, every space is a `▁`, no words."""
    vocab, merges = tokens()
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": token, **flags} for token, index in _SPECIAL.items()],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, spaces]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocab,
            "merges": [f"{left} {right}" for left, right in merges],
        },
    }


def _draw(name: str, shape: tuple[int, ...], seed: int) -> Array:
    normal = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape)
    if "norm.weight" in name or "layernorm" in name:
        values = 1 + 0.2 * normal
    elif name.endswith(".bias"):
        values = 0.1 * normal
    elif "embed_tokens" in name or "special_token" in name:
        values = normal
    else:
        # Not so lively that a rounding becomes another patch within a few frames.
        gain = 3.0 if "stop_" in name else 1.0
        values = gain * normal / np.sqrt(shape[1])
    return values.astype(np.float32)
