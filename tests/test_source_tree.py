"""From a fresh clone: what `make` says and does on a bare machine, and sonoro where nothing is installed."""

import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import processes
import pytest

import sonoro

ROOT = Path(__file__).parent.parent

PYTHON = """#!/bin/sh
# Makes a virtual environment whose programs say what they are asked for; pip fails where a file `broken` is.
if [ "$1 $2" = "-m venv" ]; then
  mkdir -p "$3/bin"
  for program in python pip sonoro; do
    printf '#!/bin/sh\\necho %s "$@"\\n[ "$2" != show ] && [ ! -e broken ]\\n' "$program" > "$3/bin/$program"
    chmod +x "$3/bin/$program"
  done
fi
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with what `make` reads, and a Python that installs nothing."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def make(clone: Path, *arguments: str, code: int = 0) -> list[str]:
    command = ["make", "-C", clone, "--no-print-directory", f"PYTHON={clone / 'python'}", *arguments]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ran.returncode == code, ran.stderr
    return ran.stdout.splitlines()


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_says_what_it_installs_once_without_what_pip_says(clone: Path) -> None:
    said = make(clone, "say", "TEXT=Hi.")
    assert said[0].startswith("Making .venv")
    assert any(line.startswith("Installing sonoro") for line in said)
    assert any("2.7 GB" in line and "make cpu" in line for line in said) == sys.platform.startswith("linux")
    assert not any(line.startswith("pip") and " install " in line for line in said)
    assert (clone / ".venv" / "install.log").read_text().strip().endswith("install -c constraints.txt -e .")
    spoken, how = said[-2:]
    assert spoken == "sonoro say Hi. -o out.wav --force"
    assert ". .venv/bin/activate" in how
    assert make(clone, "say", "TEXT=Hi.") == said[-2:]


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_shows_all_of_what_pip_says_if_it_fails(clone: Path) -> None:
    (clone / "broken").touch()
    assert make(clone, "say", code=2)[-1].endswith("install -c constraints.txt -e .")
    (clone / "broken").unlink()
    assert make(clone, "say")[-1].startswith("Next:")


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_one_command_takes_torch_without_cuda_at_the_version_of_the_constraints(clone: Path) -> None:
    [pinned] = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    make(clone, "cpu")
    installs = (clone / ".venv" / "install.log").read_text().strip()
    assert installs.endswith(f"install --no-deps --index-url https://download.pytorch.org/whl/cpu {pinned}")
    readme, makefile = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "Makefile"))
    assert "\nmake cpu\n" in readme
    for size in ("2.7 GB", ".2 GB"):
        assert size in readme
        assert size in makefile


@pytest.fixture
def uninstalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes started from now on find the sources and no metadata of an installed package."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata as metadata\n"
        "find = metadata.Distribution.from_name.__func__\n"
        "def from_name(cls, name):\n"
        "    if name == 'sonoro':\n"
        "        raise metadata.PackageNotFoundError(name)\n"
        "    return find(cls, name)\n"
        "metadata.Distribution.from_name = classmethod(from_name)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(sonoro.__file__).parent.parent}")


@pytest.mark.usefixtures("uninstalled")
def test_a_source_tree_knows_its_version_and_serves(tmp_path: Path) -> None:
    asked = "import importlib.metadata as m, sonoro; print(sonoro.__version__); m.version('sonoro')"
    told = subprocess.run([sys.executable, "-c", asked], check=False, capture_output=True, text=True)
    assert told.stdout.strip() == sonoro.__version__
    assert "PackageNotFoundError" in told.stderr
    ended = subprocess.run([sys.executable, "-m", "sonoro", "--version"], check=True, capture_output=True, text=True)
    assert ended.stdout == f"sonoro {sonoro.__version__}\n"
    with (
        processes.server(tmp_path) as (_, _, address),
        urllib.request.urlopen(f"{address}/openapi.json", timeout=60) as answer,
    ):
        assert f'"version":"{sonoro.__version__}"' in answer.read().decode()
