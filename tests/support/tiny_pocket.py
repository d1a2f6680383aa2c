"""Tiny random Pocket TTS checkpoints in the released layout, for tests and for the reference tool.

Needs numpy, safetensors and yaml alone, so the official package's own environment can read it too.
It knows neither our model nor the official one: every name, shape and value is written down here.
"""

import json
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import yaml
from safetensors.numpy import save_file
from tiny_checkpoint import Array, Config, Shapes

VARIANTS = ("lsd", "pointwise", "drifting", "first")
"""`lsd` is a small english_2026-10, `pointwise` a small 2m, `drifting` one between the small ones, `first` a small
english_2026-01."""

HOP = 1920
FRAMES, AUDIO_FRAMES = 60, 6
VOICE_SAMPLES = 13000
CONTROL_IDS = 4

_WORDS = """the quick brown fox jumps over lazy dog hello world this is a test of one two three four five number in it
and you light speak voice time not so long goes on first another after that them comes"""
_MARKS = ". , ; : ! ? ' \" ( ) - ... 3 14"


def pieces() -> list[tuple[str, float, int]]:
    """Pieces, scores and kinds of a unigram model: control tokens, bytes, then the released order of the first marks.
    No two ways to cut a text are equally good."""
    found = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("<pad>", 0.0, 3)]
    found += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    letters = [chr(code) for code in (*range(ord("a"), ord("z") + 1), *range(ord("A"), ord("Z") + 1))]
    plain = ["▁", *_MARKS.split(), *letters, *(f"▁{word}" for word in _WORDS.split())]
    plain += [f"▁{word.capitalize()}" for word in _WORDS.split()[:12]] + ["ing", "er", "ed"]
    plain = list(dict.fromkeys(plain))
    return found + [(piece, -3.0 - 0.0371 * index - 0.5 / len(piece), 1) for index, piece in enumerate(plain)]


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json and tokenizer.model, of equal ids."""
    vocabulary = [[piece, score] for piece, score, _ in pieces()]
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, spaces]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]},
        "model": {"type": "Unigram", "unk_id": 0, "vocab": vocabulary, "byte_fallback": True},
    }
    (folder / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    message = b""
    for piece, score, kind in pieces():
        text = piece.encode()
        message += _field(1, _field(1, text) + b"\x15" + struct.pack("<f", score) + _number(3, kind))
    # A unigram model with byte fallback; texts as they stand, with a space in front.
    message += _field(2, _number(3, 1) + _number(4, len(pieces())) + _number(35, 1))
    message += _field(3, _field(1, b"identity") + _number(3, 1) + _number(4, 0) + _number(5, 1))
    (folder / "tokenizer.model").write_bytes(message)


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _varint(value >> 7)


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def config(variant: str = "lsd") -> Config:
    """config.yaml. Widths of all heads are those of the model or not, and the decoder is the encoder's or not."""

    def convolutions(width: int, filters: int, kernel: int) -> Config:
        return {
            "dimension": width,
            "channels": 1,
            "n_filters": filters,
            "n_residual_layers": 1,
            "ratios": [6, 5, 4],
            "kernel_size": kernel,
            "residual_kernel_size": 3,
            "last_kernel_size": 3,
            "dilation_base": 2,
            "pad_mode": "constant",
            "compress": 2,
        }

    def windows(width: int, heads: int, layers: int, window: int, inner: int) -> Config:
        return {
            "d_model": width,
            "num_heads": heads,
            "num_layers": layers,
            "layer_scale": 0.01,
            "context": window,
            "dim_feedforward": inner,
            "input_dimension": width,
            "output_dimensions": [width],
        }

    table = {"n_bins": len(pieces()), "tokenizer": "tokenizers", "tokenizer_path": "tokenizer.json"}
    stack = {"hidden_scale": 2, "max_period": 10000}
    codec = {
        "dtype": "float32",
        "sample_rate": 24000,
        "channels": 1,
        "frame_rate": 12.5,
        "inner_dim": 8,
        "outer_dim": 32,
        "seanet": convolutions(32, 4, 7),
        "transformer": windows(32, 2, 2, 20, 64),
        "quantizer": {"dimension": 8, "output_dimension": 32},
    }
    own = {
        "outer_dim": 16,
        "quantizer": {"dimension": 8, "output_dimension": 16},
        "decoder_seanet": convolutions(16, 4, 3),
        "decoder_transformer": windows(16, 2, 3, 10, 24),
    }
    lm: Config = {"dtype": "float32", "insert_bos_before_voice": True}
    if variant in ("lsd", "first"):
        lm |= {"flow": {"depth": 2, "dim": 24}, "lookup_table": {"dim": 64, **table}}
        lm["transformer"] = {**stack, "d_model": 64, "num_heads": 4, "num_layers": 2}
        if variant == "first":
            lm["insert_bos_before_voice"] = False
            codec["inner_dim"] = 32
    elif variant == "pointwise":
        lm |= {"z_dim": 20, "flow": {"depth": 2, "dim": 16, "type": "pointwise"}}
        lm["lookup_table"] = {"dim": 24, "rank": 12, **table}
        lm["lookup_table"] |= {"tokenizer": "sentencepiece", "tokenizer_path": "tokenizer.model"}
        heads = {"num_heads": 3, "num_kv_heads": 1, "attn_dim": 48, "dim_feedforward": 20}
        lm["transformer"] = {**stack, "d_model": 24, "num_layers": 3, **heads}
        codec |= own
    else:
        lm |= {"z_dim": 12, "flow": {"depth": 3, "dim": 20, "type": "drifting"}}
        lm["lookup_table"] = {"dim": 56, **table}
        heads = {"num_heads": 4, "num_kv_heads": 2, "attn_dim": 64}
        lm["transformer"] = {**stack, "hidden_scale": 1, "d_model": 56, "num_layers": 2, **heads}
        codec |= own | {"decoder_transformer": windows(16, 4, 4, 33, 20)}
    texts: Config = {"replace_characters": {"’": "'", "‘": "'"}}
    if variant == "first":
        texts["pad_with_spaces_for_short_inputs"] = True
    if variant in ("pointwise", "drifting"):
        texts = {"default_eos_threshold": -1.0, "replace_characters": {"–": ",", "—": ",", "’": "'", "‘": "'"}}
    return {"flow_lm": lm, "mimi": codec, **texts}


def shapes(variant: str = "lsd") -> Shapes:
    """Names and shapes of the tensors in model.safetensors, written down from the released ones."""
    values = config(variant)
    lm, codec = values["flow_lm"], values["mimi"]
    sizes, table, flow = lm["transformer"], lm["lookup_table"], lm["flow"]
    width, latents, depth = sizes["d_model"], codec["quantizer"]["dimension"], flow["dim"]
    heads, attention = sizes["num_heads"], sizes.get("attn_dim", width)
    head = attention // heads
    made: Shapes = {f"flow_lm.{name}": (latents,) for name in ("bos_emb", "emb_std", "emb_mean")}
    if lm["insert_bos_before_voice"]:
        made["flow_lm.bos_before_voice"] = (1, 1, width)
    made["flow_lm.speaker_proj_weight"] = (width, codec["inner_dim"])
    made["flow_lm.conditioner.embed.weight"] = (table["n_bins"] + 1, table.get("rank", width))
    if "rank" in table:
        made["flow_lm.conditioner.proj.weight"] = (width, table["rank"])
    made["flow_lm.input_linear.weight"] = (width, latents)
    inner = sizes.get("dim_feedforward", width * sizes["hidden_scale"])
    for layer in range(sizes["num_layers"]):
        rows = attention + 2 * sizes.get("num_kv_heads", heads) * head
        made |= _layer(f"flow_lm.transformer.layers.{layer}", width, rows, attention, inner)
    made |= {"flow_lm.out_norm.weight": (width,), "flow_lm.out_norm.bias": (width,)}
    given = lm.get("z_dim", width)
    if "z_dim" in lm:
        made["flow_lm.z_proj.weight"] = (given, width)
    made |= _linear("flow_lm.out_eos", 1, given)
    net = "flow_lm.flow_net"
    for index in range(2 if "type" not in flow else 0):
        embed = f"{net}.time_embed.{index}"
        made |= {f"{embed}.freqs": (128,), f"{embed}.mlp.3.alpha": (depth,)}
        made |= _linear(f"{embed}.mlp.0", depth, 256) | _linear(f"{embed}.mlp.2", depth, depth)
    made |= _linear(f"{net}.cond_embed", depth, given) | _linear(f"{net}.input_proj", depth, latents)
    for index in range(flow["depth"]):
        block = f"{net}.res_blocks.{index}"
        made |= {f"{block}.in_ln.weight": (depth,), f"{block}.in_ln.bias": (depth,)}
        made |= _linear(f"{block}.mlp.0", depth, depth) | _linear(f"{block}.mlp.2", depth, depth)
        made |= _linear(f"{block}.adaLN_modulation.1", 3 * depth, depth)
    made |= _linear(f"{net}.final_layer.linear", latents, depth)
    made |= _linear(f"{net}.final_layer.adaLN_modulation.1", 2 * depth, depth)
    return made | _codec_shapes(codec)


def _linear(name: str, rows: int, columns: int) -> Shapes:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _conv(name: str, shape: tuple[int, ...], rows: int | None = None) -> Shapes:
    return {f"{name}.weight": shape, f"{name}.bias": (rows or shape[0],)}


def _layer(name: str, width: int, rows: int, attention: int, inner: int) -> Shapes:
    made: Shapes = {f"{name}.{norm}.{part}": (width,) for norm in ("norm1", "norm2") for part in ("weight", "bias")}
    made |= {f"{name}.self_attn.in_proj.weight": (rows, width), f"{name}.linear1.weight": (inner, width)}
    return made | {f"{name}.self_attn.out_proj.weight": (width, attention), f"{name}.linear2.weight": (width, inner)}


def _unit(name: str, channels: int) -> Shapes:
    half = channels // 2
    return _conv(f"{name}.block.1.conv", (half, channels, 3)) | _conv(f"{name}.block.3.conv", (channels, half, 1))


def _codec_shapes(codec: Config) -> Shapes:
    net, windows = (codec.get(f"decoder_{part}", codec[part]) for part in ("seanet", "transformer"))
    latents, width, own = codec["quantizer"]["dimension"], windows["d_model"], codec["seanet"]
    columns = HOP // math.prod(own["ratios"])
    made: Shapes = {
        "mimi.quantizer.output_proj.weight": (width, latents, 1),
        "mimi.upsample.convtr.convtr.weight": (width, 1, 2 * columns),
        "mimi.downsample.conv.conv.weight": (codec["inner_dim"], own["dimension"], 2 * columns),
    }
    for side, sizes in (("decoder", windows), ("encoder", codec["transformer"])):
        size, inner = sizes["d_model"], sizes["dim_feedforward"]
        for layer in range(sizes["num_layers"]):
            name = f"mimi.{side}_transformer.transformer.layers.{layer}"
            made |= _layer(name, size, 3 * size, size, inner)
            made |= {f"{name}.layer_scale_{part}.scale": (size,) for part in (1, 2)}
    channels = 8 * net["n_filters"]
    made |= _conv("mimi.decoder.model.0.conv", (channels, net["dimension"], net["kernel_size"]))
    for index, ratio in zip((2, 5, 8), net["ratios"], strict=True):
        channels //= 2
        made |= _conv(f"mimi.decoder.model.{index}.convtr", (2 * channels, channels, 2 * ratio), channels)
        made |= _unit(f"mimi.decoder.model.{index + 1}", channels)
    made |= _conv("mimi.decoder.model.11.conv", (1, channels, net["last_kernel_size"]))
    channels = own["n_filters"]
    made |= _conv("mimi.encoder.model.0.conv", (channels, 1, own["kernel_size"]))
    for index, ratio in zip((1, 4, 7), own["ratios"][::-1], strict=True):
        made |= _unit(f"mimi.encoder.model.{index}", channels)
        made |= _conv(f"mimi.encoder.model.{index + 2}.conv", (2 * channels, channels, 2 * ratio))
        channels *= 2
    return made | _conv("mimi.encoder.model.11.conv", (own["dimension"], channels, own["last_kernel_size"]))


def state_dict(variant: str = "lsd", end: str = "random") -> dict[str, Array]:
    """Arrays by released name. `end`: speech ends at random, `never` or `always`."""
    made = {name: _draw(f"{variant}/{name}", shape) for name, shape in shapes(variant).items()}
    usual = config(variant).get("default_eos_threshold", -4.0) - 2.0
    made["flow_lm.out_eos.bias"][:] = {"random": usual, "always": 1000.0, "never": -1000.0}[end]
    return made


def _draw(name: str, shape: tuple[int, ...]) -> Array:
    normal = np.random.default_rng([7, zlib.crc32(name.encode())]).standard_normal(shape)
    if name.endswith("freqs"):
        values = 10000 ** (-np.arange(128) / 128) + 0.001 * normal
    elif name.endswith("emb_std"):
        values = 0.7 + 0.3 * np.abs(normal)
    elif name.endswith(".scale"):
        values = 0.3 + 0.06 * normal
    elif name.endswith(("norm1.weight", "norm2.weight", "out_norm.weight", "in_ln.weight", "alpha")):
        values = 1 + 0.2 * normal
    elif name.endswith("embed.weight"):
        values = normal
    elif name.endswith("weight") and len(shape) > 1:
        # A depthwise kernel sums two taps, a transposed one two of each input channel.
        fan_in = 2 if "upsample" in name else 2 * shape[0] if "convtr" in name else math.prod(shape[1:])
        # Frames that are fed back must not amplify a rounding to another frame within a minute of them.
        gains = {
            "model.11": 0.15,
            "final_layer.linear": 0.15,
            "out_eos": 2.0,
            "adaLN": 0.3,
            "in_proj": 0.6,
            "cond_embed": 0.4,
        }
        gain = next((gain for part, gain in gains.items() if part in name), 1.0)
        values = gain * normal / math.sqrt(fan_in)
    else:
        values = (1.5 if "final_layer.linear" in name else 0.2) * normal
        if "decoder.model.9.block.3" in name:
            # ELU hides what is far below zero, in any dtype.
            values = np.abs(normal)
    return values.astype(np.float32)


def write_checkpoint(
    folder: Path, variant: str = "lsd", *, end: str = "random", voices: tuple[str, ...] = ("alba",)
) -> None:
    """Write a folder as it is released, with its configuration, and random voices of 19 positions and more."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    values = config(variant)
    (folder / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), encoding="utf-8")
    save_file(state_dict(variant, end), folder / "model.safetensors")
    write_tokenizer(folder)
    (folder / "embeddings").mkdir(exist_ok=True)
    for number, name in enumerate(voices):
        save_file(voice_state(variant, number), folder / "embeddings" / f"{name}.safetensors")


def voice_state(
    variant: str = "lsd", number: int = 0, positions: int | None = None, spare: int = 0
) -> dict[str, Array]:
    """A random state of a voice, as version 4 of the official package writes it; behind the live positions is NaN."""
    sizes = config(variant)["flow_lm"]["transformer"]
    heads = sizes.get("num_kv_heads", sizes["num_heads"])
    width = sizes.get("attn_dim", sizes["d_model"]) // sizes["num_heads"]
    count = 19 + 17 * number if positions is None else positions
    made: dict[str, Array] = {}
    for layer in range(sizes["num_layers"]):
        name = f"transformer.layers.{layer}.self_attn"
        cache = _draw(f"voice {number}/{name}", (2, 1, count, heads, width)) * 3
        cache = np.concatenate((cache, np.full((2, 1, spare, heads, width), np.nan, np.float32)), axis=2)
        made |= {f"{name}/cache": cache, f"{name}/offset": np.array([count], np.int64)}
        made[f"{name}/pad"] = np.zeros(1, np.int64)
    return made


def noise(variant: str, frames: int = FRAMES) -> Array:
    """Standard normal noise of a stored run: [frames, D] float32."""
    latents = config(variant)["mimi"]["quantizer"]["dimension"]
    return np.random.default_rng([3, zlib.crc32(variant.encode())]).standard_normal((frames, latents), np.float32)


def sound() -> Array:
    """A recording at 24 kHz that decays, and silence after it."""
    at = np.arange(VOICE_SAMPLES) / 24000
    harmonics = sum(np.sin(2 * math.pi * 140 * k * at) / k for k in (1, 2, 3, 5))
    made = 0.2 * harmonics * np.exp(-at) * (at < 0.4)
    return made.astype(np.float32)
