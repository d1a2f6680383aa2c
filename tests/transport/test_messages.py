"""Every message is itself again on the other side, and what could not be read there is refused here."""

import tracemalloc

import msgspec
import pytest

from sonoro.core.config import EngineConfig
from sonoro.core.errors import ConfigError, EngineBusy, ErrorFacts, InvalidRequest, UnknownVoice
from sonoro.core.events import Timings
from sonoro.core.options import OptionSpec
from sonoro.core.types import AudioChunk, Failed, Finished, ModelSpec, Reference, SamplingParams, SpeechRequest
from sonoro.transport import messages
from sonoro.transport.channel import decode_to_engine, encode_from_engine
from sonoro.transport.messages import (
    AppendText,
    Cancel,
    EncodeVoice,
    EndText,
    Fatal,
    FrontEnded,
    LoadVoice,
    Pause,
    Ping,
    Pong,
    PrefixCounts,
    Ready,
    Resume,
    Shutdown,
    Stats,
    StatsRequest,
    Submit,
    VoiceEncoded,
    VoiceFailed,
    VoiceLost,
    VoiceWanted,
    WorkerSettings,
)
from sonoro.transport.process import decode_from_engine, encode_to_engine

SPEC = ModelSpec(
    name="sine",
    sample_rate=8000,
    hop=80,
    max_frames=2000,
    voice_modes=("named", "cloned"),
    voices=("low", "high"),
    languages=("auto",),
    sampling=SamplingParams(temperature=1.0, top_k=50, top_p=1.0, repetition_penalty=1.0),
    options=(OptionSpec(name="strength", type="int", default=50, minimum=0, maximum=100),),
)
REQUEST = SpeechRequest(
    id="a",
    text="Grüße, 你好 🎙",
    voice="low",
    references=(Reference(pcm=bytes(range(256)), sample_rate=8000, text="hm"),),
    sampling=SamplingParams(temperature=0.5, top_k=3),
    seed=2**63 - 1,
    max_frames=7,
    ignore_eos=True,
    options={"strength": 3, "warmth": 0.5, "is_loud": True, "mood": "calm"},
)
TO_ENGINE = [
    Submit(REQUEST),
    Submit(SpeechRequest(id="b", text="Hi")),
    AppendText("a", "Grüße"),
    EndText("a"),
    Cancel("a"),
    Pause("a"),
    Resume("a"),
    StatsRequest(),
    Ping(),
    EncodeVoice(3, REQUEST.references),
    LoadVoice("0af3", b"\x00\xff"),
    VoiceLost("0af3", ErrorFacts.of(UnknownVoice("voice", "anna", "it has just been deleted"))),
    FrontEnded("front-1"),
    Shutdown(),
]
FROM_ENGINE = [
    Ready(
        spec=SPEC,
        ready_s=1.5,
        report="a line\nanother",
        gpu_memory_mib=10.5,
        graph_memory_mib=0.5,
        fingerprint="f",
        phases={"weights": 0.5},
    ),
    AudioChunk(request_id="a", index=3, pcm=b"\x00\x80\xff"),
    Finished(request_id="a", reason="runaway", frames=4, characters=9, timings=Timings(first_audio_s=0.1, total_s=2.0)),
    Failed.of("a", UnknownVoice("voice", "nobody", "known voices: low, high")),
    Failed.of("a", RuntimeError("it exploded")),
    Stats(
        launches={"frame": {"graph": 3, "eager": 0}},
        prefixes=PrefixCounts(tokens_prefilled=40, tokens_cached=32, hits=1, evictions=5, kept_bytes=2048),
        running=1,
        waiting=2,
        paused=1,
        free_slots=3,
        free_pages=4,
        tick_ms={"p50": 1.0},
        frame_ms={"p50": 2.0},
        gpu_memory_mib=0.0,
        broken_samples=7,
        preemptions=2,
        fallbacks={"conv": {"smaller": 1, "reference": 2}},
        compiled={"_conv": 3},
    ),
    Pong(),
    Fatal(ErrorFacts.of(ConfigError("pages", 3, "it must be at least 4"))),
    VoiceEncoded(3, "0af3", b"\x00\xff"),
    VoiceWanted("0af3"),
    VoiceFailed(5, ErrorFacts.of(EngineBusy("too many"))),
]


def test_the_lists_here_hold_every_message() -> None:
    assert {type(message) for message in TO_ENGINE} == set(messages.ToEngine.__args__)
    assert {type(message) for message in FROM_ENGINE} == set(messages.FromEngine.__args__)


@pytest.mark.parametrize("message", TO_ENGINE)
def test_messages_to_the_engine_survive_the_crossing(message: messages.ToEngine) -> None:
    again = decode_to_engine(encode_to_engine(message))
    assert (type(again), again) == (type(message), message)


@pytest.mark.parametrize("count", [0, 1, len(FROM_ENGINE)])
def test_messages_from_the_engine_survive_the_crossing_together(count: int) -> None:
    again = decode_from_engine(encode_from_engine(FROM_ENGINE[:count]))
    assert again == FROM_ENGINE[:count]
    assert [type(message) for message in again] == [type(message) for message in FROM_ENGINE[:count]]


def test_a_failure_is_the_error_that_it_was() -> None:
    for message, kind in ((FROM_ENGINE[3], UnknownVoice), (FROM_ENGINE[7], ConfigError)):
        [again] = decode_from_engine(encode_from_engine([message]))
        error = again.facts.error
        assert type(error) is kind
        assert (error.field, error.limit) == (message.facts.field, message.facts.limit)


@pytest.mark.parametrize(
    "changes",
    [
        {"id": 5},
        {"ignore_eos": "yes"},
        {"options": {"strength": None}},
        {"options": {"strength": 2**70}},
        {"options": ["loud"]},
        {"references": ("a.wav",)},
        {"instructions": "\ud800"},
        {"voice": object},
        {"speaker_embedding": ("much",)},
    ],
)
def test_a_request_that_the_engine_could_not_read_is_refused(changes: dict) -> None:
    with pytest.raises(InvalidRequest):
        encode_to_engine(Submit(SpeechRequest(**{"id": "a", "text": "Hi"} | changes)))


@pytest.mark.parametrize("message", [EncodeVoice("1", ()), EncodeVoice(1, ("a.wav",)), EncodeVoice(1, 5)])
def test_a_voice_that_the_engine_could_not_read_is_refused(message: messages.ToEngine) -> None:
    with pytest.raises(InvalidRequest, match="every field must be of its type"):
        encode_to_engine(message)


@pytest.mark.parametrize("is_voice", [False, True])
def test_a_recording_is_copied_once(is_voice: bool) -> None:
    references = (Reference(pcm=bytes(4_000_000), sample_rate=48000, text="Hm."),)
    message = (
        EncodeVoice(1, references) if is_voice else Submit(SpeechRequest(id="a", text="Hi", references=references))
    )
    tracemalloc.start()
    try:
        sent = encode_to_engine(message)
        assert tracemalloc.get_traced_memory()[1] < 1.5 * len(sent)
    finally:
        tracemalloc.stop()


def test_settings_survive_as_json_with_the_whole_configuration() -> None:
    config = EngineConfig(slots=3, chunk_frames=(1, 5), memory_fraction=0.25, is_eager=True)
    settings = WorkerSettings(model="a folder", device="cpu", dtype="float32", load_format="dummy", config=config)
    assert msgspec.json.decode(msgspec.json.encode(settings), type=WorkerSettings) == settings


def test_settings_take_a_configuration_alone() -> None:
    with pytest.raises(ConfigError, match="EngineConfig"):
        WorkerSettings(config={"slots": 3})


def test_a_configuration_that_is_wrong_is_refused_as_it_is_read() -> None:
    payload = msgspec.json.encode(WorkerSettings()).replace(b'"slots":16', b'"slots":0')
    with pytest.raises(ConfigError) as refusal:
        msgspec.json.decode(payload, type=WorkerSettings)
    assert refusal.value.field == "slots"
