"""Lines of a log: time, level, event and fields, as text and as JSON; nothing in them that does not belong there."""

import json
import logging
import re
import subprocess
import sys

import pytest
from processes import GUARD_S

from sonoro.core.logs import LineFormatter, configure_logging, log_event

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


def record(
    message: str, *args: object, name: str = "sonoro.server", error: BaseException | None = None
) -> logging.LogRecord:
    info = None if error is None else (type(error), error, error.__traceback__)
    return logging.LogRecord(name, logging.WARNING, "here.py", 1, message, args, info)


def test_a_line_is_time_level_event_and_fields() -> None:
    made = record("event=ready model=%s ready_s=%.1f slots=%d reason=%r", "sine", 1.25, 4, "it took long")
    text = LineFormatter().format(made)
    assert re.fullmatch(rf'{TIME} WARNING event=ready model=sine ready_s=1\.2 slots=4 reason="it took long"', text), (
        text
    )
    said = json.loads(LineFormatter(is_json=True).format(made))
    assert re.fullmatch(TIME, said.pop("time"))
    fields = {"event": "ready", "model": "sine", "ready_s": 1.2, "slots": 4, "reason": "it took long"}
    assert said == {"level": "WARNING", **fields}
    nothing = record("event=request key=%s", None)
    assert LineFormatter().format(nothing).endswith("event=request key=-")
    assert json.loads(LineFormatter(is_json=True).format(nothing))["key"] is None


@pytest.mark.parametrize("is_json", [False, True])
@pytest.mark.parametrize("value", ["a\nb", "a b", 'a"b', "a=b", "\x1b[31m", "", "\u2028", "level=ERROR event=forged"])
def test_no_value_makes_another_line_or_field(value: str, is_json: bool) -> None:
    line = LineFormatter(is_json=is_json).format(record("event=request path=%s status=%d", value, 200))
    assert len(line.splitlines()) == 1
    if is_json:
        assert json.loads(line)["path"] == value
    else:
        assert line.endswith(f"event=request path={json.dumps(value)} status=200")


def test_lines_of_others_have_an_event_and_no_place_in_memory() -> None:
    others = record("Fatal: protocol <Connection object at %s>", hex(id(object())), name="asyncio")
    for is_json in (False, True):
        line = LineFormatter(is_json=is_json).format(others)
        assert "<Connection object>" in line
        assert "0x" not in line
    assert json.loads(line)["event"] == "log"
    assert json.loads(line)["logger"] == "asyncio"


def test_what_a_failed_request_says_is_not_told_but_where_it_failed_is() -> None:
    written = "what somebody wrote"

    def fail(text: str) -> None:
        raise ValueError(text)

    try:
        fail(written)
    except ValueError as error:
        theirs = record("Exception in ASGI application\n", name="uvicorn.error", error=error)
        own = record("event=start_failed", error=error)
    for is_json in (False, True):
        line = LineFormatter(is_json=is_json).format(theirs)
        assert "somebody" not in line
        assert "in fail" in line
        assert "ValueError" in line
        assert "somebody" in LineFormatter(is_json=is_json).format(own)


def test_others_are_not_debugged(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a library for WebSockets tells then is what clients say."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    monkeypatch.setattr(logging.getLogger("sonoro"), "level", 0)
    configure_logging(logging.DEBUG, stream=sys.stderr)
    configure_logging(logging.DEBUG, is_json=True, stream=sys.stderr)
    logging.getLogger("uvicorn.error").debug("< TEXT 'what somebody wrote'")
    log_event(logging.getLogger("sonoro.server"), logging.DEBUG, "request", {"id": "a", "status": 200})
    (line,) = capsys.readouterr().err.splitlines()
    assert (json.loads(line)["id"], json.loads(line)["status"]) == ("a", 200)


WRITER = """
import logging, sys, time
from sonoro.core.logs import configure_logging
configure_logging(logging.INFO)
logger = logging.getLogger("sonoro.test")
for number in range(3000):
    logger.info("event=counted number=%d text=%s", number, "a" * 200)
print("done", flush=True)
while not sys.stdin.readline():
    time.sleep(0.01)
while logging.getLogger().handlers[0]._outlet._waiting:
    logger.info("event=last text=%s", "b" * 10_000)
    time.sleep(0.01)
"""


def test_a_log_that_nobody_reads_stops_nobody_and_says_what_it_lost() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", WRITER], stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0) as writer:
        assert writer.stdout
        assert writer.stdout.readline() == b"done\n"
        _, read = writer.communicate(b"\n", timeout=GUARD_S)
    lines = read.decode().splitlines()
    numbers = [int(number) for number in re.findall(r"number=(\d+)", read.decode())]
    assert numbers == list(range(len(numbers)))
    lost = int(lines[-1].rpartition("event=log_dropped lines=")[2])
    assert lost >= 3000 - len(numbers) > 1000
    assert lines[-2].endswith("b" * 10_000)
