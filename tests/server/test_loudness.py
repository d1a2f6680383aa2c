"""The level of speech over HTTP and in live text: by default, as asked for, and refused by name."""

from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from servers import Server, check_error, serving
from sessions import session
from sine_engines import nothing_left, run

__all__ = ["nothing_left"]

pytestmark = pytest.mark.usefixtures("nothing_left")

TEXT = "[voice:low]Good morning to you.[voice:high]Good evening to all."


async def speak(server: Server, text: str = "Good morning.", **fields: object) -> np.ndarray:
    answer = await server.speak(text, **{"response_format": "pcm", **fields})
    assert answer.status_code == 200, answer.text
    return np.frombuffer(answer.content, "<i2").astype(float)


def asked(work: Callable[[Server], Awaitable[None]], model: str = "measured") -> None:
    async def ask() -> None:
        async with serving(model) as server:
            await work(server)

    run(ask())


def test_each_voice_is_brought_to_the_level() -> None:
    async def ask(server: Server) -> None:
        for voice, lowered_db in (("low", 3), ("high", 6)):
            plain, by_default = await speak(server, voice=voice, loudness="none"), await speak(server, voice=voice)
            np.testing.assert_allclose(by_default, plain * 10 ** (-lowered_db / 20), atol=1)
            assert np.array_equal(await speak(server, voice=voice, loudness=-18), by_default)
            louder = await speak(server, voice=voice, loudness=-16)
            np.testing.assert_allclose(louder, plain * 10 ** ((2 - lowered_db) / 20), atol=1)
        plain, lines = [await speak(server, TEXT, markup="voices", loudness=level) for level in ("none", None)]
        shares = lines[np.abs(plain) > 3000] / plain[np.abs(plain) > 3000]
        assert {round(share, 2) for share in shares} == {0.71, 0.5}

    asked(ask)


def test_live_text_has_the_level_too() -> None:
    async def ask(server: Server) -> None:
        heard = []
        for level in ("none", None):
            async with session(server) as live:
                await live.say("session.config", voice="high", response_format="pcm", loudness=level)
                sound, _ = await live.speak("Good ", "morning.")
                heard.append(np.frombuffer(sound, "<i2").astype(float))
        np.testing.assert_allclose(heard[1], heard[0] * 10 ** (-6 / 20), atol=1)

    asked(ask)


@pytest.mark.parametrize("level", [-15, -40, "loud", [1]])
def test_a_bad_level_is_refused_by_name(level: object) -> None:
    async def ask(server: Server) -> None:
        answer = await server.speak(loudness=level)
        check_error(answer, 400, "loudness")
        assert isinstance(level, list) or "-36 to -16" in answer.json()["error"]["message"]

    asked(ask)


def test_a_voice_of_unknown_loudness_passes_unchanged() -> None:
    async def ask(server: Server) -> None:
        assert np.array_equal(await speak(server), await speak(server, loudness="none"))
        check_error(await server.speak(loudness=-18), 400, "loudness")

    asked(ask, "sine")
