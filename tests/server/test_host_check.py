"""By which names a server may be asked, so that no page whose name was made to point at it is taken for its own."""

import asyncio
import dataclasses
import json

import pytest
from servers import SETTINGS, check_error, serving
from sessions import session
from sine_engines import nothing_left, run
from starlette.types import Message, Receive, Scope, Send
from websockets.exceptions import InvalidStatus

from sonoro.server.config import ServerConfig
from sonoro.server.middleware import HostCheck

__all__ = ["nothing_left"]

LOOPBACK = ["localhost", "localhost:8000", "LOCALHOST.", "127.0.0.1:8000", "[::1]:8000", "[::1]"]
FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.nip.io",
    "192.0.2.1",
    "",
    "a b",
    "::1",
]


def status(
    config: ServerConfig, host: str | None, origin: str | None = None, kind: str = "http", path: str = "/"
) -> int:
    """How a server of that configuration answers."""
    statuses: list[int] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        statuses.append(200)

    async def send(message: Message) -> None:
        if "status" in message:
            statuses.append(message["status"])

    async def receive() -> Message:
        raise AssertionError

    given = {"host": host, "origin": origin}
    headers = [(name.encode(), value.encode()) for name, value in given.items() if value is not None]
    run(
        HostCheck(application, config)(
            {"type": kind, "path": path, "raw_path": path.encode(), "headers": headers}, receive, send
        )
    )
    (answered,) = statuses
    return answered


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize("bound", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
def test_bound_to_a_loopback_address_only_its_names_are_answered(bound: str, kind: str) -> None:
    config = ServerConfig(host=bound)
    for host in [*LOOPBACK, None]:
        assert status(config, host, kind=kind) == 200, host
    for host in FOREIGN:
        assert status(config, host, kind=kind) == 403, host
        # As a rebound page does: to the browser it is of the same origin.
        assert status(config, host, f"http://{host}", kind) == 403


def test_names_are_added_and_any_name_is_for_who_says_so_or_listens_everywhere() -> None:
    named = ServerConfig(host="127.0.0.1", allowed_hosts=("Speech.example", "fd00::7"))
    for host in ("speech.example", "SPEECH.example:443", "[fd00::7]:8000", "localhost"):
        assert status(named, host) == 200
    assert status(named, "evil.example") == 403
    everywhere = ServerConfig(host="0.0.0.0")
    restricted = ServerConfig(host="0.0.0.0", allowed_hosts=("speech.example",))
    anybody = ServerConfig(allowed_hosts=("*",))
    for host in ("evil.example", "192.0.2.1:80"):
        assert (status(everywhere, host), status(anybody, host), status(restricted, host)) == (200, 200, 403)
    assert status(restricted, "127.0.0.1") == 200
    assert status(ServerConfig(host="192.0.2.1"), "192.0.2.1:8000") == 200
    assert status(ServerConfig(host="192.0.2.1"), "localhost:8000") == 403


def test_a_page_calls_from_where_it_was_served_or_from_where_it_may() -> None:
    config = ServerConfig(allowed_hosts=("speech.example",), cors_origins=("https://friend.example",))
    for origin, host, expected in (
        ("http://localhost:8000", "localhost:8000", 200),
        ("http://localhost", "localhost:80", 200),
        ("https://localhost", "localhost", 200),
        ("https://speech.example", "127.0.0.1:8000", 200),
        ("https://friend.example", "localhost:8000", 200),
        ("http://localhost:3000", "localhost:8000", 403),
        ("http://127.0.0.1:8000", "localhost:8000", 403),
        ("https://friend.example.evil.example", "localhost:8000", 403),
        ("null", "localhost:8000", 403),
        ("", "localhost:8000", 403),
        ("http://[", "localhost:8000", 403),
        ("https://speech.example@evil.example", "localhost:8000", 403),
    ):
        for kind in ("http", "websocket"):
            assert status(config, host, origin, kind) == expected, origin
    assert status(ServerConfig(allowed_hosts=("*",)), "a.example", "https://b.example") == 403
    assert status(ServerConfig(cors_origins=("*",)), "localhost", "https://b.example") == 200


@pytest.mark.usefixtures("nothing_left")
def test_no_path_and_no_session_is_open_to_a_name_that_is_not_the_servers() -> None:
    async def ask() -> None:
        async with serving("live", dataclasses.replace(SETTINGS, api_keys=())) as server:
            for path in ("/", "/health", "/metrics", "/docs", "/v1/models", "/v1/audio/voices", "/nothing"):
                answer = await server.http.get(path, headers={"host": "evil.example"})
                check_error(answer, 403)
                assert answer.json()["error"]["code"] == "foreign_host"
                assert answer.headers["x-request-id"]
            port = int(server.url.rpartition(":")[2])
            rebound = dataclasses.replace(server, url="http://evil.example")
            with pytest.raises(InvalidStatus) as refused:
                async with session(rebound, host="127.0.0.1", port=port, origin="http://evil.example"):
                    pass
            assert refused.value.response.status_code == 403
            assert json.loads(refused.value.response.body)["error"]["code"] == "foreign_host"
            assert (await server.speak()).status_code == 200

    run(ask())


@pytest.mark.parametrize("allowed", [(), ("speech.example",)])
def test_probes_may_name_the_address_of_a_pod(allowed: tuple[str, ...]) -> None:
    """Kubernetes restarts a pod whose probes are refused, for ever."""
    config = ServerConfig(host="0.0.0.0" if allowed else "127.0.0.1", allowed_hosts=allowed)
    for path in ("/health", "/ready", "/metrics"):
        assert status(config, "10.1.2.3:8000", path=path) == 200
        assert status(config, "[fd00::8]:8000", path=path) == 200
        assert status(config, "10.1.2.3:8000", "http://evil.example", path=path) == 403
        assert status(config, "evil.example", path=path) == 403
    assert status(config, "10.1.2.3:8000", path="/v1/models") == 403


@pytest.mark.usefixtures("nothing_left")
def test_a_url_as_target_names_host_and_path() -> None:
    async def ask() -> None:
        async with serving() as server:
            host, port = server.url.removeprefix("http://").split(":")
            for target, status in (
                (f"{server.url}/health", 200),
                ("HTTP://LOCALHOST/health", 200),
                ("http://evil.example/v1/models", 403),
                (f"{server.url}/none", 404),
                (f"{server.url}", 200),
            ):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                assert (await reader.read()).split()[1] == b"%d" % status, target
                writer.close()

    run(ask())
