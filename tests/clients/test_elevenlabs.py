"""ElevenLabs' own client."""

from __future__ import annotations

import asyncio
import itertools

import elevenlabs
import numpy as np
import pytest
from elevenlabs.core.api_error import ApiError

from conftest import KEY, LONG, TEXT, Native, Server, is_same, pause_of, run, sounds_like, until

VOICE = "JBFqnCBsd6RMkjVDRZzb"
"""The voice of the SDK's examples, which stands for the default one."""


def client(server: Server, key: str = KEY) -> elevenlabs.ElevenLabs:
    made = elevenlabs.ElevenLabs(base_url=server.url, api_key=key)
    made.text_to_speech._ws_base_url = server.ws  # otherwise it asks for TLS
    return made


def test_a_text_is_spoken_whole_and_streamed(server: Server, native: Native) -> None:
    speech = client(server).text_to_speech
    for convert in (speech.convert, speech.stream):
        pcm = b"".join(convert(VOICE, text=TEXT, model_id="eleven_flash_v2_5", output_format="pcm_24000"))
        assert is_same(pcm, native.whole(TEXT))
    mp3 = list(speech.stream(VOICE, text=TEXT))
    assert len(mp3) > 1
    assert sounds_like(b"".join(mp3), native.whole(TEXT))


def test_times_come_with_the_audio(server: Server, native: Native) -> None:
    speech = client(server).text_to_speech
    told = speech.convert_with_timestamps(VOICE, text=TEXT, output_format="pcm_24000")
    assert "".join(told.alignment.characters) == TEXT
    assert told.alignment.character_end_times_seconds[-1] == pytest.approx(len(native.whole(TEXT)) / 24000, abs=0.2)
    parts = list(speech.stream_with_timestamps(VOICE, text=TEXT, output_format="pcm_24000"))
    assert "".join("".join(part.alignment.characters) for part in parts if part.alignment) == TEXT


def test_live_text_is_spoken(server: Server, native: Native) -> None:
    pieces = iter(["Good morning, ", "everyone."])
    pcm = b"".join(client(server).text_to_speech.convert_realtime(VOICE, text=pieces, output_format="pcm_24000"))
    assert is_same(pcm, native.live(TEXT))


def test_a_client_that_stops_listening_frees_its_slot(server: Server) -> None:
    def live() -> itertools.chain[str]:
        return itertools.chain(f"{sentence}. " for sentence in LONG.split(". "))

    speech = client(server).text_to_speech
    for audio in (speech.stream(VOICE, text=LONG), speech.convert_realtime(VOICE, text=live())):
        next(iter(audio))
        audio.close()
        until(lambda: server.is_idle)


def test_voices_models_and_the_user_are_told(server: Server) -> None:
    asked = client(server)
    assert {voice.voice_id for voice in asked.voices.get_all().voices} >= {"nora", "miles"}
    assert [voice.voice_id for voice in asked.voices.search(search="nora").voices] == ["nora"]
    assert asked.voices.get("nora").name == "nora"
    assert all(model.can_do_text_to_speech and model.languages for model in asked.models.list())
    assert asked.user.get().subscription.tier
    assert asked.user.subscription.get().character_limit


def test_what_is_refused_is_an_error_of_the_client(server: Server) -> None:
    with pytest.raises(ApiError) as caught:
        b"".join(client(server, "wrong").text_to_speech.convert(VOICE, text=TEXT))
    assert caught.value.status_code == 401
    assert caught.value.body["detail"]["status"] == "invalid_api_key"
    with pytest.raises(ApiError) as caught:
        b"".join(client(server).text_to_speech.convert_realtime(VOICE, text=iter(["x" * 5000])))
    assert "4096" in caught.value.body["message"]


def test_the_asynchronous_client_speaks(server: Server, native: Native) -> None:
    async def speak() -> bytes:
        asked = elevenlabs.AsyncElevenLabs(base_url=server.url, api_key=KEY)
        stream = asked.text_to_speech.stream(VOICE, text=TEXT, output_format="pcm_24000")
        return b"".join([part async for part in stream])

    async def both() -> list[bytes]:
        return await asyncio.gather(speak(), speak())

    assert all(is_same(pcm, native.whole(TEXT)) for pcm in run(both()))


PAUSED = 'Good morning.<break time="750ms"/>My friends.'


def test_a_break_is_a_pause_whole_and_live(server: Server) -> None:
    speech = client(server).text_to_speech
    assert pause_of(b"".join(speech.convert(VOICE, text=PAUSED, output_format="pcm_24000"))) == 18000
    pieces = iter(["Good morning.<br", 'eak time="750ms"/>', "My friends."])
    live = b"".join(speech.convert_realtime(VOICE, text=pieces, output_format="pcm_24000"))
    assert pause_of(live) == 18000


def test_a_dialogue_is_one_answer(server: Server, native: Native) -> None:
    turns = [("nora", "Good morning."), ("miles", "Yes, it is.")]
    inputs = [elevenlabs.DialogueInput(text=text, voice_id=voice) for voice, text in turns]
    talk = client(server).text_to_dialogue
    for convert in (talk.convert, talk.stream):
        pcm = b"".join(convert(inputs=inputs, output_format="pcm_24000"))
        assert pause_of(pcm) >= 7200
        assert len(pcm) > len(native.whole("Good morning."))


def test_a_dialogue_tells_who_speaks_when(server: Server) -> None:
    turns = [("nora", "Good morning."), ("miles", "Yes, it is.")]
    inputs = [elevenlabs.DialogueInput(text=text, voice_id=voice) for voice, text in turns]
    talk = client(server).text_to_dialogue
    whole = talk.convert_with_timestamps(inputs=inputs, output_format="pcm_24000")
    said = "".join(text for _, text in turns)
    assert "".join(whole.alignment.characters) == said
    first, second = whole.voice_segments
    assert [first.voice_id, second.voice_id] == ["nora", "miles"]
    assert said[second.character_start_index : second.character_end_index] == turns[1][1]
    assert second.start_time_seconds >= first.end_time_seconds
    parts = list(talk.stream_with_timestamps(inputs=inputs, output_format="pcm_24000"))
    assert "".join("".join(part.alignment.characters) for part in parts if part.alignment) == said
    assert {segment.dialogue_input_index for part in parts for segment in part.voice_segments} == {0, 1}


def test_dictionaries_are_managed_and_used(server: Server) -> None:
    asked = client(server).pronunciation_dictionaries
    rule = {"type": "alias", "string_to_replace": "SQL", "alias": "sequel", "case_sensitive": True}
    made = asked.create_from_rules(name="words", rules=[{**rule, "word_boundaries": True}])
    assert made.version_rules_num == 1
    assert made.id in [one.id for one in asked.list().pronunciation_dictionaries]
    assert b"sequel" in b"".join(asked.download(made.id, made.version_id))
    locator = elevenlabs.PronunciationDictionaryVersionLocator(
        pronunciation_dictionary_id=made.id, version_id=made.version_id
    )
    speech = client(server).text_to_speech
    how = {"output_format": "pcm_24000", "pronunciation_dictionary_locators": [locator]}
    said = b"".join(speech.convert(VOICE, text="SQL", **how))
    alone = b"".join(speech.convert(VOICE, text="sequel", output_format="pcm_24000"))
    assert is_same(said, np.frombuffer(alone, np.int16).astype(int))
    assert asked.rules.remove(made.id, rule_strings=["SQL"]).version_rules_num == 0
