"""README and docs/: their length, their lines, their links, the files they name, and their Python."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest
from tiny_checkpoint import write_checkpoint
from typer.main import get_command

from sonoro.api import TTS
from sonoro.audio.files import write_audio
from sonoro.cli.arguments import COMMANDS
from sonoro.cli.main import app

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
WITH_PYTHON = [page for page in PAGES if "```python" in page.read_text(encoding="utf-8")]
PARENTS = (ROOT, ROOT / "src" / "sonoro", ROOT / "examples")
"""Where a file may be that a page names by its path."""


LEXICON = """<lexicon xmlns="http://www.w3.org/2005/01/pronunciation-lexicon" version="1.0" xml:lang="en">
<lexeme><grapheme>NASA</grapheme><alias>nasa</alias></lexeme></lexicon>"""


def slug(heading: str) -> str:
    """The anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {slug(line.lstrip("# ")) for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("#")}


def test_the_readme_has_at_most_1000_words() -> None:
    assert len(README.read_text(encoding="utf-8").split()) <= 1000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_line_is_over_120_characters(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert [number for number, line in enumerate(lines, 1) if len(line) > 120] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_to_files_and_headings(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), link
        assert not anchor or anchor in anchors(there), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_names_in_them_exist_that_a_page_names(page: Path) -> None:
    """`folder/file.py`, and `folder/file.py:Class.method` for a name in it."""
    for path, name in re.findall(r"`((?:\w+/)*\w+\.py)(?::([\w.]+))?`", page.read_text(encoding="utf-8")):
        files = [parent / path for parent in PARENTS if (parent / path).exists()]
        assert files or not (name or "/" in path), path
        for part in name.split(".") if name else ():
            defined = rf"^\s*(?:class |def |async def )?{part}\b(?:[\[(:]| =)"
            assert re.search(defined, files[0].read_text(encoding="utf-8"), re.MULTILINE), f"{path}: {part}"


def test_the_readme_links_to_the_index_which_links_to_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert "docs/README.md" in README.read_text(encoding="utf-8")
    assert {page.name for page in PAGES} <= set(re.findall(r"\]\((?:\.\./)?([\w.]+)", index))


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.name)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks one after the other, in a folder with the files that they name. Nothing is played."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sonoro.api_audio.find_player", lambda rate: None)
    (tmp_path / "names.pls").write_text(LEXICON, encoding="utf-8")
    write_checkpoint(tmp_path / "folder" / "of" / "a" / "base" / "model", variant="base", topology="0.6b")
    for name in ("ann", "bob"):
        write_audio(tmp_path / f"{name}.wav", np.sin(np.arange(24000) / 9).astype(np.float32) / 3, 24000)
    names = {"TTS": TTS}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, page.name, "exec"), names)
    if page == README:
        assert (tmp_path / "out.wav").stat().st_size > 24000


def test_the_needs_of_every_command_of_the_readme_are_known() -> None:
    """`tools/readme_commands.py` runs them."""
    tool = runpy.run_path(str(ROOT / "tools" / "readme_commands.py"))
    needs = {tool["need"](command) for command in tool["commands"]()}
    assert {"a GPU", "nothing"} < needs


def test_the_design_lists_every_command() -> None:
    names = get_command(app).commands
    assert set(COMMANDS) == set(names)
    assert f"`sonoro {' | '.join(COMMANDS)}`" in " ".join(
        (ROOT / "docs" / "design.md").read_text(encoding="utf-8").split()
    )
