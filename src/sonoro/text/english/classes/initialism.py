"""Letters that are spelled: FBI, U.S., TVs, PhD. Words in capitals that are said as words stay."""

import re
from collections.abc import Iterator

from sonoro.text.english.line import SURE, Candidate, after, before
from sonoro.text.english.tables import listed

from .common import LABELS, ends_sentence, pieces, whole

STARTS = ("letter",)

_DOTTED = re.compile(r"(?:[A-Za-z]\.){2,8}(?P<last>[A-Z](?![\w]))?(?P<s>'?s\b)?")
_CAPITALS = re.compile(r"(?P<letters>[A-Z]{2,6})(?P<s>'?s)?(?!\w|'(?:T|RE|LL|VE|D|M)\b)")
_INITIAL = re.compile(r"[A-Z]\.(?=\s[A-Z])")
_DEGREE = re.compile(r"(?:Ph\.? ?D|M\.? ?Sc|B\.? ?Sc|M\.? ?D|Ed\.? ?D|LL\. ?[BMD])\.?(?P<s>s)?(?![A-Za-z])\.?")
_BLOOD = re.compile(r"(?P<group>A|B|AB|O)(?P<sign>[-+])(?![\w+-])")
_OF_BLOOD = re.compile(r"\b(?:[Tt]ype:?|blood) $")
_DICTATED = re.compile(r"(?:[A-Z]-){2,}[A-Z](?![\w'-])|(?:[a-z]-){2,}[a-z](?![\w'-])")
_SHARP = re.compile(r"[A-G]#(?![\w])")
_GRADE = re.compile(
    r"(?P<grade>A{1,3}|B{1,3}|C{1,3}|D|E|F)"
    r"(?P<sign>[-−–](?=\s(?:grade|average|student|range|rating|in|on|credit|rated|bonds?|debt)\b|[,.;)]|$)|\+(?![\da-rt-zA-Z+]|s\w))(?P<s>'?s)?"
)
_LABEL = re.compile(
    r"A(?=,|'s\b)|(?<!\()A(?= (?:and|or|to|vs\.?|versus) [B-HJ-Z]\b)|(?<=\b[Aa]n )A(?![\w&+#.-])|"
    r"(?<=\()[Aa](?=\))|a(?=\) [a-z])"
)
_AND = re.compile(r"(?P<one>[A-Z]{1,3})&(?P<two>[A-Z]{1,3}?)(?P<s>s)?(?![\w])")
_SPELLED = listed(
    "USA US UK EU UN AI ID IDs IQ UFO CEO CIA FBI USB API APIs FAQ URL OK ASAP RSVP ISBN UCLA HTTP HTTPS IOU ATM EEG "
    "IRA IRS UI UX IP IT AA IOS AWS IBM UAE EPA ADHD AARP IEEE UAV UDP OSI HDMI ESPN UCSF ICBM USDA IOC IOT IAEA "
    "DIY YMCA YWCA NAACP ACLU LMAO IMHO IIRC AFAIK BYOB OECD IMDB ASPCA USSR USMC USPS USAF USGS UNHCR"
)
_SAID = listed(
    "ACT ADD AGE AGO AHA AIR ALL AM AN AND ANY ARE ARM ART AS ASK AT BAD BE BED BIG BOX BOY BUT BUY BY CAN CAR CAT "
    "COP DAD DAY DID DO DOG EAR EAT EGG END EYE FAN FAR FEW FIX FOR FUN GET GIF GO GOD GOT GUY HA HAD HAS HAT HE HER "
    "HEY HIM HIS HIT HO HOT HOW IF IN IS ITS JOB JOY KEY KID LAN LAW LEG LET LIE LOT LOW MAN MAP MAY ME MEN MIX MOM "
    "MY NET NEW NO NOR NOT NOW OF OFF OH OIL OLD ON ONE OR OUR OUT OW OWN PAN PAY PEN PET PIN PUT RAM RAN RAW RED ROM "
    "RUN SAD SAT SAW SAY SEA SEE SET SHE SIM SIN SIR SIT SIX SO SON SUN TAX TEA TED TEN THE TIP TO TOO TOP TOY TRY TWO "
    "UH UM UP USE WAN WAR WAS WAY WE WET WHO WHY WIN WOW YES YET YOU ZIP"
)
"""Words of two or three letters that are said even in capitals."""

_LABELLED = re.compile(r"A(?![\w'&+#.-])")
_BEHIND_LABEL = re.compile(rf"\b(?:{LABELS}|(?:(?i:apt|ste|rm|fig|bldg)|App)\.) $")
_SMALL = listed(
    "omg brb ttyl idk imo imho iirc afaik tbh btw fyi wtf smh ikr lmk lmao afk irl diy asap rsvp faq url pdf html css "
    "xml usb vpn gps cpu gpu tv dvd dna rna hiv sms http https ftp api sdk ceo cfo ngo suv atm "
    "idc wfh np hbu wyd ily tbf ngl gtg wdym hmu omw fwiw nbd tysm lmfao"
)
"""Letters that are spelled though they are small, as in a chat."""

_SMALL_LETTERS = re.compile(
    rf"(?P<letters>(?i:{'|'.join(sorted(_SMALL, key=len, reverse=True))}))(?<![A-Z]{{2}})(?P<s>'?s)?(?![\w']|\.\w)"
)
WORDS = frozenset(word + ending for word in _SMALL for ending in ("", "s", "'s"))
_ONSET = re.compile(
    r"B[JLR]|C[HLNRZ]|D[HJMRW]|F[JLR]|G[HLNRW]|K[HLNRVW]|LL|M[BCN]|N[GKV]|P[FHLNRST]|RH|S|T(?:[CHRWZ]|S[AEIOUY])|V[LR]|W[HR]|"
    r"Y[PTV]|Z[HLW]|[AEIOU]|.[AEIOUY]"
)
"""How a word that can be said begins."""

_CODA = re.compile(r".+(?:[BCDFGKPTV][LR]|[CPT]HR|[TPKC][BDG]|G[BD]|D[BG]|[BDGKPTV]F|[DGKPTV]C|KSC|[LMPT]CS)$")
"""How no word ends: AAPL, ECHR, ALCS."""

_NO_CLAUSE = re.compile(r"[^\w' ]")
_TEST = re.compile(r" (?:scores?|prep|tests?|exams?)\b")
_FIRST, _LAST = re.compile(r"\s([A-Z]{2,})"), re.compile(r"([A-Z]{2,})\s$")
_AFTER_WORD = re.compile(r"\b[a-z]+ $")
_AFTER_JOINT = re.compile(r"(?:^|[^A-Z] )(?:and|or|but|by|with|to|from|for|that|when|said|says) $")
_IN_WORD = re.compile(r"[\w'&]$")


def recognise(text: str, at: int) -> Iterator[Candidate]:
    if _IN_WORD.search(before(text, at, 1)):
        return
    if (found := _DOTTED.match(text, at)) and not re.match(r"(?:e\.g|i\.e)\.", found[0]):
        letters = [letter for letter in found[0][: found.start("s") - at if found["s"] else None] if letter.isalpha()]
        said = spell("".join(letters)) + ("'s" if found["s"] else "")
        is_end = found[0].endswith(".") and len(letters) > 1 and ends_sentence(text, found.end())
        is_postscript = said in ("P S", "P P S") and re.match(r"\s+[A-Z]", text[found.end() : found.end() + 3])
        yield whole(found, SURE / 2, said, mark="," if is_postscript else "." * is_end)
    if found := _DEGREE.match(text, at):
        is_end = found[0].endswith(".") and ends_sentence(text, found.end())
        degree = re.sub(r"[^A-Za-z]", "", found[0].rstrip(".").removesuffix("s"))
        if "." in found[0][:-1] or degree in ("PhD", "MSc", "BSc", "EdD"):
            said = spell(degree.upper()) + "'s" * bool(found["s"])
            yield whole(found, SURE / 2, said, mark="." * is_end)
    if ((found := _LABEL.match(text, at)) and re.search(r"^$|[\s(]$", before(text, at, 1))) or (
        (found := _LABELLED.match(text, at)) and _BEHIND_LABEL.search(before(text, at))
    ):
        yield whole(found, SURE, "ay")
    if found := _GRADE.match(text, at):
        sign = ("plus" if found["sign"] == "+" else "minus") + "es" * bool(found["s"])
        yield pieces(found, SURE, (spell(found["grade"]), "grade"), (sign, "sign"))
    if text[at] in "ABO" and (found := _BLOOD.match(text, at)) and _OF_BLOOD.search(before(text, at)):
        sign = "positive" if found["sign"] == "+" else "negative"
        yield pieces(found, SURE / 2, (spell(found["group"]), "group"), (sign, "sign"))
    if (found := _DICTATED.match(text, at)) and len(set(found[0])) > 2:
        yield whole(found, SURE / 2, spell(found[0]))
    if found := _SHARP.match(text, at):
        yield whole(found, SURE, f"{found[0][0]} sharp")
    if found := _AND.match(text, at):
        plural = "'s" if found["s"] else ""
        yield whole(found, SURE, f"{spell(found['one'])} and {spell(found['two'])}{plural}")
    if (found := _INITIAL.match(text, at)) and _is_initial(text, found):
        yield whole(found, SURE, spell(found[0][0]))
    if found := _SMALL_LETTERS.match(text, at):
        yield whole(found, SURE / 2, spell(found["letters"].upper()) + ("'s" if found["s"] else ""))
    if (found := _CAPITALS.match(text, at)) and _is_spelled(text, found):
        yield whole(found, SURE, spell(found["letters"]) + ("'s" if found["s"] else ""))


def spell(letters: str) -> str:
    """Letters by their names. A lone "a" reads as the article, so the letter is written as it sounds."""
    return " ".join("ay" if letter in "aA" else letter for letter in letters if letter.isalpha())


def is_spelled(letters: str) -> bool:
    """Whether capitals are spelled rather than said as a word: FBI and HTTP, not NASA."""
    if letters in _SPELLED or not set(letters) & set("AEIOUY") or not _ONSET.match(letters):
        return True
    if len(letters) > 3 and _CODA.match(letters):
        return True
    return len(letters) <= 3 and letters not in _SAID


def _is_initial(text: str, found: re.Match[str]) -> bool:
    """Whether it begins a name, rather than ends a sentence as a label."""
    context = before(text, found.start())
    if _AFTER_JOINT.search(context):
        return not ends_sentence(text, found.end())
    return not (_AFTER_WORD.search(context) or _BEHIND_LABEL.search(context))


def _is_word(text: str, found: re.Match[str]) -> bool:
    """Whether IT or US is the word, in a clause of capitals: DO IT NOW, but THE IT DEPARTMENT."""
    left, right = _clause(text, found)
    is_name = left.endswith("THE ") or (found["letters"] == "US" and not left.strip())
    return not is_name and _is_loud(left + right)


def _clause(text: str, found: re.Match[str]) -> tuple[str, str]:
    """What stands before and behind it in its clause."""
    left, right = before(text, found.start()), after(text, found.end())
    return _NO_CLAUSE.split(left)[-1], _NO_CLAUSE.split(right)[0]


def _is_loud(clause: str) -> bool:
    """Whether it is all in capitals, with a word that is said."""
    return clause.isupper() and any(not is_spelled(word) for word in re.findall(r"[A-Z]{2,}", clause))


def _is_shouted(text: str, found: re.Match[str]) -> bool:
    """Whether words in capitals are beside it, rather than other initialisms: NBA MVP."""
    left, right = _clause(text, found)
    beside = [word for one in (_LAST.search(left), _FIRST.match(right)) if one for word in one.groups()]
    return bool(beside) and (_is_loud(left + right) or any(not is_spelled(word) for word in beside))


def _is_spelled(text: str, found: re.Match[str]) -> bool:
    letters = found["letters"]
    is_shouted = _is_shouted(text, found)
    if letters == "WHO" and before(text, found.start(), 4).lower() == "the ":
        return True
    if letters in ("SAT", "ACT") and not is_shouted:
        is_the = before(text, found.start(), 4).lower() == "the "
        return is_the or bool(found["s"]) or _TEST.match(text, found.end()) is not None
    if letters in ("IT", "US") and _is_word(text, found):
        return False
    if letters in _SPELLED or not set(letters) & set("AEIOUY"):
        return True
    return is_spelled(letters) and not is_shouted


EXAMPLES = (
    ("the FBI and the U.S. use TVs", "the F B I and the U S use T V's."),
    ("NASA, AT&T and DNA", "NASA, ay T and T and D N ay."),
    ("He went to the U.S. Then he left.", "He went to the U S. Then he left."),
    ("Jan 3rd, a Ph.D.", "January third, a P H D."),
    ("DO NOT RUN", "DO NOT RUN."),
    ("Vitamin C. Class C. Then John F. Kennedy", "Vitamin C. Class C. Then John F Kennedy."),
    ("The WHO said", "The W H O said."),
    ("CEO, CFO, two PhDs", "C E O, C F O, two P H D's."),
    ("a B- in COVID-19's", "a B minus in COVID nineteen's."),
    ("AAPL, ECHR, idc, BBB- credit", "ay ay P L, E C H R, I D C, B B B minus credit."),
    ("C. S. Lewis", "C S Lewis."),
)
