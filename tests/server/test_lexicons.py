"""Registered lexicons: by name, version and key, at the native routes and at those of ElevenLabs and Cartesia."""

import asyncio
import dataclasses
import errno
import os
from pathlib import Path
from typing import Any

import pytest
from servers import FRONTS, SETTINGS, Server, check_error, serving
from sessions import audio_of, session, socket
from sine_engines import nothing_left, run, until

from sonoro.core.errors import ConfigError
from sonoro.server.keys import UNKEYED
from sonoro.server.lexicons import MAX_VERSIONS, LexiconStore
from sonoro.text.script import lexicon_of
from sonoro.transport.fleet import Fleet

__all__ = ["nothing_left"]

pytestmark = pytest.mark.usefixtures("nothing_left")

SPEECH, LEXICONS = "/v1/audio/speech", "/v1/audio/lexicons"
DICTIONARIES = "/v1/pronunciation-dictionaries"
PLS = "<lexicon version='1.0'><lexeme><grapheme>SQL</grapheme><alias>sequel too</alias></lexeme></lexicon>"


async def letters(server: Server, text: str, **fields: Any) -> int:
    """How many letters are spoken of `text`."""
    sent = await server.http.post(SPEECH, json={"input": text, "response_format": "pcm", **fields})
    assert sent.status_code == 200, sent.text
    return len(sent.content) // 160


def test_a_lexicon_has_a_name_and_versions() -> None:
    async def ask() -> None:
        async with serving("shown") as server:
            first = (await server.http.post(LEXICONS, json={"name": "words", "rules": {"SQL": "sequel"}})).json()
            assert (first["name"], first["rules"], len(first["version"])) == ("words", 1, 64)
            second = (await server.http.post(LEXICONS, json={"name": "words", "content": "SQL=s q l\n# no\n"})).json()
            assert (second["id"], second["version"] == first["version"]) == (first["id"], False)
            assert await letters(server, "SQL", lexicons=["words"]) == 5
            assert await letters(server, "SQL", lexicons=[{"name": "words", "version": first["version"]}]) == 6
            assert await letters(server, "SQL", lexicons=[{"SQL": "x"}, "words"]) == 1
            assert [one["name"] for one in (await server.http.get(LEXICONS)).json()["lexicons"]] == ["words"]
            assert (await server.http.get(f"{LEXICONS}/words")).json()["version"] == second["version"]
            assert (await server.http.delete(f"{LEXICONS}/words")).status_code == 200
            refused = await server.http.post(SPEECH, json={"input": "SQL", "lexicons": ["words"]})
            check_error(refused, 404, "lexicons")

    run(ask())


def test_a_lexicon_belongs_to_its_key() -> None:
    settings = dataclasses.replace(SETTINGS, api_keys=("one", "two"), admin_keys=("all",))

    async def ask() -> None:
        async with serving("shown", settings) as server:
            one, two, everybody = ({"authorization": f"Bearer {key}"} for key in ("one", "two", "all"))
            body = {"name": "mine", "rules": {"SQL": "sequel"}}
            assert (await server.http.post(LEXICONS, json=body)).status_code == 401
            await server.http.post(LEXICONS, json=body, headers=one)
            await server.http.post(LEXICONS, json={**body, "name": "ours"}, headers=everybody)
            asked = {"input": "SQL", "lexicons": ["mine"]}
            assert (await server.http.post(SPEECH, json=asked, headers=one)).status_code == 200
            check_error(await server.http.post(SPEECH, json=asked, headers=two), 404, "lexicons")
            ours = {**asked, "lexicons": ["ours"]}
            assert (await server.http.post(SPEECH, json=ours, headers=two)).status_code == 200
            for headers, name in ((two, "mine"), (two, "ours")):
                assert (await server.http.delete(f"{LEXICONS}/{name}", headers=headers)).status_code == 404

    run(ask())


def test_a_file_of_the_servers_folder_has_a_name(tmp_path: Path) -> None:
    (tmp_path / "words.pls").write_text(PLS)
    (tmp_path.parent / "secret.txt").write_text("a=b")
    settings = dataclasses.replace(SETTINGS, reference_folder=str(tmp_path))

    async def ask() -> None:
        async with serving("shown", settings) as server:
            assert await letters(server, "SQL", lexicons=["words.pls"]) == 10
            (tmp_path / "words.pls").write_text(PLS.replace("sequel too", "sequel"))
            assert await letters(server, "SQL", lexicons=["words.pls"]) == 6
            for name in ("../secret.txt", "none.pls", "/etc/passwd"):
                refused = await server.http.post(SPEECH, json={"input": "SQL", "lexicons": [name]})
                check_error(refused, 404, "lexicons")

    run(ask())


@pytest.mark.parametrize(
    "body",
    [
        {"name": "a", "content": "[" * 100_000},
        {"name": "", "rules": {}},
        {"name": "a/b", "rules": {}},
        {"name": "a", "rules": [{"text": "x"}]},
        {"rules": []},
    ],
)
def test_what_is_no_lexicon_is_refused(body: dict[str, Any]) -> None:
    async def ask() -> None:
        async with serving("shown") as server:
            assert (await server.http.post(LEXICONS, json=body)).status_code == 400

    run(ask())


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({}, "rules"),
        ({"rules": {"": "x"}}, "rules"),
        ({"content": "no rule"}, "content"),
        ({"content": "SQL=sequel", "rules": {"SQL": "x"}}, "content"),
    ],
)
def test_a_refusal_names_the_field_that_was_sent(body: dict[str, Any], parameter: str) -> None:
    async def ask() -> None:
        async with serving("shown") as server:
            check_error(await server.http.post(LEXICONS, json={"name": "a", **body}), 400, parameter)

    run(ask())


def test_a_new_version_may_have_a_new_description() -> None:
    async def ask() -> None:
        async with serving("shown") as server:
            for given, shown in (({"description": "one"}, "one"), ({"description": "two"}, "two"), ({}, "two")):
                body = {"name": "words", "rules": {"SQL": shown}, **given}
                assert (await server.http.post(LEXICONS, json=body)).json()["description"] == shown
                [listed] = (await server.http.get(LEXICONS)).json()["lexicons"]
                assert listed["description"] == shown

    run(ask())


def test_one_name_that_is_registered_many_times_at_once_is_one_lexicon(tmp_path: Path) -> None:
    """So that nothing of it is left once it is deleted."""
    settings = dataclasses.replace(SETTINGS, lexicons_folder=str(tmp_path))

    async def ask() -> None:
        async with serving("shown", settings) as server:
            bodies = [{"name": "words", "rules": {"SQL": "x" * count}} for count in range(1, 7)]
            answers = await asyncio.gather(*(server.http.post(LEXICONS, json=body) for body in bodies))
            assert len({answer.json()["id"] for answer in answers}) == 1
            assert (await server.http.delete(f"{LEXICONS}/words")).status_code == 200
            assert (await server.http.get(LEXICONS)).json()["lexicons"] == []

    run(ask())


def test_what_is_not_read_yet_is_not_there_to_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lexicon that was registered while the engine started was lost with the memory that it was in until then."""
    settings = dataclasses.replace(SETTINGS, lexicons_folder=str(tmp_path))
    body = {"name": "words", "rules": {"SQL": "sequel"}}

    async def ask() -> None:
        may_start, start = asyncio.Event(), Fleet.start

        async def started(fleet: Fleet) -> None:
            await may_start.wait()
            await start(fleet)

        monkeypatch.setattr(Fleet, "start", started)
        async with serving("shown", settings, waits=False) as server:
            for answer in (
                await server.http.post(LEXICONS, json=body),
                await server.http.get(LEXICONS),
                await server.http.get(DICTIONARIES),
            ):
                assert answer.status_code == 503
                assert "retry-after" in answer.headers
            may_start.set()
            await until(server.is_ready)
            assert (await server.http.post(LEXICONS, json=body)).status_code == 200

    run(ask())


def test_servers_that_write_at_once_come_to_the_same_versions(tmp_path: Path) -> None:
    """Also of one name, beyond the number of versions, and in whatever order they read."""
    settings = dataclasses.replace(SETTINGS, lexicons_folder=str(tmp_path))

    async def write() -> None:
        stores = [LexiconStore(settings, 1) for _ in range(3)]
        for store in stores:
            await store.open()
        for turn in range(MAX_VERSIONS):
            for number, store in enumerate(stores):  # none has read what the others write in this turn
                alias = "same" if turn == 2 else f"{turn} {number}"
                await store.put(UNKEYED, lexicon_of({"SQL": alias}), "words", by_name=True)
            for store in stores[turn % 2 :: 2]:
                await store.refresh()
        for _ in range(2):
            for store in stores:
                await store.refresh()
        last = lexicon_of({"SQL": f"{MAX_VERSIONS - 1} 2"}).version
        for store in stores:
            [one] = store.of(UNKEYED)
            assert (one.newest.version, len(one.versions)) == (last, MAX_VERSIONS)
            assert sorted(one.files.values()) == sorted(path.name for path in tmp_path.iterdir())
        for store in stores:
            store.close()

    run(write())


def test_a_copy_in_the_folder_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is neither deleted nor taken for the newest version."""
    settings = dataclasses.replace(SETTINGS, lexicons_folder=str(tmp_path))

    async def open_store() -> LexiconStore:
        store = LexiconStore(settings, 1)
        await store.open()
        return store

    async def copy() -> None:
        store = await open_store()
        await store.put(UNKEYED, lexicon_of({"SQL": "sequel"}), "words", by_name=True)
        [file] = tmp_path.iterdir()
        copies = [tmp_path / f"copy of {file.name}", tmp_path / "zz.json", tmp_path / f"zz{file.name}"]
        for path in copies:
            path.write_bytes(file.read_bytes())
        for number in range(2):
            store.close()
            store = await open_store()
            last = await store.put(UNKEYED, lexicon_of({"SQL": str(number)}), "words", by_name=True)
            assert last.newest.rules[0].alias == str(number)
            assert len(last.versions) == number + 2
        assert all(path.exists() for path in (file, *copies))
        assert caplog.text.count("lexicon_passed_over") == 2 * len(copies)
        store.close()

    run(copy())


def test_a_lexicon_that_cannot_be_written_is_told_by_a_code_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def ask() -> None:
        async with serving("shown", dataclasses.replace(SETTINGS, lexicons_folder=str(tmp_path))) as server:
            body = {"name": "words", "rules": {"SQL": "sequel"}}
            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", is_full)
                answer = await server.http.post(LEXICONS, json=body)
            check_error(answer, 507)
            assert answer.json()["error"]["code"] == "storage"
            assert "No space left on device" in answer.json()["error"]["message"]
            assert (await server.http.get(LEXICONS)).json()["lexicons"] == []
            assert (await server.http.post(LEXICONS, json=body)).status_code == 200

    run(ask())


def test_elevenlabs_dictionaries_are_lexicons() -> None:
    async def ask() -> None:
        async with serving("shown") as server:
            rule = {"type": "alias", "string_to_replace": "SQL", "alias": "sequel"}
            made = (
                await server.http.post(f"{DICTIONARIES}/add-from-rules", json={"name": "a", "rules": [rule]})
            ).json()
            files = {"file": ("a.pls", PLS.encode())}
            other = await server.http.post(f"{DICTIONARIES}/add-from-file", data={"name": "b"}, files=files)
            assert other.json()["version_rules_num"] == 1
            listed = (await server.http.get(DICTIONARIES)).json()["pronunciation_dictionaries"]
            assert [one["name"] for one in listed] == ["a", "b"]
            path = f"{DICTIONARIES}/{made['id']}"
            more = {"rules": [{**rule, "string_to_replace": "XML", "alias": "x"}]}
            assert (await server.http.post(f"{path}/add-rules", json=more)).json()["version_rules_num"] == 2
            assert (await server.http.post(f"{path}/remove-rules", json={"rule_strings": ["SQL"]})).json()[
                "version_rules_num"
            ] == 1
            assert [one["string_to_replace"] for one in (await server.http.get(path)).json()["rules"]] == ["XML"]
            assert b"<alias>sequel</alias>" in (await server.http.get(f"{path}/{made['version_id']}/download")).content
            locator = {"pronunciation_dictionary_id": made["id"], "version_id": made["version_id"]}
            body = {"text": "SQL", "pronunciation_dictionary_locators": [locator]}
            sent = await server.http.post("/v1/text-to-speech/low?output_format=pcm_8000", json=body)
            assert len(sent.content) == 160 * 6
            body["pronunciation_dictionary_locators"] = [{"pronunciation_dictionary_id": "unknown"}]
            sent = await server.http.post("/v1/text-to-speech/low?output_format=pcm_8000", json=body)
            assert sent.status_code == 404
            async with socket(server, "/v1/text-to-speech/low/stream-input?output_format=pcm_8000") as client:
                await client.say({"text": " ", "pronunciation_dictionary_locators": [locator]})
                for text in ("S", "Q", "L", ""):
                    await client.say({"text": text})
                assert len(audio_of(await client.hear_until())) == 160 * 6
            async with socket(server, "/v1/text-to-speech/low/stream-input") as client:
                unknown = body["pronunciation_dictionary_locators"]
                await client.say({"text": " ", "pronunciation_dictionary_locators": unknown})
                assert "unknown" in (await client.hear_until())[-1]["message"]

    run(ask())


def test_no_change_of_a_dictionary_is_lost_to_another_at_the_same_time(tmp_path: Path) -> None:
    """Of rules, and of its name."""
    settings = dataclasses.replace(SETTINGS, lexicons_folder=str(tmp_path))

    def rule(text: str) -> dict[str, str]:
        return {"type": "alias", "string_to_replace": text, "alias": "x"}

    async def ask() -> None:
        if FRONTS:
            pytest.skip("a front may change what another has just changed")
        async with serving("shown", settings) as server:
            old, new = [f"OLD{number}" for number in range(4)], [f"NEW{number}" for number in range(4)]
            body = {"name": "a", "rules": [rule(text) for text in old]}
            made = (await server.http.post(f"{DICTIONARIES}/add-from-rules", json=body)).json()
            path = f"{DICTIONARIES}/{made['id']}"
            answers = await asyncio.gather(
                *(server.http.post(f"{path}/add-rules", json={"rules": [rule(text)]}) for text in new),
                *(server.http.post(f"{path}/remove-rules", json={"rule_strings": [text]}) for text in old[1:]),
                server.http.patch(path, json={"name": "b"}),
            )
            assert {answer.status_code for answer in answers} == {200}
            found = (await server.http.get(path)).json()
            assert {one["string_to_replace"] for one in found["rules"]} == {old[0], *new}
            assert found["name"] == "b"

    run(ask())


def test_cartesias_dictionaries_are_lexicons() -> None:
    async def ask() -> None:
        async with serving("shown") as server:
            body = {"name": "a", "items": [{"text": "sql", "pronunciation": "sequel"}]}
            made = (await server.http.post("/pronunciation-dicts/", json=body)).json()
            assert made["items"][0]["alias"] == "sequel"
            raw = {"container": "raw", "encoding": "pcm_s16le", "sample_rate": 8000}
            asked = {"transcript": "SQL", "output_format": raw, "pronunciation_dict_id": made["id"]}
            assert len((await server.http.post("/tts/bytes", json=asked)).content) == 160 * 6
            path = f"/pronunciation-dicts/{made['id']}"
            await server.http.patch(path, json={"items": [{"text": "sql", "alias": "x", "case_sensitive": True}]})
            assert len((await server.http.post("/tts/bytes", json=asked)).content) == 160 * 3
            assert len((await server.http.get("/pronunciation-dicts/")).json()["data"]) == 1
            rest = await server.http.get("/pronunciation-dicts/", params={"starting_after": made["id"]})
            assert rest.json()["data"] == []
            async with socket(server, "/tts/websocket?cartesia_version=2025-04-16") as client:
                said = {**asked, "context_id": "a", "model_id": "sonic-3"}
                for text in ("s", "ql"):
                    await client.say({**said, "transcript": text, "continue": text == "s"})
                assert len(audio_of(await client.hear_until(type="done"), "data")) == 160
            assert (await server.http.delete(path)).status_code == 204
            assert (await server.http.post("/tts/bytes", json=asked)).status_code == 404
            async with session(server) as live:
                assert (await live.refused("session.config", lexicons=["a"]))["param"] == "lexicons"

    run(ask())


def test_lexicons_speak_live_text_wherever_it_is_cut() -> None:
    rules = {"SQL": "sequel and more", "New York": "a", "New York City": "bee"}
    text = "SQL's at New York. New York City [pause:1s]SQL"

    async def ask() -> None:
        async with serving("live") as server:
            whole = await server.http.post(
                SPEECH, json={"input": text, "response_format": "pcm", "lexicons": [rules], "on_markup": "plain"}
            )
            async with session(server) as live:
                await live.say("session.config", response_format="pcm", lexicons=[rules], timestamps=["word"])
                await live.hear()
                for size in (1, 3, 50):
                    pieces = [text[start : start + size] for start in range(0, len(text), size)]
                    audio, events = await live.speak(*pieces)
                    assert abs(len(audio) - len(whole.content)) <= 2 * 160
                    assert events[-1]["characters"] == len(text)

    run(ask())


def test_a_server_has_lexicons_for_every_text(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("SQL=sequel\n")
    settings = dataclasses.replace(SETTINGS, lexicons=(str(tmp_path / "words.txt"),))

    async def ask() -> None:
        async with serving("shown", settings) as server:
            assert await letters(server, "SQL") == 6
            assert await letters(server, "SQL", lexicons=[{"SQL": "x"}]) == 1
            async with socket(server, "/v1/speak?encoding=linear16&sample_rate=8000") as client:
                await client.hear()
                await client.say({"type": "Speak", "text": "SQL"})
                await client.say({"type": "Flush"})
                heard = await client.hear_until(type="Flushed")
                assert len(audio_of([one for one in heard if isinstance(one, bytes)])) == 160 * 6
            limits = (await server.http.get("/v1/models")).json()["configuration"]["server"]
            assert (limits["lexicons"], limits["lexicons_folder"]) == ("1 set", "")

    run(ask())
    (tmp_path / "words.txt").write_text("SQL")
    with pytest.raises(ConfigError, match="line 1"):
        LexiconStore(settings, 1)


def test_registered_lexicons_outlive_a_server_and_are_shared(tmp_path: Path) -> None:
    settings = dataclasses.replace(SETTINGS, api_keys=("one", "two"), lexicons_folder=str(tmp_path / "kept"))
    one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))

    async def ask() -> None:
        async with serving("shown", settings) as server, serving("shown", settings) as other:
            made = [
                await server.http.post(LEXICONS, json={"name": "words", "rules": {"SQL": alias}}, headers=one)
                for alias in ("sequel", "s q l")
            ]
            asked = {"input": "SQL", "response_format": "pcm", "lexicons": ["words"]}
            assert len((await other.http.post(SPEECH, json=asked, headers=one)).content) == 160 * 5
            (tmp_path / "kept" / "broken.json").write_text("{")
        async with serving("shown", settings) as server:
            [shown] = (await server.http.get(LEXICONS, headers=one)).json()["lexicons"]
            assert (await server.http.get(LEXICONS, headers=two)).json()["lexicons"] == []
            first, second = (answer.json()["version"] for answer in made)
            assert shown["version"] == second
            asked["lexicons"] = [{"name": "words", "version": first}]
            assert len((await server.http.post(SPEECH, json=asked, headers=one)).content) == 160 * 6
            assert (await server.http.delete(f"{LEXICONS}/words", headers=one)).status_code == 200
            assert [path.name for path in (tmp_path / "kept").iterdir()] == ["broken.json"]

    run(ask())
