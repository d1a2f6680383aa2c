"""Load on a server whose delays are known: open and closed loop, refusals, broken streams, no answer at all.

Times heard over a real connection are at least those scripted; how much more depends on the machine.
"""

import itertools
import json
import logging
import multiprocessing
import time
from pathlib import Path

import pytest
from processes import GUARD_S
from servers import RATE, Answer, ScriptedServer, served, tone

from sonoro.bench.client import Target
from sonoro.bench.dataset import Prompt, Recording
from sonoro.bench.level import Ask, arrivals, asks
from sonoro.bench.load import ServeBench, run
from sonoro.bench.machine import processor
from sonoro.bench.official import OfficialClient
from sonoro.core.errors import ConfigError, EngineError, OutputError

QUICK = Answer([(0.01, tone(0.2)), (0.01, tone(0.2))])


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def bench(server: ScriptedServer, **fields: object) -> ServeBench:
    target = {name: fields.pop(name) for name in tuple(fields) if name in Target.__dataclass_fields__}
    return ServeBench(Target(server.url, **target), **{"duration_s": (0.5,), "warm_up_s": 0.1, **fields})


def test_delays_of_a_server_are_the_times_that_are_heard() -> None:
    # First byte at 50 ms, first sample at 80, of which 100 ms are silent; then a gap: played until 280, next at 2480.
    # A busy machine may take two seconds for the first sample, and it is a gap still.
    first = tone(0.2, silence_s=0.1)
    with served(Answer([(0.05, first[:1]), (0.03, first[1:]), (2.4, tone(0.3))])) as server:
        began_s = time.perf_counter()
        (row,) = run(bench(server, concurrency=(2,), duration_s=(0.7,), warm_up_s=0.0))["rows"]
        took_ms = 1000 * (time.perf_counter() - began_s)
    assert (row["mode"], row["concurrency"], row["failed"], row["peak_in_flight"]) == ("closed", 2, 0, 2)
    assert 2 == row["requests"] == row["succeeded"] == row["underruns"] == row["requests_underrun"]
    for name, expected_ms in (("ttfb", 50), ("ttfp", 80), ("ttfa", 180), ("e2e", 2480)):
        assert expected_ms <= row[f"{name}_p50_ms"] < took_ms
    assert row["leading_silence_p50_ms"] == 100
    assert row["gaps_50ms"] == row["gaps_100ms"] == row["requests"]
    assert row["continuity"] == 0
    assert row["audio_s_p50"] == 0.5
    assert row["rtf_mean"] == pytest.approx(row["e2e_mean_ms"] / 500, rel=1e-3)


def test_an_open_loop_does_not_wait_for_answers() -> None:
    slow = Answer([(0.4, tone(0.1))])
    with served(slow) as server:
        (row,) = run(bench(server, rps=(40,)))["rows"]
    sent = len(tuple(arrivals(40, 0.5, "0/rps/40/arrivals")))
    assert (row["mode"], row["rps"], row["requests"], row["succeeded"]) == ("open", 40, sent, sent)
    assert row["peak_in_flight"] > 5
    assert row["underruns"] == 0


def test_the_same_seed_sends_the_same_requests() -> None:
    def sent(seed: int) -> list[tuple[str, int]]:
        with served(QUICK) as server:
            run(bench(server, rps=(30,), frames=(3, 9), seed=seed))
            # Two that are due almost at once may arrive in either order.
            return sorted((body["input"], body["max_new_tokens"]) for body in server.bodies)

    first, again, other = sent(1), sent(1), sent(2)
    assert first == again != other
    assert {frames for _, frames in first} <= set(range(3, 10))


@pytest.mark.parametrize(("load", "count"), [({"rps": (2,)}, 3), ({"concurrency": (4,)}, 4)])
def test_several_processes_send_what_one_would(
    monkeypatch: pytest.MonkeyPatch, load: dict[str, object], count: int
) -> None:
    # What is sent after the end of its level does not count: there is time to be late.
    monkeypatch.setattr("sonoro.bench.load.LEAD_S", 2.0)

    def sent(processes: int) -> tuple[list[tuple[str, int]], dict[str, object]]:
        # After a first request, which counts for nothing, each is answered when all have come and the level has ended:
        # all are in flight at once, and each client of the closed loop sends one.
        with served(lambda number: Answer([(2.1, tone(0.1))], after=min(number, 1) * (count + 1))) as server:
            (row,) = run(bench(server, **load, frames=(3, 9), processes=processes, duration_s=(2.0,), warm_up_s=0))[
                "rows"
            ]
            return sorted((body["input"], body["max_new_tokens"]) for body in server.bodies), row

    (one, row), (three, shared) = sent(1), sent(3)
    assert one == three
    assert (row["processes"], shared["processes"]) == (1, 3)
    for name in ("requests", "succeeded", "failed", "mode"):
        assert row[name] == shared[name]
    # Those of all processes at once, on one clock.
    assert shared["peak_in_flight"] == row["peak_in_flight"] == row["requests"] == count
    assert shared["lag_p95_ms"] is not None
    assert not multiprocessing.active_children()


def test_processes_are_chosen_by_load_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    def shares(cores: int, **load: object) -> list[int]:
        monkeypatch.setattr("sonoro.bench.load.usable_cores", lambda: cores)
        made = ServeBench(Target("http://h"), **load)
        return [made.shares(level) for level in made.loads]

    assert shares(2, concurrency=(1, 256)) == [1, 1]
    assert shares(16, concurrency=(1, 64, 65, 256, 1024)) == [1, 1, 2, 4, 4]
    assert shares(16, rps=(0.5, 100, 320)) == [1, 1, 4]
    assert shares(2, rps=(0.5,), processes=3) == [3]


def test_a_process_that_dies_is_an_error_at_once() -> None:
    def kill(number: int) -> Answer:
        if number == 1:
            multiprocessing.active_children()[0].kill()
        return QUICK

    with served(kill) as server, pytest.raises(EngineError, match=r"client process \d of 2 ended with code -9"):
        run(bench(server, concurrency=(2,), processes=2, duration_s=(60,)))
    assert not multiprocessing.active_children()


def test_openais_client_hears_what_ours_does() -> None:
    answer = Answer([(0.05, tone(0.3)), (0.01, tone(0.3))])
    with served(lambda number: Answer(status=429) if number == 5 else answer) as server:
        made = {"frames": (5, 5), "extra": {"stream": True}, "api_key": "secret", "duration_s": (0.6,)}
        (row,) = run(bench(server, concurrency=(2,), speaker=OfficialClient, **made))["rows"]
        assert server.headers[0]["authorization"] == "Bearer secret"
        assert server.bodies[0] | {"input": ""} == {
            **{"model": "spoken", "input": "", "voice": "alloy", "response_format": "pcm"},
            **{"max_new_tokens": 5, "ignore_eos": True, "stream": True},
        }
    assert (row["errors"], row["succeeded"], row["audio_s_p50"]) == ({"status 429": 1}, row["requests"] - 1, 0.6)
    assert row["ttfp_p50_ms"] >= 50


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Answer([(0.0, tone(0.1))], ending="broken"), "broken stream"),
        (Answer(ending="broken"), "APIConnectionError"),
        (Answer(ending="never"), "timeout"),
        (Answer(), "no audio"),
        (Answer([(0.0, b"{}")], headers={"Content-Type": "application/json"}), "application/json instead of pcm"),
        (Answer([(0.0, b"\1\2")], status=503), "status 503"),
    ],
)
def test_what_fails_through_openais_client_fails_by_name(answer: Answer, error: str) -> None:
    timeout_s = 0.3 if error == "timeout" else GUARD_S
    with served(answer) as server, pytest.raises(EngineError, match=f"{error}, at the first request"):
        run(bench(server, concurrency=(1,), timeout_s=timeout_s, speaker=OfficialClient))


def test_a_voice_is_cloned_with_each_request() -> None:
    Path("me.wav").write_bytes(b"RIFF")
    with served(QUICK) as server:
        made = bench(server, concurrency=(1,), ref="me.wav", ref_text="It is me.", duration_s=(0.1,), warm_up_s=0)
        values = run(made)
        assert {(body["ref_audio"].partition(",")[2], body["ref_text"]) for body in server.bodies} == {
            ("UklGRg==", "It is me.")
        }
    assert (values["settings"]["ref"], values["settings"]["ref_text"]) == ("me.wav", "It is me.")
    assert "UklGRg" not in json.dumps(values)


def test_what_the_server_says_of_itself_is_in_the_results_unless_told_otherwise() -> None:
    with served(QUICK) as server:
        listed = {"arm": "graph", "gpu": "a card", "torch": "2.0"}
        server.models = {"data": [{"id": "spoken", "facts": {**listed, "weather": "fine"}}]}
        values = run(bench(server, concurrency=(1,), facts={"torch": "3.0"}, duration_s=(0.1,), warm_up_s=0))
        assert (values["arm"], values["gpu"], values["torch"], values["cpu"]) == ("graph", "a card", "3.0", None)
        assert "weather" not in values
        server.models = {"data": [{"id": "spoken"}]}
        # It runs on this machine, without a GPU that it tells of.
        assert run(bench(server, concurrency=(1,), duration_s=(0.1,), warm_up_s=0))["cpu"] == processor()


@pytest.mark.parametrize("is_met", [True, False])
def test_an_overload_is_judged_by_what_was_before_it(is_met: bool) -> None:
    refusal = Answer(status=429 if is_met else 503)
    with served(lambda number: refusal if 15 < number < 40 and number % 3 == 0 else QUICK) as server:
        loads = {"rps": (10, 40, 10), "duration_s": (1.0, 1.5, 0.5)}
        values = run(bench(server, **loads, max_queue_wait_ms=100, out=Path("r.json")))
    verdict, (before, during, after) = values["verdict"], values["rows"]
    assert json.loads(Path("r.json").read_text()) == values
    assert verdict["failed_but_429"] == [0 if is_met else during["failed"], 0]
    assert (before["failed"], after["failed"]) == (0, 0)
    assert verdict["accepted"] == during["succeeded"]


def test_arrivals_are_a_poisson_process_of_their_seed() -> None:
    times = list(arrivals(20, 500, "a"))
    assert times == list(arrivals(20, 500, "a")) != list(arrivals(20, 500, "b"))
    assert times == sorted(times)
    assert 0 < times[0] <= times[-1] < 500
    # 10000 expected with a deviation of 100; gaps of an exponential have their mean as deviation.
    assert abs(len(times) - 10000) < 400
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.04)
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(1 / 20, rel=0.05)


def test_requests_speak_openais_dialect_and_whatever_else_is_asked() -> None:
    target = Target("http://h", extra={"stream": True, "voice": "x", "response_format": None})
    assert Ask(Prompt("Hi."), None).body("m", Target("http://h")) == {
        "model": "m",
        "input": "Hi.",
        "voice": "alloy",
        "response_format": "pcm",
    }
    assert Ask(Prompt("Hi."), 40).body("m", target) == {
        **{"model": "m", "input": "Hi.", "voice": "x", "stream": True, "max_new_tokens": 40, "ignore_eos": True}
    }
    assert next(asks((Prompt("a"),), (7, 7), "")) == Ask(Prompt("a"), 7)
    Path("a.wav").write_bytes(b"RIFF")
    body = Ask(Prompt("Hi.", Recording(Path("a.wav"), None, x_vector_only=True)), None).body("m", Target("http://h"))
    assert (body["ref_audio"].partition(",")[2], body["x_vector_only_mode"], "ref_text" in body) == (
        *("UklGRg==", True, False),
    )


def test_headers_paths_and_the_model_are_those_of_the_server() -> None:
    with served(QUICK) as server:
        values = run(bench(server, concurrency=(1,), api_key="secret", duration_s=(0.1,), warm_up_s=0))
        assert values["model"] == server.bodies[0]["model"] == "spoken"
        assert set(server.paths) == {"/v1/models", "/v1/audio/speech"}
        assert server.headers[0]["authorization"] == "Bearer secret"
        assert server.headers[0]["accept-encoding"] == "identity"
        assert "secret" not in json.dumps(values)
        server.paths.clear()
        for url in (f"{server.url}/other/v2", f"{server.url}/other/v2/audio/speech"):
            made = ServeBench(Target(url, model="m"), concurrency=(1,), duration_s=(0.05,), warm_up_s=0)
            assert run(made)["model"] == "m"
        assert set(server.paths) == {"/other/v2/audio/speech"}


def test_refusals_are_counted_and_do_not_stop_the_others() -> None:
    refusal = Answer(status=429, parts=[(0.0, b"{}")])
    with served(lambda number: refusal if number % 3 == 2 else QUICK) as server:
        (row,) = run(bench(server, rps=(60,)))["rows"]
    assert row["failed"] == row["errors"]["status 429"] > 0
    assert row["succeeded"] == row["requests"] - row["failed"] > row["failed"]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Answer([(0.0, tone(0.1))], ending="broken"), "broken stream"),
        (Answer(ending="broken"), "connection closed"),
        (Answer(ending="never"), "timeout"),
        (Answer([(0.0, tone(0.1))], ending="never"), "timeout"),
        (Answer(), "no audio"),
        (Answer([(0.0, b"\1\2\3")]), "ended inside a sample"),
        (Answer([(0.0, b"ID3")], headers={"Content-Type": "audio/mpeg"}), "audio/mpeg instead of pcm"),
        (Answer([(0.0, b"{}")], headers={"Content-Type": "application/json"}), "application/json instead of pcm"),
        (Answer([(0.0, b"\1\2")], headers={"X-Sample-Rate": "-8"}), "X-Sample-Rate is not a rate"),
        (Answer([(0.0, b"\1\2")], status=503), "status 503"),
    ],
)
def test_an_answer_that_is_no_whole_speech_is_a_failure_by_name(answer: Answer, error: str) -> None:
    with served(lambda number: QUICK if number == 0 else answer) as server:
        limits = {"timeout_s": 1.0 if error == "timeout" else GUARD_S, "duration_s": (0.3,)}
        failing = bench(server, concurrency=(1,), warm_up_s=0, out=Path("r.json"), **limits)
        with pytest.raises(EngineError, match="closed loop at 1: every request failed"):
            run(failing)
    (row,) = json.loads(Path("r.json").read_text())["rows"]
    assert list(row["errors"]) == [error]
    assert (row["succeeded"], row["ttfp_p95_ms"]) == (0, None)


def test_a_closed_loop_is_not_a_storm_when_it_is_refused() -> None:
    with served(lambda number: QUICK if number == 0 else Answer(status=429)) as server:
        with pytest.raises(EngineError):
            run(bench(server, concurrency=(2,), duration_s=(0.6,), warm_up_s=0))
        assert len(server.bodies) - 1 <= 2 * 3


def test_the_rate_of_an_answer_that_names_none_is_an_option() -> None:
    with served(Answer([(0.0, tone(0.2))], headers={})) as server:
        values = run(bench(server, concurrency=(1,), sample_rate=2 * RATE, duration_s=(0.1,), warm_up_s=0))
    assert (values["sample_rate"], values["rows"][0]["audio_s_p50"]) == (2 * RATE, 0.1)


def test_a_server_that_does_not_answer_is_told_before_anything_is_measured() -> None:
    began_s = time.perf_counter()
    with served(Answer(ending="never")) as server, pytest.raises(EngineError, match=r"timeout, at the first request"):
        run(bench(server, concurrency=(1,), timeout_s=0.2, duration_s=(10 * GUARD_S,)))
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9/v1/models"):
        run(ServeBench(Target("http://127.0.0.1:9"), concurrency=(1,)))
    with served(QUICK) as server:
        server.models = {"data": []}
        with pytest.raises(EngineError, match="lists no model; give one"):
            run(bench(server, concurrency=(1,)))
    assert time.perf_counter() - began_s < GUARD_S


@pytest.mark.parametrize("load", [{"rps": (20,)}, {"concurrency": (1,)}])
def test_a_client_that_sends_late_is_warned_of(
    load: dict[str, object], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sonoro.bench.load.MAX_LAG_MS", 0.0)
    with served(QUICK) as server, caplog.at_level(logging.WARNING):
        (row,) = run(bench(server, **load))["rows"]
    assert row["lag_p95_ms"] > 0
    assert [record.message for record in caplog.records if "sent late" in record.message]


def test_many_clients_do_not_wait_for_each_other() -> None:
    # A pool that looks at every connection for every request delays them by seconds at this size.
    with served(Answer([(0.2, tone(0.1))])) as server:
        (row,) = run(bench(server, concurrency=(128,), duration_s=(1.0,), warm_up_s=0.5))["rows"]
    assert row["peak_in_flight"] > 64
    assert row["succeeded"] == row["requests"] > 128


def test_results_are_on_disk_and_name_settings_and_the_servers_side() -> None:
    out = Path("r.json")
    with served(QUICK) as server:
        facts = {"arm": "graph", "gpu": "a card"}
        values = run(bench(server, concurrency=(1, 2), frames=(3, 4), facts=facts, out=out, commit="abc"))
    assert json.loads(out.read_text()) == values
    assert [row["concurrency"] for row in values["rows"]] == [1, 2]
    assert (values["bench"], values["arm"], values["gpu"], values["torch"]) == ("serve", "graph", "a card", None)
    assert (values["commit"], values["sample_rate"]) == ("abc", RATE)
    assert values["settings"]["frames"] == [3, 4]
    with served(QUICK) as server, pytest.raises(OutputError, match=r"none/r\.json"):
        run(bench(server, concurrency=(1,), out=Path("none/r.json")))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "rps: .* either rps or concurrency"),
        ({"rps": (1.0,), "concurrency": (1,)}, "either rps or concurrency"),
        ({"rps": (1.0, 0.0)}, "rps: .* above 0"),
        ({"rps": (float("nan"),)}, "rps: .* above 0"),
        ({"concurrency": (1, 0)}, "concurrency: .* at least 1"),
        ({"concurrency": (1,), "duration_s": (0.0,)}, "duration_s"),
        ({"concurrency": (1, 2, 3), "duration_s": (1.0, 2.0)}, "duration_s"),
        ({"concurrency": (1,), "warm_up_s": -1.0}, "warm_up_s"),
        ({"concurrency": (1,), "frames": (9, 3)}, "frames: .* ascend"),
        ({"concurrency": (1,), "processes": -1}, "processes: -1 .* 0 to 256"),
        ({"rps": (1.0, 2.0), "max_queue_wait_ms": 5.0}, "overload: 5.0 .* three rates"),
        ({"concurrency": (1, 2, 3), "max_queue_wait_ms": 5.0}, "overload: 5.0 .* three rates"),
        ({"concurrency": (1,), "facts": {"weather": "fine"}}, "facts: 'weather' .* arm, gpu, cpu, driver"),
    ],
)
def test_bad_settings_are_refused_by_name(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServeBench(Target("http://localhost"), **fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"url": "localhost:8000"}, "url: 'localhost:8000'"),
        ({"url": "http://"}, "url"),
        ({"url": "http://[::1"}, "url"),
        ({"url": "http://h:99999999"}, "url"),
        ({"url": "http://h:0"}, "url"),
        ({"url": "http://me:word@h"}, "url: .* user"),
        ({"url": "http://h/v1?a=b"}, "url: .* query"),
        ({"url": "http://h/ v1"}, "url: .* no space"),
        ({"url": "http://h/v1\r\nX: y"}, "url"),
        ({"sample_rate": 0}, "sample_rate"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"api_key": "a\nb"}, "api_key"),
    ],
)
def test_bad_targets_are_refused_by_name_and_keys_not_shown(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        Target(**{"url": "http://h", **fields})
    assert "a\\nb" not in str(refused.value)
