"""Sizes of the built-in voice, in the terms of released configuration files, and its training hyperparameters.

Weights are stored in 8 and 16 bits: 15 MiB is the limit of one file, 32 MiB of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from builtin_voice.training import Course

__all__ = [
    "CODEBOOKS",
    "CODEBOOK_SIZE",
    "CODEC_HOURS",
    "DECODER_HOURS",
    "CodecTraining",
    "EncoderTraining",
    "Noise",
    "TalkerTraining",
    "codec_config",
    "generation_config",
    "model_config",
    "taught_by",
    "voices",
]

CODEBOOKS = 12
CODEBOOK_SIZE = 512
CONTROL_IDS = 1024
SAMPLE_RATE = 24_000
HOP = 1920


TEACHERS = {
    "kokoro": {"nora": "af_heart", "miles": "am_michael", "edith": "bf_emma", "hugh": "bm_george"},
    "flite": {"rowan": "rms", "clara": "slt", "angus": "awb", "quill": "kal16"},
}


SEXES = {
    **{"nora": "female", "miles": "male", "edith": "female", "hugh": "male"},
    **{"rowan": "male", "clara": "female", "angus": "male", "quill": "male"},
}
"""Perceived sex of each voice, by which OpenAI's voice names are mapped."""


DESCRIPTIONS = {
    "nora": {"accent": "American", "adjectives": ["warm", "clear", "lively"]},
    "miles": {"accent": "American", "adjectives": ["easy", "friendly", "low"]},
    "edith": {"accent": "British", "adjectives": ["calm", "precise", "even"]},
    "hugh": {"accent": "British", "adjectives": ["deep", "measured", "dry"]},
}
"""How the voices sound, for those who choose one."""


def taught_by() -> dict[str, str]:
    """The teacher's voice of each voice, over all teachers."""
    return {name: voice for taught in TEACHERS.values() for name, voice in taught.items()}


def voices(teacher: str = "kokoro") -> dict[str, str]:
    """The voices' names, and the voice of `teacher` that each learns from."""
    return TEACHERS[teacher]


ALIASES = {
    **{"clara": "nora", "rowan": "miles", "quill": "miles", "angus": "hugh"},  # voices of an earlier checkpoint
    **dict.fromkeys(("alloy", "coral", "marin", "nova"), "nora"),
    **dict.fromkeys(("sage", "shimmer"), "edith"),
    **dict.fromkeys(("ash", "echo", "onyx", "verse"), "miles"),
    **dict.fromkeys(("ballad", "cedar", "fable"), "hugh"),
}
"""Aliases: names of old voices, and those of OpenAI's API, matched by perceived sex."""


RESPELLINGS = {
    **{"aisle": "isle", "aisles": "isles", "allergies": "allerjies", "ballet": "ballay", "cafe": "caffay"},
    **{"cafes": "caffays", "cappuccino": "cappacheeno", "cliche": "cleeshay", "colonel": "kernel", "comma": "komma"},
    **{"croissant": "kwassont", "doughnut": "donut", "doughnuts": "donuts", "entree": "ontray", "f": "ef"},
    **{"jalapeno": "halapenyo", "jalapenos": "halapenyos", "kindergarten": "kindergartn", "lasagna": "lasania"},
    **{"massage": "massahge", "niece": "neece", "portrait": "portrit", "recipes": "ressipees", "s": "ess"},
    **{"saute": "saw tay", "sergeant": "sargent", "spaghetti": "spagetti"},
}
"""Common words that voices of this size mispronounce, and spellings that they pronounce right. Where text comes along,
F and S that begin an initialism sound like the start of a word ("the FBI": "the feebi"): what
follows is not known yet."""

HETERONYMS = {
    "bow:bend": "bouw",
    "close:verb": "cloze",
    "content:adjective": "contennt",
    "desert:leave": "dessert",
    "house:verb": "howz",
    "lead:metal": "led",
    "live:adjective": "lyve",
    "minute:tiny": "mynoot",
    "polish:Poland": "poalish",
    "present:verb": "preezent",
    "project:verb": "pruject",
    "read:past": "red",
    "read:present": "reed",
    "record:noun": "reckerd",
    "record:verb": "recored",
    "refuse:verb": "refuze",
    "refuse:waste": "reffuse",
    "tear:drop": "tier",
    "tear:rip": "taire",
    "use:verb": "yooz",
    "wind:verb": "wined",
    "wound:turned": "wownd",
}
"""Readings of words that are written alike and said apart, which the voice does not choose by itself."""


CODEC_HOURS = 20.0
"""Hours of audio for the codec, from the start of the corpus: enough for the codes of a few voices."""
DECODER_HOURS = 60.0


@dataclass(frozen=True)
class EncoderTraining(Course):
    """Random crops of `crop_frames`. `phone_weight` weights the cross-entropy of phones against the mean error of
    spectra, `first_weight` that of phones predicted from the first code alone, which the talker derives from the text.
    """

    steps: int = 16_000
    batch: int = 64
    crop_frames: int = 24
    learning_rate: float = 2e-3
    warmup_steps: int = 500
    phone_weight: float = 0.1
    first_weight: float = 0.05
    commitment_weight: float = 0.25
    seed: int = 0


@dataclass(frozen=True)
class CodecTraining(Course):
    """Training of the decoder. `crop_frames` equals its attention window. From the share `critic_from` of the course
    on, a critic sees `judged` crops of each batch. The result is a moving average of the weights."""

    steps: int = 25_000
    batch: int = 32
    crop_frames: int = 16
    learning_rate: float = 5e-4
    warmup_steps: int = 500
    spectral_weight: float = 15.0
    critic_from: float = 0.1
    judged: int = 16
    matching_weight: float = 2.0
    average_decay: float = 0.999
    seed: int = 0
    further_rate: float | None = 2e-4


@dataclass(frozen=True)
class Noise:
    """Noise on the past in training: shares of `codes` replaced at random and of whole `frames` blanked among those fed
    back, and `dropout` of the inputs of talker and predictor."""

    codes: float = 0.1
    frames: float = 0.15
    dropout: float = 0.1


@dataclass(frozen=True)
class TalkerTraining(Course):
    """`positions`: most rows (prompt and frames) of a batch of similar lengths. The predictor is trained on `kept`
    times as many frames (at most half), to save time.

    `shifts`: the corpus is encoded that many times, shifted by fractions of a frame, so that frame boundaries are not
    memorised. In every encoding but the first, BPE dropout splits a share `apart` of the text tokens, so that the model
    learns to spell rare words. `rest_weight` weights the mean loss of the other codebooks against the first.
    """

    steps: int = 25_000
    positions: int = 40_000
    learning_rate: float = 1.5e-3
    warmup_steps: int = 1000
    weight_decay: float = 0.1
    average_decay: float = 0.999
    rest_weight: float = 3.0
    kept: float = 0.2
    shifts: int = 3
    apart: float = 0.1
    held_out: int = 512
    noise: Noise = Noise()
    seed: int = 0
    further_rate: float | None = 5e-4


def codec_config() -> dict[str, Any]:
    """speech_tokenizer/config.json, without the encoder, which only training uses."""
    return {
        "architectures": ["Qwen3TTSTokenizerV2Model"],
        "model_type": "qwen3_tts_tokenizer_12hz",
        "encoder_valid_num_quantizers": CODEBOOKS,
        "input_sample_rate": SAMPLE_RATE,
        "output_sample_rate": SAMPLE_RATE,
        "encode_downsample_rate": HOP,
        "decode_upsample_rate": HOP,
        "decoder_config": _decoder_config(),
    }


def _decoder_config() -> dict[str, Any]:
    """Most of the compute is at the highest rates, in convolutions of width `decoder_dim`; the layers before them are
    cheap, and therefore wide."""
    return {
        "latent_dim": 320,
        "codebook_dim": 192,
        "codebook_size": CODEBOOK_SIZE,
        "num_quantizers": CODEBOOKS,
        "num_semantic_quantizers": 1,
        "decoder_dim": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "rope_theta": 10000,
        "rms_norm_eps": 1e-5,
        "sliding_window": 16,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
    }


def model_config(text_vocabulary: int, special_ids: dict[str, int]) -> dict[str, Any]:
    """config.json for `text_vocabulary` text ids; control ids are above the codes, as in the released files."""
    return {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "model_type": "qwen3_tts",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_model_size": "0b6",
        "tts_model_type": "custom_voice",
        "voice_aliases": ALIASES,
        "text_normalizer": "english",
        "respellings": RESPELLINGS,
        "heteronyms": HETERONYMS,
        # Texts longer than those of the corpus are split into segments.
        "max_segment_letters": 200,
        # Cuts 50 of the 100 to 155 ms of silence at the start of every reading, for a lower latency.
        "lead_in": 1200,
        "spk_sex": {name: SEXES[name] for name in voices()},
        "spk_description": {name: DESCRIPTIONS[name] for name in voices() if name in DESCRIPTIONS},
        "im_start_token_id": special_ids["<|im_start|>"],
        "im_end_token_id": special_ids["<|im_end|>"],
        "assistant_token_id": special_ids["assistant"],
        "tts_pad_token_id": special_ids["<tts_pad>"],
        "tts_bos_token_id": special_ids["<tts_text_bos>"],
        "tts_eos_token_id": special_ids["<tts_text_eod>"],
        "talker_config": _talker_config(text_vocabulary),
    }


def _talker_config(text_vocabulary: int) -> dict[str, Any]:
    control = {name: CODEBOOK_SIZE + 100 + offset for name, offset in _CONTROL_OFFSETS.items()}
    return {
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": CODEBOOK_SIZE + CONTROL_IDS,
        "text_vocab_size": text_vocabulary,
        "text_hidden_size": 256,
        "num_code_groups": CODEBOOKS,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_theta": 10000,
        "rope_scaling": {
            "interleaved": True,
            "mrope_section": [12, 10, 10],
            "rope_type": "default",
            "type": "default",
        },
        **control,
        "codec_language_id": {"english": CODEBOOK_SIZE + 2},
        "spk_id": {name: CODEBOOK_SIZE + 800 + row for row, name in enumerate(voices())},
        "spk_is_dialect": dict.fromkeys(voices(), False),
        "code_predictor_config": _predictor_config(),
    }


def _predictor_config() -> dict[str, Any]:
    return {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": CODEBOOK_SIZE,
        "num_code_groups": CODEBOOKS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
    }


_CONTROL_OFFSETS = {
    "codec_pad_id": 0,
    "codec_bos_id": 1,
    "codec_eos_token_id": 2,
    "codec_think_id": 6,
    "codec_nothink_id": 7,
    "codec_think_bos_id": 8,
    "codec_think_eos_id": 9,
}


def is_in_8_bits(name: str, value: Tensor) -> bool:
    """Whether the checkpoint stores the tensor `name` in 8 bits: all matrices except small ones of the decoder close to
    the output."""
    return value.ndim > 1 and not name.startswith(_IN_16_BITS)


_IN_16_BITS = tuple(f"decoder.decoder.{layer}." for layer in (3, 4, 5, 6))
SHARD_BYTES = 14 * 2**20


def generation_config() -> dict[str, Any]:
    """generation_config.json: lower temperatures than the released models' defaults, for a calm reading voice."""
    return {
        "do_sample": True,
        "temperature": 0.35,
        "top_k": 20,
        "top_p": 1.0,
        "repetition_penalty": 1.0,
        "subtalker_dosample": True,
        "subtalker_temperature": 0.35,
        "subtalker_top_k": 20,
        "subtalker_top_p": 1.0,
        "max_new_tokens": 1500,
    }
