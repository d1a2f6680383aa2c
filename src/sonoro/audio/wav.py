"""The header of a WAV file. Imports no numpy: `sonoro say` beside a running server needs none."""

import struct


def wav_header(sample_rate: int, data_bytes: int | None = None, *, encoding: int = 1, width: int = 2) -> bytes:
    """The 44 bytes of a WAV header for mono samples of `width` bytes in WAV format tag `encoding` (1: PCM).
    Without `data_bytes` it has the largest length, which readers take as "until the end"."""
    longest = 0xFFFFFFFF
    data = longest if data_bytes is None else min(data_bytes, longest - 36)
    layout = struct.pack("<4sIHHIIHH", b"fmt ", 16, encoding, 1, sample_rate, width * sample_rate, width, 8 * width)
    return b"RIFF" + struct.pack("<I", min(data + 36, longest)) + b"WAVE" + layout + b"data" + struct.pack("<I", data)
