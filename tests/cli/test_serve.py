"""`sonoro serve`: bad input is refused in one line; a real server speaks as the built-in voice and ends well."""

import dataclasses
import inspect
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import av
import httpx
import openai
import pytest
import soundfile
import yaml
from processes import GUARD_S, Run, assert_refused, interruptible, server, sonoro
from sine_engines import children, parent_of

from sonoro.cli.serve import serve
from sonoro.server.config import ServerConfig

__all__ = ["interruptible", "sonoro"]

ROOT = Path(__file__).parents[2]
PHASES = ("imports", "memory", "weights", "state", "checks", "graphs", "voices")
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "x"], ["port", "'x'", "whole number"]),
        (["--port", "65536"], ["port", "65536", "65535"]),
        (["--host", "nowhere.invalid"], ["host", "nowhere.invalid", "address"]),
        (["--host", "a" * 70], ["host", "address"]),
        (["--slots", "0"], ["slots", "0", "at least 1"]),
        (["--devices", "0,1,0"], ["devices", "0,1,0", "cuda:0 is named twice"]),
        (["--devices", "0,gpu"], ["devices", "'gpu'", "must be cpu, or a GPU by number"]),
        (["--devices", "0,1", "--device", "cuda"], ["devices", "0,1", "--device cuda is given too"]),
        (["--codec-device", "gpu"], ["codec_device", "'gpu'", "must be empty, cpu, or a GPU"]),
        (["--codec-device", "1,2"], ["codec_device", "'1,2'", "must be empty, cpu, or a GPU"]),
        (["--codec-device", "2", "--devices", "0,1"], ["codec_device", "cuda:2", "one engine can have it"]),
        (["--codec-dtype", "int8"], ["codec_dtype", "'int8'", "auto or float16 or bfloat16 or float32"]),
        (["--max-concurrency", "-1"], ["max_concurrency", "-1", "at least 0"]),
        (["--max-queue-wait-ms", "1.5"], ["max_queue_wait_ms", "'1.5'", "whole number"]),
        (["--max-characters", "0"], ["max_characters", "0", "at least 1"]),
        (["--max-body-bytes", "10"], ["max_body_bytes", "10", "at least 1024"]),
        (["--quota", "default=weight:0"], ["quotas.default.weight", "0", "at least 1"]),
        (["--quota", "other=weight:2", "--api-key", "one"], ["quotas.", "weight", "2", "keys are", "default"]),
        (["--max-waiting", "-1"], ["max_waiting", "-1", "at least 0"]),
        (["--max-sessions", "-1"], ["max_sessions", "-1", "at least 0"]),
        (["--max-total-body-bytes", "10"], ["max_total_body_bytes", "10", "at least 1024"]),
        (["--max-upload-bytes", "10"], ["max_upload_bytes", "10", "at least 1024"]),
        (["--max-batch-characters", "0"], ["max_batch_characters", "0", "at least 1"]),
        (["--head-timeout-s", "0"], ["head_timeout_s", "0.0", "at least 0.01"]),
        (["--body-timeout-s", "nan"], ["body_timeout_s", "nan", "at least 0.01"]),
        (["--keep-alive-timeout-s", "0.5"], ["keep_alive_timeout_s", "'0.5'", "whole number"]),
        (["--slow-reader-timeout-s", "x"], ["slow_reader_timeout_s", "'x'", "number"]),
        (["--shutdown-timeout-s", "9999"], ["shutdown_timeout_s", "9999", "at most 3600"]),
        (["--voice-alias", "anna"], ["voice_aliases", "'anna'", "NAME=VOICE"]),
        (["--model-alias", ""], ["model_aliases", "not empty"]),
        (["--reference-folder", "none"], ["reference_folder", "'none'", "a folder that is there"]),
        (["--api-key", ""], ["api_keys", "not empty"]),
        (["--log-format", "xml"], ["log_format", "'xml'", "text or json"]),
        (["--allowed-host", "http://a/"], ["allowed_hosts", "without scheme"]),
        (["--config", "none.yaml"], ["config", "none.yaml", "readable"]),
        (["--config", "list.yaml"], ["config", "list.yaml", "sections"]),
        (["--config", "section.yaml"], ["slots", "no such section", "engine, server"]),
        (["--config", "engine.yaml"], ["slot", "no such key", "slots"]),
        (["--config", "server.yaml"], ["keys", "no such key", "api_keys"]),
        (["--config", "twice.yaml"], ["config", "port is written twice"]),
        (["--config", "empty.yaml"], ["server", "keys and values"]),
        (["--config", "secret.yaml"], ["api_keys", "a list of strings"]),
    ],
)
def test_bad_configuration_is_refused_in_one_line(sonoro: Run, arguments: list[str], words: list[str]) -> None:
    for name, text in {
        "list": "[1]",
        "section": "slots: 4",
        "engine": "engine: {slot: 4}",
        "server": "server: {keys: [a]}",
        "twice": "server: {port: 1, port: 2}",
        "empty": "server: [1]",
        "secret": "server: {api_keys: [1, hush]}",
    }.items():
        Path(f"{name}.yaml").write_text(text)
    code, out, err = sonoro("serve", *arguments)
    assert_refused(code, out, err, words)
    assert "hush" not in err


def test_a_port_that_is_taken_is_named(sonoro: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert_refused(*sonoro("serve", "--port", port), ["port", port, "in use"])


def test_a_model_that_cannot_be_loaded_ends_the_server(sonoro: Run) -> None:
    code, out, err = sonoro("serve", "none/of/these", "--port", "0")
    assert (code, err.count("\n")) == (2, 1)
    assert "none/of/these" in err
    assert "listening on http://127.0.0.1:" in out


def test_every_field_has_a_flag_that_is_described() -> None:
    flags = set(inspect.signature(serve).parameters)
    page = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    for field in dataclasses.fields(ServerConfig):
        name = field.metadata["flag"] or field.name
        assert name in flags
        assert re.search(rf"`--{name.replace('_', '-')}[ `]", page), name


def test_a_server_is_alive_at_once_speaks_and_ends_with_what_is_under_way(tmp_path: Path) -> None:
    (tmp_path / "sonoro.yaml").write_text(
        "engine: {slots: 2}\nserver: {api_keys: [], voice_aliases: {anna: clara}, max_queue_wait_ms: 9000}\n"
    )
    flags = "--config sonoro.yaml --api-key hush --slots 3 --eager --voice-alias bo=rowan --head-timeout-s 3.5"
    folders = "--reference-folder . --allow-reference-urls"
    with server(tmp_path, *flags.split(), *folders.split()) as (process, printed, url):
        with httpx.Client(
            base_url=url, trust_env=False, timeout=GUARD_S, headers={"authorization": "Bearer hush"}
        ) as http:
            assert http.get("/health").status_code == 200
            assert printed.count("\n") == 1
            while (ready := http.get("/ready")).status_code != 200:
                assert ready.status_code == 503
                time.sleep(0.1)
            body = {"input": "Hello there, this is spoken.", "voice": "bo", "response_format": "pcm"}
            with http.stream("POST", "/v1/audio/speech", json=body) as answer:
                assert answer.headers["x-sample-rate"] == "24000"
                parts = answer.iter_raw()
                heard = next(parts)
                # As systemd does: to the server and to its engine, which is in a group of its own.
                (engine,) = children(process.pid)
                for each in (engine, process.pid):
                    os.kill(each, signal.SIGTERM)
                heard += b"".join(parts)
        assert len(heard) > 24000
        assert process.wait(GUARD_S) == -signal.SIGTERM
        assert process.stderr.read() == ""


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("number", "code", "told"), [(signal.SIGINT, 130, "error: interrupted\n"), (signal.SIGTERM, -signal.SIGTERM, "")]
)
def test_a_server_that_is_ended_while_it_starts_leaves_no_engine(
    tmp_path: Path, number: int, code: int, told: str
) -> None:
    """Its engine is begun before it can serve."""
    with server(tmp_path) as (process, _, _):
        while not (begun := children(process.pid)):
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait(GUARD_S) == code
        assert not any(map(parent_of, begun))
        assert process.stderr.read() == told


def test_what_was_decided_is_printed_on_demand(sonoro: Run) -> None:
    Path("sonoro.yaml").write_text(
        "engine: {slots: 2}\nserver: {api_keys: [], voice_aliases: {anna: clara}, max_queue_wait_ms: 9000}\n"
    )
    flags = "--config sonoro.yaml --api-key hush --slots 3 --eager --voice-alias bo=rowan --head-timeout-s 3.5"
    folders = "--reference-folder . --allow-reference-urls --allowed-host speech.example --log-format json"
    code, printed, err = sonoro("serve", "--print-config", *flags.split(), *folders.split())
    assert (code, err) == (0, "")
    assert "listening" not in printed
    resolved = yaml.safe_load(printed)
    assert resolved["engine"]["slots"] == resolved["server"]["max_concurrency"] == 3
    assert resolved["server"]["max_queue_wait_ms"] == 9000
    assert resolved["engine"]["is_eager"] is resolved["server"]["allow_reference_urls"] is True
    assert resolved["server"]["voice_aliases"] == {"bo": "rowan"}
    assert resolved["server"]["head_timeout_s"] == 3.5
    assert resolved["server"]["reference_folder"] == "."
    assert (resolved["server"]["allowed_hosts"], resolved["server"]["log_format"]) == (["speech.example"], "json")
    assert "hush" not in printed


@pytest.mark.parametrize(
    ("section", "flags", "expected"),
    [
        ("", "", True),
        ("slots: 2", "", True),
        ("is_ready_early: false", "", False),
        ("is_ready_early: false", "--ready-early", True),
        ("is_ready_early: true", "--no-ready-early", False),
    ],
)
def test_an_option_is_over_the_file_and_the_file_over_the_default(
    sonoro: Run, section: str, flags: str, expected: bool
) -> None:
    Path("sonoro.yaml").write_text(f"engine: {{{section}}}\n")
    code, printed, err = sonoro("serve", "--print-config", "--config", "sonoro.yaml", *flags.split())
    assert (code, err) == (0, "")
    assert yaml.safe_load(printed)["engine"]["is_ready_early"] is expected


def test_the_log_has_a_line_for_each_request_as_json_on_demand(tmp_path: Path) -> None:
    flags = ("--slots", "1", "--eager", "--log-format", "json", "--api-key", "hush")
    with server(tmp_path, *flags, log_level="INFO") as (process, _, url):
        with httpx.Client(base_url=url, trust_env=False, timeout=GUARD_S) as http:
            while http.get("/ready").status_code != 200:
                time.sleep(0.1)
            headers = {"authorization": "Bearer hush", "x-request-id": "job-1"}
            body = {"input": "A confidential text.", "response_format": "pcm"}
            heard = http.post("/v1/audio/speech", json=body, headers=headers).content
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=GUARD_S)
    assert "confidential" not in err
    assert "hush" not in err
    lines = [json.loads(line) for line in err.splitlines()]
    assert all({"time", "level", "event"} <= line.keys() for line in lines)
    (line,) = (line for line in lines if line["event"] == "ready")
    assert [name for name in line if name.endswith("_s")] == ["ready_s", *(f"{name}_s" for name in PHASES)]
    (line,) = (line for line in lines if line["event"] == "request")
    known = {"level": "INFO", "id": "job-1", "method": "POST", "path": "/v1/audio/speech", "status": 200}
    assert known.items() <= line.items()
    assert (line["reason"], line["characters"], len(line["key"])) == ("stop", 20, 8)
    assert line["audio_s"] == pytest.approx(len(heard) / 48000, abs=0.01)
    assert 0 < line["first_packet_ms"] <= line["total_ms"]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server that is ready."""
    with server(tmp_path_factory.mktemp("served"), "--slots", "6") as (process, _, url):
        while httpx.get(f"{url}/ready", trust_env=False, timeout=GUARD_S).status_code != 200:
            time.sleep(0.1)
        yield url
        process.send_signal(signal.SIGTERM)
        process.wait(GUARD_S)


def test_the_examples_run_as_they_are(address: str, tmp_path: Path) -> None:
    for command in (["sh", EXAMPLES / "speech.sh"], [sys.executable, EXAMPLES / "speech_openai.py"]):
        subprocess.run([*command, address], cwd=tmp_path, check=True, timeout=60)
    assert soundfile.info(tmp_path / "hello.mp3").samplerate == 24000
    assert (tmp_path / "hello.wav").read_bytes()[:4] == b"RIFF"
    assert min((tmp_path / name).stat().st_size for name in ("hello.pcm", "hello.wav")) > 24000


def test_the_official_client_gets_six_formats_while_they_are_made_and_whole(address: str) -> None:
    """From the built-in voice: the engine is still at work when the first bytes are here."""
    text, formats = "The birch canoe slid on the smooth planks.", ("mp3", "opus", "aac", "flac", "wav", "pcm")
    asked: dict[str, Any] = {"model": "gpt-4o-mini-tts", "voice": "coral"}
    with (
        httpx.Client(base_url=address, trust_env=False, timeout=GUARD_S) as http,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
        ThreadPoolExecutor() as pool,
    ):
        for format in formats:
            create = client.audio.speech.with_streaming_response.create
            with create(input=text, response_format=format, **asked) as answer:
                parts = answer.iter_bytes()
                first = next(parts)
                assert 'sonoro_engine_running{replica="0"} 1.0' in http.get("/metrics").text, format
                streamed = first + b"".join(parts)
            assert seconds(streamed, format) > 1.5, format
        # Whole, all at once.
        whole = partial(client.audio.speech.create, input="Hello.", **asked)
        answers = pool.map(lambda format: whole(response_format=format).content, formats)
        for format, answered in zip(formats, answers, strict=True):
            assert 1.5 > seconds(answered, format) > 0.2, format


def seconds(audio: bytes, format: str) -> float:
    """How long `audio` plays."""
    if format == "pcm":
        return len(audio) / 48000
    with av.open(io.BytesIO(audio), format={"opus": "ogg"}.get(format, format)) as file:
        return sum(frame.samples / frame.sample_rate for frame in file.decode(audio=0))
