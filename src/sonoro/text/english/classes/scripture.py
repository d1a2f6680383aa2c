"""Places in scripture: John 3:16, 1 Cor. 13:4-7, Gen. 1:1, Ps. 23, 2 Samuel 7."""

import re
from collections.abc import Iterator

from sonoro.text.english.line import SURE, Candidate, before
from sonoro.text.english.numbers import cardinal, ordinal
from sonoro.text.english.tables import pairs

from .common import pieces

STARTS = ("letter", "digit")

_SHORT = pairs(
    "Gen = Genesis | Ex = Exodus | Exod = Exodus | Lev = Leviticus | Num = Numbers | "
    "Deut = Deuteronomy | Josh = Joshua | Judg = Judges | Sam = Samuel | Kgs = Kings | Chr = Chronicles | "
    "Chron = Chronicles | Neh = Nehemiah | Ps = Psalm | Pss = Psalms | Prov = Proverbs | Eccl = Ecclesiastes | "
    "Isa = Isaiah | Jer = Jeremiah | Ezek = Ezekiel | Dan = Daniel | Hos = Hosea | Mic = Micah | Zech = Zechariah | "
    "Mal = Malachi | Matt = Matthew | Mt = Matthew | Mk = Mark | Lk = Luke | Jn = John | Rom = Romans | "
    "Cor = Corinthians | Gal = Galatians | Eph = Ephesians | Phil = Philippians | Col = Colossians | "
    "Thess = Thessalonians | Tim = Timothy | Heb = Hebrews | Jas = James | Pet = Peter | Rev = Revelation"
)
_NUMBERED = (
    "Samuel|Kings|Chronicles|Corinthians|Thessalonians|Timothy|Peter|John|Maccabees|"
    "Sam|Kgs|Chr|Chron|Cor|Thess|Tim|Pet|Jn"
)
_FULL = (
    "Genesis|Exodus|Leviticus|Deuteronomy|Joshua|Judges|Ruth|Ezra|Nehemiah|Esther|Job|Psalms?|Proverbs|Ecclesiastes|"
    "Isaiah|Jeremiah|Lamentations|Ezekiel|Daniel|Hosea|Amos|Jonah|Micah|Zechariah|Malachi|Matthew|Mark|Luke|John|Acts|"
    "Romans|Galatians|Ephesians|Philippians|Colossians|Titus|Hebrews|James|Jude|Revelation|Samuel|Kings|Chronicles|"
    "Corinthians|Thessalonians|Timothy|Peter|Quran|Qur'an|Sura|Surah"
)
_VERSES = r"(?P<chapter>\d{1,3})(?::(?P<verse>\d{1,3})(?:(?P<to>\s?[-–]\s?)(?P<last>\d{1,3}))?)"
_PLACE = re.compile(
    rf"(?:(?P<number>[123])\s)?(?P<book>{_FULL}|(?:{'|'.join(_SHORT)})\.?)\s{_VERSES}(?![\d:]|[.,]\d|\s?[ap]\.?m\b)"
)
_CHAPTER = re.compile(rf"(?P<number>[123])\s(?P<book>{_NUMBERED})\.?\s(?P<chapter>\d{{1,3}})(?![\d:]|[.,]\d)")
WORDS = frozenset([*_SHORT, *_FULL.replace("?", "").split("|"), "Psalm"])
_JOINED = re.compile(r"[\w.,/:$£€-]$")


def recognise(text: str, at: int) -> Iterator[Candidate]:
    if _JOINED.search(before(text, at, 1)):
        return
    if found := _PLACE.match(text, at):
        parts = [*_book(found), (cardinal(found["chapter"]), "chapter"), (cardinal(found["verse"]), "verse")]
        if found["last"]:
            parts += [("to", "to"), (cardinal(found["last"]), "last")]
        yield pieces(found, SURE, *parts)
    if found := _CHAPTER.match(text, at):
        yield pieces(found, SURE, *_book(found), (cardinal(found["chapter"]), "chapter"))


def _book(found: re.Match[str]) -> list[tuple[str, str]]:
    number = [(ordinal(found["number"]).capitalize(), "number")] if found["number"] else []
    book = found["book"].rstrip(".")
    return [*number, (_SHORT.get(book, book), "book")]


EXAMPLES = (
    ("John 3:16 and Gen. 1:1-3", "John three sixteen and Genesis one one to three."),
    ("1 Cor. 13 and 2 Samuel 7:12", "First Corinthians thirteen and Second Samuel seven twelve."),
    ("Psalm 23:4", "Psalm twenty three four."),
)
