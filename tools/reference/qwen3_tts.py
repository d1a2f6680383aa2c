"""Run the official Qwen3-TTS package on tiny random checkpoints and store its results as test assets.

    python tools/reference/qwen3_tts.py --out tests/assets/qwen3_tts

Runs in an environment of its own (requirements.txt beside this file, then `pip install --no-deps qwen-tts==0.1.1`).
Imports only the tests' checkpoint writer. The output is one `{group}.safetensors` per group, with tensors named
`{case}/{tensor}`, and scenarios.json with each case's facts; tests/support/parity.py reads them.
On one machine a rerun writes the same bytes; on another, integers are equal and floats differ by their rounding.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from official_qwen3_tts import (
    Facts,
    Official,
    Qwen3TTSModel,
    Request,
    Run,
    Store,
    generate,
    reference_tensors,
    token_ids,
)
from qwen_tts.core.models.modeling_qwen3_tts import mel_spectrogram
from qwen_tts.core.tokenizer_12hz.modeling_qwen3_tts_tokenizer_v2 import (
    Qwen3TTSTokenizerV2DecoderRMSNorm,
    Qwen3TTSTokenizerV2DecoderRotatoryEmbedding,
)
from transformers.utils import logging

SAMPLE_RATE = 24000
NUM_CODES, NUM_GROUPS = 64, 4
NEW_TOKENS = 37
LOGIT_STEPS = (0, 1, 2, 3, 4, 5, 6, 7, 15, 23, 31)


def facts_of(official: Qwen3TTSModel, request: Request, non_streaming: bool) -> Facts:
    return {
        "variant": request.variant,
        "topology": request.topology,
        "mode": request.mode,
        "text": request.text,
        "language": request.language,
        "speaker": request.speaker,
        "instruct": request.instruct,
        "ref_text": request.ref_text,
        "non_streaming": non_streaming,
        **token_ids(official, request),
    }


LONG = "Hello world, this is the voice that was in the light of the moon."
REF = "It's not the time to speak."
CALM = "Speak with a calm, low voice."
PROMPTS = (
    Request("cv_english", "custom_voice", "1.7b", LONG, speaker="serena"),
    Request("cv_auto_instruct", "custom_voice", "1.7b", "What's that? 42 of them!", "Auto", "ryan", CALM),
    Request("cv_dialect_chinese", "custom_voice", "0.6b", "你好，世界。", "Chinese", "Eric"),
    Request("cv_dialect_auto", "custom_voice", "1.7b", "你好 and hello", "auto", "dylan", "慢一点"),
    Request("cv_dialect_english", "custom_voice", "0.6b", "This is not a dialect.", "English", "dylan"),
    Request("cv_one_token", "custom_voice", "1.7b", "I", speaker="Serena"),
    Request("vd_instruct", "voice_design", "1.7b", LONG, "German", None, CALM),
    Request("vd_plain", "voice_design", "0.6b", "No description at all.", "auto"),
    Request("x_vector", "base", "1.7b", LONG),
    Request("x_vector_auto", "base", "0.6b", "Ünïcode, naïvely — ok…", "auto"),
    Request("x_vector_instruct", "base", "1.7b", "The other way.", "french", None, CALM),
    Request("in_context_long_text", "base", "1.7b", LONG, ref_text=REF, ref_frames=6),
    Request("in_context_short_text", "base", "0.6b", "So be it.", ref_text="Ok.", ref_frames=40),
    Request("in_context_instruct", "base", "0.6b", "The other way.", "auto", None, CALM, REF, 9),
)
# Text rows of the in-context block are payloads + 1, codec rows ref_frames + 1: one case on each side of equality.
EDGE_TEXT, EDGE_REF = "Ok", "Ok"


def edge_requests(official: Qwen3TTSModel) -> list[Request]:
    rows = len(token_ids(official, Request("", "base", "1.7b", EDGE_TEXT))["ids"] or ()) - 8
    rows += len(token_ids(official, Request("", "base", "1.7b", "", ref_text=EDGE_REF))["ref_ids"] or ()) - 5
    return [
        Request(f"in_context_{name}", "base", "1.7b", EDGE_TEXT, ref_text=EDGE_REF, ref_frames=rows + extra)
        for name, extra in (("equal", 0), ("one_text_row_more", -1))
    ]


def store_prompts(store: Store, models: Official) -> None:
    for request in (*PROMPTS, *edge_requests(models.get("base", "1.7b"))):
        official = models.get(request.variant, request.topology)
        for non_streaming in (False, True):
            run = generate(official, [request], non_streaming, max_new_tokens=3)
            facts = facts_of(official, request, non_streaming)
            tensors = {"prompt": run.prompts[0], "trail": run.trails[0], **reference_tensors(request)}
            store.add("prompts", f"{request.name}_{'whole' if non_streaming else 'stream'}", facts, tensors)


GREEDY = (
    (Request("custom_voice_stream", "custom_voice", "1.7b", LONG, speaker="ryan"), False),
    (Request("custom_voice_whole", "custom_voice", "0.6b", "You and I.", "auto", "eric"), True),
    (Request("voice_design_stream", "voice_design", "0.6b", "What was that?", "auto", None, CALM), False),
    (Request("voice_design_whole", "voice_design", "1.7b", LONG, "german", None, CALM), True),
    (Request("x_vector_stream", "base", "1.7b", LONG, "auto"), False),
    (Request("x_vector_whole", "base", "0.6b", "The light of the moon."), True),
    (Request("in_context_stream", "base", "0.6b", LONG, ref_text=REF, ref_frames=12), False),
    (Request("in_context_whole", "base", "1.7b", "You and I.", ref_text=REF, ref_frames=20), True),
)
PAIR = (
    Request("pair_long", "custom_voice", "1.7b", LONG, "english", "serena", CALM),
    Request("pair_short", "custom_voice", "1.7b", "Not so.", "auto", "ryan"),
)
ENDING = Request("ending", "custom_voice", "1.7b", "This is the end.", speaker="serena")
ENDING_EOS_SCALE = 8.0


def checked_greedy(official: Qwen3TTSModel, requests: list[Request], non_streaming: bool) -> Run:
    """A greedy run without near ties: raises unless the same model in float64 gives the same codes."""
    run = generate(official, requests, non_streaming, max_new_tokens=NEW_TOKENS)
    official.model.double()
    exact = generate(official, requests, non_streaming, max_new_tokens=NEW_TOKENS)
    official.model.float()
    for single, double in zip(run.codes, exact.codes, strict=True):
        if not np.array_equal(single, double):
            raise RuntimeError(f"{requests[0].name}: greedy codes hang on rounding; choose another text")
    return run


def store_greedy(store: Store, models: Official) -> None:
    batches = [([request], non_streaming) for request, non_streaming in GREEDY] + [(list(PAIR), False)]
    for requests, non_streaming in batches:
        official = models.get(requests[0].variant, requests[0].topology)
        run = checked_greedy(official, requests, non_streaming)
        for row, request in enumerate(requests):
            if len(run.codes[row]) != NEW_TOKENS - 1:
                raise RuntimeError(f"{request.name} ended after {len(run.codes[row])} frames; choose another text")
            facts = facts_of(official, request, non_streaming) | {"batch": len(requests), "eos_row_scale": 1.0}
            add_greedy(store, request, facts, run, row)
    store_ending(store, models.get(ENDING.variant, ENDING.topology))


def store_ending(store: Store, official: Qwen3TTSModel) -> None:
    """Store a run that ends by itself, with the head's end-of-speech row scaled up meanwhile."""
    head, end = official.model.talker.codec_head, official.model.config.talker_config.codec_eos_token_id
    head.weight.detach()[end] *= ENDING_EOS_SCALE
    run = checked_greedy(official, [ENDING], False)
    # Looked up again: the conversion to float64 and back has replaced the weights.
    head.weight.detach()[end] /= ENDING_EOS_SCALE
    if not 2 <= len(run.codes[0]) < NEW_TOKENS - 1:
        raise RuntimeError(f"{ENDING.name} made {len(run.codes[0])} frames; choose another text")
    facts = facts_of(official, ENDING, False) | {"batch": 1, "eos_row_scale": ENDING_EOS_SCALE}
    add_greedy(store, ENDING, facts, run, 0)


def add_greedy(store: Store, request: Request, facts: Facts, run: Run, row: int) -> None:
    frames = len(run.codes[row])
    steps = [step for step in LOGIT_STEPS if step <= frames]
    tensors = {
        "prompt": run.prompts[row],
        "codes": run.codes[row],
        "logits": np.stack([run.logits[step][row] for step in steps]),
        **reference_tensors(request),
    }
    if facts["batch"] == 1:
        # In a batch, trails are padded to the longest.
        tensors["trail"] = run.trails[row]
    store.add("greedy", request.name, facts | {"frames": frames, "logit_steps": steps}, tensors)


CLONE = Request("in_context", "base", "1.7b", "Hello, this is the voice.", ref_text=REF)


def make_audio(samples: int, seed: int) -> np.ndarray:
    """A gliding, pulsing hum with some noise, [samples] int16."""
    time = np.arange(samples) / SAMPLE_RATE
    phase = 2 * np.pi * (110 * time + 90 * time**2)
    hum = sum(np.sin(harmonic * phase) / harmonic for harmonic in range(1, 9))
    noise = np.random.default_rng(seed).standard_normal(samples)
    pulse = 0.55 - 0.45 * np.cos(2 * np.pi * (3 + seed) * time)
    return (32767 * (0.25 * pulse * hum + 0.03 * noise).clip(-1, 1)).astype(np.int16)


def to_float(audio: np.ndarray) -> np.ndarray:
    return audio.astype(np.float32) / 32768


def store_clone(store: Store, models: Official) -> None:
    """Store cloning through the official wrapper: reference audio, and the waveform after the reference."""
    official = models.get(CLONE.variant, CLONE.topology)
    tokenizer, audio = official.model.speech_tokenizer, make_audio(19200, 5)
    (item,) = official.create_voice_clone_prompt((to_float(audio), SAMPLE_RATE), CLONE.ref_text)
    with mock.patch.object(tokenizer, "decode", wraps=tokenizer.decode) as decode:
        (waveform,), _ = official.generate_voice_clone(
            CLONE.text,
            CLONE.language,
            voice_clone_prompt=[item],
            do_sample=False,
            subtalker_dosample=False,
            max_new_tokens=13,
        )
    codes = decode.call_args.args[0][0]["audio_codes"].numpy()
    count = len(item.ref_code)
    tensors = {
        "ref_audio": audio,
        "ref_codes": item.ref_code.numpy(),
        "x_vector": item.ref_spk_embedding.numpy(),
        "codes": codes[count:],
        "waveform": waveform,
    }
    store.add("clone", CLONE.name, facts_of(official, CLONE, False) | {"mode": "in_context"}, tensors)


def wide_norm(norm: Qwen3TTSTokenizerV2DecoderRMSNorm, x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon) * norm.weight


def wide_rotary(
    rotary: Qwen3TTSTokenizerV2DecoderRotatoryEmbedding, _: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = len(rotary.inv_freq)
    frequencies = rotary.config.rope_theta ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    angles = (positions[..., None] * frequencies).repeat(1, 1, 2)
    return angles.cos(), angles.sin()


def decode_wide(decoder: torch.nn.Module, codes: torch.Tensor) -> torch.Tensor:
    """Decode in float64, avoiding two places where the official code always computes in float32."""
    with (
        mock.patch.object(Qwen3TTSTokenizerV2DecoderRMSNorm, "forward", wide_norm),
        mock.patch.object(Qwen3TTSTokenizerV2DecoderRotatoryEmbedding, "forward", wide_rotary),
    ):
        return decoder(codes)


def store_codec(store: Store, models: Official) -> None:
    random = np.random.default_rng(7)
    facts: Facts = {"variant": "custom_voice", "topology": "1.7b"}

    def draw(frames: int) -> np.ndarray:
        return random.integers(0, NUM_CODES, (frames, NUM_GROUPS))

    decoder = models.get("custom_voice", "1.7b", 0.5).model.speech_tokenizer.model.decoder.double()
    codes = draw(27)
    batch = torch.from_numpy(codes.T[None])
    with torch.inference_mode():
        tensors = {"codes": codes, "waveform": decoder(batch)[0, 0].numpy()}
        tensors["waveform_wide"] = decode_wide(decoder, batch)[0, 0].numpy()
    store.add("codec", "float64", facts | {"snake_std": 0.5, "batch": 1}, tensors)
    tokenizer = models.get("custom_voice", "1.7b").model.speech_tokenizer
    for names in (("float32",), ("pair_long", "pair_short")):
        batch = [draw(frames) for frames in (18, 7)[: len(names)]]
        waveforms, _ = tokenizer.decode([{"audio_codes": codes} for codes in batch])
        for name, codes, waveform in zip(names, batch, waveforms, strict=True):
            more = {"snake_std": 0.1, "batch": len(names)}
            store.add("codec", name, facts | more, {"codes": codes, "waveform": waveform})


def store_encoder(store: Store, models: Official) -> None:
    tokenizer = models.get("base", "1.7b").model.speech_tokenizer
    for seed, samples in enumerate((24000, 1921, 10000, 5759)):
        audio = make_audio(samples, seed)
        (codes,) = tokenizer.encode(to_float(audio), SAMPLE_RATE).audio_codes
        tokenizer.model.double()
        (exact,) = tokenizer.encode(to_float(audio), SAMPLE_RATE).audio_codes
        tokenizer.model.float()
        if not torch.equal(codes, exact):
            raise RuntimeError(f"codes of {samples} samples hang on rounding; choose another seed")
        facts = {"variant": "base", "topology": "1.7b", "snake_std": 0.1}
        store.add("encoder", f"samples_{samples}", facts, {"audio": audio, "codes": codes.numpy()})


def store_speaker(store: Store, models: Official) -> None:
    official = models.get("base", "1.7b")
    for seed, samples in enumerate((24000, 10001)):
        audio = make_audio(samples, seed)
        waveform = torch.from_numpy(to_float(audio))[None]
        mel = mel_spectrogram(waveform, 1024, 128, SAMPLE_RATE, 256, 1024, 0, 12000)[0].T.numpy()
        embedding = official.model.extract_speaker_embedding(to_float(audio), SAMPLE_RATE).numpy()
        tensors = {"audio": audio, "mel": mel, "embedding": embedding}
        store.add("speaker", f"samples_{samples}", {"variant": "base", "topology": "1.7b"}, tensors)


SAMPLED = Request("", "custom_voice", "1.7b", LONG, speaker="serena")
SETTINGS: dict[str, Facts] = {
    "default": {"temperature": 0.9, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.05},
    "narrow": {"temperature": 0.7, "top_k": 12, "top_p": 0.8, "repetition_penalty": 1.5},
}


def store_sampling(store: Store, models: Official) -> None:
    """Store the logits of each decision of a sampled run, and the distribution that the official code sampled from."""
    official = models.get(SAMPLED.variant, SAMPLED.topology)
    for name, settings in SETTINGS.items():
        torch.manual_seed(1)
        sub = {f"subtalker_{key}": value for key, value in settings.items() if key != "repetition_penalty"}
        arguments = {"max_new_tokens": 7, "do_sample": True, "subtalker_dosample": True, **settings, **sub}
        with mock.patch.object(torch, "multinomial", wraps=torch.multinomial) as multinomial:
            run = generate(official, [SAMPLED], False, **arguments)
        drawn = [call.args[0][0].numpy() for call in multinomial.call_args_list]
        frames = len(run.codes[0])
        wide = [probabilities for probabilities in drawn if len(probabilities) != NUM_CODES][:frames]
        narrow = [probabilities for probabilities in drawn if len(probabilities) == NUM_CODES]
        tensors = {
            "codes": run.codes[0],
            "logits": np.stack([row[0] for row in run.logits[:frames]]),
            "probabilities": np.stack(wide),
            "depth_logits": np.stack([row[0] for row in run.depth_logits]).reshape(frames, NUM_GROUPS - 1, NUM_CODES),
            "depth_probabilities": np.stack(narrow).reshape(frames, NUM_GROUPS - 1, NUM_CODES),
        }
        facts = {"variant": SAMPLED.variant, "topology": SAMPLED.topology, "frames": frames, "settings": settings}
        store.add("sampling", name, facts, tensors)


TEXTS = (
    LONG,
    "Don't, won't; it'll cost $1,234.50 (or 7%)!",
    "iPhone XR-2000/v2 ... ok?!",
    "你好，世界。这是一个测试：123",
    "Ünïcode e\u0301 u\u0308ber\u00a0naïve\u2009— “quoted”…",
    "two  spaces   three\ttab",
    "line one\nline two\n\n  line three ",
    "한국어 日本語 русский العربية हिन्दी",
    "🙂🎉👍🏽 fl\ufb01 \u2167",
    "don'T I'VE we'Re",
)


def store_tokens(store: Store, models: Official) -> None:
    official = models.get("custom_voice", "1.7b")
    for index, text in enumerate(TEXTS):
        request = Request("", "custom_voice", "1.7b", text, instruct=text, ref_text=text)
        store.add("tokens", f"text_{index}", {"text": text, **token_ids(official, request)}, {})


STAGES: tuple[Callable[[Store, Official], None], ...] = (
    store_tokens,
    store_prompts,
    store_greedy,
    store_sampling,
    store_clone,
    store_codec,
    store_encoder,
    store_speaker,
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Store what the official package computes on tiny random checkpoints.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    logging.set_verbosity_error()
    store = Store()
    models = Official(store)
    for stage in STAGES:
        stage(store, models)
    store.write(out)
    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"wrote {sum(map(len, store.facts.values()))} cases, {size} bytes, to {out}")


if __name__ == "__main__":
    main()
