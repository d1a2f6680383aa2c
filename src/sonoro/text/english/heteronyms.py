"""Words that are written alike and said apart, by what stands beside them: to read, has read; lead pipes, to lead.

Each word has two readings. A reading is chosen where its context is found, tried in order; else the one that is named
first is meant. How a reading is written for a voice is the voice's own matter: `respellings` of its checkpoint, by
keys like "read:past".
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

_ADVERB = (
    r"(?: (?:not|never|always|also|even|just|really|only|still|now|all|both|either|quickly|carefully|often|ever))?"
)
_AUXILIARY = (
    "will|would|can|could|should|must|may|might|shall|do|does|did|don't|doesn't|didn't|won't|can't|cannot|couldn't|"
    "wouldn't|shouldn't|mustn't|had better|'d better|let's|let us|let me|please"
)
_PERSONS = (
    "I|you|we|they|who|people|men|women|children|everyone|I'll|you'll|we'll|they'll|he'll|she'll|it'll|I'd|you'd|"
    "we'd|they'd"
)
_INFINITIVE = rf"(?:(?<!close) to|^to|\b(?:{_AUXILIARY})(?: (?:I|you|he|she|it|we|they))?)"
_VERB = (
    rf"(?:{_INFINITIVE}|\b(?:{_PERSONS})|\b(?:never|always|often|usually|sometimes|and then)|\bhelp (?:me|us|them|"
    rf"him|her)){_ADVERB} $"
)
"""Before a verb in its plain form."""

_START = r"(?:^|[.!?] )$"
_OBJECT = (
    r" (?:the|a|an|your|my|his|her|its|our|their|it|them|him|me|us|this|that|these|those|all|everything|every|each|"
    r"some|up|down)\b"
)
_PLURAL = (
    r"\b(?!(?:was|is|has|does|this|always|its|his|us|as|perhaps|sometimes|yes|news) )"
    r"(?:[a-z]{2,}(?<!s)s|people|men|women|children) $"
)
"""Several of a kind, which may be the subject of a verb in its plain form."""

_NOUN = (
    r"\b(?:the|a|an|this|that|my|your|his|her|its|our|their|some|any|no|each|every|another|one|of|whose|what|"
    r"which)(?: [a-z]+(?<!s))? $"
)
_TO_WIND = (
    r" (?:the|a|his|her|my|your|their|our) (?:[a-z]+ )?(?:clock|watch|bandage|rope|hose|toy|yarn|string|wool|scarf|"
    r"thread|wire|cord|tape|film|handle|window)\b"
)
"""What one winds."""

_BE = (
    r"(?:\b(?:am|is|are|was|were|be|been|being|feel|feels|felt|seem|seems|seemed|look|looks|looked|remain|stay|"
    r"stayed|get|gets|got)|'s|'re|'m)"
)
_DEGREE = r"(?: (?:very|quite|so|too|perfectly|fairly|really|not|more|most|rather|only|just|almost|all))?"
_PAST = (
    r"\b(?:yesterday|ago|was|were|had|then|earlier|previously|once|\w{3,}ed|as an? (?:boy|girl|child|kid|student)|"
    r"last (?:night|week|weekend|month|year|time|summer|winter|spring|fall|autumn|\w+day))\b"
)


class _Rule(NamedTuple):
    """A `reading` of a word where `left` is found before it and `right` begins behind it."""

    reading: str
    left: str = ""
    right: str = ""


def _verb(reading: str, right: str = _OBJECT) -> tuple[_Rule, ...]:
    return _Rule(reading, _VERB), _Rule(reading, _START, right), _Rule(reading, _PLURAL, right)


_FIRST = {
    "read": "present", "lead": "guide", "live": "verb", "wind": "noun", "tear": "drop", "bow": "knot",
    "close": "adjective", "record": "noun", "content": "noun", "object": "noun", "minute": "time",
    "desert": "sand", "polish": "shine", "wound": "injury", "use": "verb", "house": "noun", "refuse": "verb",
    "present": "gift", "project": "noun",
}  # fmt: skip
"""The reading without a context that says otherwise."""

_RULES: dict[str, tuple[_Rule, ...]] = {
    "read": (
        _Rule("past", r"(?:\b(?:have|has|had|having|haven't|hasn't|hadn't|was|were|been|being|is|are|be|well)|'ve|"
            r"'d)(?: (?:never|already|just|ever|not|also|only|always|recently|once|been|you|we|they|I|he|"
            r"she))?(?: (?:never|already|just|ever))? $"),
        _Rule("present", rf"(?:{_INFINITIVE}|\bhelp (?:me|us|them|him|her)){_ADVERB} $"),
        _Rule("present", r"\b(?:a|an)(?: [a-z]+)? $", r"(?:[.,?!]|$)"),
        _Rule("present", _START),
        _Rule("past", r"\b(?:he|she|it|who|which|no one|nobody|everyone|everybody|"
            r"someone|(?-i:(?!They|We|You|I|People|Children|Men|Women|And|But|If|Or|So|"
            r"Now|Then|First|Next|Just|Also|Always|"
            r"When)[A-Z][a-z]+(?<!s)))(?: (?:only|also|never|always|then|just|once|even))? $"),
        _Rule("past", r"\b(?:the|a|an|my|his|her|their|our|your|this|that) [a-z]+(?<!s) $"),
        _Rule("past", r"\b(?:I|we|they) $", r" (?:somewhere|(?:him|her|me|us|them) (?:his|"
            r"her|the|a|an|my|our|their))\b"),
        _Rule("past", rf"(?:{_PAST}|\b(?:took|sat|stood|lay|came|went|found|got)\b.* and)[^.!?]* $"),
        _Rule("past", "", rf"[^.!?]*{_PAST}"),
    ),
    "lead": (
        _Rule("metal", "", r" (?:pipes?|paint|poisoning|acid|pencils?|levels?|ore|bullets?|shot|weights?|mines?|"
            r"batter(?:y|ies)|aprons?|crystal|glass|lined|free|based|sheets?|sheeting|flashing|roofs?|contamination|"
            r"exposure|solder|content|balloons?)\b"),
        _Rule("metal", r"\b(?:made of|made from|heavy as|contains?|containing|contained|molten|liquid|pounds of|"
            r"tons of|traces of|amounts? of|like|copper and|zinc and|iron and|tin and|silver and|gold and|"
            r"mercury and|arsenic and|(?:test|check|screen)(?:s|ed|ing)?\b[^.]* for|"
            r"covered in|covered with|lined with|coated in|coated with) $"),
        _Rule("metal", r"\b(?:metals?|pencils?)\b[^.]* $"),
        _Rule("metal", "", r"[^.]*\b(?:metals?|unleaded)\b"),
        _Rule("metal", "", r" (?:is|was) (?:toxic|poisonous|soft|dense|heavier|denser|harmful)\b"),
        _Rule("metal", "", r" (?:and|or) (?:copper|zinc|iron|tin|silver|gold|mercury|arsenic|other metals)\b"),
        _Rule("metal", "", r" (?:in|from) (?:the |our |their |drinking |tap )?(?:water|paint|pipes|soil|blood|air|"
            r"pencils?)\b"),
    ),
    "live": (
        _Rule("adjective", r"\b(?:watch(?:ed|ing)?|see|saw|heard?|listen)\b[^.]* $", r"(?: (?:tonight|now|on|at|"
            r"online)\b|[.,]|$)"),
        _Rule("adjective", "", r" (?:music|shows?|broadcasts?|streams?|streaming|audiences?|performances?|concerts?|"
            r"coverage|events?|television|t v|wires?|bait|ammunition|updates?|chat|data|videos?|recordings?|albums?|"
            r"animals?|action|feeds?|demos?|bands?|sports?|radio|birds?|theat(?:re|er)|comedy|gigs?|tours?|footage|"
            r"sessions?|podcasts?|from|on (?:air|stage|radio|television|"
            r"t v))\b"),
        _Rule("adjective", rf"(?:{_BE}|\b(?:go|goes|went|gone|going|come|comes|came|broadcast|streamed|streaming|"
            rf"recorded|performed|performing|shown|played|playing|sing|sings|sang|report|"
            rf"reporting|plays?|perform|performs|airs?|aired)){_DEGREE} $"),
        _Rule("adjective", r"\b(?:a|an|the|this|that|more|some|our|their|first|of) $", r" [a-z]"),
        _Rule("adjective", r"\b(?:join|catch|follow|meet) (?:us|me|him|her|them|it) $",
            r"(?! (?:far|here|there|alone)\b)"),
    ),
    "wind": (
        *_verb("verb"),
        _Rule("verb", "", _TO_WIND),
        _Rule("verb", "", r" (?:up|back|around|through) (?:the|a|your|my|his|her|its|our|their|in|with|to)\b"),
        _Rule("verb", _PLURAL, r" (?:up|down|upwards?|downwards?|along|across|past|between|into|towards?|over)\b"),
    ),
    "tear": (
        _Rule("drop", "", r" (?:gas|drops?|ducts?|stain(?:s|ed)?|rolled|fell|ran|slid|trickled)\b"),
        _Rule("rip", rf"{_VERB}"),
        _Rule("rip", "", r" (?:up|apart|down|off|out|open|here|it|them|along|through|into|away|at)\b"),
        _Rule("rip", _START, _OBJECT),
        _Rule("rip", r"\b(?:wear and|muscle|ligament|tendon|a small|a big|a large|a long|a slight|a huge) $"),
        _Rule("rip", "", r" in (?:the|my|his|her|its|your|our|their|a) (?!eyes?\b|corner)[a-z]"),
    ),
    "bow": (
        _Rule("knot", "", r" (?:and arrows?|ties?|tied|string)\b"),
        _Rule("bend", "", r" (?:of (?:the|a|his|her|its|our|their) (?:ship|boat|vessel|ferry|yacht|canoe)|and stern|"
            r"down|before|out|low|deeply|his head|her head|their heads?|my head|your head|our heads)\b"),
        _Rule("bend", r"\b(?:ship's|boat's|take|takes|took|taking|taken|make|made|deep|low|little|polite|final|last|"
            r"from)(?: an?)?(?: (?:final|last|deep|low))? $", r"(?![^.,]*\b(?:ribbon|hair)\b)"),
        _Rule("bend", _VERB),
        _Rule("bend", _PLURAL, " to"),
    ),
    "close": (
        _Rule("verb", rf"{_VERB}"),
        _Rule("verb", _START, rf"(?:{_OBJECT}| [a-z]+ing)"),
        _Rule("verb", r"\b(?:the|a|to a|at|market|a quick|an early) $", r"(?: of\b|[.,?!]|$)"),
        _Rule("verb", _PLURAL, r"(?: (?:at|in|on|for|early|late|the|their|down|when|before|after|higher|"
            r"lower|up|mixed)\b|[.,?!]|$)"),
    ),
    "record": (_Rule("noun", r"\b(?:world|on the|for the|track|criminal|police|medical|off the) $"), *_verb("verb")),
    "content": (
        _Rule("adjective", rf"{_BE}{_DEGREE} $", r"(?: (?:with|to|in|here|there|at|now|just)\b|[.,?!]|$)"),
        _Rule("adjective", r"\b(?:perfectly|quite|fully|seldom|not|happy and) $", r"(?: (?:with|to|in|here)\b|"
            r"[.,?!]|$)"),
        _Rule("adjective", ", $", r" with (?:his|her|my|our|their|it|what|himself|herself)\b"),
        _Rule("adjective", "", r" (?:themselves?|himself|herself|myself|ourselves|yourself)\b"),
        _Rule("adjective", r"\b(?:is|are|was|were|am) (?:he|she|it|they|we|you|I) $"),
    ),
    "object": (_Rule("verb", rf"\b(?:{_PERSONS}|strongly|also) $"), _Rule("noun", _NOUN), *_verb("verb"), _Rule(
            "verb", "", r" (?:to|strongly|that|if)\b")),
    "minute": (
        _Rule("tiny", r"\b(?:even|very|the most) $", r" [a-z]+s\b"),
        _Rule("tiny", "", r" (?:errors?|mistakes?|flaws?|portions?|samples?|grains?|bits?|amounts?|details?|"
            r"particles?|traces?|quantit(?:y|ies)|differences?|cracks?|"
            r"fractions?|changes|fragments?|organisms?|scale|dust|doses?|holes?|specks?|scratches|creatures|"
            r"variations?|pieces?)\b"),
        _Rule("tiny", rf"{_BE}{_DEGREE} $", r"(?:[.,?!]|$| (?:and|but|in|when|compared)\b)"),
    ),
    "desert": (
        _Rule("sand", _NOUN),
        *_verb("leave", r" (?:the|his|her|their|my|your|our|its|it|him|them|me|us)\b"),
        _Rule("leave", r"\b(?:soldiers|troops|friends|allies|men) $"),
    ),
    "polish": (),
    "wound": (
        _Rule("injury", _NOUN, r"(?! (?:up|around|round|its|through|tightly))"),
        _Rule("turned", "", r" (?:up|around|round|through|down|along|across|its|their|his way|her way|back|tightly|"
            r"itself)\b"),
        _Rule("turned", "", _TO_WIND),
    ),
    "use": (
        _Rule("verb", rf"{_VERB}"),
        _Rule("noun", r"\b(?:the|a|of|no|in|for|its|their|your|my|his|her|our|any|this|much|some|make|makes|made|"
            r"making|good|better|best|great|little|full|daily|personal|common|widespread|drug|land|water|energy|"
            r"phone|first|fair|is|external|internal|regular|heavy|frequent|future|later|medical|commercial|private|"
            r"public|"
            r"home|proper) $", r"(?! (?:the|a|an|it|them|this|your|my|our|his|her|their)\b)"),
        _Rule("noun", "", r" (?:of|cases?)\b"),
        _Rule("noun", r"\bwhat $"),
    ),
    "house": (_Rule("noun", _NOUN), _Rule("verb", _VERB), _Rule("verb", _PLURAL, r" (?:the|a|an|their|our|my|his|"
            r"all|some|many|over|"
            r"up)\b")),
    "refuse": (
        _Rule("waste", "", r" (?:collections?|collectors?|bins?|sacks?|dumps?|disposal|heaps?|trucks?|bags?|tips?|"
            r"lorr(?:y|ies)|can|was|is)\b"),
        _Rule("waste", r"\b(?:the|of|collects?|collected|dump|dumped|burns?|burned|sort|sorted|removed?|garden|"
            r"household|kitchen|domestic|industrial|some|any|this|and|with|burning|their|our) $", r"(?! (?:to)\b)"),
    ),
    "present": (
        _Rule("gift", r"\b(?:past|from past) to $"),
        _Rule("gift", r"\b(?:everyone|everybody|anyone|nobody|no one) $", rf"(?!{_OBJECT})"),
        _Rule("gift", _NOUN),
        *_verb("verb", r" (?:the|a|an|your|my|his|her|its|our|their|it|them|this|that|these|some|[a-z]+s)\b"),
    ),
    "project": (_Rule("noun", _NOUN), *_verb("verb", r"(?:[^.]* (?:in|into|onto|the|a)\b| [a-z]+)")),
}  # fmt: skip


@cache
def _compiled(word: str) -> tuple[tuple[str, re.Pattern[str] | None, re.Pattern[str] | None], ...]:
    return tuple((rule.reading, _context(rule.left), _context(rule.right)) for rule in _RULES[word])


def _context(pattern: str) -> re.Pattern[str] | None:
    return re.compile(pattern, re.IGNORECASE) if pattern else None


_WORDS = re.compile(rf"\b(?i:{'|'.join(_FIRST)})\b")
REACH = 50
"""Characters before and behind a word that are looked at."""


def reading(text: str, start: int, end: int) -> str:
    """Which reading of the heteronym `text[start:end]` is meant."""
    word = text[start:end].lower()
    begin = max(text.rfind(mark, 0, start) for mark in ".!?") + 1
    left = text[max(begin, start - REACH) : start].lstrip()
    right = text[end : end + REACH]
    if word == "polish" and text[start].isupper() and (left or not re.match(_OBJECT, right)):
        return "Poland"
    for named, before, after in _compiled(word):
        if (before is None or before.search(left)) and (after is None or after.match(right)):
            return named
    return _FIRST[word]


def places(text: str, spellings: Mapping[str, str], before: str = "", after: str = "") -> list[tuple[int, int, str]]:
    """Where `text`, between `before` and `after`, has a heteronym whose reading has one of the `spellings`."""
    before = before.rpartition("\n\n")[2]
    whole = before + (text.removesuffix(".") + after if after else text)
    moved, found = len(before), []
    for word in _WORDS.finditer(text):
        key = f"{word[0].lower()}:{reading(whole, word.start() + moved, word.end() + moved)}"
        if key in spellings:
            found.append((*word.span(), spellings[key]))
    return found


def first_unsettled(text: str, end: int) -> int:
    """Where the first heteronym of `text[:end]` begins that more text may change, or `end`."""
    for word in _WORDS.finditer(text, 0, end):
        rest = text[word.end() : word.end() + REACH]
        if len(rest) < REACH and not re.search(r"[.!?]\s|\n\n", rest):
            return word.start()
    return end
