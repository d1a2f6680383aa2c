"""Requests and what a model says of itself: valid once constructed, resolved once."""

import hashlib

import msgspec
import numpy as np
import pytest

from sonoro.core.errors import EngineError, InvalidReference, InvalidRequest, UnknownLanguage, UnknownVoice
from sonoro.core.events import Timings
from sonoro.core.options import OptionSpec
from sonoro.core.types import AudioChunk, Failed, Finished, ModelSpec, Reference, SamplingParams, SpeechRequest

DEFAULTS = SamplingParams(temperature=0.9, top_k=50, top_p=1.0, repetition_penalty=1.05)
REFERENCE = Reference(pcm=np.zeros(16000, "<f4").tobytes(), sample_rate=16000, text="Hi.")


def spec(**changes: object) -> ModelSpec:
    values = {
        "name": "m", "sample_rate": 24000, "hop": 1920, "max_frames": 100, "voice_modes": ("named",),
        "voices": ("ann", "bob"), "languages": ("auto", "english"), "sampling": DEFAULTS,
        "options": (OptionSpec(name="pace", type="float", default=1.0, minimum=0.5, maximum=2.0),),
    }  # fmt: skip
    return ModelSpec(**(values | changes))


def request(**changes: object) -> SpeechRequest:
    return SpeechRequest(**({"id": "a", "text": "Hello."} | changes))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"text": ""}, "text"),
        ({"text": " \n\t"}, "text"),
        ({"text": "?!..."}, "text"),
        ({"text": "a\udc80"}, "text"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"max_frames": 0}, "max_frames"),
        ({"instructions": " "}, "instructions"),
    ],
)
def test_a_request_refuses_bad_fields(changes: dict, field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        request(**changes)
    assert refusal.value.field == field


@pytest.mark.parametrize("text", ["", " \n", "?!...", "Hello"])
def test_a_live_request_may_begin_with_any_text_but_surrogates(text: str) -> None:
    assert request(text=text, is_live=True).text == text
    for bad in ("a\udc80", None, 5):
        with pytest.raises(InvalidRequest, match="text"):
            request(text=bad, is_live=True)


def test_an_option_may_have_another_default_for_live_text() -> None:
    option = OptionSpec(name="pace", type="float", default=1.0, live_default=0.5)
    model = spec(options=(option,))
    assert model.resolve(request()).options == {"pace": 1.0}
    assert model.resolve(request(is_live=True)).options == {"pace": 0.5}
    assert model.resolve(request(is_live=True, options={"pace": 1})).options == {"pace": 1.0}


@pytest.mark.parametrize(
    ("field", "bad", "good"),
    [
        ("temperature", (-0.1, 10.1, float("nan"), float("inf")), (0, 0.0, 10)),
        ("top_k", (-1,), (0, 1, 1_000_000)),
        ("top_p", (0.0, 1.1, float("nan")), (0.01, 1.0)),
        ("repetition_penalty", (0.0, -1.0, 11.0), (0.5, 1.05, 10)),
    ],
)
def test_sampling_bounds(field: str, bad: tuple, good: tuple) -> None:
    for value in bad:
        with pytest.raises(InvalidRequest) as refusal:
            SamplingParams(**{field: value})
        assert refusal.value.field == field
    for value in good:
        assert getattr(SamplingParams(**{field: value}), field) == value


def test_sampling_keeps_what_is_given_over_the_defaults() -> None:
    resolved = SamplingParams(temperature=0.0, top_k=5).over(DEFAULTS)
    assert resolved == SamplingParams(temperature=0.0, top_k=5, top_p=1.0, repetition_penalty=1.05)


def test_resolve_fills_in_every_default() -> None:
    resolved = spec().resolve(request())
    assert (resolved.voice, resolved.language) == ("ann", "auto")
    assert (resolved.sampling, resolved.options) == (DEFAULTS, {"pace": 1.0})


def test_a_request_is_resolved_once() -> None:
    resolved = spec().resolve(request(voice="Bob"))
    assert resolved.is_resolved
    # At the door, where other names may have been known than behind it.
    with pytest.raises(AssertionError, match="resolved once"):
        spec(voices=("eve",)).resolve(resolved, {"bob": "0af3"})


def test_resolve_takes_names_in_any_case() -> None:
    resolved = spec().resolve(request(voice="Bob", language="English"))
    assert (resolved.voice, resolved.language) == ("bob", "english")


def test_an_alias_is_the_voice_it_stands_for() -> None:
    named = spec(voice_aliases={"robert": "bob"})
    assert named.resolve(request(voice="Robert")).voice == "bob"
    assert named.resolve(request(voice="Robert"), {"robert": "digest"}).voice == "robert", (
        "a registered voice comes first"
    )
    with pytest.raises(UnknownVoice, match="ann, bob"):
        named.resolve(request(voice="rob"))


def test_a_registered_voice_is_known_in_any_case_beside_the_model_s_own() -> None:
    for modes in ({}, {"voice_modes": ("cloned",), "voices": ()}):
        resolved = spec(**modes).resolve(request(voice="Eve"), {"eve": "0af3"})
        assert (resolved.voice, resolved.voice_digest) == ("eve", "0af3")
        with pytest.raises(UnknownVoice, match=r"known voices: .*eve"):
            spec(**modes).resolve(request(voice="adam"), {"eve": "0af3"})
    with pytest.raises(UnknownVoice, match=r"ann, bob, .*v17, and 82 more"):
        spec().resolve(request(voice="adam"), {f"v{number}": "" for number in range(100)})
    assert spec().resolve(request(voice="ann"), {"eve": "0af3"}).voice_digest is None
    with pytest.raises(UnknownVoice, match=r"ann, bob$"):
        spec().resolve(request(voice="adam"), {"eve.0123456789abcdef": "0af3"})


@pytest.mark.parametrize(
    ("spec_changes", "changes", "error", "words"),
    [
        ({}, {"voice": "eve"}, UnknownVoice, "ann, bob"),
        ({}, {"language": "klingon"}, UnknownLanguage, "auto, english"),
        ({}, {"instructions": "Whisper."}, InvalidRequest, "instructions"),
        ({}, {"max_frames": 101}, InvalidRequest, "at most 100"),
        ({}, {"options": {"pace": 3}}, InvalidRequest, "<= 2"),
        ({}, {"options": {"depth": 3}}, InvalidRequest, "known options: pace"),
        ({}, {"references": (REFERENCE,)}, InvalidReference, "cannot clone"),
        ({"voice_modes": ("cloned",), "voices": ()}, {}, InvalidReference, "give one"),
        ({"voice_modes": ("cloned",), "voices": ()}, {"voice": "ann"}, UnknownVoice, "no named voices"),
        (
            {"voice_modes": ("named", "cloned")},
            {"references": (REFERENCE,), "voice": "ann"},
            InvalidRequest,
            "leave it out",
        ),
    ],
)
def test_resolve_refuses_what_the_model_cannot_do(spec_changes: dict, changes: dict, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        spec(**spec_changes).resolve(request(**changes))


@pytest.mark.parametrize(
    ("option", "good", "bad"),
    [
        (OptionSpec(name="o", type="bool", default=True), (True, False), (1, "yes", 0.0)),
        (OptionSpec(name="o", type="int", default=1, minimum=0, maximum=9), (0, 9, 3.0), (-1, 10, 2.5, True, "3")),
        (OptionSpec(name="o", type="float", default=1.0, minimum=0), (0, 0.5, 1e9), (-0.1, float("nan"), float("inf"))),
        (OptionSpec(name="o", type="str", default="a", choices=("a", "b")), ("a", "b"), ("c", 1)),
    ],
)
def test_options_are_checked_by_type_and_bounds(option: OptionSpec, good: tuple, bad: tuple) -> None:
    for value in good:
        checked = option.check(value)
        assert checked == value
        assert type(checked).__name__ == option.type
    for value in bad:
        with pytest.raises(InvalidRequest, match="must be") as refusal:
            option.check(value)
        assert refusal.value.field == "o"


def test_a_reference_knows_its_samples_and_length() -> None:
    samples = np.linspace(-1, 1, 8000, dtype="<f4")
    reference = Reference(pcm=samples.tobytes(), sample_rate=16000, use="reference")
    np.testing.assert_array_equal(reference.samples, samples)
    assert reference.duration_s == 0.5
    assert reference.digest == hashlib.sha256(samples.tobytes()).hexdigest()
    with pytest.raises(ValueError, match="read-only"):
        reference.samples[0] = 0


@pytest.mark.parametrize(
    "value",
    [
        request(references=(REFERENCE,), options={"pace": 1.5}, max_frames=3),
        AudioChunk(request_id="a", index=0, pcm=b"\x00\x01"),
        Finished(
            request_id="a", reason="stop", frames=3, characters=9, timings=Timings(first_audio_s=0.1, total_s=1.0)
        ),
        Failed.of("a", EngineError("no")),
        spec(),
        request(speaker_embedding=(0.5, -1e-3)),
    ],
)
def test_wire_values_survive_the_wire(value: msgspec.Struct) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value)) == value
