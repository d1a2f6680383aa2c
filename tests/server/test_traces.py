"""Traces of texts: what their spans tell, and that they cost nothing where they are off."""

import asyncio
import dataclasses
import itertools
import subprocess
import sys
from collections.abc import Sequence

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from servers import SETTINGS, recording, serving
from sessions import session
from sine_engines import nothing_left, run

from sonoro.core.errors import ConfigError

__all__ = ["nothing_left"]

pytestmark = pytest.mark.usefixtures("nothing_left")

TRACED = dataclasses.replace(SETTINGS, traces=True)
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GIVEN = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
PARTS = ["queue", "voice", "slot", "prefill", "speak"]


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What the spans of a server are sent to; it has all once the server has ended."""
    made = InMemorySpanExporter()
    monkeypatch.setattr("sonoro.server.traces.exporter", lambda: made)
    return made


def texts(exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    """The spans of texts, as they ended."""
    return [span for span in exporter.get_finished_spans() if span.name == "speech"]


def parts(exporter: InMemorySpanExporter, whole: ReadableSpan) -> Sequence[ReadableSpan]:
    """The spans below one, as they began."""
    below = [
        span for span in exporter.get_finished_spans() if span.parent and span.parent.span_id == whole.context.span_id
    ]
    return sorted(below, key=lambda span: (span.start_time, span.end_time))


def check_parts(exporter: InMemorySpanExporter, whole: ReadableSpan) -> None:
    """Each of them begins where the one before ends, within the whole, but for the time from a permit to the engine."""
    found = parts(exporter, whole)
    assert [span.name for span in found] == PARTS
    assert found[0].start_time == whole.start_time
    for before, after in itertools.pairwise(found):
        assert abs(after.start_time - before.end_time) <= 1000
    for sent in whole.events:
        assert (sent.name, found[0].end_time <= sent.timestamp <= whole.end_time) == ("first_packet", True)


def test_a_text_goes_on_with_the_trace_of_its_client(exporter: InMemorySpanExporter) -> None:
    async def ask() -> httpx.Response:
        async with serving("cloning", settings=TRACED) as server:
            body = {"input": "Some words.", "response_format": "pcm", "ref_audio": recording(), "ref_text": "hm"}
            return await server.http.post("/v1/audio/speech", json=body, headers=GIVEN | {"X-Request-Id": "mine"})

    async def main() -> None:
        answer = await ask()
        [span] = texts(exporter)
        assert answer.headers["traceresponse"].startswith(f"00-{TRACE}-{span.context.span_id:016x}-")
        assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
        assert (span.kind, span.status.status_code) == (SpanKind.SERVER, StatusCode.UNSET)
        told = {"dialect": "native", "id": "mine", "reason": "stop", "characters": 11}
        assert told.items() <= span.attributes.items()
        assert span.attributes["audio_s"] == round(len(answer.content) / 16000, 2)
        assert len(span.events) == 1
        check_parts(exporter, span)

    run(main())


def test_each_text_of_a_batch_and_of_a_session_has_a_span(exporter: InMemorySpanExporter) -> None:
    async def ask() -> None:
        async with serving("live", settings=TRACED) as server:
            await server.http.post("/v1/audio/speech/batch", json={"items": [{"input": "Words."}] * 3}, headers=GIVEN)
            async with session(server, additional_headers=GIVEN) as client:
                await client.speak("Some ", "words.")
                await client.speak("Others.")
            await server.speak()

    run(ask())
    spans = texts(exporter)
    assert sorted(span.attributes["characters"] for span in spans) == [6, 6, 6, 7, 11, 11]
    assert [f"{span.context.trace_id:032x}" == TRACE for span in spans] == [True] * 5 + [False]
    assert spans[-1].parent is None
    assert sorted(len(span.events) for span in spans) == [0, 0, 0, 1, 1, 1]  # a batch is sent at its end
    for span in spans:
        check_parts(exporter, span)


def test_a_refused_text_has_a_span_that_says_why(exporter: InMemorySpanExporter) -> None:
    async def ask() -> None:
        settings = dataclasses.replace(TRACED, quotas={"default": {"characters_per_day": 5}})
        async with serving(settings=settings) as server:
            answers = await asyncio.gather(server.speak(), server.speak(voice="nobody"))
            assert [answer.status_code for answer in answers] == [429, 404]

    run(ask())
    [span] = texts(exporter)  # what is refused before it could be spoken is none
    assert (span.attributes["reason"], span.status.status_code) == ("quota_exceeded", StatusCode.ERROR)
    assert not parts(exporter, span)


def test_without_the_extra_a_server_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sonoro.server.traces", None)

    with pytest.raises(ConfigError, match=r"traces.*pip install \"\.\[otel\]\""):
        TRACED.resolve(4)


def test_off_nothing_of_it_is_imported() -> None:
    """FastAPI imports the API of OpenTelemetry by itself, where it is installed."""
    look = "import sonoro.server.app, sys; print({'opentelemetry.sdk', 'sonoro.server.traces'} & {*sys.modules})"
    assert subprocess.run((sys.executable, "-c", look), check=True, stdout=subprocess.PIPE).stdout == b"set()\n"
