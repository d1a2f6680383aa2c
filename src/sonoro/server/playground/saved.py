"""What the playground saves of speech: PCM16 as a whole MP3 or M4A file. Knows no engine and no route."""

import io
from fractions import Fraction

import av
import numpy as np

KINDS = {"mp3": ("mp3", "libmp3lame", "audio/mpeg"), "m4a": ("ipod", "aac", "audio/mp4")}
"""Container, codec and content type of each kind of file."""

RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)
"""Sample rates that both codecs have."""

_BLOCK = 16_384


def audio_file(kind: str, pcm: bytes, rate: int) -> bytes:
    """`pcm` (PCM16 mono of one of `RATES`) as a file of one of `KINDS`, whose header tells its length. A minute takes
    some .3 s."""
    container, codec, _ = KINDS[kind]
    samples, file = np.frombuffer(pcm[: len(pcm) // 2 * 2], "<i2"), io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate, layout="mono", bit_rate=min(4 * rate, 128_000))
        assert isinstance(stream, av.AudioStream)
        for at in range(0, len(samples), _BLOCK):
            frame = av.AudioFrame.from_ndarray(samples[None, at : at + _BLOCK], format="s16", layout="mono")
            frame.sample_rate, frame.time_base, frame.pts = rate, Fraction(1, rate), at
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()
