"""Speech from a running server of the same user, version, voice and settings. Quick to import.

It is asked by HTTP on its socket. Whatever goes wrong is a `LostServer`: the caller then speaks by itself."""

from __future__ import annotations

import contextlib
import json
import socket
from binascii import a2b_base64
from typing import TYPE_CHECKING, Any, NamedTuple

from sonoro.cli.speaking import Ended, Piece
from sonoro.core.nearby import digest, own_sockets, stamp
from sonoro.core.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from io import BufferedReader

_IDENTITY_S, _AUDIO_S = 2.0, 20.0
"""How long a server may take to say who it is, and to make the next piece of audio."""


class LostServer(Exception):
    """A server does not answer, or not as it should; the message says how. Some of the speech `was_heard`."""

    was_heard = False


class Server(NamedTuple):
    """A server that speaks as this process would."""

    path: str
    voices: list[str]
    sample_rate: int

    def speech(self, fields: dict[str, Any], remark: Callable[[str], object]) -> Generator[Piece, None, Ended]:
        """The speech of `fields`, as in a body of OpenAI's API; calls `remark` with each remark on the text.
        Raises `LostServer`."""
        was_heard = False
        try:
            with _answer(self.path, "/local/speech", _AUDIO_S, json.dumps(fields).encode()) as lines:
                for event in _events(lines):
                    for one in event.get("remarks", ()):
                        remark(one)
                    if event["type"] == "speech.audio.done":
                        return Ended(event["finish_reason"], event["characters"])
                    if event["type"] != "speech.audio.delta":
                        break
                    was_heard = True
                    yield Piece(a2b_base64(event["audio"]), event["characters"])
            raise LostServer(f"{self.path} broke off")
        except (LostServer, ValueError, KeyError) as error:
            lost = error if isinstance(error, LostServer) else LostServer(f"{self.path} broke off")
            lost.was_heard = was_heard
            raise lost from error


def _events(lines: BufferedReader) -> Iterator[dict[str, Any]]:
    """Server-sent events."""
    return (json.loads(line[6:]) for line in lines if line.startswith(b"data: "))


def find_server() -> tuple[Server | None, str]:
    """A server that says what this process would, and ""; else None, and why there is none."""
    reason = "no server is running"
    for path in own_sockets():
        try:
            with _answer(path, "/local", _IDENTITY_S) as lines:
                told = json.loads(lines.read())
            reason = _difference(told)
            if not reason:
                return Server(path, told["voices"], told["sample_rate"]), ""
        except (LostServer, ValueError, KeyError) as error:
            reason = str(error) if isinstance(error, LostServer) else f"{path} is no server of this kind"
    return None, reason


def _difference(told: dict[str, Any]) -> str:
    """How a server that has `told` its identity differs from this process; "" if it does not."""
    if told["version"] != VERSION:
        return f"the server has version {told['version']}, this is {VERSION}"
    if told["settings"]:
        settings = ", ".join(f"{name}={value}" for name, value in told["settings"].items())
        return f"the server has settings of its own: {settings}"
    if told["stamp"] != stamp() and told["digest"] != digest():
        return "the server has another built-in voice"
    return ""


@contextlib.contextmanager
def _answer(path: str, target: str, timeout_s: float, body: bytes | None = None) -> Iterator[BufferedReader]:
    """The body of the answer to a request of `target`, a POST if it has a `body`. Raises `LostServer`, also for what
    goes wrong in the block."""
    # In HTTP/1.0 the body ends with the connection, and needs no parser of chunks.
    head = f"{'GET' if body is None else 'POST'} {target} HTTP/1.0\r\n"
    if body is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(timeout_s)
            sock.connect(path)
            sock.sendall(f"{head}\r\n".encode() + (body or b""))
            with sock.makefile("rb") as answer:
                _check_head(path, answer)
                yield answer
    except OSError as error:
        raise LostServer(f"{path}: {error.strerror or error}") from error


def _check_head(path: str, answer: BufferedReader) -> None:
    """Read the head of an `answer`. Raises `LostServer` unless it is a good one."""
    status = answer.readline().split()
    while answer.readline().strip():
        pass
    if status[1:2] != [b"200"]:
        said = b" ".join(status[1:]).decode(errors="replace")
        raise LostServer(f"{path} answered {said}: {_told(answer)}")


def _told(answer: BufferedReader) -> str:
    try:
        return str(json.loads(answer.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "no reason was given"
