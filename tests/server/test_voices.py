"""Voices by upload: registered, listed, spoken with, deleted, kept; and every way an upload can be wrong."""

import asyncio
import dataclasses
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import SETTINGS, Server, check_error, recording, serving, sound
from sine_engines import CONFIG, engines, nothing_left, run, until

from sonoro.server import voice_directory, voices

__all__ = ["nothing_left"]

# The folder of a test is made before that of its links, which must be empty at the end.
pytestmark = pytest.mark.usefixtures("tmp_path", "nothing_left")

VOICES = "/v1/audio/voices"


async def upload(server: Server, audio: bytes | None = None, **fields: str) -> httpx.Response:
    files = {"audio": ("a.wav", sound() if audio is None else audio, "audio/wav")}
    return await server.http.post(VOICES, data={"name": "anna", "ref_text": "A tone.", **fields}, files=files)


async def listed(server: Server) -> dict[str, Any]:
    answer = await server.http.get(VOICES)
    assert answer.status_code == 200
    voices: dict[str, Any] = answer.json()
    return voices


def named(answer: dict[str, Any]) -> list[str]:
    """The names that may be spoken with."""
    assert all(voice["id"] == voice["name"] for voice in answer["voices"])
    return [voice["name"] for voice in answer["voices"]]


def test_a_voice_is_registered_spoken_with_and_deleted() -> None:
    async def ask() -> None:
        async with serving() as server:
            added = await upload(server, name="Anna", consent="by Anna, in writing")
            assert added.status_code == 201
            facts = added.json()
            assert facts["created_at"] > 1_700_000_000
            assert {name: facts[name] for name in ("name", "use", "duration_s", "transcript", "consent")} == {
                "name": "anna",
                "use": "prompt",
                "duration_s": 1.0,
                "transcript": "A tone.",
                "consent": "by Anna, in writing",
            }
            timbre = await upload(server, name="bert", ref_text="", x_vector_only_mode="true")
            assert (timbre.status_code, timbre.json()["use"], timbre.json()["transcript"]) == (201, "reference", None)
            voices = await listed(server)
            assert named(voices) == ["low", "high", "anna", "bert"]
            assert voices["uploaded_voices"] == [facts, timbre.json()]
            inline = await server.speak(ref_audio=recording(), ref_text="A tone.")
            for fields in ({"voice": "anna"}, {"voice": {"id": "ANNA"}}, {"speaker": "Anna", "task_type": "Base"}):
                assert (await server.speak(**fields)).content == inline.content
            other = await server.speak(voice="bert")
            assert (other.status_code, other.content == inline.content) == (200, False)
            check_error(await server.speak(voice="anna", task_type="CustomVoice"), 400, "task_type")
            deleted = await server.http.delete(f"{VOICES}/Anna")
            assert (deleted.status_code, deleted.json()) == (200, {"name": "anna", "deleted": True})
            assert [voice["name"] for voice in (await listed(server))["uploaded_voices"]] == ["bert"]
            check_error(await server.speak(voice="anna"), 404, "voice")
            check_error(await server.http.delete(f"{VOICES}/anna"), 404, "name")
            assert (await upload(server)).status_code == 201

    run(ask())


def test_what_is_wrong_with_an_upload_is_refused_by_name() -> None:
    settings = dataclasses.replace(SETTINGS, max_upload_bytes=1_000_000)

    async def ask() -> None:
        async with serving(settings=settings) as server:
            assert (await upload(server)).status_code == 201
            for audio, fields, status, parameter in (
                (None, {}, 409, "name"),
                (None, {"name": ""}, 400, "name"),
                (None, {"name": "../anna"}, 400, "name"),
                (None, {"name": "a b"}, 400, "name"),
                (None, {"name": "\N{KELVIN SIGN}ate"}, 400, "name"),
                (None, {"name": "a" * 65}, 400, "name"),
                (None, {"name": "low"}, 400, "name"),
                (None, {"name": "b", "ref_text": ""}, 400, "ref_text"),
                (None, {"name": "b", "ref_text": "a" * 5000}, 400, "ref_text"),
                (None, {"name": "b", "consent": "a" * 3000}, 400, "consent"),
                (None, {"name": "b", "x_vector_only_mode": "perhaps"}, 400, "x_vector_only_mode"),
                (b"", {"name": "b"}, 400, "audio"),
                (b"no sound", {"name": "b"}, 400, "audio"),
                (sound(0.1), {"name": "b"}, 400, "audio"),
                (sound(61), {"name": "b"}, 400, "audio"),
                (sound(peak=0), {"name": "b"}, 400, "audio"),
                (sound()[:60], {"name": "b"}, 400, "audio"),
                (bytes(1_000_001), {"name": "b"}, 400, "audio"),
            ):
                check_error(await upload(server, audio, **fields), status, parameter)
            check_error(await upload(server, bytes(2_000_000), name="b"), 413)
            assert [voice["name"] for voice in (await listed(server))["uploaded_voices"]] == ["anna"]

    run(ask())


def test_forms_that_are_broken_are_refused() -> None:
    async def ask() -> None:
        async with serving() as server:
            kind = "multipart/form-data; boundary=edge"
            name = b'--edge\r\nContent-Disposition: form-data; name="name"\r\n\r\nanna\r\n'
            audio = b'--edge\r\nContent-Disposition: form-data; name="audio"; filename="a.wav"\r\n\r\n' + sound()
            field = b'--edge\r\nContent-Disposition: form-data; name="audio"\r\n\r\nwords\r\n'
            file = b'--edge\r\nContent-Disposition: form-data; name="name"; filename="a"\r\n\r\nanna\r\n'
            many = b"".join(field.replace(b"audio", b"a%d" % number) for number in range(30))
            for content, content_type, parameter in (
                (name + audio, kind, "body"),
                (name + audio[:200], kind, "body"),
                (name + audio + b"\r\n--edge-", kind, "body"),
                (name + field + b"--edge--\r\n", kind, "audio"),
                (name + b"--edge--\r\n", kind, "audio"),
                (audio + b"\r\n--edge--\r\n", kind, "name"),
                (file + b"--edge--\r\n", kind, "name"),
                (name + audio + b"\r\n" + audio + b"\r\n--edge--\r\n", kind, "body"),
                (many + b"--edge--\r\n", kind, "body"),
                (b"no form", kind, "body"),
                (b"", kind, "body"),
                (b"--edge--", kind, "name"),
                (name, "multipart/form-data", "body"),
                (name, "multipart/form-data; boundary=" + "e" * 500, "body"),
                (b"name=anna", "application/x-www-form-urlencoded", "body"),
                (b'{"name": "anna"}', "application/json", "body"),
                (b"--edge\r\nnonsense\r\n\r\nx\r\n--edge--\r\n", kind, "body"),
            ):
                answer = await server.http.post(VOICES, content=content, headers={"content-type": content_type})
                check_error(answer, 400, parameter)
            assert (await listed(server))["uploaded_voices"] == []
            assert (await upload(server)).status_code == 201

    run(ask())


def test_a_form_is_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    read, threads = voices.read_form, list[threading.Thread]()

    def noted(*arguments: object) -> object:
        threads.append(threading.current_thread())
        return read(*arguments)

    monkeypatch.setattr(voices, "read_form", noted)

    async def ask() -> None:
        async with serving() as server:
            assert (await upload(server)).status_code == 201
        assert threads
        assert threading.current_thread() not in threads

    run(ask())


def test_voices_outlive_an_engine_and_a_server(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, voices_folder=str(tmp_path))

    async def ask() -> None:
        async with serving(config=config) as server:
            assert (await upload(server)).status_code == 201
            spoken = await server.speak(voice="anna")
            assert spoken.status_code == 200
            (worker,) = engines()
            os.kill(worker, signal.SIGKILL)
            await until(lambda: not server.engine.is_ready)
            assert [voice["name"] for voice in (await listed(server))["uploaded_voices"]] == ["anna"]
            await until(server.is_ready)
            assert (await server.speak(voice="anna")).content == spoken.content
        async with serving(config=config) as server:
            assert [voice["name"] for voice in (await listed(server))["uploaded_voices"]] == ["anna"]
            assert (await server.http.delete(f"{VOICES}/anna")).status_code == 200
        assert list(tmp_path.glob("*.safetensors")) == []

    run(ask())


def test_files_put_into_the_folder_by_others_are_voices_if_they_can_be(tmp_path: Path) -> None:
    """At any time, and whatever else lies there."""
    here, there = tmp_path / "here", tmp_path / "there"

    async def ask() -> None:
        async with serving(config=dataclasses.replace(CONFIG, voices_folder=str(there))) as server:
            assert (await upload(server)).status_code == 201
            its = (await server.speak(voice="anna")).content
        async with serving(config=dataclasses.replace(CONFIG, voices_folder=str(here))) as server:
            for _ in range(6):
                check_error(await server.speak(voice="anna"), 404, "voice")
            for name, size in (("sparse", 3 * 2**30), ("zeros", 2**20)):
                (here / f"{name}.safetensors").touch()
                os.truncate(here / f"{name}.safetensors", size)
            (here / "link.safetensors").symlink_to("/etc/passwd")
            shutil.copy(there / "anna.safetensors", here / "bert.safetensors")
            shutil.copy(there / "anna.safetensors", here)
            for _ in range(6):
                assert (await server.speak(voice="anna")).content == its
                assert named(await listed(server)) == ["low", "high", "anna"]
                for voice in ("sparse", "zeros", "link", "bert"):
                    check_error(await server.speak(voice=voice), 404, "voice")

    run(ask())


def test_a_folder_that_hangs_is_waited_for_no_longer_than_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(voice_directory, "SCAN_TIMEOUT_S", 0.1)
    config = dataclasses.replace(CONFIG, voices_folder=str(tmp_path))

    async def ask() -> None:
        async with serving(config=config) as server:
            assert (await upload(server)).status_code == 201
            store, is_back = server.process.config.app.state.service.voices.store, asyncio.Event()
            refresh = store.refresh

            async def hang() -> None:
                await is_back.wait()
                await refresh()

            store.refresh = hang
            for _ in range(2):
                check_error(await server.speak(voice="bert"), 503)
                check_error(await server.http.get(VOICES), 503)
                check_error(await server.http.delete(f"{VOICES}/anna"), 503)
            assert (await server.speak(voice="anna")).status_code == 200
            is_back.set()
            monkeypatch.setattr(voice_directory, "SCAN_TIMEOUT_S", 10)
            assert [voice["name"] for voice in (await listed(server))["uploaded_voices"]] == ["anna"]

    run(ask())


def test_uploads_at_once_take_turns_and_streams_go_on() -> None:
    async def ask() -> None:
        async with serving("slow voices") as server:
            stream = asyncio.create_task(server.speak("Some words.", max_new_tokens=300, ignore_eos=True))
            await until(lambda: server.metric("sonoro_engine_running"))
            answers = await asyncio.gather(*(upload(server, name=f"v{number % 3}") for number in range(5)))
            assert sorted(answer.status_code for answer in answers) == [201, 201, 201, 409, 409]
            assert (await stream).status_code == 200
            assert await server.is_idle()

    run(ask())


def test_an_embedding_is_a_voice_too() -> None:
    async def ask() -> None:
        async with serving() as server:
            assert (await server.speak(speaker_embedding=[1, 2.5], task_type="Base")).status_code == 200
            for embedding in ([1], [1, 2, 3], [1, "2"], [], "ab", [1, 1e30], [0.0] * 20_000):
                check_error(await server.speak(speaker_embedding=embedding), 400, "speaker_embedding")
            check_error(await server.speak(speaker_embedding=[1, 2], voice="low"), 400, "voice")

    run(ask())


KEYS = dataclasses.replace(SETTINGS, api_keys=("one", "two"), admin_keys=("all",), voice_aliases={"sam": "high"})


def test_no_voice_is_called_as_one_of_the_model_may_be() -> None:
    async def ask() -> None:
        async with serving(settings=KEYS) as server:
            for key in ("one", "all"):
                server.http.headers["authorization"] = f"Bearer {key}"
                for name in ("low", "High", "sam", "alloy", "Nova"):
                    check_error(await upload(server, name=name), 400, "name")

    run(ask())


def test_what_was_called_so_before_does_not_stand_for_it(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, voices_folder=str(tmp_path))

    async def ask() -> None:
        async with serving(config=config) as server:
            assert (await upload(server, name="sam")).status_code == 201
            uploaded = (await server.speak(voice="sam")).content
        async with serving(
            config=config, settings=dataclasses.replace(SETTINGS, voice_aliases={"sam": "high"})
        ) as server:
            assert (await server.speak(voice="sam")).content == (await server.speak(voice="high")).content != uploaded
            assert named(await listed(server)) == ["low", "high"]
            assert (await server.http.delete(f"{VOICES}/sam")).status_code == 200

    run(ask())


def test_a_voice_is_known_to_the_key_that_made_it_and_to_an_admins(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, voices_folder=str(tmp_path))

    async def ask() -> None:
        async with serving(config=config, settings=KEYS) as server:

            def be(key: str) -> None:
                server.http.headers["authorization"] = f"Bearer {key}"

            async def uploaded() -> list[str]:
                return [voice["name"] for voice in (await listed(server))["uploaded_voices"]]

            be("one")
            assert (await upload(server)).json()["name"] == "anna"
            its = (await server.speak(voice="Anna")).content
            (file,) = tmp_path.iterdir()
            be("two")
            # Not even that there is one is told.
            assert (await uploaded(), named(await listed(server))) == ([], ["low", "high"])
            for voice in ("anna", file.stem):
                refused = await server.speak(voice=voice)
                check_error(refused, 404, "voice")
                assert refused.json()["error"]["message"].endswith("known voices: low, high")
                check_error(await server.http.delete(f"{VOICES}/{voice}"), 404, "name")
            # The name is free, and stands for another voice.
            assert (await upload(server, sound(2.0))).status_code == 201
            check_error(await upload(server), 409, "name")
            assert (await server.http.delete(f"{VOICES}/anna")).status_code == 200
            be("one")
            assert (await uploaded(), (await server.speak(voice="anna")).content == its) == (["anna"], True)
            be("all")
            (seen,) = (await listed(server))["uploaded_voices"]
            assert (seen["name"], seen["id"], f"anna.{seen['owner']}") == ("anna", file.stem, file.stem)
            assert (await server.speak(voice=file.stem)).content == its
            check_error(await server.speak(voice="anna"), 404, "voice")
            # What an admin registers is everybody's, and nobody else's to delete.
            assert (await upload(server, name="bert")).json()["owner"] is None
            be("two")
            assert (await uploaded(), (await server.speak(voice="bert")).status_code) == (["bert"], 200)
            check_error(await upload(server, name="bert"), 409, "name")
            check_error(await server.http.delete(f"{VOICES}/bert"), 404, "name")
            be("all")
            assert (await upload(server)).status_code == 201
            be("one")
            assert (await server.speak(voice="anna")).content == its, "nobody else's takes its place"
            be("all")
            for voice in (file.stem, "bert", "anna"):
                assert (await server.http.delete(f"{VOICES}/{voice}")).status_code == 200
            assert list(tmp_path.iterdir()) == []

    run(ask())


def test_an_upload_needs_no_room_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    async def ask() -> None:
        async with serving() as server:
            monkeypatch.setattr("tempfile.TemporaryFile", full)
            assert (await upload(server, sound(30, rate=44_100))).status_code == 201

    run(ask())


def test_each_key_has_a_share_of_the_voices() -> None:
    settings = dataclasses.replace(SETTINGS, api_keys=("one", "two"))

    async def ask() -> None:
        async with serving(settings=settings, config=CONFIG.over(max_registered_voices=4)) as server:
            server.http.headers["Authorization"] = "Bearer one"
            added = [await upload(server, name=name) for name in "abc"]
            assert [answer.status_code for answer in added] == [201, 201, 507]
            assert added[-1].json()["error"]["code"] == "too_many_voices"
            server.http.headers["Authorization"] = "Bearer two"
            assert [(await upload(server, name=name)).status_code for name in "abc"] == [201, 201, 507]
            assert (await server.http.delete(f"{VOICES}/a")).status_code == 200
            assert (await upload(server, name="c")).status_code == 201

    run(ask())


def test_newer_names_of_openais_models_are_names_of_the_model() -> None:
    async def ask() -> None:
        async with serving() as server:
            for name in ("tts-1", "tts-1-hd-1106", "gpt-4o-mini-tts-2025-12-15", "gpt-5-tts"):
                assert (await server.speak(model=name)).status_code == 200, name
                assert (await server.http.get(f"/v1/models/{name}")).json()["id"] == name
            for name in ("gpt-9", "whisper-1", "tts"):
                check_error(await server.speak(model=name), 404, "model")
        own = dataclasses.replace(SETTINGS, model_aliases=("mine",))
        async with serving(settings=own) as server:
            check_error(await server.speak(model="tts-1-hd-1106"), 404, "model")

    run(ask())
