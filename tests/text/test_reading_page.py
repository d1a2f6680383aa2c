"""docs/reading.md shows examples of each class as they are read."""

import re
from pathlib import Path

from sonoro.text import read
from sonoro.text.english.classes import CLASSES

PAGE = Path(__file__).parents[2] / "docs" / "reading.md"


def test_the_examples_of_the_page_are_read_so() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("| class | written | read |")[2].partition("\n\n")[0]
    rows = re.findall(r"(?m)^\| (\w+) \| (.*) \| (.*) \|$", table.replace("\\*", "*"))
    assert {name for name, _, _ in rows} == {module.__name__.rpartition(".")[2].rstrip("_") for module in CLASSES}
    for _, written, said in rows:
        assert read(written, "plain").text == said
