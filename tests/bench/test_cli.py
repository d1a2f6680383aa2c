"""`sonoro bench serve` and `live`: they measure a server, compare, draw, and refuse bad input in one line."""

import json
from pathlib import Path

import pytest
from processes import Run, assert_refused, sonoro
from servers import Answer, served, tone

__all__ = ["sonoro"]

URL = ("--url", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--concurrency", "1"], ["url", "--compare"]),
        ([*URL], ["rps", "either rps or concurrency"]),
        ([*URL, "--rps", "1,x"], ["rps", "'1,x'", "between commas"]),
        ([*URL, "--rps", "1,-2"], ["rps", "above 0"]),
        ([*URL, "--concurrency", "1.5"], ["concurrency", "'1.5'", "between commas"]),
        ([*URL, "--concurrency", "1", "--frames", "90-30"], ["frames", "(90, 30)", "ascend"]),
        ([*URL, "--concurrency", "1", "--frames", "x"], ["frames", "'x'", "around a dash"]),
        ([*URL, "--concurrency", "1", "--extra", "{"], ["extra", "'{'", "JSON"]),
        ([*URL, "--concurrency", "1", "--extra", "[1]"], ["extra", "'[1]'", "JSON object"]),
        ([*URL, "--concurrency", "1", "--facts", '{"a": 1}'], ["facts", "'a'", "arm, gpu"]),
        ([*URL, "--concurrency", "1", "--dataset", "none"], ["dataset", "'none'"]),
        ([*URL, "--concurrency", "1", "--duration", "x"], ["duration", "'x'", "number"]),
        ([*URL, "--concurrency", "1", "--plot", "r.picture"], ["r.picture", "suffix"]),
        (["--url", "here", "--concurrency", "1"], ["url", "'here'", "http://"]),
        ([*URL, "--concurrency", "1", "--clients", "curl"], ["clients", "'curl'", "raw or openai"]),
        ([*URL, "--concurrency", "1", "--processes", "1.5"], ["processes", "'1.5'", "whole number"]),
        ([*URL, "--concurrency", "1", "--processes", "999"], ["processes", "999", "256"]),
        ([*URL, "--rps", "1,2", "--overload", "5000"], ["overload", "5000", "three rates"]),
        ([*URL, "--concurrency", "1", "--ref", "none.wav"], ["ref", "'none.wav'", "readable audio"]),
        ([*URL, "--concurrency", "1", "--ref-text", "Hm."], ["ref_text", "'Hm.'", "ref"]),
        ([*URL, "--concurrency", "1", "-o", "none/r.json"], ["none/r.json", "No such file or directory"]),
        ([*URL, "--concurrency", "1", "-o", "."], [".", "Is a directory"]),
        (["--compare", "a.json", "b.json"], ["compare", "a.json", "readable"]),
        (["--compare", "a.json", "a.json"], ["compare", "a.json"]),
    ],
)
def test_bad_input_is_refused_in_one_line(sonoro: Run, arguments: list[str], words: list[str]) -> None:
    assert_refused(*sonoro("bench", "serve", *arguments), words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*URL, "--word-ms", "x"], ["word_ms", "'x'", "number"]),
        ([*URL, "--requests", "0"], ["requests", "0", "at least 1"]),
        ([*URL, "--frames", "x"], ["frames", "'x'", "around a dash"]),
        ([*URL, "-o", "none/r.json"], ["none/r.json", "No such file or directory"]),
        (["--url", "here"], ["url", "'here'", "http://"]),
        ([], ["--url"]),
    ],
)
def test_bad_input_of_live_text_is_refused_in_one_line(sonoro: Run, arguments: list[str], words: list[str]) -> None:
    assert_refused(*sonoro("bench", "live", *arguments), words)


def test_where_no_results_can_be_written_nothing_is_sent(sonoro: Run) -> None:
    with served(Answer([(0.0, tone(0.1))])) as server:
        sonoro("bench", "serve", "--url", server.url, "--concurrency", "1", "-o", "none/r.json")
        assert server.paths == []
    # Nor is a file left where there was none, or an older one touched.
    Path("old.json").write_text("{}")
    for name in ("new.json", "old.json"):
        assert sonoro("bench", "serve", *URL, "--concurrency", "1", "-o", name)[0] == 1
    assert [path.name for path in Path().iterdir()] == ["old.json"]
    assert Path("old.json").read_text() == "{}"


@pytest.mark.parametrize(("status", "expected"), [(429, 0), (503, 1)])
def test_the_exit_code_tells_whether_an_overload_was_stood(sonoro: Run, status: int, expected: int) -> None:
    quick = Answer([(0.01, tone(0.2))])
    with served(lambda number: Answer(status=status) if 20 < number < 30 else quick) as server:
        code, out, err = sonoro(
            *("bench", "serve", "--url", server.url, "--rps", "15,60,15", "--overload", "1000"),
            *("--duration", "1", "--warm-up", "0", "--seed", "1", "--timeout", "5"),
        )
    verdict = json.loads(out.splitlines()[-1])["verdict"]
    # A recovery to within a fifth is a matter of how busy this machine is.
    assert verdict["failed_but_429"] == [9 * expected, 0]
    assert code == (not verdict["is_met"])
    assert ("overload: a figure is beyond its limit" in err) == bool(code)
    assert code >= expected


def test_it_clones_through_several_processes_and_openais_client(sonoro: Run) -> None:
    Path("lines").mkdir()
    Path("lines/me.wav").write_bytes(b"RIFF")
    Path("lines/meta.lst").write_text("a|It is me.|me.wav|Say this.\n")
    with served(Answer([(0.02, tone(0.3))])) as server:
        code, out, _ = sonoro(
            *("bench", "serve", "--url", server.url, "--concurrency", "2", "--duration", "0.3", "--warm-up", "0"),
            *("--dataset", "lines/meta.lst", "--ref", "list", "--x-vector-only"),
            *("--clients", "openai", "--processes", "2"),
        )
        assert {(body["input"], body["ref_text"], body["x_vector_only_mode"]) for body in server.bodies} == {
            ("Say this.", "It is me.", True)
        }
        assert all(headers["user-agent"].startswith("AsyncOpenAI") for headers in server.headers)
    values = json.loads(out.splitlines()[-1])
    assert code == 0
    assert (values["settings"]["clients"], values["rows"][0]["processes"]) == ("openai", 2)


def test_a_server_that_is_not_there_is_a_failure_in_one_line(sonoro: Run) -> None:
    code, _, err = sonoro("bench", "serve", *URL, "--concurrency", "1")
    assert (code, err.count("\n")) == (1, 1)
    assert "http://127.0.0.1:9/v1/models" in err


def test_it_measures_draws_and_compares(sonoro: Run) -> None:
    Path("meta.lst").write_text("a|b|c.wav|Say this.\n")
    answer = Answer([(0.02, tone(0.3)), (0.01, tone(0.3))])
    with served(answer) as server:
        for name in ("a", "b"):
            code, out, err = sonoro(
                *("bench", "serve", "--url", server.url, "--concurrency", "1,2", "--duration", "0.3"),
                *("--warm-up", "0.1", "--dataset", "meta.lst", "--voice", "low", "--frames", "5", "--seed", "3"),
                *("--extra", '{"stream": true}', "--facts", '{"gpu": "a card"}', "--timeout", "5"),
                *("-o", f"{name}.json", "--plot", f"{name}.png"),
            )
            assert code == 0
            # A busy machine may send late, and says so.
            assert all("sent late" in line for line in err.splitlines())
        asked = server.bodies[-1]
    assert asked == {
        **{"model": "spoken", "input": "Say this.", "voice": "low", "response_format": "pcm"},
        **{"max_new_tokens": 5, "ignore_eos": True, "stream": True},
    }
    values = json.loads(out.splitlines()[-1])
    assert values == json.loads(Path("b.json").read_text())
    assert [(row["mode"], row["concurrency"]) for row in values["rows"]] == [("closed", 1), ("closed", 2)]
    assert all(row["failed"] == 0 and row["ttfp_p50_ms"] >= 20 for row in values["rows"])
    assert values["gpu"] == "a card"
    assert Path("b.png").read_bytes().startswith(b"\x89PNG")

    code, out, err = sonoro("bench", "serve", "--compare", "a.json", "b.json", "--plot", "both.svg")
    assert (code, err) == (0, "")
    comparison = json.loads(out.splitlines()[-1])
    assert [row["concurrency"] for row in comparison["improved_pct"]] == [1, 2]
    drawn = Path("both.svg").read_text()
    assert "<!-- a p50 -->" in drawn
    assert "<!-- b p50 -->" in drawn
