"""Addresses of the net: e-mail, URL, domain, file name, path, @handle, #tag."""

import re
from collections.abc import Iterator

from sonoro.text.english.line import SURE, Candidate, before
from sonoro.text.english.numbers import cardinal, digits, grouped
from sonoro.text.english.tables import listed, pairs

from .common import pieces, whole
from .initialism import spell

STARTS = ("letter", "sign", "digit")

_MAIL = re.compile(r"[\w.+&-]{1,64}@(?:[\w-]{1,63}\.){1,8}[A-Za-z]{2,24}(?:/[^\s<>]{0,200})?(?![\w@])")
_URL = re.compile(r"(?:(?:https?|ftp|file)://|www\.(?=\w))[^\s<>\"]{1,2000}", re.IGNORECASE)
_DOMAINS = (
    "com|org|net|edu|gov|mil|int|io|ai|dev|app|info|biz|co|uk|de|fr|es|it|eu|tv|ca|us|jp|cn|in|au|ch|nl|se|no|ru|br|me|ly|gg|xyz|tech|blog|"
    "online|site|cloud|page|sh|rs|so|to"
)
_DOMAIN = re.compile(
    rf"(?:(?:[A-Za-z0-9-]{{1,63}}\.){{1,6}}(?:{_DOMAINS})(?![\w-])|localhost(?=:))(?::\d{{2,5}})?(?:/[^\s<>\"]{{0,500}})?"
)
_SURE_DOMAIN = re.compile(r"(?:com|org|net|edu|gov|io|ai|dev|app|info|uk|de|fr|eu|tv|ca|jp|ch|nl|us)(?:[/:]|$)")
_ENDINGS = (
    "pdf|html?|css|jsx?|tsx?|py|jpe?g|png|gif|svg|webp|mp[34]|wav|flac|ogg|txt|csv|tsv|md|php|sql|xml|json|ya?ml|toml|"
    "ini|cfg|conf|log|zip|tar|gz|exe|dll|so|docx?|xlsx?|pptx?|rs|go|cpp|hpp|java|rb|sh|bat|ipynb|lock|env|"
    "PDF|HTML?|JPE?G|PNG|GIF|MP[34]|WAV|TXT|CSV|XML|JSON|ZIP|EXE|DOCX?|MD"
)
_FILE = re.compile(rf"[\w-]{{1,64}}(?:\.[\w-]{{1,32}}){{0,3}}\.(?:{_ENDINGS})(?!\w)")
_PATH = re.compile(r"(?:~|\.{1,2})?(?:/[\w.@+-]{1,64}){2,12}/?(?![\w])|(?:~|\.{1,2})/[\w./-]{1,200}")
_HANDLE = re.compile(r"@(?P<name>[A-Za-z_]\w{0,63})")
_FLAG = re.compile(r"--(?P<name>[a-z][\w-]{1,40})")
_ORDER = re.compile(r"#(?P<letters>[A-Z]{1,4})-?(?P<number>\d{1,12})(?!\w)")
_OF_ORDER = re.compile(
    r"(?i)\b(?:order|ticket|invoice|case|item|part|serial|ref|reference|booking|claim|policy|model)s? $"
)
_TAG = re.compile(r"#(?P<name>[A-Za-z_]\w{0,99})")
_COLOR = re.compile(r"#(?=[A-Fa-f]*\d)[\dA-Fa-f]{6}(?!\w)")
_WINDOWS_PATH = re.compile(r"[A-Za-z]:(?:\\[\w .-]{0,63}[\w]){1,12}\\?")
_MARKS = pairs(
    ". = dot | / = slash | - = dash | _ = underscore | ? = question mark | = = equals | & = and | # = hash | "
    "% = percent | + = plus | : = colon | \\ = backslash | ~ = tilde | @ = at"
)
_SPELLED = listed(
    "ai io uk eu us tv api url faq id ui ux usa au ca de exe ch nl jp fr html css js jsx ts py jpg png gif svg mp mp3 "
    "pdf csv md php sql xml ftp http https www sm rs cpp tsx yml db dns ip cdn"
)
_PARTS = re.compile(r"[A-Za-z]+|\d+|[^A-Za-z\d]")
_PORT = re.compile(r"(?<!localhost )\bcolon(?= (?:zero|one|two|three|four|five|six|seven|eight|nine)\b)")
_IN_WORD = re.compile(r"[\w&]$")
_IN_ADDRESS = re.compile(r"[\w@./-]$")


def recognise(text: str, at: int) -> Iterator[Candidate]:
    context = before(text, at, 1)
    if text[at] == "#" and (found := _ORDER.match(text, at)) and _OF_ORDER.search(before(text, at)):
        number = grouped(found["number"]) if len(found["number"]) < 5 else digits(found["number"])
        yield pieces(found, SURE / 2, (f"number {spell(found['letters'])}", "letters"), (number, "number"))
        return
    if text[at] == "#" and (found := _COLOR.match(text, at)):
        yield whole(
            found,
            SURE,
            "hash " + " ".join(digits(sign) if sign.isdecimal() else spell(sign) for sign in found[0]).strip(),
        )
        return
    if text[at] == "-":
        if (found := _FLAG.match(text, at)) and re.search(r"\w \Z", before(text, at, 2)):
            yield pieces(found, SURE, ("dash dash", 0), (" ".join(_camel(found["name"])), "name"))
        return
    if text[at] in "@#":
        form = _HANDLE if text[at] == "@" else _TAG
        if (found := form.match(text, at)) and not _IN_WORD.search(context):
            sign = "at" if text[at] == "@" else "hashtag"
            yield whole(found, SURE, f"{sign} {' '.join(_camel(found['name']))}")
        return
    if _IN_ADDRESS.search(context):
        return
    for form in (_MAIL, _URL, _FILE, _PATH, _WINDOWS_PATH):
        if found := form.match(text, at):
            yield _address(found, SURE / 2)
    if (found := _DOMAIN.match(text, at)) and _is_domain(text, found):
        yield _address(found, SURE / 2)


def _is_domain(text: str, found: re.Match[str]) -> bool:
    """Whether it is a domain rather than a full stop without a space after it (done.In the morning)."""
    host = found[0].partition("/")[0]
    return (
        bool(_SURE_DOMAIN.search(host))
        or "/" in found[0]
        or host.startswith("localhost")
        or (host.islower() and host.rpartition(".")[2] not in ("in", "it", "me", "to", "so", "no", "us"))
    )


def _address(found: re.Match[str], cost: float) -> Candidate:
    written = re.sub(r"(?i)^(?:(?:https?|ftp)://)?(?:www\.)?", "", found[0])
    kept = written.rstrip(".,;:!?)]}'*/")
    if not kept:
        kept = written
    said = " ".join(say for part in _PARTS.findall(kept) if (say := _part(part)))
    said = _PORT.sub("port", said)
    return whole(
        found,
        cost,
        said,
        end=found.end() - len(written) + len(kept) + (len(written) > len(kept) and written[len(kept)] == "/"),
    )


def _part(part: str) -> str:
    if part.isdecimal():
        return digits(part) if len(part) != 4 or part[0] == "0" or part[1:] != "000" else cardinal(part)
    if not part[0].isalnum():
        return _MARKS.get(part, "")
    is_spelled = part.lower() in _SPELLED or (1 < len(part) <= 5 and not set(part.lower()) & set("aeiouy"))
    return spell(part.upper()) if is_spelled else " ".join(_camel(part))


def _camel(name: str) -> list[str]:
    """The words of a name in camel or snake case."""
    found = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)
    return [(grouped if len(word) == 4 else cardinal)(word) if word.isdecimal() else word for word in found]


EXAMPLES = (
    ("me@example.com", "me at example dot com."),
    ("a1b2@abc.com", "a one b two at abc dot com."),
    ("See https://www.example.com/docs/intro.html.", "See example dot com slash docs slash intro dot H T M L."),
    ("nvidia.com or test.uk", "nvidia dot com or test dot U K."),
    ("Edit main.py and setup.cfg", "Edit main dot P Y and setup dot C F G."),
    ("run ./run.sh or ~/.bashrc", "run dot slash run dot S H or tilde slash dot bashrc."),
    ("http://test.com:8080/a", "test dot com port eight zero eight zero slash a."),
    ("@mypizza #MyPizza", "at mypizza hashtag My Pizza."),
    (
        "order #A10293, the colour #A10293",
        "order number ay one zero two nine three, the colour hash ay one zero two nine three.",
    ),
    ("He was done.In the end", "He was done. In the end."),
)
