"""Names and facts of registered voices."""

import msgspec
import pytest

from sonoro.core.errors import InvalidRequest
from sonoro.transport.encoded_voice import VoiceFacts, voice_name


def test_a_voice_name_is_lower_case() -> None:
    assert voice_name("Anna-2_b") == "anna-2_b"
    assert voice_name("a" * 64) == "a" * 64
    for name in ("", "_a", "a" * 65, "ann a", "ann\n", 5):
        with pytest.raises(InvalidRequest, match="1 to 64 letters"):
            voice_name(name)


def test_facts_survive_the_wire() -> None:
    facts = VoiceFacts(name="ann", use="reference", duration_s=1.5, created_at_s=1.8e9)
    assert msgspec.json.decode(msgspec.json.encode(facts), type=VoiceFacts) == facts
