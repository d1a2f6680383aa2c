"""Tiny random Qwen3-TTS checkpoints in the released folder layout, for tests and for the reference tool.

Imports only the standard library and numpy, so the official package's own environment can read it too.
It knows neither our model nor the official one: every name, shape and value is written down here.
"""

import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]

VARIANTS = ("custom_voice", "voice_design", "base")
TOPOLOGIES = ("1.7b", "0.6b")

NUM_GROUPS = 4
NUM_CODES = 64
# The ids forbidden as a first code are the last 1024 of the talker's vocabulary whatever its size, so a small number
# of control ids would change the meaning of the model.
NUM_CONTROL_IDS = 1024
TEXT_VOCAB_SIZE = 424

# Ranked byte-pair merges, one "left+right" per word. The first row makes "assistant" and "user" single tokens.
_MERGES = """
i+s is+t a+n an+t a+s as+s ist+ant ass+istant e+r u+s us+er
Ġ+t h+e Ġt+he Ġ+a i+n o+n r+e Ġ+s o+u Ġ+w o+r e+n Ġ+o i+t n+d in+g e+s Ġ+b l+l a+r Ġ+c a+t Ġ+f o+w Ġo+f e+d Ġ+m
Ġ+p a+l Ġ+h Ġ+d Ġ+l l+e Ġ+n Ġa+nd Ġt+o Ġ+in r+o v+e i+c o+m s+t Ġ+g Ġw+h Ġ+y Ġy+ou o+o o+t u+t a+y g+h gh+t i+ght
e+l c+h Ġb+e Ġ+is Ġ+it Ġ+he t+h th+e Ġt+h e+a e+e s+e k+e Ġ+k Ġ+v l+y i+on t+ion Ġth+at Ġf+or Ġ+on Ġw+as i+th Ġw+ith
Ġ+re i+d i+l u+r c+k p+l Ġs+t Ġs+h o+l o+k a+m a+d u+n Ġ+u Ġ+e Ġ+I Ġ+T h+is Ġth+is Ġn+ot Ġd+o Ġs+o Ġ+j s+h m+e Ġm+e
Ġ+as w+or k+s ll+o H+e He+llo Ġw+or Ġwor+d Ġs+p ea+k Ġsp+eak Ġv+o ic+e Ġvo+ice c+e
"""

# Ids follow the merges, in the released order.
_ADDED_TOKENS = """
<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> <|quad_start|>
<|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> <tool_call> </tool_call>
<|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> <tool_response> </tool_response>
<think> </think> <|audio_start|> <|audio_end|> <tts_pad> <tts_text_bos> <tts_text_eod> <tts_text_bos_single>
<|audio_pad|>
"""


def _byte_symbols() -> list[str]:
    """The 256 printable stand-ins for bytes, in the vocabulary order of GPT-2 (a line break is id 198)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    return [chr(byte) for byte in printable] + [chr(256 + n) for n in range(256 - len(printable))]


def vocabulary() -> tuple[dict[str, int], list[tuple[str, str]], dict[str, int]]:
    """The text tokenizer: vocabulary, ranked merges, and the added tokens with their ids."""
    merges = [(left, right) for left, right in (word.split("+") for word in _MERGES.split())]
    vocab = {symbol: index for index, symbol in enumerate(_byte_symbols())}
    for left, right in merges:
        assert left in vocab, left
        assert right in vocab, right
        assert left + right not in vocab, left + right
        vocab[left + right] = len(vocab)
    added = {token: len(vocab) + index for index, token in enumerate(_ADDED_TOKENS.split())}
    assert len(vocab) + len(added) <= TEXT_VOCAB_SIZE
    return vocab, merges, added


def configs(variant: str, topology: str) -> tuple[Config, Config]:
    """config.json of the model and of its codec. The 1.7b topology has a predictor narrower than the talker (and
    so a projection); in the 0.6b topology the widths are equal."""
    assert variant in VARIANTS, variant
    assert topology in TOPOLOGIES, topology
    data = _data()
    vocab, _, added = vocabulary()
    talker = data["talker"] | {"text_vocab_size": TEXT_VOCAB_SIZE}
    talker["code_predictor_config"] = data["code_predictor"] | {"hidden_size": {"1.7b": 16, "0.6b": 32}[topology]}
    if variant != "custom_voice":
        languages = talker["codec_language_id"].items()
        talker["codec_language_id"] = {name: index for name, index in languages if "dialect" not in name}
        talker["spk_id"] = talker["spk_is_dialect"] = {}
    main = data["model"] | {
        "assistant_token_id": vocab["assistant"],
        "im_start_token_id": added["<|im_start|>"],
        "im_end_token_id": added["<|im_end|>"],
        "tts_pad_token_id": added["<tts_pad>"],
        "tts_bos_token_id": added["<tts_text_bos>"],
        "tts_eos_token_id": added["<tts_text_eod>"],
        "tts_model_size": {"1.7b": "1b7", "0.6b": "0b6"}[topology],
        "tts_model_type": variant,
        "talker_config": talker,
    }
    if variant == "base":
        main["speaker_encoder_config"] = data["speaker_encoder"]
    return main, data["codec"]


def _data() -> Config:
    data: Config = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return data


def _linear(shapes: Shapes, name: str, out_width: int, in_width: int, *, bias: bool = False) -> None:
    shapes[f"{name}.weight"] = (out_width, in_width)
    if bias:
        shapes[f"{name}.bias"] = (out_width,)


def _conv(shapes: Shapes, name: str, out_width: int, in_width: int, kernel: int, *, transposed: bool = False) -> None:
    shapes[f"{name}.weight"] = (in_width, out_width, kernel) if transposed else (out_width, in_width, kernel)
    shapes[f"{name}.bias"] = (out_width,)


def _attention(shapes: Shapes, name: str, width: int, query_width: int, key_width: int) -> None:
    _linear(shapes, f"{name}.q_proj", query_width, width)
    _linear(shapes, f"{name}.k_proj", key_width, width)
    _linear(shapes, f"{name}.v_proj", key_width, width)
    _linear(shapes, f"{name}.o_proj", width, query_width)


def _gated_mlp(shapes: Shapes, name: str, width: int, inner: int) -> None:
    _linear(shapes, f"{name}.gate_proj", inner, width)
    _linear(shapes, f"{name}.up_proj", inner, width)
    _linear(shapes, f"{name}.down_proj", width, inner)


def _qwen_stack(shapes: Shapes, name: str, config: Config) -> None:
    width, head_dim = config["hidden_size"], config["head_dim"]
    for index in range(config["num_hidden_layers"]):
        layer = f"{name}.layers.{index}"
        query_width, key_width = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
        _attention(shapes, f"{layer}.self_attn", width, query_width, key_width)
        shapes[f"{layer}.self_attn.q_norm.weight"] = shapes[f"{layer}.self_attn.k_norm.weight"] = (head_dim,)
        shapes[f"{layer}.input_layernorm.weight"] = shapes[f"{layer}.post_attention_layernorm.weight"] = (width,)
        _gated_mlp(shapes, f"{layer}.mlp", width, config["intermediate_size"])
    shapes[f"{name}.norm.weight"] = (width,)


def _main_shapes(config: Config) -> Shapes:
    talker, predictor = config["talker_config"], config["talker_config"]["code_predictor_config"]
    width, text_width, inner_width = talker["hidden_size"], talker["text_hidden_size"], predictor["hidden_size"]
    shapes: Shapes = {
        "talker.model.text_embedding.weight": (talker["text_vocab_size"], text_width),
        "talker.model.codec_embedding.weight": (talker["vocab_size"], width),
    }
    _linear(shapes, "talker.text_projection.linear_fc1", text_width, text_width, bias=True)
    _linear(shapes, "talker.text_projection.linear_fc2", width, text_width, bias=True)
    _qwen_stack(shapes, "talker.model", talker)
    _linear(shapes, "talker.codec_head", talker["vocab_size"], width)
    _qwen_stack(shapes, "talker.code_predictor.model", predictor)
    for table in range(NUM_GROUPS - 1):
        shapes[f"talker.code_predictor.model.codec_embedding.{table}.weight"] = (NUM_CODES, width)
        _linear(shapes, f"talker.code_predictor.lm_head.{table}", NUM_CODES, inner_width)
    if inner_width != width:
        _linear(shapes, "talker.code_predictor.small_to_mtp_projection", inner_width, width, bias=True)
    if config["tts_model_type"] == "base":
        _speaker_shapes(shapes, config["speaker_encoder_config"])
    return shapes


def _speaker_shapes(shapes: Shapes, config: Config) -> None:
    first, *_, last = config["enc_channels"]
    narrow, attention = config["enc_se_channels"], config["enc_attention_channels"]
    _conv(shapes, "speaker_encoder.blocks.0.conv", first, 128, 5)
    for index in (1, 2, 3):
        block = f"speaker_encoder.blocks.{index}"
        _conv(shapes, f"{block}.tdnn1.conv", first, first, 1)
        for part in range(7):
            _conv(shapes, f"{block}.res2net_block.blocks.{part}.conv", first // 8, first // 8, 3)
        _conv(shapes, f"{block}.tdnn2.conv", first, first, 1)
        _conv(shapes, f"{block}.se_block.conv1", narrow, first, 1)
        _conv(shapes, f"{block}.se_block.conv2", first, narrow, 1)
    _conv(shapes, "speaker_encoder.mfa.conv", last, last, 1)
    _conv(shapes, "speaker_encoder.asp.tdnn.conv", attention, 3 * last, 1)
    _conv(shapes, "speaker_encoder.asp.conv", last, attention, 1)
    _conv(shapes, "speaker_encoder.fc", config["enc_dim"], 2 * last, 1)


def _decoder_shapes(config: Config) -> Shapes:
    shapes: Shapes = {}
    book_width, latent, width = config["codebook_dim"] // 2, config["latent_dim"], config["hidden_size"]
    for part, books in (("rvq_first", 1), ("rvq_rest", NUM_GROUPS - 1)):
        name = f"decoder.quantizer.{part}"
        for index in range(books):
            shapes[f"{name}.vq.layers.{index}._codebook.embedding_sum"] = (NUM_CODES, book_width)
            shapes[f"{name}.vq.layers.{index}._codebook.cluster_usage"] = (NUM_CODES,)
        shapes[f"{name}.input_proj.weight"] = (book_width, 2 * book_width, 1)
        shapes[f"{name}.output_proj.weight"] = (2 * book_width, book_width, 1)
    _conv(shapes, "decoder.pre_conv.conv", latent, 2 * book_width, 3)
    stack = "decoder.pre_transformer"
    _linear(shapes, f"{stack}.input_proj", width, latent, bias=True)
    for index in range(config["num_hidden_layers"]):
        layer = f"{stack}.layers.{index}"
        heads_width = config["num_attention_heads"] * config["head_dim"]
        _attention(shapes, f"{layer}.self_attn", width, heads_width, heads_width)
        _gated_mlp(shapes, f"{layer}.mlp", width, config["intermediate_size"])
        for vector in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            shapes[f"{layer}.{vector}"] = (width,)
        shapes[f"{layer}.self_attn_layer_scale.scale"] = shapes[f"{layer}.mlp_layer_scale.scale"] = (width,)
    shapes[f"{stack}.norm.weight"] = (width,)
    _linear(shapes, f"{stack}.output_proj", latent, width, bias=True)
    for index, ratio in enumerate(config["upsampling_ratios"]):
        _conv(shapes, f"decoder.upsample.{index}.0.conv", latent, latent, ratio, transposed=True)
        block = f"decoder.upsample.{index}.1"
        _conv(shapes, f"{block}.dwconv.conv", latent, 1, 7)
        shapes[f"{block}.norm.weight"] = shapes[f"{block}.norm.bias"] = shapes[f"{block}.gamma"] = (latent,)
        _linear(shapes, f"{block}.pwconv1", 4 * latent, latent, bias=True)
        _linear(shapes, f"{block}.pwconv2", latent, 4 * latent, bias=True)
    return shapes | _vocoder_shapes(config)


def _vocoder_shapes(config: Config) -> Shapes:
    shapes: Shapes = {}
    channels = config["decoder_dim"]
    _conv(shapes, "decoder.decoder.0.conv", channels, config["latent_dim"], 7)
    for index, rate in enumerate(config["upsample_rates"], start=1):
        block = f"decoder.decoder.{index}.block"
        shapes[f"{block}.0.alpha"] = shapes[f"{block}.0.beta"] = (channels,)
        _conv(shapes, f"{block}.1.conv", channels // 2, channels, 2 * rate, transposed=True)
        channels //= 2
        for unit in (2, 3, 4):
            for vector in ("act1.alpha", "act1.beta", "act2.alpha", "act2.beta"):
                shapes[f"{block}.{unit}.{vector}"] = (channels,)
            _conv(shapes, f"{block}.{unit}.conv1.conv", channels, channels, 7)
            _conv(shapes, f"{block}.{unit}.conv2.conv", channels, channels, 1)
    last = len(config["upsample_rates"]) + 1
    shapes[f"decoder.decoder.{last}.alpha"] = shapes[f"decoder.decoder.{last}.beta"] = (channels,)
    _conv(shapes, f"decoder.decoder.{last + 1}.conv", 1, channels, 7)
    return shapes


def _encoder_shapes(config: Config) -> Shapes:
    shapes: Shapes = {}
    channels, width, book_width = config["num_filters"], config["hidden_size"], config["codebook_dim"]
    _conv(shapes, "encoder.encoder.layers.0.conv", channels, 1, 7)
    index = 1
    for ratio in reversed(config["upsampling_ratios"]):
        _conv(shapes, f"encoder.encoder.layers.{index}.block.1.conv", channels // 2, channels, 3)
        _conv(shapes, f"encoder.encoder.layers.{index}.block.3.conv", channels, channels // 2, 1)
        _conv(shapes, f"encoder.encoder.layers.{index + 2}.conv", 2 * channels, channels, 2 * ratio)
        channels, index = 2 * channels, index + 3
    _conv(shapes, f"encoder.encoder.layers.{index + 1}.conv", width, channels, 3)
    for index in range(config["num_hidden_layers"]):
        layer = f"encoder.encoder_transformer.layers.{index}"
        _attention(shapes, f"{layer}.self_attn", width, width, width)
        _linear(shapes, f"{layer}.mlp.fc1", config["intermediate_size"], width)
        _linear(shapes, f"{layer}.mlp.fc2", width, config["intermediate_size"])
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{norm}.weight"] = shapes[f"{layer}.{norm}.bias"] = (width,)
        shapes[f"{layer}.self_attn_layer_scale.scale"] = shapes[f"{layer}.mlp_layer_scale.scale"] = (width,)
    shapes["encoder.downsample.conv.weight"] = (width, width, 4)
    for part, books in (("semantic", 1), ("acoustic", config["num_quantizers"] - 1)):
        name = f"encoder.quantizer.{part}_residual_vector_quantizer"
        for book in (f"{name}.layers.{index}.codebook" for index in range(books)):
            shapes[f"{book}.embed_sum"] = (NUM_CODES, book_width)
            shapes[f"{book}.cluster_usage"], shapes[f"{book}.initialized"] = (NUM_CODES,), (1,)
        shapes[f"{name}.input_proj.weight"] = (book_width, width, 1)
        shapes[f"{name}.output_proj.weight"] = (width, book_width, 1)
    return shapes


def _draw(name: str, shape: tuple[int, ...], seed: int, snake_std: float) -> Array:
    """Seeded by the name, so a tensor keeps its values whatever else the checkpoint holds."""
    normal = np.random.default_rng([zlib.crc32(name.encode()), seed]).standard_normal(shape)
    leaf = name.rsplit(".", 1)[-1]
    if leaf == "initialized":
        values = np.ones(shape)
    elif leaf == "cluster_usage":
        values = 0.5 + np.abs(normal)
    elif leaf in ("embedding_sum", "embed_sum"):
        usage = _draw(name.removesuffix(leaf) + "cluster_usage", shape[:1], seed, snake_std)
        values = normal * usage[:, None]
    elif leaf in ("alpha", "beta"):
        values = snake_std * normal
    elif leaf in ("scale", "gamma"):
        values = 0.5 + 0.1 * normal
    elif leaf == "bias":
        values = 0.1 * normal
    elif len(shape) == 1:
        values = 1 + 0.2 * normal
    else:
        values = _gain(name) * normal / np.sqrt(_fan_in(name, shape))
    return values.astype(np.float32)


def _fan_in(name: str, shape: tuple[int, ...]) -> int:
    """Products summed into one output, so that activations keep a size near 1."""
    if "_embedding." in name:
        return 1
    if ".upsample." in name and name.endswith(".0.conv.weight"):
        return shape[0]
    if ".block.1.conv." in name and name.startswith("decoder."):
        return 2 * shape[0]
    return int(np.prod(shape[1:]))


def _gain(name: str) -> float:
    """Chosen by trial: greedy codes keep changing, and the waveform stays within [-1, 1]."""
    if name.startswith("decoder.decoder."):
        return 0.08 if name.startswith("decoder.decoder.6.") else 0.7
    if name.startswith("encoder.encoder."):
        return 2.0
    if "codec_embedding" in name:
        return 1.0
    if "codec_head" in name or "lm_head" in name:
        return 3.0
    if name.startswith("talker.") and ("o_proj" in name or "down_proj" in name):
        return 2.0
    return 1.0


def state_dicts(
    variant: str = "custom_voice", topology: str = "1.7b", seed: int = 0, snake_std: float = 0.1
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Float32 tensors of model.safetensors (every value exact in bfloat16) and of speech_tokenizer/model.safetensors.
    The end-of-speech row of the head is quartered, so that greedy speech is long."""
    main_config, codec_config = configs(variant, topology)
    main = {name: _draw(name, shape, seed, snake_std) for name, shape in _main_shapes(main_config).items()}
    main["talker.codec_head.weight"][main_config["talker_config"]["codec_eos_token_id"]] *= 0.25
    main = {name: (bfloat16_bits(tensor).astype(np.uint32) << 16).view(np.float32) for name, tensor in main.items()}
    codec_shapes = _decoder_shapes(codec_config["decoder_config"]) | _encoder_shapes(codec_config["encoder_config"])
    return main, {name: _draw(name, shape, seed, snake_std) for name, shape in codec_shapes.items()}


def bfloat16_bits(tensor: Array) -> NDArray[np.uint16]:
    """Round to the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(tensor).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def digest(tensors: dict[str, Array]) -> str:
    """Sha256 over names and bytes: tells a drift of numpy's generator from an error of a model."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode() + np.ascontiguousarray(tensors[name]).tobytes())
    return total.hexdigest()


def write_checkpoint(
    folder: str | Path,
    *,
    variant: str = "custom_voice",
    topology: str = "1.7b",
    seed: int = 0,
    snake_std: float = 0.1,
) -> None:
    """Write a whole checkpoint into `folder`: bfloat16 model, float32 codec, text tokenizer, configurations."""
    folder = Path(folder)
    codec_folder = folder / "speech_tokenizer"
    codec_folder.mkdir(parents=True, exist_ok=True)
    data = _data()
    main_config, codec_config = configs(variant, topology)
    main, codec = state_dicts(variant, topology, seed, snake_std)
    write_tensors(folder / "model.safetensors", "BF16", {name: bfloat16_bits(main[name]) for name in main})
    write_tensors(codec_folder / "model.safetensors", "F32", codec)
    write_json(folder / "config.json", main_config)
    write_json(folder / "generation_config.json", data["generation"])
    write_json(folder / "preprocessor_config.json", data["processor"])
    write_json(codec_folder / "config.json", codec_config)
    write_json(codec_folder / "preprocessor_config.json", data["features"])
    _write_tokenizer(folder)


def write_tensors(path: Path, dtype: str, tensors: Mapping[str, NDArray[Any]]) -> None:
    """By hand, because safetensors' own numpy writer has no bfloat16."""
    header: Config = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.nbytes
        header[name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(tensor.tobytes() for tensor in tensors.values())


def _write_tokenizer(folder: Path) -> None:
    vocab, merges, added = vocabulary()
    write_json(folder / "vocab.json", vocab)
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    tokens = list(added)
    plain = tokens[tokens.index("<tool_call>") : tokens.index("</think>") + 1]
    decoder = {str(index): {"content": token, **flags, "special": token not in plain} for token, index in added.items()}
    specials = [token for token in tokens if token not in plain]
    config = _data()["tokenizer"] | {"added_tokens_decoder": decoder, "additional_special_tokens": specials[1:]}
    write_json(folder / "tokenizer_config.json", config)


def write_json(path: Path, value: Config) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
