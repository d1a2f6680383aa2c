"""What ElevenLabs' clients send, as recorded from them, and what they need to be answered."""

import pytest

from engine_processes import nothing_left, run
from server_processes import serving

__all__ = ["nothing_left"]

pytestmark = pytest.mark.usefixtures("nothing_left")

ID = "JBFqnCBsd6RMkjVDRZzb"


def test_a_text_is_spoken_whole_and_streamed() -> None:
    async def speak() -> None:
        async with serving() as server:
            for path in ("", "/stream"):
                answer = await server.http.post(f"/v1/text-to-speech/{ID}{path}", json={"text": "Some words."})
                assert answer.status_code == 200, answer.text
                assert await server.metric('sonoro_requests_total{dialect="elevenlabs",model="sine",reason="stop"}')
            refused = await server.http.post(f"/v1/text-to-speech/{ID}", json={"txt": 1})
            assert refused.status_code == 400
            assert refused.json()["detail"]["status"] == "invalid_request"
            assert (await server.http.get(f"/v1/text-to-speech/{ID}")).json()["detail"]["status"] == "http"

    run(speak())
