"""Words travel with audio and ends, and move with its speed."""

import msgspec

from sonoro.core.events import Timings, Word, at_speed
from sonoro.core.types import AudioChunk, Finished

WORDS = (
    Word(text="Well", start_s=0.1, end_s=0.5, start=0, end=4),
    Word(text="go", start_s=0.9, end_s=1.1, start=6, end=8),
    Word(text="on", start_s=1.1, end_s=1.5, start=9, end=11),
)


def test_words_move_with_the_speed_of_the_audio() -> None:
    faster = at_speed(WORDS, 2.0)
    assert [word.start_s for word in faster] == [0.05, 0.45, 0.55]
    assert [(word.text, word.start, word.end) for word in faster] == [(w.text, w.start, w.end) for w in WORDS]


def test_words_travel_with_chunks_and_ends() -> None:
    chunk = AudioChunk(request_id="a", index=0, pcm=b"", words=WORDS)
    end = Finished(
        request_id="a", reason="stop", frames=1, characters=2, timings=Timings(first_audio_s=0, total_s=0), words=WORDS
    )
    for sent in (chunk, end):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=type(sent)) == sent
    assert AudioChunk(request_id="a", index=0, pcm=b"").words is None
