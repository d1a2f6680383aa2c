"""Bodies of responses: one JSON object, with its audio in base64, made without a long stretch of work at its end."""

import base64
import io
import json
import time
import wave

import pytest
from servers import MAX_STRETCH_S

from sonoro.audio.wav import wav_header
from sonoro.core.events import Timings
from sonoro.core.types import Finished
from sonoro.server.bodies import HeldAudio, JSONBody
from sonoro.server.errors import AnswerTooLarge

END = Finished(request_id="a", reason="stop", frames=1, characters=1, timings=Timings(first_audio_s=0.1, total_s=0.2))


@pytest.mark.parametrize("step", [1, 2, 47, 48, 1000])
def test_held_audio_is_the_same_in_whatever_parts_it_comes(step: int) -> None:
    whole = bytes(range(256)) * 3 + b"ab"
    held = HeldAudio(b"before ", "pcm", len(whole))
    for start in range(0, len(whole), step):
        held.add(whole[start : start + step])
    assert held.end(b" after") == b"before " + base64.b64encode(whole) + b" after"
    with pytest.raises(AnswerTooLarge, match="input"):
        held.add(b"c")


@pytest.mark.parametrize("samples", [0, 1, 5, 8000])
def test_a_wav_file_in_json_states_its_length(samples: int) -> None:
    body = JSONBody(1.0, "wav", 100_000)
    for part in (wav_header(8000), bytes(samples), bytes(samples)):
        assert body.packet(part) == b""
    answer = json.loads(body.end(END, {}))
    audio = base64.b64decode(answer["audio"], validate=True)
    assert int.from_bytes(audio[4:8], "little") == len(audio) - 8
    with wave.open(io.BytesIO(audio)) as file:
        assert file.getnframes() == samples
        assert file.readframes(samples) == bytes(2 * samples)
    assert (answer["format"], answer["finish_reason"], answer["words"]) == ("wav", "stop", None)


def test_the_end_of_minutes_of_audio_is_quickly_made() -> None:
    body = JSONBody(1.0, "pcm", 20_000_000)
    for _ in range(100):
        body.packet(bytes(96_000))
    began_s = time.thread_time()
    body.end(END, {})
    assert time.thread_time() - began_s < MAX_STRETCH_S
