"""A tiny random Fish S2 Pro checkpoint in the released folder layout, for tests and for the reference tool.

Needs numpy and torch alone, so the official code's own environment can read it too.
It knows neither our model nor the official one: every name, shape and value is written down here.
"""

import zlib
from pathlib import Path

import numpy as np
from tiny_checkpoint import Array, Config, Shapes, bfloat16_bits, vocabulary, write_json, write_tensors
from tiny_fish_codec import TINY_CODEC, write_codec

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
