"""What the playground and its documentation hold that a running server makes, and what it needs of a connection.

    python tools/playground.py previews|pictures|connection [URL]

The server speaks with the built-in voice. `previews` makes the previews of its voices, `pictures` those of the page in
docs/ (with Pillow), and `connection` says how the page plays speech that was made before over 200 kbit/s. The last two
need chromium on the path.
"""

import io
import json
import shutil
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

ROOT = Path(__file__).parents[1]
BITS = 48_000
SENTENCES = {
    "nora": "Hello, I'm Nora. Hand me your words, and I'll read them as if they were mine.",
    "miles": "I'm Miles. Good for long stories, quiet evenings, and the news in between.",
    "edith": "Good afternoon, I'm Edith. Shall we begin at the beginning?",
    "hugh": "I'm Hugh. Take a seat: the kettle is on, and the story is about to start.",
}
PICTURES = {"playground": (1280, "light"), "playground-dark": (1280, "dark"), "playground-phone": (390, "light")}
PICTURES |= {"playground-phone-dark": (390, "dark")}
COLOURS = 48


def previews(url: str) -> None:
    for voice, text in SENTENCES.items():
        body = json.dumps({"input": text, "voice": voice, "bit_rate": BITS}).encode()
        request = urllib.request.Request(f"{url}/v1/audio/speech", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            (ROOT / f"src/sonoro/server/playground/preview-{voice}.mp3").write_bytes(answer.read())


@contextmanager
def opened(url: str, **settings: Any) -> Iterator[Page]:
    """The page, which has begun to speak its sample of narration when the block runs."""
    flags = ["--no-sandbox", "--disable-gpu", "--autoplay-policy=no-user-gesture-required"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        page = browser.new_page(**settings)
        page.set_default_timeout(120_000)
        page.goto(url)
        page.get_by_role("button", name="Narration").click()
        yield page
        browser.close()


def pictures(url: str) -> None:
    for name, (width, scheme) in PICTURES.items():
        with opened(url, viewport={"width": width, "height": 800}, color_scheme=scheme) as page:
            page.get_by_role("button", name="Speak", exact=True).click()
            expect(page.locator("#spoken .heard")).to_have_count(10, timeout=120_000)
            page.get_by_role("button", name="Pause").click()
            expect(page.locator("#total")).not_to_contain_text("so far", timeout=120_000)
            page.evaluate("scrollTo(0, 0)")
            image = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
        image.quantize(COLOURS, dither=Image.Dither.NONE).save(ROOT / f"docs/{name}.png", optimize=True)


class Relay(BaseHTTPRequestHandler):
    """Asks the server for the whole of an answer before it is sent: how fast speech is made is left out."""

    protocol_version = "HTTP/1.1"
    url = ""

    def do_GET(self, body: bytes | None = None) -> None:
        request = urllib.request.Request(self.url + self.path, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            whole = answer.read()
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.headers["Content-Type"])
        self.send_header("Content-Length", str(len(whole)))
        self.end_headers()
        self.wfile.write(whole)

    def do_POST(self) -> None:
        self.do_GET(self.rfile.read(int(self.headers["Content-Length"])))

    def log_message(self, *_: object) -> None:
        pass


def connection(url: str) -> None:
    Relay.url = url
    relay = ThreadingHTTPServer(("127.0.0.1", 0), Relay)
    threading.Thread(target=relay.serve_forever, daemon=True).start()
    for kilobits in (200, 120):
        with opened(f"http://127.0.0.1:{relay.server_port}/") as page:
            network = page.context.new_cdp_session(page)
            speed = {"downloadThroughput": kilobits * 125, "uploadThroughput": kilobits * 125, "latency": 100}
            network.send("Network.emulateNetworkConditions", {"offline": False, **speed})
            page.get_by_role("button", name="Speak", exact=True).click()
            expect(page.get_by_role("status")).to_contain_text("Spoke", timeout=120_000)
            names = ("coding", "first", "need", "audio", "rtf", "stalls")
            print(f"{kilobits} kbit/s", {name: page.locator(f"#{name}").text_content() for name in names})


COMMANDS: dict[str, Callable[[str], None]] = {"previews": previews, "pictures": pictures, "connection": connection}

if __name__ == "__main__":
    COMMANDS[sys.argv[1]](sys.argv[2] if len(sys.argv) > 2 else "http://localhost:8000")
