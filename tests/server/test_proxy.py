"""Behind nginx with its default buffering: the audio that there is passes while more is being made."""

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from processes import GUARD_S
from servers import Server, serving
from sessions import TEXT, session
from sine_engines import nothing_left, run, until
from sine_models import STOPPED

__all__ = ["nothing_left"]

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")

pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed (Debian: apt install nginx-light)"),
]

SPEECH = "/v1/audio/speech"

CONFIGURATION = """
daemon off; master_process off; pid FOLDER/pid; error_log stderr;
events {}
http {
    access_log off;
    client_body_temp_path FOLDER/body; proxy_temp_path FOLDER/proxy; fastcgi_temp_path FOLDER/fastcgi;
    uwsgi_temp_path FOLDER/uwsgi; scgi_temp_path FOLDER/scgi;
    map $http_upgrade $connection_upgrade { default upgrade; "" close; }
    server {
        listen 127.0.0.1:PORT;
        location / {
            proxy_pass URL;
            proxy_http_version 1.1;
            proxy_set_header Host $host;
            proxy_set_header Upgrade $http_upgrade;
            proxy_set_header Connection $connection_upgrade;
        }
        location /deaf/ { proxy_pass URL/; proxy_ignore_headers X-Accel-Buffering; }
    }
}
"""
"""What docs/server.md says; /deaf/ is what it warns of."""


@contextlib.asynccontextmanager
async def behind_nginx(url: str, folder: Path) -> AsyncIterator[str]:
    """The address of an nginx in front of `url`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = CONFIGURATION.replace("FOLDER", str(folder)).replace("PORT", str(port)).replace("URL", url)
    (folder / "nginx.conf").write_text(text)
    assert NGINX is not None
    with subprocess.Popen([NGINX, "-p", folder, "-c", folder / "nginx.conf"]) as nginx:
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=GUARD_S) as http:

                async def is_up() -> bool:
                    with contextlib.suppress(httpx.TransportError):
                        return (await http.get("/health")).status_code == 200
                    return False

                await until(is_up)
            yield f"http://127.0.0.1:{port}"
        finally:
            nginx.terminate()


@contextlib.asynccontextmanager
async def stopped(go: Path) -> AsyncIterator[tuple[Server, httpx.AsyncClient]]:
    """A server whose engine does nothing after its first frame until there is `go`, and what asks it through nginx."""
    async with serving(f"{STOPPED}{go}") as server:
        try:
            async with (
                behind_nginx(server.url, go.parent) as url,
                httpx.AsyncClient(base_url=url, timeout=GUARD_S, trust_env=False) as http,
            ):
                yield server, http
        finally:
            go.touch()


@pytest.mark.parametrize("fields", [{}, {"response_format": "wav"}, {"stream_format": "sse"}], ids=str)
def test_the_first_bytes_pass_while_the_engine_is_held_before_its_second_chunk(
    fields: dict[str, str], tmp_path: Path
) -> None:
    body = {"input": TEXT, "response_format": "pcm", **fields}

    async def ask() -> None:
        async with stopped(tmp_path / "go") as (server, http):
            async with http.stream("POST", SPEECH, json=body) as answer:
                parts = answer.aiter_raw()
                heard = await anext(parts)
                if "stream_format" in fields:
                    assert json.loads(heard.removeprefix(b"data: "))["type"] == "speech.audio.delta"
                assert not (tmp_path / "go").exists()
                (tmp_path / "go").touch()
                heard += b"".join([part async for part in parts])
            if "stream_format" not in fields:
                assert len(heard) - (44 if "wav" in body.values() else 0) == 160 * len(TEXT)
            await until(server.is_idle)

    run(ask())


def test_without_the_header_they_do_not_pass(tmp_path: Path) -> None:
    body, heard = {"input": TEXT, "response_format": "pcm"}, list[bytes]()

    async def listen(http: httpx.AsyncClient) -> None:
        async with http.stream("POST", f"/deaf{SPEECH}", json=body) as answer:
            async for part in answer.aiter_raw():
                heard.append(part)

    async def ask() -> None:
        async with stopped(tmp_path / "go") as (server, http):
            asking = asyncio.create_task(listen(http))
            await until(lambda: server.has('sonoro_first_packet_seconds_count{model="sine"}', 1))
            await asyncio.sleep(0.2)
            assert not heard
            (tmp_path / "go").touch()
            await asking
            assert len(b"".join(heard)) == 160 * len(TEXT)

    run(ask())


def test_a_session_passes_too(tmp_path: Path) -> None:
    async def speak() -> None:
        async with serving("live") as server, behind_nginx(server.url, tmp_path) as url:
            server.url = url
            async with session(server) as client:
                assert (await client.speak(TEXT))[0] == (await server.speak(TEXT)).content

    run(speak())
