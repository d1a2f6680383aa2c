"""Run the shell commands of README.md and docs/: `python tools/readme_commands.py [--list] [FOLDER]`.

`sonoro` and the `python` of its environment must be on PATH. The commands run in order in FOLDER or a temporary folder.
`--list` prints what each needs and runs nothing. A released checkpoint is replaced by a tiny random one of the same
layout, which speaks 6 frames. Commands that need a GPU run only where there is one. The exit code is 1 if a command
failed.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[1]
URL = "http://localhost:8000"
TEXTS = {
    "chapter.txt": "One sentence. Another one.",
    "book.txt": "A short book. It ends here.",
    "play.txt": "ALICE: Good morning.\nBOB: Good morning, Alice.\n",
    "names.txt": "SQL=sequel\n",
}

NEEDS = {
    "make ": "installs the package: run by hand in a fresh clone",
    "pip install": "installs the package: run by hand in a fresh clone",
    ". .venv": "installs the package: run by hand in a fresh clone",
    "serve run": "a Ray cluster: run by hand; tests/scale/test_ray.py does so",
    "python benchmarks/serve.py": "a GPU",
    "sonoro verify MODEL --device cuda": "a GPU",
    "python benchmarks/plan.py": "many minutes: run by hand",
    "sonoro bench frame": "a GPU",
    "sonoro bench engine": "a GPU",
    "sonoro serve": "nothing; it runs in the background until the end",
    "curl": "the server",
    "sonoro bench serve": "the server",
    "echo": "nothing; aplay is replaced by a file",
    "sonoro say": "nothing",
    "sonoro voices": "nothing",
    "sonoro info": "nothing",
    "sonoro verify": "nothing",
    "sonoro read": "nothing",
    'sonoro "': "nothing; without a player it writes a file",
}
"""What a command needs that begins with the key; the first key counts."""

CHECKPOINTS = {
    "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice": ("custom_voice", "0.6b"),
    "./Qwen3-TTS-12Hz-1.7B-VoiceDesign": ("voice_design", "1.7b"),
    "./Qwen3-TTS-12Hz-0.6B-Base": ("base", "0.6b"),
}
"""Variant and topology of the tiny checkpoint that stands for a released one."""


def commands() -> list[str]:
    """The commands of the shell blocks, each on one line and without its comment, those of README.md first."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    lines = "".join(re.findall(r"```(?:sh|bash)\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ").splitlines()
    return [command for line in lines if (command := re.sub(r"(^|\s{2,})# .*", "", line))]


def need(command: str) -> str:
    """What `command` needs. Raises `KeyError` for a command that `NEEDS` lacks."""
    if "--model" in command and command.startswith("sonoro say"):
        return "a released checkpoint; here a tiny one"
    for start, needed in NEEDS.items():
        if command.startswith(start):
            return needed
    raise KeyError(command)


def replaced(command: str) -> str:
    """The command as it runs here."""
    for name, (variant, topology) in CHECKPOINTS.items():
        command = command.replace(f"--model {name} ", f"--max-frames 6 --model {variant}-{topology} ")
    command = command.replace("--voice vivian", "--voice serena")
    command = re.sub(r"python (examples|benchmarks)/", rf"python {ROOT}/\1/", command)
    # A refusal of the server is a failure; what it says is shown.
    return command.replace("| aplay", "> played.wav").replace("curl ", "curl --fail-with-body --silent --show-error ")


def prepare(folder: Path) -> None:
    """Write the texts, the recording and the tiny checkpoints that the commands name."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from tiny_checkpoint import write_checkpoint  # noqa: PLC0415

    for variant, topology in CHECKPOINTS.values():
        write_checkpoint(folder / f"{variant}-{topology}", variant=variant, topology=topology)
    for name, text in TEXTS.items():
        (folder / name).write_text(text, encoding="utf-8")
    subprocess.run(["sonoro", "say", "What I say in it.", "-o", "me.wav"], cwd=folder, check=True)
    for name in ("alice.wav", "bob.wav"):
        shutil.copy(folder / "me.wav", folder / name)


def wait_for_server() -> None:
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        try:
            urllib.request.urlopen(f"{URL}/ready", timeout=5)
            return
        except OSError:
            time.sleep(0.5)
    raise TimeoutError(f"{URL} is not ready")


def run(folder: Path) -> list[str]:
    """Run the commands in `folder`, and return those that failed."""
    prepare(folder)
    has_gpu = os.path.exists("/dev/nvidia0")
    server, failed = None, []
    for command in commands():
        needed = need(command)
        if "by hand" in needed or (needed == "a GPU" and not has_gpu):
            print(f"SKIPPED  {command}", flush=True)
            continue
        line = replaced(command)
        if command.startswith("sonoro serve"):
            server = subprocess.Popen(line.split(), cwd=folder)
            wait_for_server()
            continue
        with open(os.devnull, "wb") as nothing:
            output = nothing if command.startswith("curl $URL") else None
            ran = subprocess.run(
                ["sh", "-ec", line], cwd=folder, check=False, stdout=output, env={**os.environ, "URL": URL}
            )
        code = ran.returncode
        print(f"{'ok' if code == 0 else f'FAILED ({code})':8} {command}", flush=True)
        failed += [command] if code else []
    if server is not None:
        server.terminate()
        server.wait()
    return failed


def main() -> int:
    if "--list" in sys.argv:
        for command in commands():
            print(f"{need(command):52} {command}")
        return 0
    if folder := next(iter(sys.argv[1:]), None):
        return bool(run(Path(folder)))
    with tempfile.TemporaryDirectory() as made:
        return bool(run(Path(made)))


if __name__ == "__main__":
    sys.exit(main())
