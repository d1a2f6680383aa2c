"""The playground in a browser: servers that live as long as a module, one browser for all its tests, and its pages."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from processes import GUARD_S, stem
from servers import Server, serving
from sine_engines import children

CHROMIUM = shutil.which("chromium")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--autoplay-policy=no-user-gesture-required"),
    # A microphone that beeps, and nobody to ask whether it may be used.
    *("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"),
)
expect.set_options(timeout=1000 * GUARD_S)
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the path (Debian: chromium)")

Result = TypeVar("Result")
Open = Callable[..., Page]


class Host:
    """Servers in a thread of their own, each started once. `servers` is by the arguments of `serving`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._open = contextlib.AsyncExitStack()
        self._servers: dict[str, Server] = {}

    def serve(self, name: str, *arguments: Any, **settings: Any) -> Server:
        """The server called `name`, which is started with these arguments at first."""
        if name not in self._servers:
            self._servers[name] = self.run(self._open.enter_async_context(serving(*arguments, **settings)))
        return self._servers[name]

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of `work` in the thread of the servers."""
        future: Future[Result] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(2 * GUARD_S)

    def close(self) -> None:
        self.run(self._open.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """Servers for the tests of a module; afterwards no process is left that was not there before."""
    with TemporaryDirectory(prefix="s") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", folder)
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
        patch.setattr("sonoro.transport.launch.spawn", stem().launcher(is_always=True))
        before, host = children(), Host()
        try:
            yield host
        finally:
            host.close()
        assert children() == before


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens the page of a server, ready to speak unless `is_ready` is false. Whatever it complains of, or asks of
    another host, fails the test."""
    complaints: list[str] = []
    contexts = []

    def opened(server: Server, *, is_ready: bool = True, sound: str = "auto", **settings: Any) -> Page:
        context = browser.new_context(permissions=["clipboard-read", "clipboard-write", "microphone"], **settings)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(1000 * GUARD_S)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        own = (server.url, "data:", "blob:")
        page.on("request", lambda request: request.url.startswith(own) or complaints.append(request.url))
        page.goto(server.url)
        if is_ready:
            expect(status(page)).to_have_text("Ready.")
        if sound != "auto":
            page.get_by_text("Figures for engineers").click()
            page.get_by_label("Sound comes as").select_option(sound)
        return page

    yield opened
    for context in contexts:
        context.close()
    # A refused request is noted by the browser itself; that the page tells of it is asserted where it is asked for.
    assert [words for words in complaints if "Failed to load resource" not in words] == []


def status(page: Page) -> Any:
    return page.get_by_role("status")


def error(page: Page) -> Any:
    return page.get_by_role("alert")


def button(page: Page, name: str) -> Any:
    return page.get_by_role("button", name=name, exact=True)


def speak(page: Page, text: str) -> None:
    """Type `text`, and press the button."""
    page.get_by_label("Text", exact=True).fill(text)
    button(page, "Speak").click()


def asked(page: Page, path: str = "/v1/audio/speech") -> list[Any]:
    """The JSON bodies of the requests for `path` from now on; the list grows."""
    bodies: list[Any] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.url.endswith(path) else None)
    return bodies


def saved(page: Page, kind: str) -> bytes:
    """The file that a button gives."""
    with page.expect_download() as waiting:
        button(page, kind).click()
    return Path(waiting.value.path()).read_bytes()
