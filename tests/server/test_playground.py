"""The playground: its files name no other host; in a browser it speaks, stops, records and says what is wrong."""

import asyncio
import contextlib
import dataclasses
import io
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
from playwright.async_api import FilePayload, Page, async_playwright, expect
from servers import SETTINGS, Server, serving
from sine_engines import CONFIG, LONG, alone, nothing_left, run, until

from sonoro.core.config import EngineConfig
from sonoro.core.types import SpeechRequest
from sonoro.transport.fleet import Fleet
from sonoro.transport.messages import WorkerSettings
from sonoro.words.spans import word_spans

__all__ = ["nothing_left"]

pytestmark = pytest.mark.usefixtures("nothing_left")

CHROMIUM = shutil.which("chromium")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--autoplay-policy=no-user-gesture-required"),
    # A microphone that beeps, and nobody to ask whether it may be used.
    *("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"),
)
expect.set_options(timeout=60_000)
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the path (Debian: chromium)")


@contextlib.asynccontextmanager
async def browsing(server: Server, **settings: object) -> AsyncIterator[Page]:
    """The page in a browser, ready to speak. Whatever it complained of fails the test."""
    complaints: list[str] = []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = await browser.new_page(**settings)
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on(
            "request",
            lambda request: request.url.startswith((server.url, "data:", "blob:")) or complaints.append(request.url),
        )
        await page.goto(server.url)
        yield page
        await browser.close()
    # A refused request is noted by the browser itself; that the page tells of it is asserted where it is asked for.
    assert [words for words in complaints if "Failed to load resource" not in words] == []


async def downloaded(page: Page) -> tuple[np.ndarray, int]:
    """The WAV file that the download button gives: its samples as PCM16, and its rate."""
    async with page.expect_download() as waiting:
        await page.get_by_role("button", name="Download").click()
    file = Path(await (await waiting.value).path()).read_bytes()
    samples, rate = soundfile.read(io.BytesIO(file), dtype="int16")
    assert soundfile.info(io.BytesIO(file)).subtype == "PCM_16"
    return samples, rate


async def speak(page: Page, text: str) -> None:
    await page.get_by_label("Text").fill(text)
    await page.get_by_role("button", name="Speak", exact=True).click()


async def figure(page: Page, name: str) -> float:
    """One of the figures under the drawing."""
    return float((await page.locator(f"#{name}").inner_text()).split()[0])


def test_the_files_of_the_page_are_served_and_name_no_other_host() -> None:
    async def ask() -> None:
        async with serving(settings=dataclasses.replace(SETTINGS, api_keys=("hush",))) as server:
            page = await server.http.get("/")
            assert page.headers["content-type"] == "text/html; charset=utf-8"
            names = re.findall(r'(?:href|src)="(playground/[^"]+)"', page.text)
            assert len(names) == 2
            for path in ("/", *names, "playground/audio.js"):
                answer = await server.http.get(path)
                assert answer.status_code == 200
                assert "default-src 'none'" in answer.headers["content-security-policy"]
                assert not re.search(r"(?<!xmlns=')https?://\w", answer.text)
                again = await server.http.get(path, headers={"if-none-match": answer.headers["etag"]})
                assert (again.status_code, again.content) == (304, b"")
                assert (await server.http.head(path)).headers["etag"] == answer.headers["etag"]
            for path in ("/playground/none.js", "/playground/__init__.py", "/playground/..%2fapp.py"):
                refused = await server.http.get(path)
                assert refused.status_code == 404
                assert refused.json()["error"]["message"]

    run(ask())


@in_a_browser
def test_what_is_typed_is_heard_counted_and_can_be_kept() -> None:
    async def hear() -> None:
        async with serving("slow") as server, browsing(server) as page:
            await page.get_by_label("Voice").select_option("high")
            await speak(page, "Some words, said a little slowly.")
            await expect(page.get_by_role("status")).to_have_text(re.compile(r"Spoke 0\.3 s"))
            samples, rate = await downloaded(page)
            request = SpeechRequest(id="a", text="Some words, said a little slowly.", voice="high")
            assert rate == 8000
            assert samples.tobytes() == alone(request)
            assert 0 < await figure(page, "first") < 5000
            # A frame is 10 ms of audio and takes 5.
            assert 0.4 < await figure(page, "rtf") < 50
            assert await figure(page, "audio") == 0.3
            await speak(page, "Again.")
            await expect(page.get_by_role("status")).to_have_text(re.compile(r"Spoke 0\.1 s"))
            # This model does not tell when its words are spoken.
            await expect(page.locator("#spoken")).to_be_hidden()

    run(hear())


WATCH = """() => {
  const parts = ["before", "word", "after"].map((id) => document.getElementById(id));
  window.marked = [];
  new MutationObserver(() => marked.push(parts.map((part) => part.textContent)))
    .observe(document.getElementById("spoken"), { childList: true, subtree: true });
}"""
"""Keeps what stands before, in and behind the mark whenever that has changed."""


@in_a_browser
def test_the_word_that_is_heard_is_marked_where_it_was_written() -> None:
    # What a string of JavaScript counts twice stands before them.
    text = "\U0001f642 " + " ".join(["Some words, which come one by one."] * 8)
    words = word_spans(text)

    async def watch() -> None:
        async with serving("shown") as server, browsing(server) as page:
            await page.evaluate(WATCH)
            await speak(page, text)
            await expect(page.get_by_role("status")).to_have_text(re.compile(r"Spoke 2\.8 s"))
            marked = [parts for parts in await page.evaluate("marked") if parts[1]]
            assert marked
            assert {"".join(parts) for parts in marked} == {text}
            spans = [(len(before), len(before + word)) for before, word, _ in marked]
            assert set(spans) <= set(words)
            assert spans == sorted(spans)
            await expect(page.locator("#spoken")).to_have_text(text)
            await expect(page.locator("#word")).to_be_empty()

    run(watch())


@in_a_browser
def test_stop_is_silent_at_once_and_frees_the_slot() -> None:
    # Almost five seconds are needed to make it: a slow browser still comes in time to stop it.
    text = LONG * 3
    roomy = {"max_positions": 2400, "prefill_tokens": 2400, "max_frames": 1200, "segment_letters": len(text)}
    config = dataclasses.replace(CONFIG, slots=1, **roomy)

    async def stop() -> None:
        async with serving("slow", config=config) as server, browsing(server) as page:
            await speak(page, text)
            await expect(page.get_by_role("status")).to_have_text("Speaking.")
            await expect(page.locator("#audio")).to_have_text(re.compile(r"^(0\.[5-9]|[1-9])"))
            await page.get_by_role("button", name="Stop").click()
            await expect(page.get_by_role("status")).to_have_text(re.compile("Stopped after"))
            await until(lambda: server.metric('sonoro_requests_total{model="sine",reason="disconnected"}'))
            samples, _ = await downloaded(page)
            # What was heard is a beginning of what would have been said.
            assert 0 < len(samples) < len(text) * 80
            assert alone(SpeechRequest(id="a", text=text), config).startswith(samples.tobytes())
            await speak(page, "There is a place again.")
            await expect(page.get_by_role("status")).to_have_text(re.compile("Spoke"))

    run(stop())


@in_a_browser
def test_what_goes_wrong_is_said_in_words() -> None:
    async def refuse() -> None:
        settings = dataclasses.replace(SETTINGS, api_keys=("hush→",), max_characters=40)
        async with serving("slow", settings, waits=False) as server, browsing(server) as page:
            error = page.get_by_role("alert")
            await expect(page.locator("#model")).to_have_text(re.compile("API key"))
            await expect(page.get_by_role("button", name="Speak", exact=True)).to_be_disabled()
            key = page.get_by_label("Key", exact=True)
            await key.fill("Schlüssel→")
            await key.press("Tab")
            await expect(page.locator("#model")).to_have_text(re.compile("API key"))
            await key.fill("hush→")
            await key.press("Tab")
            await expect(page.get_by_role("status")).to_have_text("Ready.")
            await page.get_by_label("Text").fill("🙂🙂 two")
            await expect(page.locator("#count")).to_have_text("6 of 40")
            await speak(page, "word " * 9)
            await expect(error).to_have_text(re.compile("input: .*at most 40"))
            await expect(page.get_by_role("button", name="Speak", exact=True)).to_be_enabled()
            await speak(page, "It is unspeakable.")
            await expect(error).to_have_text(re.compile("must be speakable"))
            await speak(page, "Some words.")
            await expect(page.get_by_role("status")).to_have_text(re.compile("Spoke"))
            await expect(error).to_be_empty()
            await page.reload()
            await expect(page.get_by_role("status")).to_have_text("Ready.")
            await speak(page, "It must die.")
            await expect(error).to_have_text(re.compile("engine"))

    run(refuse())


COUNT_MICROPHONES = """() => {
  window.asked = 0;
  const ask = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
  navigator.mediaDevices.getUserMedia = (wanted) => { asked += 1; return ask(wanted); };
}"""


@in_a_browser
def test_a_recording_and_a_file_are_spoken_like() -> None:
    tone, file = np.sin(np.arange(48000) / 20) / 2, io.BytesIO()
    soundfile.write(file, np.stack([tone, tone], 1), 44100, format="FLAC")
    voice: FilePayload = {"name": "voice.flac", "mimeType": "audio/flac", "buffer": file.getvalue()}

    async def said(page: Page) -> bytes:
        await speak(page, "As you said.")
        await expect(page.get_by_role("status")).to_have_text(re.compile("Spoke"))
        return (await downloaded(page))[0].tobytes()

    async def record() -> None:
        async with serving() as server, browsing(server) as page:
            own = await said(page)
            await page.get_by_label("Choose a file").set_input_files({**voice, "buffer": b"no sound"})
            await expect(page.get_by_role("alert")).to_have_text(re.compile("no audio"))
            await page.get_by_label("Choose a file").set_input_files(voice)
            await expect(page.get_by_role("status")).to_have_text("The recording is the voice.")
            await expect(page.get_by_label("Voice")).to_be_disabled()
            timbre = await said(page)
            await page.get_by_role("button", name="Remove").click()
            await expect(page.get_by_role("status")).to_have_text("The recording is removed.")
            assert await said(page) == own
            await page.evaluate(COUNT_MICROPHONES)
            # Twice before the browser has answered: one microphone, which is on until the recording ends.
            await page.evaluate("[1, 2].forEach(() => document.getElementById('record').click())")
            await expect(page.get_by_role("button", name="End the recording")).to_be_visible()
            assert await page.evaluate("asked") == 1
            await asyncio.sleep(1.5)  # a reference lasts a second or more
            await page.get_by_role("button", name="End the recording").click()
            await expect(page.get_by_role("status")).to_have_text("The recording is the voice.")
            await page.get_by_label("What is said in it").fill("Beep.")
            assert len({own, timbre, await said(page)}) == 3

    run(record())


@in_a_browser
def test_the_built_in_voice_is_not_silent_and_the_page_fits() -> None:
    """On the screen of a telephone and on a wide one."""

    async def hear() -> None:
        builtin = Fleet(WorkerSettings(config=EngineConfig(slots=1)), ("cpu",))
        async with serving(engine=builtin) as server:
            for width in (360, 1280):
                screen = {"viewport": {"width": width, "height": 800}, "has_touch": width < 600}
                async with browsing(server, **screen) as page:
                    await hear_and_measure(page, width)

    run(hear())


async def hear_and_measure(page: Page, width: int) -> None:
    await speak(page, "Hello there.")
    await expect(page.get_by_role("status")).to_have_text(re.compile("Spoke"))
    samples, rate = await downloaded(page)
    assert rate == 24000
    assert len(samples) > rate / 4
    # Speech, not silence: full scale is 32768.
    assert np.sqrt(np.square(samples.astype(float)).mean()) > 300
    assert await figure(page, "first") > 0
    assert await figure(page, "rtf") > 0
    assert await page.evaluate("document.documentElement.scrollWidth") <= width
    for button in await page.get_by_role("button").all():
        box = await button.bounding_box()
        assert box is not None
        assert box["height"] >= 44
