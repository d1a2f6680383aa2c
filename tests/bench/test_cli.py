"""`sonoro bench serve`: it measures a server, compares, draws, and refuses bad input in one line."""

import json
from pathlib import Path

import pytest

from command_line import Run, assert_refused, sonoro
from speech_server import Answer, served, tone

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
        (["--compare", "a.json", "b.json"], ["compare", "a.json", "readable"]),
        (["--compare", "a.json", "a.json"], ["compare", "a.json"]),
    ],
)
def test_bad_input_is_refused_in_one_line(sonoro: Run, arguments: list[str], words: list[str]) -> None:
    assert_refused(*sonoro("bench", "serve", *arguments), words)


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
