"""The Python face over a model that speaks sine waves."""

import asyncio
import base64
import gc
import inspect
import io
import random
import re
import threading
import time
import weakref
from pathlib import Path

import msgspec
import numpy as np
import pytest
import soundfile
import torch
from processes import GUARD_S
from sine_models import MeasuredSineModel, VoicedSineModel
from tiny_checkpoint import write_checkpoint

from sonoro import TTS, Audio, EngineConfig, api_audio
from sonoro.api import RequestFields, SpokenFields, speech_request
from sonoro.audio.files import write_audio
from sonoro.audio.pcm import to_pcm16
from sonoro.core.config import Tuning
from sonoro.core.errors import (
    CheckpointNotFound,
    ConfigError,
    EngineClosed,
    EngineError,
    InvalidReference,
    InvalidRequest,
    OutputError,
    SonoroError,
    UnknownLanguage,
    UnknownVoice,
)
from sonoro.core.types import SpeechRequest
from sonoro.models.base import LoadedModel

TEXTS = ["Good morning.", "A sentence of middling length, no more.", "Hm.", "One. Two. Three. Four. Five. Six. Seven."]


def sine_model() -> LoadedModel:
    return LoadedModel(VoicedSineModel(), torch.device("cpu"), torch.float32, {})


def tts(**config: int | tuple[int, ...]) -> TTS:
    return TTS(sine_model(), config={"slots": 2} | config)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "reference.wav"
    write_audio(path, np.sin(np.arange(8000) / 20).astype(np.float32), 8000)
    return path


def test_generate_returns_the_whole_with_its_figures() -> None:
    audio = tts().generate("Hello there.", voice="high", seed=5)
    assert audio.samples.dtype == np.float32
    assert audio.samples.shape == (12 * 80,)
    assert (audio.sample_rate, audio.finish_reason, audio.frames) == (8000, "stop", 12)
    assert audio.duration_s == 0.12
    assert 0 < audio.time_to_first_audio_s <= audio.total_s
    assert audio.rtf == audio.total_s / 0.12


def test_fields_reach_the_model() -> None:
    speaker = tts()
    same = speaker.generate("Hello there.")
    np.testing.assert_array_equal(speaker.generate("Hello there.", seed=0).samples, same.samples)
    np.testing.assert_array_equal(speaker.generate("Hello there.", "low").samples, same.samples)
    for fields in ({"seed": 1}, {"voice": "high"}, {"strength": 20}, {"options": {"strength": 20}}):
        assert not np.array_equal(speaker.generate("Hello there.", **fields).samples, same.samples)
    cut = speaker.generate("Hello there.", max_frames=4)
    assert (cut.frames, cut.finish_reason) == (4, "length")


def test_stream_yields_what_generate_returns() -> None:
    speaker = tts()
    pieces = list(speaker.stream(TEXTS[1]))
    assert [piece.index for piece in pieces] == list(range(len(pieces)))
    assert all(len(piece.samples) // 80 in speaker.config.chunk_frames for piece in pieces[:-1])
    assert len(pieces[0].samples) == 80
    assert pieces[0].duration_s == 0.01
    np.testing.assert_array_equal(
        np.concatenate([piece.samples for piece in pieces]), speaker.generate(TEXTS[1]).samples
    )


def test_stream_says_at_its_end_how_the_speech_ended() -> None:
    stream = tts().stream(TEXTS[0], max_frames=2)
    next(stream)
    next(stream)
    with pytest.raises(StopIteration) as end:
        next(stream)
    assert (end.value.value.reason, end.value.value.frames) == ("length", 2)


@pytest.mark.parametrize("leave", ["close", "forget", "throw"])
def test_leaving_a_stream_cancels_its_request(leave: str) -> None:
    speaker = tts(slots=1)
    stream = speaker.stream("word " * 200)
    next(stream)
    if leave == "close":
        stream.close()
    elif leave == "throw":
        with pytest.raises(KeyboardInterrupt):
            stream.throw(KeyboardInterrupt)
    else:
        del stream
        gc.collect()
    # The only slot is free again, and nobody is served the rest of the first request.
    np.testing.assert_array_equal(speaker.generate(TEXTS[0]).samples, tts().generate(TEXTS[0]).samples)


def test_a_batch_keeps_its_order_and_equals_single_requests() -> None:
    speaker = tts()
    items = [TEXTS[0], {"text": TEXTS[1], "voice": "high"}, TEXTS[2], speech_request(TEXTS[3], seed=9)]
    expected = [
        speaker.generate(TEXTS[0]),
        speaker.generate(TEXTS[1], voice="high"),
        speaker.generate(TEXTS[2]),
        speaker.generate(TEXTS[3], seed=9),
    ]
    for got, alone in zip(speaker.generate_batch(items), expected, strict=True):
        np.testing.assert_array_equal(got.samples, alone.samples)
    assert speaker.generate_batch([]) == []


def test_a_batch_may_be_longer_than_what_may_wait() -> None:
    items = [{"text": TEXTS[number % 4], "seed": number} for number in range(20)]
    speaker = TTS(sine_model(), config=EngineConfig(slots=2, tuning=Tuning(max_queued=1)))
    for got, item in zip(speaker.generate_batch(items), items, strict=True):
        np.testing.assert_array_equal(got.samples, tts().generate(**item).samples)


@pytest.mark.parametrize("bad", [{"text": "Hi", "voice": "nobody"}, "", {"voice": "low"}, {"text": "unspeakable"}])
def test_one_bad_item_refuses_the_batch_and_leaves_nothing_running(bad: object) -> None:
    speaker = tts(slots=1)
    with pytest.raises(InvalidRequest):
        speaker.generate_batch([TEXTS[0], bad])
    assert speaker.generate(TEXTS[2]).finish_reason == "stop"


def test_what_is_wrong_with_a_batch_names_the_item() -> None:
    for items in ([TEXTS[0], {"text": "Hi", "voice": "nobody"}], [TEXTS[0], ""], [TEXTS[0], "An explosive one."]):
        with pytest.raises(SonoroError) as refusal:
            tts().generate_batch(items)
        assert refusal.value.__notes__ == ["in item 1 of the batch"]
    with pytest.raises(SonoroError) as refusal:
        tts().generate("An explosive one.")
    assert not hasattr(refusal.value, "__notes__")


@pytest.mark.parametrize("items", ["Hello.", {"text": "Hello."}])
def test_a_batch_is_a_sequence_of_items(items: object) -> None:
    with pytest.raises(InvalidRequest, match="items"):
        tts().generate_batch(items)


def test_a_request_that_is_made_takes_no_more_fields() -> None:
    request = speech_request(TEXTS[0])
    for args, fields, field in (((), {"seed": 3}, "seed"), (("low",), {}, "voice")):
        with pytest.raises(InvalidRequest) as refusal:
            tts().generate(request, *args, **fields)
        assert refusal.value.field == field


def test_a_second_use_of_a_running_request_does_not_disturb_the_first() -> None:
    speaker, request = tts(), speech_request(TEXTS[1])
    stream = speaker.stream(request)
    pieces = [next(stream).samples]
    with pytest.raises(InvalidRequest, match="still running"):
        speaker.generate(request)
    pieces += [piece.samples for piece in stream]
    np.testing.assert_array_equal(np.concatenate(pieces), speaker.generate(request).samples)


def test_a_stream_collected_inside_a_tick_is_cancelled() -> None:
    """The garbage collector runs anywhere, in the thread that holds the engine too."""
    model, left = VoicedSineModel(), []
    speaker = TTS(LoadedModel(model, torch.device("cpu"), torch.float32, {}), config={"slots": 2})
    left.append(speaker.stream("word " * 200))
    next(left[0])
    step = model.frame

    def frame(state: object, slots: torch.Tensor) -> None:
        left.clear()
        step(state, slots)

    model.frame = frame
    done = threading.Thread(target=speaker.generate, args=(TEXTS[0],), daemon=True)
    done.start()
    done.join(timeout=GUARD_S)
    assert not done.is_alive()
    # Both slots are free again.
    assert [audio.finish_reason for audio in speaker.generate_batch(TEXTS[:2])] == ["stop", "stop"]


def test_interleaved_streams_share_the_batch() -> None:
    # With longer chunks a slow machine may put a whole text into fewer than are taken here.
    speaker = tts(chunk_frames=(1,))
    streams = [speaker.stream(text, seed=3) for text in TEXTS[:2]]
    heard: list[list[np.ndarray]] = [[], []]
    for _ in range(3):
        for pieces, stream in zip(heard, streams, strict=True):
            pieces.append(next(stream).samples)
    middle = speaker.generate(TEXTS[3])
    for pieces, stream, text in zip(heard, streams, TEXTS, strict=False):
        pieces += [piece.samples for piece in stream]
        np.testing.assert_array_equal(np.concatenate(pieces), speaker.generate(text, seed=3).samples)
    np.testing.assert_array_equal(middle.samples, speaker.generate(TEXTS[3]).samples)


def test_threads_may_share_a_speaker() -> None:
    speaker, answers = tts(), {}

    def speak(seed: int) -> None:
        answers[seed] = speaker.generate(TEXTS[seed % 4], seed=seed).samples

    threads = [threading.Thread(target=speak, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=GUARD_S)
    for seed in range(8):
        np.testing.assert_array_equal(answers[seed], tts().generate(TEXTS[seed % 4], seed=seed).samples)


def test_references_come_by_path_and_by_bytes(recording: Path) -> None:
    speaker = tts()
    by_path = speaker.generate("Hi there.", ref_audio=recording, ref_text="Hm.")
    by_bytes = speaker.generate("Hi there.", ref_audio=recording.read_bytes(), ref_text="Hm.")
    timbre = speaker.generate("Hi there.", ref_audio=str(recording), x_vector_only=True)
    np.testing.assert_array_equal(by_path.samples, by_bytes.samples)
    assert not np.array_equal(by_path.samples, timbre.samples)


@pytest.mark.parametrize(
    ("fields", "error", "field"),
    [
        ({"ref_text": "Hm."}, InvalidReference, "ref_text"),
        ({"x_vector_only": True}, InvalidReference, "x_vector_only"),
        ({"ref_audio": b"noise"}, InvalidReference, "ref_audio"),
        ({"temperature": -1}, InvalidRequest, "temperature"),
        ({"top_p": 0}, InvalidRequest, "top_p"),
        ({"temperature": "hot"}, InvalidRequest, "temperature"),
        ({"top_k": 2.5}, InvalidRequest, "top_k"),
        ({"seed": "abc"}, InvalidRequest, "seed"),
        ({"seed": True}, InvalidRequest, "seed"),
        ({"max_frames": 2.0}, InvalidRequest, "max_frames"),
        ({"voice": 5}, InvalidRequest, "voice"),
        ({"voice": ""}, UnknownVoice, "voice"),
        ({"language": ["english"]}, InvalidRequest, "language"),
        ({"language": ""}, UnknownLanguage, "language"),
        ({"instructions": 1}, InvalidRequest, "instructions"),
        ({"voice": "nobody"}, UnknownVoice, "voice"),
        ({"wobble": 3}, InvalidRequest, "options.wobble"),
    ],
)
def test_bad_fields_are_refused_by_name(fields: dict, error: type, field: str) -> None:
    with pytest.raises(error) as refusal:
        tts().generate("Hi.", **fields)
    assert refusal.value.field == field
    with pytest.raises(error):
        next(tts().stream("Hi.", **fields))


def test_in_context_cloning_needs_the_transcript(recording: Path) -> None:
    with pytest.raises(InvalidReference, match="transcript"):
        tts().generate("Hi.", ref_audio=recording)


def test_a_request_that_fails_later_raises() -> None:
    with pytest.raises(EngineError, match="it exploded"):
        tts().generate("An explosive one.")
    with pytest.raises(InvalidRequest, match="speakable"):
        tts(segment_letters=16).generate("All is well now. It is unspeakable.")


class DawdlingModel(VoicedSineModel):
    """Takes now this long for a frame, now that; `cuts` are the lengths its codec was asked for."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.cuts: list[tuple[int, int]] = []
        draw, step, decode = random.Random(seed), self.frame, self.codec.decode

        def frame(state: object, slots: torch.Tensor) -> None:
            time.sleep(0.02 * draw.random() ** 3)
            step(state, slots)

        def noted(frames: torch.Tensor, *others: object) -> torch.Tensor:
            self.cuts.append(frames.shape[:2])
            return decode(frames, *others)

        self.frame, self.codec.decode = frame, noted


def test_the_same_request_is_cut_alike_on_a_machine_that_dawdles() -> None:
    """Chunks of other lengths are rounded differently: that is what made two runs differ."""
    for items in ([TEXTS[3]], TEXTS):
        cuts = []
        for seed in range(3):
            model = DawdlingModel(seed)
            TTS(LoadedModel(model, torch.device("cpu"), torch.float32, {}), config={"slots": 2}).generate(items)
            cuts.append(model.cuts)
        assert cuts[1] == cuts[0]
        assert cuts[2] == cuts[0]


def test_generate_takes_a_list_and_what_holds_for_all_of_it() -> None:
    speaker = tts()
    items = [TEXTS[0], {"text": TEXTS[1], "voice": "low"}, {"text": TEXTS[2], "speed": 2.0}]
    expected = [
        speaker.generate(TEXTS[0], "high", seed=4),
        speaker.generate(TEXTS[1], voice="low", seed=4),
        speaker.generate(TEXTS[2], voice="high", seed=4, speed=2),
    ]
    for together in (speaker.generate(items, "high", seed=4), speaker.generate(items, voice="high", seed=4)):
        for got, alone in zip(together, expected, strict=True):
            np.testing.assert_array_equal(got.samples, alone.samples)
    assert speaker.generate([]) == []
    with pytest.raises(InvalidRequest) as refusal:
        speaker.generate([TEXTS[0], {"text": "Hi", "voice": "nobody"}])
    assert refusal.value.__notes__ == ["in item 1 of the batch"]


@pytest.mark.parametrize("speed", [0.5, 1.5, 3])
def test_speed_changes_the_length_alone(speed: float) -> None:
    speaker = tts()
    plain, other = speaker.generate("word " * 40), speaker.generate("word " * 40, speed=speed)
    assert other.duration_s == pytest.approx(plain.duration_s / speed, rel=0.03)
    pieces = list(speaker.stream("word " * 40, speed=speed))
    assert [piece.index for piece in pieces] == list(range(len(pieces)))
    streamed = np.concatenate(pieces)
    assert len(streamed) == len(other)


@pytest.mark.parametrize("speed", [0, 5, -1, float("nan"), "fast"])
def test_a_speed_that_cannot_be_is_refused_and_leaves_nothing_running(speed: object) -> None:
    speaker = tts(slots=1)
    with pytest.raises(InvalidRequest) as refusal:
        speaker.generate("Hi.", speed=speed)
    assert refusal.value.field == "speed"
    assert speaker.generate(TEXTS[0]).finish_reason == "stop"


def test_pieces_say_how_far_in_the_text_they_are() -> None:
    speaker = tts(segment_letters=16)
    text = "The first one. And then the second. So be it."
    reached = [piece.characters for piece in speaker.stream(text)]
    assert reached == sorted(reached)
    assert len(set(reached)) > 2
    assert reached[-1] == len(text)


def test_a_closed_speaker_refuses_and_frees_its_model() -> None:
    model = VoicedSineModel()
    left = weakref.ref(model)
    with TTS(LoadedModel(model, torch.device("cpu"), torch.float32, {}), config={"slots": 2}) as speaker:
        del model
        stream = speaker.stream("word " * 200)
        next(stream)
        assert left() is not None
    assert left() is None
    speaker.close()
    with pytest.raises(EngineClosed, match="closed"):
        speaker.generate("Hi.")
    assert speaker.voices == ("low", "high")


def test_closing_ends_what_is_being_spoken() -> None:
    speaker = tts()
    stream = speaker.stream("word " * 200)
    next(stream)
    speaker.close()
    with pytest.raises(EngineClosed):
        list(stream)


def test_speech_without_blocking_the_event_loop() -> None:
    speaker, turns = tts(), []

    async def watch() -> None:
        while True:
            turns.append(None)
            await asyncio.sleep(0)

    async def talk() -> tuple[list[Audio], np.ndarray]:
        watching = asyncio.create_task(watch())
        together = await asyncio.gather(*(speaker.agenerate(text, seed=2) for text in TEXTS))
        pieces = [piece async for piece in speaker.astream(TEXTS[1], voice="high")]
        watching.cancel()
        return together, np.concatenate(pieces)

    together, streamed = asyncio.run(talk())
    assert len(turns) > 3
    for audio, text in zip(together, TEXTS, strict=True):
        np.testing.assert_array_equal(audio.samples, speaker.generate(text, seed=2).samples)
    np.testing.assert_array_equal(streamed, speaker.generate(TEXTS[1], voice="high").samples)


@pytest.mark.parametrize("leave", ["break", "cancel"])
def test_leaving_an_asynchronous_stream_cancels_its_request(leave: str) -> None:
    speaker = tts(slots=1)

    async def listen(begun: asyncio.Event) -> None:
        stream = speaker.astream("word " * 400)
        async for _ in stream:
            begun.set()
            if leave == "break":
                break
        await stream.aclose()

    async def talk() -> None:
        begun = asyncio.Event()
        listening = asyncio.create_task(listen(begun))
        await begun.wait()
        if leave == "cancel":
            listening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await listening
        else:
            await listening

    asyncio.run(talk())
    # The only slot is free again.
    assert speaker.generate(TEXTS[0]).finish_reason == "stop"


@pytest.mark.parametrize(
    ("given", "meant"),
    [("sed", "seed"), ("voise", "voice"), ("temprature", "temperature"), ("strenth", "strength"), ("sped", "speed")],
)
def test_a_misspelt_keyword_gets_the_nearest_name(given: str, meant: str) -> None:
    for speak in (
        tts().generate,
        lambda *text, **fields: next(tts().stream(*text, **fields)),
        lambda *text, **fields: asyncio.run(tts().agenerate(*text, **fields)),
        lambda text, **fields: tts().generate_batch([{"text": text} | fields]),
    ):
        with pytest.raises(InvalidRequest, match=f"did you mean {meant}"):
            speak("Hi.", **{given: 3})
    with pytest.raises(ConfigError, match="did you mean slots"):
        tts(slotz=3)


def test_help_explains_every_parameter() -> None:
    explained = {
        **{kind: kind.__annotations__ for kind in (RequestFields, SpokenFields)},
        **{made: inspect.signature(made).parameters for made in (TTS, TTS.generate, speech_request)},
    }
    explained[SpokenFields] = set(SpokenFields.__annotations__) - set(RequestFields.__annotations__)
    for what, names in explained.items():
        for name in set(names) - {"self"}:
            assert re.search(rf"^ *{name}: .{{10}}", inspect.getdoc(what), re.M), name


def test_audio_is_an_array_and_a_player(monkeypatch: pytest.MonkeyPatch) -> None:
    audio = tts().generate(TEXTS[0])
    assert len(audio) == len(audio.samples)
    np.testing.assert_array_equal(np.asarray(audio), audio.samples)
    assert np.asarray(audio, dtype=np.float64).dtype == np.float64
    assert np.asarray(audio) is audio.samples
    assert np.array(audio) is not audio.samples
    assert float(np.abs(audio).max()) > 0.1
    embedded = re.fullmatch(r'<audio controls src="data:audio/wav;base64,([^"]+)"></audio>', audio._repr_html_())
    assert base64.b64decode(embedded[1]) == audio.to_bytes()

    player = FakePlayer()
    monkeypatch.setattr(api_audio, "find_player", lambda rate: player if rate == 8000 else None)
    audio.play()
    assert player.played == [to_pcm16(audio.samples), None]
    monkeypatch.setattr(api_audio, "find_player", lambda rate: None)
    with pytest.raises(OutputError, match=re.escape('pip install ".[play]"')):
        audio.play()


class FakePlayer:
    """Remembers what it plays, and None at the end."""

    def __init__(self) -> None:
        self.played = []
        self.write = self.played.append

    def __enter__(self) -> "FakePlayer":
        return self

    def __exit__(self, *_: object) -> None:
        self.played.append(None)


@pytest.mark.parametrize("format", ["wav", "flac", "mp3", "opus", "pcm"])
def test_audio_as_bytes_and_into_an_open_file(format: str, tmp_path: Path) -> None:
    audio = tts().generate(TEXTS[3])
    made = audio.to_bytes(format)
    if format == "pcm":
        assert made == to_pcm16(audio.samples)
    else:
        assert soundfile.info(io.BytesIO(made)).duration == pytest.approx(audio.duration_s, abs=0.1)
    unnamed = io.BytesIO()
    audio.save(unnamed, format)
    assert abs(len(unnamed.getvalue()) - len(made)) < 100
    with (tmp_path / f"a.{format}").open("wb") as file:
        audio.save(file)
        assert not file.closed
    assert abs((tmp_path / f"a.{format}").stat().st_size - len(made)) < 100


def test_a_file_that_takes_no_audio_is_an_output_error(tmp_path: Path) -> None:
    audio = tts().generate(TEXTS[0])
    with pytest.raises(OutputError, match="format"):
        audio.to_bytes("aac")
    with (tmp_path / "a.wav").open("w") as text, pytest.raises(OutputError, match="bytes"):
        audio.save(text)
    closed = io.BytesIO()
    closed.close()
    with pytest.raises(OutputError, match="closed"):
        audio.save(closed)
    assert closed.closed
    unnamed = io.BytesIO()
    audio.save(unnamed)
    assert unnamed.getvalue() == audio.to_bytes("wav")


def test_a_voice_that_cannot_clone_says_so_before_it_asks_for_a_transcript(recording: Path) -> None:
    model = VoicedSineModel()
    model.spec = msgspec.structs.replace(model.spec, voice_modes=("named",))
    speaker = TTS(LoadedModel(model, torch.device("cpu"), torch.float32, {}), config={"slots": 1})
    for fields in (
        {"ref_audio": recording},
        {"ref_audio": "none.wav"},
        {"ref_audio": recording, "ref_text": "Hm."},
        {"ref_text": "Hm."},
        {"x_vector_only": True},
    ):
        with pytest.raises(InvalidReference, match="sine cannot clone voices; name one of its own"):
            speaker.generate("Hi.", **fields)


@pytest.mark.parametrize("format", ["wav", "flac", "mp3", "opus", "pcm"])
def test_save(format: str, tmp_path: Path) -> None:
    audio = tts().generate(TEXTS[3])
    audio.save(tmp_path / f"a.{format}")
    audio.save(tmp_path / "b", format)
    if format == "pcm":
        assert len((tmp_path / "a.pcm").read_bytes()) == 2 * len(audio.samples)
    else:
        assert soundfile.info(tmp_path / f"a.{format}").samplerate == audio.sample_rate
    with pytest.raises(OutputError):
        audio.save(tmp_path / "missing" / "a.wav")


def test_the_spec_is_at_hand() -> None:
    speaker = tts()
    assert (speaker.voices, speaker.languages) == (("low", "high"), ("auto", "english"))
    assert (speaker.spec.name, speaker.sample_rate) == ("sine", 8000)


def test_the_configuration_comes_in_every_form(tmp_path: Path) -> None:
    model = LoadedModel(VoicedSineModel(), torch.device("cpu"), torch.float32, {})
    path = tmp_path / "engine.yaml"
    path.write_text("slots: 3\n")
    for given in (EngineConfig(slots=3), {"slots": 3}, path, str(path)):
        assert TTS(model, config=given).config == EngineConfig(slots=3)
    with pytest.raises(ConfigError, match="known keys"):
        TTS(model, config={"slotz": 3})


@pytest.mark.parametrize("variant", ["custom_voice", "voice_design", "base"])
def test_a_checkpoint_streams_and_batches_as_it_speaks_alone(variant: str, recording: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", variant=variant)
    speaker = TTS(tmp_path / "model", device="cpu", config={"slots": 3, "segment_letters": 24})
    voice = {
        "custom_voice": [{"voice": "ryan"}, {"instructions": "Speak up."}],
        "voice_design": [{"instructions": "A calm voice."}, {"instructions": "An old, hoarse voice."}],
        "base": [{"ref_audio": recording, "ref_text": "Hm."}, {"ref_audio": recording, "x_vector_only": True}],
    }[variant]
    items = [
        {"text": text, "seed": seed, "max_frames": 10 + 9 * seed, **voice[seed % 2]}
        for seed, text in enumerate(["Hello there.", "One sentence. Then another one.", "Hm.", "And so on.", "Yes."])
    ]
    for together, item in zip(speaker.generate_batch(items), items, strict=True):
        pieces = list(speaker.stream(**item))
        alone = np.concatenate([piece.samples for piece in pieces])
        assert together.frames * 1920 == len(together.samples) == len(alone)
        assert together.samples.std() > 0
        # Float32 rounds differently in another batch size; one step of PCM16 is 3e-5.
        np.testing.assert_allclose(together.samples, alone, atol=2e-4)


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound):
        TTS(tmp_path / "none")


def test_the_signature_shows_every_field() -> None:
    for method in (TTS.generate, TTS.stream, TTS.agenerate, TTS.astream):
        shown = inspect.signature(method).parameters
        assert list(shown) == ["self", "text", "voice", "fields"]
        assert shown["fields"].annotation == "Unpack[SpokenFields]"
    assert inspect.signature(speech_request).parameters["fields"].annotation == "Unpack[RequestFields]"
    assert {"language", "ref_audio", "seed", "max_frames", "options", "speed"} <= set(SpokenFields.__annotations__)


def test_audio_without_samples_has_no_rate_of_making() -> None:
    assert Audio(np.zeros(0, np.float32), 8000, "stop", 0, 0.1, 0.1).rtf == float("inf")


def test_live_text_needs_an_engine_process() -> None:
    with pytest.raises(InvalidRequest, match="is_live"):
        tts().generate(SpeechRequest(id="a", text="Hi", is_live=True))


def test_audio_comes_at_one_level_whole_and_streamed() -> None:
    """The voices are 3 and 6 LU too loud: each line of a text is lowered by what its voice is."""
    text = "[voice:low]Good morning to you.[voice:high]Good evening to all.[pause:100ms]Good night."
    fields: SpokenFields = {"markup": "voices", "lexicons": ()}
    with TTS(LoadedModel(MeasuredSineModel(), torch.device("cpu"), torch.float32, {}), config={"slots": 2}) as speaker:
        plain = speaker.generate(text, loudness="none", **fields)
        whole = speaker.generate(text, **fields)
        assert len(whole) == len(plain)
        assert (whole.words, whole.marks, whole.faults) == (plain.words, plain.marks, plain.faults)
        changed = whole.samples[np.abs(plain.samples) > 0.1] / plain.samples[np.abs(plain.samples) > 0.1]
        first = sum(np.abs(changed - 10 ** (-3 / 20)) < 0.001)
        assert first > 100
        assert sum(np.abs(changed - 10 ** (-6 / 20)) < 0.001) == len(changed) - first
        pieces = list(speaker.stream(text, **fields))
        np.testing.assert_array_equal(np.concatenate([piece.samples for piece in pieces]), whole.samples)
        assert [piece.pause_s for piece in pieces if piece.pause_s] == [0.1]
        assert [piece.index for piece in pieces] == list(range(len(pieces)))
        louder = speaker.generate("Good morning.", loudness=-18).samples
        quieter = speaker.generate("Good morning.", loudness=-24).samples
        np.testing.assert_allclose(quieter, louder / 2, atol=0.002)
        assert len(speaker.generate(text, speed=1.5, **fields)) == len(
            speaker.generate(text, speed=1.5, loudness="none", **fields)
        )
        for bad in (-3, "loud", True):
            with pytest.raises(InvalidRequest, match=r"loudness: .* must be from -36 to -16, in LUFS, or none"):
                speaker.generate("Hello.", loudness=bad)  # type: ignore[arg-type]
    with tts() as speaker:
        np.testing.assert_array_equal(
            speaker.generate("Hello.").samples, speaker.generate("Hello.", loudness="none").samples
        )
        with pytest.raises(InvalidRequest, match="loudness of low is not known; leave it out, or give none"):
            speaker.generate("Hello.", loudness=-18)
