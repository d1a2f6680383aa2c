"""The limits of the house: no class, file or function outgrows its reader, and no feature leaves its rooms."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

LIMITS = {
    "lines of src": 55_660,
    "lines of core": 1_600,
    "lines of engine": 4_120,
    "lines of a file": 450,
    "lines of a class": 300,
    "methods of a class": 20,
    "lines of a function": 50,
    "lines of a function, p90": 16,
    "lines of a kernel": 80,
    "modules in an import circle": 0,
    "folders that know word times": 4,
    "holders of temperature": 4,
    "fields of EngineConfig": 24,
    "modules of a request, server": 12,
    "modules of a request, engine": 21,
    "calls from the loop to a launch": 5,
}
"""Figures of tools/house.py. A limit on lines of src or of a package is raised by the commit that says what it adds."""


@pytest.fixture(scope="module")
def figures() -> dict[str, tuple[int, str]]:
    script = Path(__file__).parents[1] / "tools" / "house.py"
    return json.loads(subprocess.run((sys.executable, script, "--json"), check=True, stdout=subprocess.PIPE).stdout)


def test_a_family_is_a_folder_that_one_can_read() -> None:
    """The last that was added."""
    folder = Path(__file__).parents[1] / "src" / "sonoro" / "models" / "pocket_tts"
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*.py")) <= 1_700


@pytest.mark.parametrize("name", LIMITS)
def test_figure_keeps_its_limit(figures: dict[str, tuple[int, str]], name: str) -> None:
    figure, place = figures[name]
    assert figure <= LIMITS[name], place
