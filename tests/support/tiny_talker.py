"""The tiny Qwen3-TTS, loaded without a checkpoint folder: talkers, prompts, and a codec whose weights hide no term."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from types import SimpleNamespace

import torch
from parity import Case, begin
from tiny_checkpoint import NUM_CONTROL_IDS, configs, state_dicts, vocabulary
from tokenizers import models
from torch import Tensor

from sonoro.core.options import OptionValue
from sonoro.core.types import SamplingParams
from sonoro.models.base import Voice
from sonoro.models.qwen3_tts.backbone import Talker
from sonoro.models.qwen3_tts.codec import Qwen3Codec
from sonoro.models.qwen3_tts.config import ModelConfig, released_configs
from sonoro.models.qwen3_tts.prompt import ClonedVoice, PromptBuilder, TalkerPrompt, TextTokenizer
from sonoro.models.qwen3_tts.state import FrameState, admit, prefill, stage
from sonoro.nn.configs import build
from sonoro.runtime.sampling import Controls

_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def tiny_config(variant: str = "custom_voice", topology: str = "1.7b") -> ModelConfig:
    return build(ModelConfig, configs(variant, topology)[0], "tiny")


@functools.cache
def stored_tensors(variant: str = "custom_voice", topology: str = "1.7b") -> dict[str, Tensor]:
    """The talker's tensors as a file stores them, without the prefix."""
    main, _ = state_dicts(variant, topology)
    prefix = "talker."
    return {name.removeprefix(prefix): torch.from_numpy(main[name]) for name in main if name.startswith(prefix)}


def tiny_talker(
    variant: str = "custom_voice",
    topology: str = "1.7b",
    dtype: torch.dtype = torch.float32,
    *,
    end_scale: float = 1.0,
    is_final: bool = True,
) -> Talker:
    """`end_scale` multiplies the row of the head that decides end of speech; `is_final` calls `finalize`."""
    config = tiny_config(variant, topology).talker_config
    talker = Talker(config)
    stored = dict(stored_tensors(variant, topology))
    fused = {}
    for name in talker.state_dict():
        target = next((target for target in _PARTS if f".{target}." in name), None)
        parts = [name] if target is None else [name.replace(target, part) for part in _PARTS[target]]
        fused[name] = torch.cat([stored.pop(part) for part in parts])
    assert not stored, sorted(stored)
    fused["codec_head.weight"][config.codec_eos_token_id] *= end_scale
    talker.load_state_dict(fused)
    talker.to(dtype).eval().requires_grad_(False)
    if is_final:
        talker.finalize()
    return talker


def controls(
    *,
    temperature: float = 0.9,
    top_k: int = 50,
    top_p: float = 1.0,
    repetition_penalty: float = 1.05,
    seed: int = 0,
    segment: int = 0,
    max_frames: int = 12,
    ignore_eos: bool = False,
    **options: OptionValue,
) -> Controls:
    """Complete controls; temperature 0 makes the other codebooks greedy too unless `options` say otherwise."""
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=repetition_penalty)
    rest: dict[str, OptionValue] = {
        "subtalker_dosample": temperature > 0,
        "subtalker_temperature": 0.9,
        "subtalker_top_k": 50,
        "subtalker_top_p": 1.0,
    }
    return Controls(sampling, seed, segment, max_frames, ignore_eos, rest | options)


def random_prompt(key: int, wanted: Controls, *, has_voice: bool = False) -> TalkerPrompt:
    """Some layout with text, control and reference rows and a trail; different for every `key`."""
    config = tiny_config().talker_config
    books, codes, vocabulary = config.num_code_groups, config.code_predictor_config.vocab_size, config.text_vocab_size
    generator = torch.Generator().manual_seed(key)

    def ids(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    positions, trail = 5 + int(ids(12)), 1 + int(ids(8))
    code_rows = torch.full((positions, books), -1)
    code_rows[3:, 0] = codes + ids(NUM_CONTROL_IDS, positions - 3)
    code_rows[-2] = ids(codes, books)
    voice = None
    if has_voice:
        code_rows[4, 0] = -1
        voice = Voice(data=ClonedVoice(torch.randn(config.hidden_size, generator=generator)))
    row = 4 if has_voice else None
    return TalkerPrompt(wanted, voice, ids(vocabulary, positions), code_rows, ids(vocabulary, trail), row)


def voice_of(case: Case) -> Voice | None:
    """The cloned voice of a stored run, if it has one."""
    if "x_vector" not in case.tensors:
        return None
    frames = case.tensors.get("ref_codes")
    return Voice(
        data=ClonedVoice(torch.from_numpy(case.tensors["x_vector"]), case.facts["ref_text"]),
        reference_frames=None if frames is None else torch.from_numpy(frames),
    )


def reference_prompt(case: Case, wanted: Controls) -> TalkerPrompt:
    """The prompt of a stored greedy run, laid out by our own builder."""
    facts = case.facts
    vocab, merges, _ = vocabulary()
    tokenizer = TextTokenizer(models.BPE(vocab=vocab, merges=merges))
    return PromptBuilder(tiny_config(facts["variant"], facts["topology"]), tokenizer).build(
        facts["text"],
        wanted,
        is_non_streaming=facts["non_streaming"],
        language=facts["language"],
        speaker=facts["speaker"],
        instructions=facts["instruct"],
        voice=voice_of(case),
    )


def begin_talker(talker: Talker, state: FrameState, prompts: Sequence[TalkerPrompt], slots: Tensor) -> None:
    """Bring rows `slots` to the first frame of `prompts`."""
    begin(SimpleNamespace(stage=stage, admit=admit, prefill=functools.partial(prefill, talker)), state, prompts, slots)


FRAMES = 19
CHUNKS = [[1] * 19, [2] * 9 + [1], [3] * 6 + [1], [5, 5, 5, 4], [8, 8, 3], [1, 4, 2, 8, 1, 3], [19]]

RELEASED = released_configs("qwen3-tts-0.6b-base").codec
RELEASED_ENCODER = RELEASED.encoder_config
SMALL_DECODER = dataclasses.replace(
    RELEASED.decoder_config,
    latent_dim=12,
    codebook_dim=8,
    codebook_size=32,
    num_quantizers=4,
    decoder_dim=16,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    sliding_window=5,
    upsample_rates=(3, 2),
    upsampling_ratios=(2,),
)
SMALL = dataclasses.replace(
    RELEASED,
    encoder_valid_num_quantizers=4,
    decode_upsample_rate=12,
    decoder_config=SMALL_DECODER,
    encoder_config=None,
)


def fill(module, seed=0, snake_std=0.5):
    """Values that hide no term: nothing is left at 0 or 1, sums keep a size near 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in module.state_dict().items():
        leaf = name.rsplit(".", 1)[-1]
        normal = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        if leaf in ("alpha", "beta"):
            tensor.copy_(snake_std * normal)
        elif leaf in ("embedding_sum", "embed_sum"):
            tensor.copy_(normal)
        elif leaf in ("cluster_usage", "scale", "gamma") or "norm" in name:
            tensor.copy_(0.7 + 0.1 * normal.abs())
        elif leaf == "bias":
            tensor.copy_(0.1 * normal)
        else:
            tensor.copy_(normal / math.sqrt(math.prod(tensor.shape[1:])))
    return module


def make_codec(config=SMALL, dtype=torch.float64, snake_std=0.5):
    codec = fill(Qwen3Codec(config), snake_std=snake_std).to(dtype)
    with torch.no_grad():
        # Far from the clamp, which would hide differences.
        codec.decoder.decoder[-1].conv.weight.mul_(0.02)
    codec.finalize()
    return codec


def draw(rows, frames=FRAMES, seed=0):
    return torch.randint(0, 32, (rows, frames, 4), generator=torch.Generator().manual_seed(seed))


def stream(codec, frames, slots, history, chunks):
    return torch.cat([codec.decode(chunk, slots, history) for chunk in frames.split(chunks, dim=1)], dim=1)


def close(actual, expected, tolerance=1e-9):
    """1e-9: two float64 computations in another order, amplified by the periodic activations."""
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)
