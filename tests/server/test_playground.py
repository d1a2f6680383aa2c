"""The playground: its files name no other host; in a browser it speaks, stops, records, saves, and tells of errors."""

import dataclasses
import io
import os
import re
import subprocess
import sys
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
from pages import Host, Open, asked, browser, button, error, host, in_a_browser, open_page, saved, speak, status
from playwright.sync_api import FilePayload, Page, expect
from servers import SETTINGS, Server
from sine_engines import CONFIG, LONG, alone, nothing_left, until
from sine_models import HELD

from sonoro.core.config import EngineConfig
from sonoro.core.types import SpeechRequest
from sonoro.transport.fleet import Fleet
from sonoro.transport.messages import WorkerSettings
from sonoro.words.spans import word_spans

__all__ = ["browser", "host", "nothing_left", "open_page"]

PAGE = files("sonoro.server.playground")
LONGEST = 120_000
"""Most bytes of the page without its previews."""


@pytest.fixture
def told(host: Host) -> Server:
    """A server whose model tells when words are spoken, and does not clone."""
    return host.serve("told", "shown")


@pytest.fixture
def cloning(host: Host) -> Server:
    """A server whose model clones, tells no words, and takes half of the time of its audio."""
    return host.serve("cloning", "slow")


@pytest.fixture
def locked(host: Host) -> Server:
    """A server with a key that no header holds as it is, and a low limit."""
    return host.serve("locked", "slow", dataclasses.replace(SETTINGS, api_keys=("hush→",), max_characters=40))


@pytest.fixture
def builtin(host: Host) -> Server:
    return host.serve("builtin", engine=Fleet(WorkerSettings(config=EngineConfig(slots=1)), ("cpu",)))


def hear(page: Page, text: str) -> None:
    speak(page, text)
    expect(status(page)).to_have_text(re.compile(r"^Spoke "))


def position(page: Page) -> float:
    """Seconds from the start to where the player stands, once it is drawn."""
    page.evaluate("() => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)))")
    return float(page.locator("#position").input_value())


def again(page: Page) -> float:
    """Play what was spoken once more; the seconds of sound that were scheduled for it."""
    page.evaluate(
        """() => {
          window.scheduled = 0;
          const start = AudioBufferSourceNode.prototype.start;
          AudioBufferSourceNode.prototype.start = function (...at) {
            scheduled += this.buffer.duration;
            return start.apply(this, at);
          };
          const status = document.getElementById("status");
          window.over = new Promise((resolve) => {
            const seen = new MutationObserver(() => status.textContent.startsWith("Spoke") && resolve());
            seen.observe(status, { childList: true });
          });
        }"""
    )
    button(page, "Play").click()
    page.evaluate("over")
    return page.evaluate("scheduled")


def wav(file: bytes) -> tuple[np.ndarray, int]:
    """The samples of a WAV file as PCM16, and its rate."""
    assert soundfile.info(io.BytesIO(file)).subtype == "PCM_16"
    return soundfile.read(io.BytesIO(file), dtype="int16")


# The files of the page ------------------------------------------------------------------------------------------------


def test_the_files_of_the_page_are_served_and_name_no_other_host(host: Host) -> None:
    server = host.serve("locked", "slow", dataclasses.replace(SETTINGS, api_keys=("hush→",), max_characters=40))

    async def ask() -> None:
        page = await server.http.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        names = {f"playground/{entry.name}" for entry in PAGE.iterdir() if entry.name.endswith((".js", ".css"))}
        assert set(re.findall(r'(?:href|src)="(playground/[^"]+)"', page.text)) <= names
        for path in ("/", *names):
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

    host.run(ask())


def test_the_page_is_small() -> None:
    sizes = {entry.name: len(entry.read_bytes()) for entry in PAGE.iterdir() if entry.is_file()}
    assert sum(size for name, size in sizes.items() if name.endswith((".html", ".css", ".js"))) < LONGEST


def test_what_is_saved_by_the_server_needs_a_key_and_a_known_kind(host: Host, told: Server, locked: Server) -> None:
    async def ask() -> None:
        pcm = np.zeros(8000, "<i2").tobytes()
        assert (await locked.http.post("/playground/mp3?rate=8000", content=pcm)).status_code == 401
        assert (await told.http.post("/playground/mp3?rate=8000", content=pcm)).content
        for path, code, field in (("mp3?rate=7", 400, "rate"), ("m4a", 400, "rate"), ("exe?rate=8000", 404, None)):
            refused = await told.http.post(f"/playground/{path}", content=pcm)
            assert (refused.status_code, refused.json()["error"]["param"]) == (code, field)
        empty = await told.http.post("/playground/m4a?rate=8000", content=b"")
        assert empty.status_code == 200

    host.run(ask())


# Speech ---------------------------------------------------------------------------------------------------------------


@in_a_browser
def test_what_is_typed_is_heard_and_can_be_kept_to_the_sample(told: Server, open_page: Open) -> None:
    page = open_page(told, sound="pcm")
    page.get_by_role("radio", name="High").check()
    hear(page, "Some words, said a little slowly.")
    samples, rate = wav(saved(page, "WAV"))
    assert rate == 8000
    assert samples.tobytes() == alone(SpeechRequest(id="a", text="Some words, said a little slowly.", voice="high"))
    assert float(page.locator("#first").inner_text().split()[0]) > 0
    assert float(page.locator("#rtf").inner_text()) > 0
    assert page.locator("#audio").inner_text() == "0.3 s"
    hear(page, "Again.")
    expect(status(page)).to_have_text("Spoke 0.1 s.")


@in_a_browser
def test_opus_is_the_default_and_needs_a_fraction_of_the_connection(builtin: Server, open_page: Open) -> None:
    needs = {}
    for sound in ("auto", "pcm"):
        page = open_page(builtin, sound=sound)
        hear(page, "The connection carries this sentence twice.")
        needs[page.locator("#coding").text_content()] = int((page.locator("#need").text_content() or "").split()[0])
    # An eighth more than a fifth at most: a short sentence has a header too.
    assert needs["opus"] < 0.22 * needs["pcm"]
    assert needs["opus"] < 150


@in_a_browser
def test_opus_that_arrives_in_pieces_sounds_as_a_whole(host: Host, told: Server, open_page: Open) -> None:
    text = "Some words, which come one by one. " * 6
    answer = host.run(told.speak(text, response_format="opus"))
    page = open_page(told)
    noise = page.evaluate(
        """async (bytes) => {
          const { OpusStream } = await import("/playground/opus.js");
          const [stream, parts] = [new OpusStream(), []];
          for (let at = 0, step = 1; at < bytes.length; at += step, step = (step * 7 + 3) % 900 + 1) {
            parts.push(...await stream.feed(Uint8Array.from(bytes.slice(at, at + step))));
          }
          const context = new OfflineAudioContext(1, 1, 48000);
          const whole = (await context.decodeAudioData(Uint8Array.from(bytes).buffer)).getChannelData(0);
          const power = (samples) => samples.reduce((sum, sample) => sum + sample ** 2, 0);
          return [parts.length, whole.length, power(whole.map((sample, i) => sample - parts[i])) / power(whole)];
        }""",
        list(answer.content),
    )
    assert noise[0] == noise[1]
    assert noise[2] < 1e-3  # 30 dB: the state of a decoder that begins late differs a little


WATCH = """() => {
  window.lit = [];
  new MutationObserver(() => {
    const word = document.querySelector("#spoken .lit");
    if (!word || word === window.last) return;
    window.last = word;
    const range = document.createRange();
    range.setStart(document.getElementById("spoken"), 0);
    range.setEndBefore(word);
    lit.push([range.toString(), word.textContent]);
  }).observe(document.getElementById("spoken"), { subtree: true, attributes: true, childList: true });
}"""
"""Keeps what stands before and in each word that is lit."""


@in_a_browser
def test_the_word_that_is_heard_is_lit_where_it_was_written(told: Server, open_page: Open) -> None:
    # What a string of JavaScript counts twice stands before them.
    text = "\U0001f642 " + " ".join(["Some words, which come one by one."] * 4)
    page = open_page(told)
    page.evaluate(WATCH)
    hear(page, text)
    spans = [(len(before), len(before + word)) for before, word in page.evaluate("lit")]
    assert spans
    assert set(spans) <= set(word_spans(text))
    assert spans == sorted(spans)
    expect(page.locator("#spoken")).to_have_text(text)
    expect(page.locator("#spoken .lit")).to_have_count(0)


@in_a_browser
def test_the_word_that_is_heard_is_scrolled_into_view(told: Server, open_page: Open) -> None:
    page = open_page(told, viewport={"width": 390, "height": 800}, reduced_motion="reduce")
    hear(page, "Some words, which come one by one. " * 11)
    box = page.locator("#spoken")
    page.get_by_role("slider", name="Position").press("Home")
    expect(page.locator("#now")).to_have_text("0:00")
    page.locator("#spoken span").last.dispatch_event("click")
    expect(page.locator("#spoken .lit")).to_be_in_viewport()
    assert box.evaluate("box => box.scrollTop") > 0


@in_a_browser
def test_speech_without_word_times_is_shown_and_moved_in_by_seconds(cloning: Server, open_page: Open) -> None:
    page = open_page(cloning)
    hear(page, "This model does not tell when its words are spoken.")
    expect(page.locator("#spoken")).to_have_text("This model does not tell when its words are spoken.")
    expect(page.locator("#spoken span")).to_have_count(0)
    button(page, "A word back").click()
    assert position(page) == 0
    button(page, "SRT").click()
    expect(error(page)).to_have_text(re.compile("no word times"))


@in_a_browser
def test_stop_is_silent_at_once_keeps_what_was_heard_and_frees_the_slot(host: Host, open_page: Open) -> None:
    # Almost five seconds are needed to make it: a slow browser still comes in time to stop it.
    text = LONG * 3
    roomy = {"max_positions": 2400, "prefill_tokens": 2400, "max_frames": 1200, "segment_letters": len(text)}
    config = dataclasses.replace(CONFIG, slots=1, **roomy)
    server = host.serve("one slot", "slow", config=config)
    page = open_page(server, sound="pcm")
    speak(page, text)
    expect(page.locator("#audio")).to_have_text(re.compile(r"^(0\.[5-9]|[1-9])"))
    expect(status(page)).to_have_text("Speaking.")
    button(page, "Stop").click()
    expect(status(page)).to_have_text(re.compile("Stopped after"))
    host.run(until(lambda: server.metric('sonoro_requests_total{model="sine",reason="disconnected"}')))
    samples, _ = wav(saved(page, "WAV"))
    # What was heard is a beginning of what would have been said.
    assert 0 < len(samples) < len(text) * 80
    assert alone(SpeechRequest(id="a", text=text), config).startswith(samples.tobytes())
    hear(page, "There is a place again.")


@in_a_browser
def test_it_says_that_it_is_buffering_while_it_waits(host: Host, tmp_path: Path, open_page: Open) -> None:
    goes_on = tmp_path / "on"
    server = host.serve("held", f"{HELD}{goes_on}")
    page = open_page(server)
    speak(page, "A text that is made by and by, then waits for a file, and only then is made to its end. " * 2)
    expect(status(page)).to_have_text("Buffering …")
    assert int(page.locator("#stalls").text_content() or "") > 0
    goes_on.touch()
    expect(status(page)).to_have_text(re.compile(r"^Spoke 1\.8 s"))


@in_a_browser
def test_a_slow_connection_carries_more_than_is_needed(told: Server, open_page: Open) -> None:
    """`tools/playground.py` counts the stalls, which a slow machine would have too."""
    page = open_page(told)
    network = page.context.new_cdp_session(page)
    speed = {"downloadThroughput": 200_000 / 8, "uploadThroughput": 200_000 / 8, "latency": 50}
    network.send("Network.emulateNetworkConditions", {"offline": False, **speed})
    hear(page, "Some words, which come one by one. " * 8)
    assert int((page.locator("#need").text_content() or "").split()[0]) < 150


# The player -----------------------------------------------------------------------------------------------------------


@in_a_browser
def test_speech_is_heard_again_without_being_made_again(told: Server, open_page: Open) -> None:
    page = open_page(told)
    bodies = asked(page)
    hear(page, "Heard twice.")
    assert again(page) == pytest.approx(0.12, abs=0.01)
    assert len(bodies) == 1


@in_a_browser
def test_a_word_that_is_pressed_is_heard_next(told: Server, open_page: Open) -> None:
    page = open_page(told)
    hear(page, "Some words, which come one by one.")
    page.locator("#spoken span").nth(3).click()
    expect(page.locator("#spoken .lit")).to_have_text("come")
    # A letter is a frame of 10 ms; the times of words are known to a frame or two.
    assert position(page) == pytest.approx(0.18, abs=0.03)


@in_a_browser
def test_keys_go_by_words_and_play(told: Server, open_page: Open) -> None:
    page = open_page(told)
    page.get_by_label("Text", exact=True).fill("Some words, which come one by one.")
    page.keyboard.press("Control+Enter")
    expect(status(page)).to_have_text(re.compile("^Spoke"))
    lit = page.locator("#spoken .lit")
    page.locator("#spoken").focus()
    page.keyboard.press("ArrowLeft")
    expect(lit).to_have_text("one")
    page.keyboard.press("ArrowLeft")
    expect(lit).to_have_text("by")
    page.get_by_role("slider", name="Position").press("ArrowRight")
    expect(lit).to_have_text("one")
    page.locator("#spoken").focus()
    page.keyboard.press(" ")
    expect(status(page)).to_have_text(re.compile("^Spoke"))
    # In a field the same keys write.
    page.get_by_label("Text", exact=True).fill("")
    page.keyboard.type("a b")
    assert page.get_by_label("Text", exact=True).input_value() == "a b"


@in_a_browser
def test_a_pause_is_a_pause(told: Server, open_page: Open) -> None:
    page = open_page(told)
    hear(page, "Some words, which come one by one. " * 4)
    # In a loop it is there to be paused, however slow the browser is.
    button(page, "Loop").click()
    button(page, "Play").click()
    button(page, "Pause").click()
    expect(status(page)).to_have_text("Paused.")
    at = position(page)
    assert position(page) == at
    button(page, "Loop").click()
    button(page, "Play").click()
    expect(status(page)).to_have_text(re.compile(r"^Spoke 1\.4 s"))


@in_a_browser
def test_a_loop_begins_again(told: Server, open_page: Open) -> None:
    page = open_page(told)
    loop = button(page, "Loop")
    hear(page, "Again and again.")
    loop.click()
    expect(loop).to_have_attribute("aria-pressed", "true")
    button(page, "Play").click()
    turns = page.evaluate(
        """() => new Promise((resolve) => {
          let [last, turns] = [0, 0];
          const look = () => {
            const now = Number(document.getElementById("position").value);
            turns += now < last;
            last = now;
            if (turns === 2) resolve(turns);
            else requestAnimationFrame(look);
          };
          look();
        })"""
    )
    assert turns == 2
    loop.click()
    expect(status(page)).to_have_text(re.compile("^Spoke"))


@in_a_browser
@pytest.mark.parametrize("speed", [0.5, 1.5])
def test_speed_changes_the_tempo_and_not_the_pitch(told: Server, open_page: Open, speed: float) -> None:
    page = open_page(told)
    played = page.evaluate(
        """async (speed) => {
          const { Take } = await import("/playground/take.js");
          const { Stretch } = await import("/playground/stretch.js");
          const take = new Take({ text: "", rate: 8000 });
          take.append(Float32Array.from({ length: 16000 }, (_, i) => 0.5 * Math.sin(i * 2 * Math.PI * 200 / 8000)));
          take.finish();
          const [stretch, samples] = [new Stretch(take, 0, speed), []];
          for (let part = stretch.next(); part; part = stretch.next()) samples.push(...part);
          return samples;
        }""",
        speed,
    )
    samples = np.array(played)
    assert len(samples) / 8000 == pytest.approx(2 / speed, abs=0.05)
    heard = samples[800:-800]
    spectrum = np.abs(np.fft.rfft(heard * np.hanning(len(heard))))
    assert np.argmax(spectrum) * 8000 / len(heard) == pytest.approx(200, abs=2)
    # A sine stays one: pieces join where they are alike.
    assert np.sqrt(np.mean(heard**2)) == pytest.approx(0.5 / np.sqrt(2), rel=0.05)


@in_a_browser
def test_speed_is_chosen_in_the_player(told: Server, open_page: Open) -> None:
    page = open_page(told)
    hear(page, "Some words, which come one by one.")
    page.get_by_label("Speed").select_option("2×")
    assert again(page) == pytest.approx(0.17 + 0.05, abs=0.05)


@in_a_browser
def test_what_was_spoken_in_this_visit_is_heard_again(told: Server, open_page: Open) -> None:
    page = open_page(told)
    bodies = asked(page)
    hear(page, "The first of them.")
    hear(page, "The second one.")
    takes = page.get_by_role("region", name="This visit").get_by_role("button")
    expect(takes).to_have_count(2)
    expect(takes.first).to_have_attribute("aria-current", "true")
    takes.last.click()
    expect(page.locator("#spoken")).to_have_text("The first of them.")
    expect(takes.last).to_have_attribute("aria-current", "true")
    expect(status(page)).to_have_text(re.compile("^Spoke"))
    assert len(bodies) == 2


# Files and code -------------------------------------------------------------------------------------------------------


@in_a_browser
@pytest.mark.parametrize("kind", ["MP3", "M4A"])
def test_speech_is_saved_as_files_that_others_play(told: Server, open_page: Open, kind: str) -> None:
    page = open_page(told)
    hear(page, "Some words, which come one by one. " * 2)
    file = saved(page, kind)
    with av.open(io.BytesIO(file)) as opened:
        stream = opened.streams.audio[0]
        assert (stream.codec.name, stream.rate) == ({"MP3": "mp3float", "M4A": "aac"}[kind], 8000)
        seconds = sum(frame.samples for frame in opened.decode(stream)) / stream.rate
    # A letter is 10 ms. Codecs add up to two of their frames.
    assert 0.69 <= seconds < 1.0


@in_a_browser
def test_captions_have_the_words_and_their_times(told: Server, open_page: Open) -> None:
    page = open_page(told)
    hear(page, "Some words, which come one by one. Then others.")
    shown = saved(page, "SRT").decode().strip().split("\n\n")
    assert [block.splitlines()[2:] for block in shown] == [["Some words, which come one by one."], ["Then others."]]
    assert [block.splitlines()[0] for block in shown] == ["1", "2"]
    times = [time for block in shown for time in re.findall(r"00:00:00,(\d{3})", block)]
    assert len(times) == 4
    assert times == sorted(times)


def copied(page: Page, name: str) -> str:
    button(page, name).click()
    expect(status(page)).to_have_text(f"Copied as {name}.")
    return page.evaluate("navigator.clipboard.readText()")


TRICKY = "It's $5, \"so\" they \\say: 'fine' `ls` {x} → 🙂.\nThen more."


@in_a_browser
@pytest.mark.parametrize("name", ["curl", "Python", "OpenAI client"])
def test_what_is_copied_runs(told: Server, open_page: Open, tmp_path: Path, name: str) -> None:
    if name == "OpenAI client" and find_spec("openai") is None:
        pytest.skip("there is no client of OpenAI (the extra openai)")
    page = open_page(told)
    page.get_by_text("Pronunciations").click()
    page.get_by_label("One a line").fill("more = less")
    page.get_by_role("radio", name="High").check()
    bodies = asked(page)
    hear(page, TRICKY)
    code = copied(page, name)
    command = ["bash", "-c", code] if name == "curl" else [sys.executable, "-c", code]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60, env={**os.environ, "no_proxy": "*"})
    spoken = alone(SpeechRequest(id="a", text=TRICKY.replace("more", "less"), voice="high"))
    with av.open(str(tmp_path / "speech.mp3")) as opened:
        seconds = sum(frame.samples for frame in opened.decode(opened.streams.audio[0])) / 8000
    assert bodies[0]["input"] == TRICKY
    assert 0 <= seconds - len(spoken) / 16000 < 0.4


@in_a_browser
def test_the_code_of_a_recording_reads_it_from_a_file(cloning: Server, open_page: Open, tmp_path: Path) -> None:
    page = open_page(cloning)
    tone = io.BytesIO()
    soundfile.write(tone, np.sin(np.arange(16000) / 20) / 2, 16000, format="WAV")
    page.get_by_label("Choose a file").set_input_files(
        {"name": "a.wav", "mimeType": "audio/wav", "buffer": tone.getvalue()}
    )
    expect(status(page)).to_have_text("The recording is the voice.")
    hear(page, "As you said, for $5.")
    (tmp_path / "me.wav").write_bytes(tone.getvalue())
    sizes = []
    for name in ("curl", "Python"):
        code = copied(page, name)
        assert len(code) < 2000
        command = ["bash", "-c", code] if name == "curl" else [sys.executable, "-c", code]
        subprocess.run(command, cwd=tmp_path, check=True, timeout=60, env={**os.environ, "no_proxy": "*"})
        sizes.append((tmp_path / "speech.mp3").read_bytes())
    assert sizes[0] == sizes[1]


@in_a_browser
def test_a_text_file_is_opened_or_dropped(told: Server, open_page: Open) -> None:
    page = open_page(told)
    text = page.get_by_label("Text", exact=True)
    chosen: FilePayload = {"name": "a.txt", "mimeType": "text/plain", "buffer": "A chosen text: café.\r\n".encode()}
    page.get_by_label("Open a text file").set_input_files(chosen)
    expect(text).to_have_value("A chosen text: café.")
    dropped = page.evaluate_handle(
        """() => {
          const data = new DataTransfer();
          data.items.add(new File(["A dropped text."], "b.txt", { type: "text/plain" }));
          return data;
        }"""
    )
    page.locator("#sheet").dispatch_event("drop", {"dataTransfer": dropped})
    expect(text).to_have_value("A dropped text.")
    page.get_by_label("Open a text file").set_input_files({**chosen, "name": "c.bin", "buffer": b"\x89\xff\x00"})
    expect(error(page)).to_have_text("c.bin is not a text file in UTF-8.")
    expect(text).to_have_value("A dropped text.")


# Scripts --------------------------------------------------------------------------------------------------------------


@in_a_browser
def test_samples_are_there_by_use_and_can_be_undone(told: Server, open_page: Open) -> None:
    page = open_page(told)
    text = page.get_by_label("Text", exact=True)
    text.fill("My own words.")
    for name, words in (("Narration", "lighthouse"), ("Agent", "front desk"), ("Numbers", "4:45 p.m.")):
        button(page, name).click()
        expect(text).to_have_value(re.compile(words))
        expect(button(page, "Speak")).to_be_enabled()
    for _ in range(3):
        text.press("Control+z")
    expect(text).to_have_value("My own words.")


@in_a_browser
def test_a_dialogue_has_a_voice_for_each_line(told: Server, open_page: Open) -> None:
    page = open_page(told, sound="pcm")
    bodies = asked(page)
    button(page, "Dialogue").click()
    expect(page.get_by_role("radio", name="Low")).to_be_disabled()
    page.get_by_label("Line 1", exact=True).fill("One comes first.")
    page.get_by_label("Line 2", exact=True).fill("The first is not one.")
    page.get_by_label("Voice of line 2").select_option("High")
    for _ in range(2):
        button(page, "Remove line 3").click()
    page.get_by_label("Line 2", exact=True).press("Enter")
    expect(page.get_by_label("Line 3", exact=True)).to_be_focused()
    page.keyboard.press("Backspace")
    expect(page.get_by_label("Line 3", exact=True)).to_have_count(0)
    page.evaluate(WATCH)
    button(page, "Speak").click()
    expect(status(page)).to_have_text(re.compile("^Spoke"))
    lines = [{"voice": "low", "text": "One comes first."}, {"voice": "high", "text": "The first is not one."}]
    assert bodies[0]["inputs"] == lines
    shown = "\n".join(line["text"] for line in lines)
    expect(page.locator("#spoken")).to_have_text(shown)
    assert "voice" not in bodies[0]
    expect(page.locator("#spoken span")).to_have_text([shown[start:end] for start, end in word_spans(shown)])
    expect(page.locator("#speaker")).to_have_text("Low, High")


@in_a_browser
def test_pronunciations_are_sent_as_a_lexicon(told: Server, open_page: Open) -> None:
    page = open_page(told)
    bodies = asked(page)
    page.get_by_text("Pronunciations").click()
    rules = page.get_by_label("One a line")
    rules.fill("SQL = sequel\n\nA = b = c")
    hear(page, "SQL is spoken.")
    assert bodies[0]["lexicons"] == [{"SQL": "sequel", "A": "b = c"}]
    rules.fill("SQL = sequel\nNginx")
    button(page, "Speak").click()
    expect(error(page)).to_have_text("Pronunciations, line 2: write it as word = how it is said.")
    rules.fill("")
    expect(error(page)).to_be_empty()
    assert len(bodies) == 1


# What is wrong --------------------------------------------------------------------------------------------------------


@in_a_browser
def test_a_text_over_the_limit_cannot_be_sent(locked: Server, open_page: Open) -> None:
    page = open_page(locked, is_ready=False)
    page.get_by_label("Key", exact=True).fill("hush→")
    page.get_by_label("Key", exact=True).press("Tab")
    expect(status(page)).to_have_text("Ready.")
    text, counter, bodies = page.get_by_label("Text", exact=True), page.locator("#count"), asked(page)
    text.fill("🙂🙂 two")
    expect(counter).to_have_text("6 of 40")
    colour = counter.evaluate("counter => getComputedStyle(counter).color")
    text.fill("🙂" * 38 + " two")
    expect(counter).to_have_text("42 of 40: 2 too many")
    assert counter.evaluate("counter => getComputedStyle(counter).color") != colour
    expect(button(page, "Speak")).to_be_disabled()
    text.press("Control+Enter")
    text.fill("🙂" * 36 + " two")
    expect(counter).to_have_text("40 of 40")
    hear(page, "🙂" * 36 + " two")
    assert [body["input"] for body in bodies] == ["🙂" * 36 + " two"]


@in_a_browser
def test_lines_are_counted_as_the_server_counts_them(told: Server, open_page: Open) -> None:
    page = open_page(told)
    page.get_by_label("Text", exact=True).fill("a\nb")
    page.get_by_text("One for each line").click()
    counted = len("[voice:low][rate:1]a[pause:300ms]\n[voice:high][rate:1]b")
    expect(page.locator("#count")).to_have_text(f"{counted} of 4,096")


@in_a_browser
def test_keys_are_taken_as_they_are_and_refused_in_words(locked: Server, open_page: Open) -> None:
    page = open_page(locked, is_ready=False)
    told, key = page.locator("#model"), page.get_by_label("Key", exact=True)
    expect(told).to_have_text(re.compile("API key"))
    expect(button(page, "Speak")).to_be_disabled()
    key.fill("Schlüssel→")
    key.press("Tab")
    expect(told).to_have_text(re.compile("API key"))
    # A field drops line breaks, not tabs.
    key.fill("hu\tsh")
    key.press("Tab")
    expect(told).to_have_text("A key is one line: remove the line breaks or tabs in it.")
    key.fill(" hush→ ")
    key.press("Tab")
    expect(status(page)).to_have_text("Ready.")
    page.reload()
    expect(status(page)).to_have_text("Ready.")
    hear(page, "Some words.")
    assert "SONORO_API_KEY" in copied(page, "curl")
    assert "hush" not in copied(page, "Python")


@in_a_browser
def test_what_goes_wrong_is_said_and_old_errors_go(cloning: Server, open_page: Open) -> None:
    page = open_page(cloning)
    speak(page, "It is unspeakable.")
    expect(error(page)).to_have_text(re.compile("must be speakable"))
    page.get_by_label("Text", exact=True).press_sequentially("x")
    expect(error(page)).to_be_empty()
    button(page, "Speak").click()
    expect(error(page)).to_have_text(re.compile("must be speakable"))
    hear(page, "Some words.")
    expect(error(page)).to_be_empty()
    speak(page, "It must die.")
    expect(error(page)).to_have_text(re.compile("engine"))


@in_a_browser
def test_an_unreachable_server_is_said_and_found_again(told: Server, open_page: Open) -> None:
    page = open_page(told)
    page.route("**/v1/**", lambda route: route.abort())
    speak(page, "Nobody is there.")
    expect(error(page)).to_have_text(re.compile("cannot be reached"))
    page.unroute("**/v1/**")
    hear(page, "Somebody is there.")
    expect(error(page)).to_be_empty()


# Voices ---------------------------------------------------------------------------------------------------------------


@in_a_browser
def test_a_model_that_does_not_clone_names_those_that_do(told: Server, cloning: Server, open_page: Open) -> None:
    page = open_page(told)
    expect(button(page, "Record")).to_be_hidden()
    page.get_by_text("A voice of your own").click()
    expect(page.locator("#uncloned")).to_contain_text("Pocket TTS, also without a GPU")
    expect(page.locator("#uncloned code").first).to_contain_text("sonoro serve ")
    other = open_page(cloning)
    expect(button(other, "Record")).to_be_visible()
    expect(other.get_by_text("A voice of your own")).to_be_hidden()


COUNT_MICROPHONES = """() => {
  window.streams = [];
  const ask = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
  navigator.mediaDevices.getUserMedia = async (wanted) => {
    const stream = await ask(wanted);
    streams.push(stream);
    return stream;
  };
}"""
LIVE = "streams.flatMap((stream) => stream.getTracks()).filter((track) => track.readyState === 'live').length"
LISTEN = """() => new Promise((resolve) => {
  const context = new AudioContext();
  const source = new ConstantSourceNode(context);
  source.addEventListener("ended", resolve);
  source.connect(context.destination);
  source.start();
  source.stop(context.currentTime + 1.5);
})"""
"""Waits 1.5 s by the clock of the sound: a reference lasts a second or more."""


@in_a_browser
def test_two_clicks_on_record_leave_no_microphone_on(cloning: Server, open_page: Open) -> None:
    page = open_page(cloning)
    page.evaluate(COUNT_MICROPHONES)
    page.evaluate("[1, 2].forEach(() => document.getElementById('record').click())")
    expect(button(page, "Record")).to_be_visible()
    page.evaluate("() => new Promise((resolve) => setInterval(() => streams.length && resolve(), 10))")
    page.evaluate("() => new Promise((resolve) => setTimeout(resolve))")
    assert page.evaluate(LIVE) == 0
    button(page, "Record").click()
    expect(button(page, "End the recording")).to_be_visible()
    assert page.evaluate(LIVE) == 1
    page.evaluate(LISTEN)
    button(page, "End the recording").click()
    expect(button(page, "Remove")).to_be_visible()
    assert page.evaluate(LIVE) == 0


@in_a_browser
def test_a_recording_of_nothing_says_so(cloning: Server, open_page: Open) -> None:
    page = open_page(cloning)
    page.evaluate(
        """() => {
          const start = MediaRecorder.prototype.start;
          MediaRecorder.prototype.start = function () {
            start.apply(this);
            this.stop();
          };
        }"""
    )
    button(page, "Record").click()
    expect(error(page)).to_have_text("Nothing was recorded. Record for a second or longer.")
    expect(button(page, "Record")).to_be_visible()
    expect(button(page, "Remove")).to_be_hidden()


@in_a_browser
def test_a_recording_and_a_file_are_spoken_like(cloning: Server, open_page: Open) -> None:
    tone, file = np.sin(np.arange(48000) / 20) / 2, io.BytesIO()
    soundfile.write(file, np.stack([tone, tone], 1), 44100, format="FLAC")
    voice: FilePayload = {"name": "voice.flac", "mimeType": "audio/flac", "buffer": file.getvalue()}
    page = open_page(cloning, sound="pcm")

    def said() -> bytes:
        hear(page, "As you said.")
        return wav(saved(page, "WAV"))[0].tobytes()

    own = said()
    page.get_by_label("Choose a file").set_input_files({**voice, "buffer": b"no sound"})
    expect(error(page)).to_have_text(re.compile("no audio"))
    page.get_by_label("Choose a file").set_input_files(voice)
    expect(status(page)).to_have_text("The recording is the voice.")
    expect(page.get_by_role("radio", name="Low")).to_be_disabled()
    timbre = said()
    button(page, "Remove").click()
    expect(status(page)).to_have_text("The recording is removed.")
    assert said() == own
    button(page, "Record").click()
    page.evaluate(LISTEN)
    button(page, "End the recording").click()
    expect(status(page)).to_have_text("The recording is the voice.")
    page.get_by_label("What is said in it").fill("Beep.")
    assert len({own, timbre, said()}) == 3


SOUNDED = """(names) => new Promise((resolve) => {
  const press = () => document.querySelector(`[aria-label="${names[0]}"]`).click();
  const start = AudioBufferSourceNode.prototype.start;
  AudioBufferSourceNode.prototype.start = function () {
    start.apply(this);
    AudioBufferSourceNode.prototype.start = start;
    const lit = document.querySelectorAll(".hear.on").length;
    queueMicrotask(() => {
      if (names[1]) press();
      resolve([lit, document.querySelectorAll(".hear.on").length]);
    });
  };
  press();
})"""
"""Presses a button until a preview sounds, and then once more if told to: how many buttons are lit before and after."""


@in_a_browser
def test_voices_of_the_package_are_heard_at_one_press(builtin: Server, open_page: Open) -> None:
    page = open_page(builtin)
    bodies = asked(page)
    for name in ("Nora", "Miles", "Edith", "Hugh"):
        with page.expect_response(re.compile(rf"preview-{name.lower()}\.mp3$")) as answer:
            button(page, f"Hear {name}").click()
        assert answer.value.ok
        file = answer.value.body()
        assert len(file) < 40_000
        samples, _ = soundfile.read(io.BytesIO(file))
        assert np.sqrt(np.mean(samples**2)) > 0.01
    expect(page.locator(".hear.on")).to_have_count(0)
    assert page.evaluate(SOUNDED, ["Hear Hugh", True]) == [1, 0]
    assert bodies == []


@in_a_browser
def test_other_voices_say_a_sentence_once(told: Server, open_page: Open) -> None:
    page = open_page(told)
    bodies = asked(page)
    for _ in range(2):
        assert page.evaluate(SOUNDED, ["Hear High", False]) == [1, 1]
        expect(page.locator(".hear.on")).to_have_count(0)
    assert [body["voice"] for body in bodies] == ["high"]


# Looks and access -----------------------------------------------------------------------------------------------------


@in_a_browser
@pytest.mark.parametrize("width", [390, 1280, 1600])
def test_the_built_in_voice_is_not_silent_and_the_page_fits(builtin: Server, open_page: Open, width: int) -> None:
    page = open_page(builtin, viewport={"width": width, "height": 800}, has_touch=width < 600)
    hear(page, "Hello there.")
    samples, rate = wav(saved(page, "WAV"))
    assert rate == 24000
    assert len(samples) > rate / 4
    # Speech, not silence: full scale is 32768.
    assert np.sqrt(np.square(samples.astype(float)).mean()) > 300
    page.get_by_text("Figures for engineers").click()
    button(page, "Dialogue").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # A file is chosen by the label of its field.
    for one in page.locator("button:visible, label.button:visible, select:visible, summary:visible").all():
        box = one.bounding_box()
        assert box is not None
        assert box["height"] >= 44
        assert box["x"] + box["width"] <= width or "Hear" in (one.get_attribute("aria-label") or "")


@in_a_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_many_voices_and_every_field_fit(cloning: Server, open_page: Open, width: int) -> None:
    voices = [{"id": f"v{i}", "name": f"a_voice_of_a_long_name_{i}", "accent": "Far" * 9} for i in range(30)]
    able = {"sample_rate": 8000, "voice_modes": ["named", "cloned"], "languages": ["auto", "one", "two"]}
    model = {"id": "somebody/a-model-" + "with-a-long-name-" * 3, "accepts_instructions": True, "max_characters": 9}
    page = open_page(cloning, viewport={"width": width, "height": 800})
    page.route("**/v1/audio/voices", lambda route: route.fulfill(json={"voices": voices, "uploaded_voices": []}))
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{**model, **able}]}))
    page.reload()
    expect(page.get_by_role("radio", name="A Voice Of A Long Name 29")).to_have_count(1)
    expect(page.get_by_label("Instructions")).to_be_visible()
    expect(page.get_by_label("Language")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@in_a_browser
def test_the_page_is_light_or_dark_as_the_system_is(told: Server, open_page: Open) -> None:
    brightness = {}
    for scheme in ("light", "dark"):
        page = open_page(told, color_scheme=scheme)
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness[scheme] = sum(map(int, re.findall(r"\d+", colour)[:3]))
    assert brightness["dark"] < 100
    assert brightness["light"] > 600


AXE = find_spec("axe_playwright_python")


@in_a_browser
@pytest.mark.skipif(AXE is None, reason="axe is not installed (the extra test: axe-playwright-python)")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_axe_finds_nothing(told: Server, open_page: Open, width: int, scheme: str) -> None:
    assert AXE is not None
    assert AXE.origin is not None
    axe = (Path(AXE.origin).parent / "axe.min.js").read_text()
    page = open_page(told, viewport={"width": width, "height": 800}, color_scheme=scheme, reduced_motion="reduce")
    page.evaluate(axe)
    states = [page.evaluate("axe.run()")]
    hear(page, "Some words.")
    button(page, "Dialogue").click()
    for summary in page.locator("summary").all():
        summary.click()
    states.append(page.evaluate("axe.run()"))
    for state in states:
        assert len(state["passes"]) > 30
        assert [(one["id"], [node["target"] for node in one["nodes"]]) for one in state["violations"]] == []


@in_a_browser
def test_every_control_has_a_name_and_is_reached_by_the_keyboard(told: Server, open_page: Open) -> None:
    page = open_page(told)
    hear(page, "Some words.")
    for summary in page.locator("summary:visible").all():
        summary.click()
    wanted = page.evaluate(
        """() => [...document.querySelectorAll("button, select, textarea, input, summary, a[href], [tabindex='0']")]
          .filter((one) => !one.disabled && one.checkVisibility() && (one.type !== "radio" || one.checked))
          .map((one) => one.id || one.getAttribute("aria-label") || one.textContent)"""
    )
    page.evaluate("document.body.tabIndex = -1, document.body.focus()")
    reached = []
    for _ in wanted:
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate(
                """() => {
                  const one = document.activeElement;
                  return one.id || one.getAttribute("aria-label") || one.textContent;
                }"""
            )
        )
    assert sorted(reached) == sorted(wanted)
    unnamed = re.findall(
        r"^\s*- (?:button|textbox|combobox|radio|slider|spinbutton|link)$", page.locator("body").aria_snapshot(), re.M
    )
    assert unnamed == []
