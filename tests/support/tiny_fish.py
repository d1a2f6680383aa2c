"""A tiny random Fish S2 Pro checkpoint and codec in the released folder layout, for tests and for the reference tools.

Needs numpy and torch alone, so the official code's own environment can read it too.
It knows neither our model nor the official one: every name, shape and value is written down here.
"""

import hashlib
import zlib
from pathlib import Path

import numpy as np
import torch
from tiny_checkpoint import Array, Config, Shapes, bfloat16_bits, vocabulary, write_json, write_tensors

TRANSFORMER = {
    "width": 64,
    "intermediate": 96,
    "layers": 2,
    "heads": 4,
    "kv_heads": 4,
    "head_width": 16,
    "window": 8,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "has_rounded_angles": True,
}
TINY_CODEC = {
    "sample_rate": 44100,
    "encoder_dim": 8,
    "encoder_rates": [2, 2, 2],
    "encoder_transformer": TRANSFORMER
    | {"intermediate": 192, "heads": 1, "kv_heads": 1, "head_width": 64, "window": 512},
    "downsample": [2, 2],
    "transformer": TRANSFORMER,
    "semantic_codes": 64,
    "residual_codes": 32,
    "residual_codebooks": 9,
    "codebook_width": 8,
    "decoder_dim": 48,
    "decoder_rates": [2, 2, 2],
}
"""What config.json has as `codec_config`. The encoder's heads are 64 wide in the official code, whatever the width."""

HOP = 32


def _conv(name, weight, rows=None):
    """A convolution with weight norm as it is released; `rows` biases."""
    stem = f"{name}.conv.parametrizations.weight"
    return {
        f"{stem}.original0": (weight[0], 1, 1),
        f"{stem}.original1": weight,
        f"{name}.conv.bias": (rows or weight[0],),
    }


def _unit(name, channels):
    return {
        f"{name}.block.0.alpha": (1, channels, 1),
        **_conv(f"{name}.block.1", (channels, channels, 7)),
        f"{name}.block.2.alpha": (1, channels, 1),
        **_conv(f"{name}.block.3", (channels, channels, 1)),
    }


def _transformer(name, sizes):
    width, inner, heads = sizes["width"], sizes["intermediate"], sizes["heads"] * sizes["head_width"]
    shapes = {f"{name}.norm.weight": (width,)}
    for index in range(sizes["layers"]):
        layer = f"{name}.layers.{index}"
        shapes |= {
            f"{layer}.attention.wqkv.weight": (3 * heads, width),
            f"{layer}.attention.wo.weight": (width, heads),
            f"{layer}.feed_forward.w1.weight": (inner, width),
            f"{layer}.feed_forward.w3.weight": (inner, width),
            f"{layer}.feed_forward.w2.weight": (width, inner),
            **{f"{layer}.{part}_norm.weight": (width,) for part in ("attention", "ffn")},
            **{f"{layer}.{part}_layer_scale.gamma": (width,) for part in ("attention", "ffn")},
        }
    return shapes


def _resampler(name, width):
    block = f"{name}.1"
    return {
        f"{name}.0.conv.weight": (width, width, 2),
        f"{name}.0.conv.bias": (width,),
        f"{block}.dwconv.conv.weight": (width, 1, 7),
        f"{block}.dwconv.conv.bias": (width,),
        f"{block}.norm.weight": (width,),
        f"{block}.norm.bias": (width,),
        f"{block}.pwconv1.weight": (4 * width, width),
        f"{block}.pwconv1.bias": (4 * width,),
        f"{block}.pwconv2.weight": (width, 4 * width),
        f"{block}.pwconv2.bias": (width,),
        f"{block}.gamma": (width,),
    }


def _codebook(name, codes, width, inner):
    return {
        f"{name}.codebook.weight": (codes, inner),
        f"{name}.in_proj.weight_g": (inner, 1, 1),
        f"{name}.in_proj.weight_v": (inner, width, 1),
        f"{name}.in_proj.bias": (inner,),
        f"{name}.out_proj.weight_g": (width, 1, 1),
        f"{name}.out_proj.weight_v": (width, inner, 1),
        f"{name}.out_proj.bias": (width,),
    }


def shapes_of(config=TINY_CODEC):
    """Names and shapes of codec.pth, written down from the released one, none of them asked of the code under test."""
    width, inner = config["transformer"]["width"], config["codebook_width"]
    channels = config["encoder_dim"]
    shapes = _conv("encoder.block.0", (channels, 1, 7))
    for index, rate in enumerate(config["encoder_rates"], start=1):
        block = f"encoder.block.{index}.block"
        for unit in range(3):
            shapes |= _unit(f"{block}.{unit}", channels)
        shapes |= {f"{block}.3.alpha": (1, channels, 1), **_conv(f"{block}.4", (2 * channels, channels, 2 * rate))}
        channels *= 2
    shapes |= _transformer(f"{block}.5", config["encoder_transformer"])
    index = len(config["encoder_rates"]) + 1
    shapes |= {f"encoder.block.{index}.alpha": (1, width, 1), **_conv(f"encoder.block.{index + 1}", (width, width, 3))}
    for index in range(len(config["downsample"])):
        shapes |= _resampler(f"quantizer.downsample.{index}", width) | _resampler(f"quantizer.upsample.{index}", width)
    for part in ("pre_module", "post_module"):
        shapes |= _transformer(f"quantizer.{part}", config["transformer"])
    shapes |= _codebook("quantizer.semantic_quantizer.quantizers.0", config["semantic_codes"], width, inner)
    for index in range(config["residual_codebooks"]):
        shapes |= _codebook(f"quantizer.quantizer.quantizers.{index}", config["residual_codes"], width, inner)
    channels = config["decoder_dim"]
    shapes |= _conv("decoder.model.0", (channels, width, 7))
    for index, rate in enumerate(config["decoder_rates"], start=1):
        block, half = f"decoder.model.{index}.block", channels // 2
        shapes |= {f"{block}.0.alpha": (1, channels, 1), **_conv(f"{block}.1", (channels, half, 2 * rate), half)}
        for unit in (2, 3, 4):
            shapes |= _unit(f"{block}.{unit}", half)
        channels = half
    index = len(config["decoder_rates"]) + 1
    return shapes | {
        f"decoder.model.{index}.alpha": (1, channels, 1),
        **_conv(f"decoder.model.{index + 1}", (1, channels, 7)),
    }


def codec_tensors(seed=0, config=TINY_CODEC, snake_std=0.3):
    """Float32 arrays by released name: nothing is left at 0 or 1, sums keep a size near 1, samples stay below 1."""
    tensors = {}
    last = f"decoder.model.{len(config['decoder_rates']) + 2}."
    for name, shape in shapes_of(config).items():
        normal = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape)
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "alpha":
            normal = 0.8 + snake_std * np.abs(normal)
        elif leaf == "gamma" or "norm.weight" in name:
            normal = 0.6 + 0.1 * np.abs(normal)
        elif leaf in ("weight_g", "original0"):
            normal = (0.05 if name.startswith(last) else 0.8) * (1 + 0.1 * np.abs(normal))
        elif leaf == "bias":
            normal = 0.1 * normal
        elif leaf == "weight" and "codebook" not in name:
            normal = normal / np.sqrt(np.prod(shape[1:]))
        tensors[name] = normal.astype(np.float32)
    return tensors


def digest(tensors):
    """A fingerprint of names and values."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode() + tensors[name].tobytes())
    return total.hexdigest()


def write_codec(path, seed=0, config=TINY_CODEC, snake_std=0.3):
    """Write codec.pth with random tensors, and stale buffers as the released one has them."""
    tensors = {name: torch.from_numpy(tensor) for name, tensor in codec_tensors(seed, config, snake_std).items()}
    for part in ("encoder.block.3.block.5", "quantizer.pre_module", "quantizer.post_module"):
        tensors[f"{part}.causal_mask"] = torch.ones(4, 4, dtype=torch.bool)
        tensors[f"{part}.freqs_cis"] = torch.ones(4, 8, 2, dtype=torch.bfloat16)
    torch.save(tensors, path)


def sound(samples, seed=0):
    """Something with a changing pitch and loudness: [S] float64 within +-0.9."""
    random = np.random.default_rng(seed)
    pitch = np.cumsum(0.02 + 0.3 * np.repeat(random.random(samples // 200 + 1), 200)[:samples])
    loudness = np.repeat(random.random(samples // 300 + 1), 300)[:samples]
    return np.clip(loudness * np.sin(pitch) + 0.1 * random.standard_normal(samples), -0.9, 0.9)


NUM_CODEBOOKS = 10
NUM_CODES = 64
SHARDS = 2

_SPECIAL_TOKENS = """
<|endoftext|> <|im_start|> <|im_end|> <|pad|> <|phoneme_start|> <|phoneme_end|> <|text|> <|voice|> <|interleave|>
<|audio_start|> <|audio_end|> <|audio_pad|>
"""

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def special_tokens() -> dict[str, int]:
    """The special tokens with their ids, in the released order: they follow the merges."""
    first = len(vocabulary()[0])
    names = [*_SPECIAL_TOKENS.split(), *(f"<|semantic:{code}|>" for code in range(NUM_CODES))]
    return {token: first + index for index, token in enumerate(names)}


def config() -> Config:
    """config.json. The width of all queries is not that of the model, and the stacks differ in depth alone."""
    special = special_tokens()
    stack = {
        "dim": 64,
        "n_head": 8,
        "n_local_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "rope_base": 1000000,
        "norm_eps": 1e-6,
        "attention_qkv_bias": False,
        "attention_o_bias": False,
    }
    text = {
        "vocab_size": max(special.values()) + 3,
        "n_layer": 3,
        "max_seq_len": 4096,
        "attention_qk_norm": True,
        "tie_word_embeddings": True,
    }
    audio = {
        "vocab_size": NUM_CODES,
        "num_codebooks": NUM_CODEBOOKS,
        "n_layer": 2,
        "max_seq_len": NUM_CODEBOOKS + 1,
        "text_dim": 64,
        "attention_qk_norm": False,
        "tie_word_embeddings": False,
    }
    return {
        "model_type": "fish_qwen3_omni",
        "dtype": "bfloat16",
        "eos_token_id": special["<|im_end|>"],
        "pad_token_id": special["<|pad|>"],
        "audio_pad_token_id": special["<|audio_pad|>"],
        "semantic_start_token_id": special["<|semantic:0|>"],
        "semantic_end_token_id": special[f"<|semantic:{NUM_CODES - 1}|>"],
        "text_config": {"model_type": "fish_qwen3", **stack, **text},
        "audio_decoder_config": {"model_type": "fish_qwen3_audio_decoder", **stack, **audio},
        "codec_config": TINY_CODEC,
    }


def shapes() -> Shapes:
    """The tensors of the language model under their released names."""
    values = config()
    found: Shapes = {}
    for prefix, stack in (
        ("text_model.model.", values["text_config"]),
        ("audio_decoder.", values["audio_decoder_config"]),
    ):
        dim, width, inner = stack["dim"], stack["head_dim"], stack["intermediate_size"]
        heads, shared = stack["n_head"], stack["n_local_heads"]
        for index in range(stack["n_layer"]):
            layer = f"{prefix}layers.{index}."
            found[f"{layer}attention.wqkv.weight"] = ((heads + 2 * shared) * width, dim)
            found[f"{layer}attention.wo.weight"] = (dim, heads * width)
            if stack["attention_qk_norm"]:
                found[f"{layer}attention.q_norm.weight"] = found[f"{layer}attention.k_norm.weight"] = (width,)
            found[f"{layer}feed_forward.w1.weight"] = found[f"{layer}feed_forward.w3.weight"] = (inner, dim)
            found[f"{layer}feed_forward.w2.weight"] = (dim, inner)
            found[f"{layer}attention_norm.weight"] = found[f"{layer}ffn_norm.weight"] = (dim,)
        found[f"{prefix}norm.weight"] = (dim,)
        found[f"{prefix}embeddings.weight"] = (stack["vocab_size"], dim)
    found["audio_decoder.codebook_embeddings.weight"] = (NUM_CODEBOOKS * NUM_CODES, dim)
    found["audio_decoder.output.weight"] = (NUM_CODES, dim)
    return found


def state_dict(end_scale: float = 0.25, seed: int = 0) -> dict[str, Array]:
    """Float32 tensors of the language model, every value exact in bfloat16.

    `end_scale` multiplies the row that means end of speech, so that greedy speech is long, or ends.
    """
    tensors = {name: _draw(name, shape, seed) for name, shape in shapes().items()}
    tensors["text_model.model.embeddings.weight"][config()["eos_token_id"]] *= end_scale
    return {name: (bfloat16_bits(tensor).astype(np.uint32) << 16).view(np.float32) for name, tensor in tensors.items()}


def write_checkpoint(folder: str | Path, *, end_scale: float = 0.25, seed: int = 0) -> None:
    """Write a whole checkpoint: bfloat16 shards under an index, codec, tokenizer, config.json."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors, files = state_dict(end_scale, seed), {}
    for number in range(SHARDS):
        file = f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors"
        stored = {name: bfloat16_bits(tensors[name]) for name in sorted(tensors)[number::SHARDS]}
        write_tensors(folder / file, "BF16", stored)
        files.update(dict.fromkeys(stored, file))
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": files})
    write_json(folder / "config.json", config())
    write_codec(folder / "codec.pth", seed)
    _write_tokenizer(folder)


def uniforms(seed: int, frames: int, *, is_first_end: bool = False) -> Array:
    """What a seeded run draws: [frames, K + 1, codes + 1] float32 in (0, 1); the last draw of a frame is the second of
    codebook 0, the last id end of speech. `is_first_end` makes that the first decision."""
    drawn = np.random.default_rng(seed).random((frames, NUM_CODEBOOKS + 1, NUM_CODES + 1), dtype=np.float32)
    if is_first_end:
        drawn[0, 0, -1] = 1
    return drawn.clip(1e-6, 1 - 1e-6)


def _draw(name: str, shape: tuple[int, ...], seed: int) -> Array:
    normal = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape)
    if len(shape) == 1:
        values = 1 + 0.2 * normal
    elif "embeddings" in name:
        values = (1.0 if name == "audio_decoder.embeddings.weight" else 0.4) * normal
    else:
        gain = 3.0 if "output" in name else 2.0 if "wo." in name or "w2." in name else 1.0
        values = gain * normal / np.sqrt(shape[1])
    return values.astype(np.float32)


def _write_tokenizer(folder: Path) -> None:
    vocab, merges, _ = vocabulary()
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": index, "content": token, **flags} for token, index in special_tokens().items()]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": _SPLIT}, "behavior": "Isolated", "invert": False}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": vocab,
        "merges": [f"{left} {right}" for left, right in merges],
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": None,
        "decoder": level,
        "model": model,
    }
    write_json(folder / "tokenizer.json", tokenizer)
    names = {"eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})
