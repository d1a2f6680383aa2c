"""Abbreviations that are said in full: Dr. Smith, e.g., approx., No. 5, p. 12, w/o."""

import re
from collections.abc import Iterator
from string import ascii_letters

from sonoro.text.english.line import SURE, Candidate, Piece, before
from sonoro.text.english.tables import NUMBERED, listed, pairs

from .common import before_capital, ends_sentence, whole

STARTS = ("letter", "sign", "digit")


def _pairs(text: str) -> dict[str, str]:
    """Written to spoken forms, from "Mr:Mister c/o:care_of" with _ for a space."""
    return dict(pair.replace("_", " ").split(":") for pair in text.split())


_TITLES = pairs(
    "Mr = Mister | Mrs = Missus | Ms = Miz | Dr = Doctor | Prof = Professor | Capt = Captain | Gen = General | "
    "Sgt = Sergeant | Lt = Lieutenant | Col = Colonel | Rev = Reverend | Gov = Governor | Sen = Senator | "
    "Rep = Representative | Maj = Major | Cpl = Corporal | Cmdr = Commander | Adm = Admiral | Hon = Honorable | "
    "Messrs = Messieurs | Mt = Mount | Ft = Fort | Fr = Father | Pres = President | St = Saint | "
    "Supt = Superintendent | Det = Detective | Insp = Inspector | Mme = Madame | Mlle = Mademoiselle | "
    "Mssrs = Messieurs | Sts = Saints | Pvt = Private | Atty = Attorney | Attys = Attorneys"
)
_TITLES |= {
    word.upper(): _TITLES[word] for word in ("Mr", "Mrs", "Dr", "St", "Mt", "Rev", "Capt", "Col", "Prof", "Gen")
}
"""Before a name: a dot after them ends no sentence."""

_DOTTED = pairs(
    "Jr = Junior | Sr = Senior | Sat = Saturday | Wm = William | lb = pound | Inc = Incorporated | "
    "Ltd = Limited | Corp = Corporation | Co = Company | "
    "Dept = Department | approx = approximately | Bldg = Building | Esq = Esquire | Assn = Association | "
    "Bros = Brothers | Univ = University | govt = government | misc = miscellaneous | "
    "tel = telephone | etc = et cetera | est = estimated | Est = Established | max = maximum | "
    "min = minimum | avg = average | dept = department | vs = versus | Vs = versus | incl = including | "
    "excl = excluding | cont = continued | Mfg = Manufacturing | Intl = International | Natl = National | "
    "temp = temperature | orig = original | abbr = abbreviation | pron = pronounced | Apr = April | Jan = January | "
    "Feb = February | Mar = March | Jun = June | Jul = July | Aug = August | Sep = September | Sept = September | "
    "Oct = October | Nov = November | Dec = December | Mon = Monday | Tue = Tuesday | Tues = Tuesday | "
    "Wed = Wednesday | Thu = Thursday | Thurs = Thursday | Fri = Friday | cf = compare | viz = namely | ibid = ibid | "
    "Ave = Avenue | Blvd = Boulevard | Rd = Road | Ln = Lane | Hwy = Highway | Pkwy = Parkway | Sq = Square | "
    "Expy = Expressway | acct = account | Weds = Wednesday | qty = quantity | agg = aggregate | p.a = per annum | "
    "asst = assistant | mgr = manager | attn = attention | yr = year | wk = week | hr = hour | rm = room | "
    "Ret = retired | doz = dozen | pkg = package | pkgs = packages | ea = each | "
    "Lieut = Lieutenant | Regt = Regiment | "
    "appt = appointment | appts = appointments | choc = chocolate | shs = shares | rds = rounds | Drs = Doctors | "
    "Profs = Professors | occ = occasionally | Flt = Flight | diff = difference | Grp = Group | Utd = United"
)
_DOTTED = {word.capitalize(): said.capitalize() for word, said in _DOTTED.items() if word.islower()} | _DOTTED
"""Expanded if a dot follows, which ends a sentence only before a usual first word."""

_BEFORE_NUMBER = pairs(
    "apt = apartment | ste = suite | rm = room | bldg = building | hwy = highway | rte = route | rt = route | "
    "fig = figure | figs = figures | vol = volume | vols = volumes | ch = chapter | chap = chapter | "
    "eq = equation | ext = extension | nos = numbers | ep = episode | p = page | pp = pages | ver = version | "
    "art = article | sec = section | para = paragraph | no = number | tbl = table | app = appendix | "
    "mk = mark | fl = floor | bk = book | pt = part | cl = clause | amend = amendment | op = opus | pg = page | "
    "pgs = pages | "
    "ln = line | blk = block | "
    "pop = population | elev = elevation"
)
_NEEDS_DOT = frozenset(
    ["fl", "bk", "pt", "cl", "amend", "op", "p", "pp", "art", "sec", "para", "no", "app", "ln", "pop"]
)
_WORDS = pairs(
    "w/o = without | et al. = et al | et seq. = et seq | etc = et cetera | A/C = ay C | "
    "E.g. = For example | I.e. = That is | N.B. = Note | N.b. = Note | "
    "Lt. Gov. = Lieutenant Governor | Maj. Gen. = Major General | Brig. Gen. = Brigadier General | "
    "tel. no. = telephone number | Tel. no. = Telephone number | "
    "y/o = years old | c/o = care of | b/c = because | n/a = not applicable | "
    "N/A = not applicable | Ctrl = Control | aka = also known as | a.k.a. = also known as | e.g. = for example | "
    "i.e. = that is | vs = versus | Mr = Mister | Mrs = Missus | Ms = Miz | Prof = Professor | 4K = four K | "
    "8K = eight K | Cmd = Command | Esc = Escape | op. cit. = op cit | loc. cit. = loc cit | sec'y = secretary | "
    "gov't = government | cont'd = continued | int'l = international | nat'l = national | dep't = department | "
    "ass'n = association | and/or = and or | he/she = he or she | him/her = him or her | his/her = his or her | "
    "she/he = she or he | s/he = she or he | mins = minutes | secs = seconds | hrs = hours | yrs = years | "
    "WWI = World War One | WWII = World War Two | WW1 = World War One | WW2 = World War Two | A-Z = ay to Z | "
    "S/N = serial number | P/N = part number | y/y = year on year | q/q = quarter on quarter | "
    "YoY = Y O Y | QoQ = Q O Q | MoM = M O M | P/E = P E | wkts = wickets | pts = points | "
    "I/O = I O | A/B = ay B | AC/DC = ay C D C | TCP/IP = T C P I P | ISO/IEC = I S O I E C | PCIe = P C I e | "
    "M.2 = M dot two | NVMe = N V M e | Mbps = megabits per second | Gbps = gigabits per second | "
    "mmHg = millimeters of mercury | rebs = rebounds | asts = assists | m/m = month on month | rn = right now | "
    "ur = your | rly = really | M/W/F = Monday Wednesday and Friday | bus. days = business days | "
    "y.o. = years old | Sec'y = Secretary | o/n = overnight | Pub. L. = Public Law | wks = weeks | NE = northeast | "
    "NW = northwest | SE = southeast | SW = southwest | M-F = Monday to Friday | acct = account | "
    "fan/gas = fan or gas | pH = p H | pKa = p K ay"
)
_CHAT = pairs(
    "thx = thanks | pls = please | plz = please | ppl = people | nvm = never mind | gr8 = great | l8r = later | "
    "tmrw = tomorrow | 2nite = tonight | 2day = today | 2moro = tomorrow | tho = though | m8 = mate | sry = sorry | "
    "mtg = meeting | mtgs = meetings | "
    "msg = message | msgs = messages | w/e = whatever | tl;dr = T L D R"
)
_WORDS |= {word.capitalize(): said.capitalize() for word, said in _CHAT.items()} | _CHAT
_WORDS |= pairs(
    "TL;DR = T L D R | Rt. Hon. = Right Honourable | ATTN = attention | Sq. ft. = Square feet | "
    "sq. ft. = square feet | "
    "Ste. Marie = Saint Marie | Ste. Anne = Saint Anne | AM/FM = ay M F M | JPEG = J peg | JPEGs = J pegs | "
    "MPEG = M peg | MPEGs = M pegs | LSAT = L sat | MCAT = M cat | JSON = Jason | JSONs = Jasons | json = Jason | "
    "P/B = P B | P/S = P S"
)
NEAR = "et|ur"
_EITHER = listed(
    "yes/no left/right before/after parent/guardian true/false his/hers male/female pass/fail husband/wife "
    "day/night hot/cold buy/sell buyer/seller mother/father brother/sister men/women boys/girls"
)
_WORDS |= {pair: pair.replace("/", " or ") for pair in _EITHER}
_WORD = re.compile(
    "(?:" + "|".join(re.escape(word) for word in sorted(_WORDS, key=len, reverse=True)) + r")(?![\w/])(?P<comma>,?)"
)
_TITLE = re.compile(rf"(?P<word>{'|'.join(_TITLES)})(?P<dot>\.?)(?=\s(?:[A-Z]|& |and [A-Z]|1st Class))")
_TITLE_ALONE = re.compile(
    r"(?P<word>Mr|Mrs|Ms|Dr|Prof|MR|MRS|DR|(?:Rev|Capt|Gen|Sgt|Lt|Col|Gov|Sen|Rep|Maj|Cpl|Cmdr|Adm|Pres|Supt|Det|Insp|Attys?)"
    r"(?=\.,? (?!ed\b|of\b)[a-z]|\.'s|\.\s*$))\."
)
_BEHIND_NTH = re.compile(r"(?P<word>[Ff]l|c|ed|inst|ult)\.(?!\w)")
_SIZED = r"(?:eggs?|onions?|potato|tomato|carrots?|apples?|bananas?|lemons?|cloves?|shrimp|bowl|pan|pot|can|red|ripe)"
_OF_NTH = pairs("fl = Floor | c = century | ed = edition | inst = instant | ult = ultimo")
_AFTER_DAY = re.compile(
    r"\b(?:Mon|Tues?|Wed|Thu|Thurs|Fri|Sat)(?:\.,?|,)?(?: (?:and|or|to|through|&))? $"
    r"|\b(?:[Cc]losed|[Oo]pen|[Ee]very|[Nn]ext|[Ll]ast|[Tt]his|[Oo]n) $"
)
_LABEL_NUMBER = re.compile(r"(?P<word>[Nn]o)\.(?!\s?\d)")
_LETTERED = re.compile(r"(?P<word>(?i:apt|ste|rm|fig|tbl)|App)\.(?= [A-Z](?![\w']))")
_LABELLED = re.compile(rf"(?i)\b(?:{NUMBERED}) $")
_BY_DAY = re.compile(r"\b(?:[Bb]y|[Oo]n|[Uu]ntil|[Nn]ext|[Ee]very) $")
_DAYS = pairs(
    "mon = Monday | tue = Tuesday | tues = Tuesday | wed = Wednesday | weds = Wednesday | thur = Thursday | "
    "thurs = Thursday | fri = Friday | sat = Saturday"
)
_OF_ACT = re.compile(r"\b(?:[Uu]nder|[Ii]n|of|by|to|[Ss]ee|and|with) $")
_BEHIND = (
    (_BEHIND_NTH, re.compile(r"\d(?:st|nd|rd|th|[23]d) $"), _OF_NTH),
    (re.compile(r"(?P<word>pp)\.(?!\s?\w)"), re.compile(r"\d $"), {"pp": "pages"}),
    (re.compile(r"(?P<word>Sun)\.(?!\w)"), _AFTER_DAY, {"sun": "Sunday"}),
    (re.compile(rf"(?P<word>lg|med)\b\.? (?={_SIZED})"), re.compile(r"[\d½] $"), {"lg": "large", "med": "medium"}),
    (re.compile(r"(?P<word>med)\.?(?=[- ](?:low|high|heat)\b)"), re.compile(r"$"), {"med": "medium"}),
    (
        re.compile(r"(?P<word>def(?=\. [A-Z])|d(?=\. [A-Z][\w'-]+ \d{1,3}-\d))\."),
        re.compile(r"[A-Z][\w.'-]* $"),
        dict.fromkeys(("def", "d"), "defeated"),
    ),
    (
        re.compile(r"(?P<word>y/o)(?= [a-z])"),
        re.compile(r"\b(?:an?|the|my|his|her|our) \d+[ -]?$"),
        {"y/o": "year old"},
    ),
    (re.compile(r"(?P<word>min)\."), re.compile(r"\d(?:st|nd|rd|th) $"), {"min": "minute"}),
    (
        re.compile(r"(?P<word>co)\.(?= [a-z])"),
        re.compile(r"$"),
        {"co": "company"},
    ),
    (re.compile(r"(?P<word>ss?)\.(?=\s?\d)"), _OF_ACT, {"s": "section", "ss": "sections"}),
    (re.compile(r"(?P<word>INT|EXT)\.(?= [A-Z]{2})"), re.compile(r"$"), {"int": "Interior", "ext": "Exterior"}),
    (re.compile(r"(?P<word>tabs?)\.(?= [a-z])"), re.compile(r"[\d½] $"), {"tab": "tablet", "tabs": "tablets"}),
    (re.compile(r"(?P<word>Mon|Tues?|Weds?|Thurs?|Fri|Sat)(?![\w.'])"), _BY_DAY, _DAYS),
    (re.compile(r"(?P<word>n)\.(?=\d)"), re.compile(r"\d $"), {"n": "note"}),
    (re.compile(r"(?P<word>K)\.(?=\s?\d{1,3}(?!\w))"), re.compile(r"(?:^|'s |[a-z], |\()$"), {"k": "K"}),
    (
        re.compile(r"(?P<word>[Uu]r)(?= (?:an?|the|so|not|right|late|too|very|welcome|[a-z]{2,}ing)\b)"),
        re.compile(r"$"),
        {"ur": "you're"},
    ),
    (
        re.compile(r"(?P<word>Del|Ins)(?![\w'])"),
        re.compile(r"\w ?[+-] ?$|(?:[Pp]ress|[Hh]it) $"),
        {"del": "Delete", "ins": "Insert"},
    ),
    (_LABEL_NUMBER, _LABELLED, {"no": "number"}),
    (
        re.compile(r"(?P<word>[Nn]o)\.(?= of\b)"),
        re.compile(r"(?:^|[,;:.(] ?|\b(?:[Tt]he|[Aa]|total|max\.|min\.) )$"),
        {"no": "number"},
    ),
)
"""Forms that are read by what stands before them: the form, what is before it, and what is said for its word."""

_BEHIND_OF = {
    first: [one for one in _BEHIND if any(word[0] == first.lower() for word in one[2])] for first in ascii_letters
}
"""The same by the letter that they begin with."""

_FEATURING = re.compile(r"(?P<word>ft|feat)\.(?=\s[A-Z])")
_NAMED = re.compile(r"(?:^|[A-Za-z\"')(]\s?)$")
_PLURAL = re.compile(r"(?P<word>[A-Za-z]{2,30})\((?P<s>e?s)\)(?!\w)")
_WITH_DOT = re.compile(
    rf"(?P<word>{'|'.join(map(re.escape, sorted(_DOTTED, key=len, reverse=True)))})\.(?P<owner>'s(?!\w))?(?P<comma>,?)"
)
_NUMBERED = re.compile(
    rf"(?P<word>(?i:{'|'.join(sorted(_BEFORE_NUMBER, key=len, reverse=True))}))(?P<dot>\.?)\s?"
    r"(?=[#(]?\d|(?-i:[VXL][IVXL]*|I[IVX]+|I(?=[.,;:)]|$)|(?<=\. )[ivx]{2,7})(?!\w))"
)
_WITH = re.compile(r"w/(?:\s|(?=\w\w))")
_F_STOP = re.compile(r"[fF]/(?=\d)")
_AGAINST = re.compile(r"vs?\.?(?= [A-Z])")
_HASH = re.compile(r"(?:#|№\s?)(?=\d)")
WORDS = (
    listed("Sun Ins ed inst ult lg med def min co ur Ur ss INT EXT tab tabs Mon Tue Tues Wed Weds Thur Thurs Fri Sat")
    | {*_TITLES, *_DOTTED, *_BEFORE_NUMBER}
    | {word.split()[0].rstrip(".") for word in _WORDS}
)
_BEGIN_WORD, _BEGIN_DOTTED = (frozenset(word[:2] for word in words) for words in (_WORDS, _DOTTED))
"""How the words of the longer tables begin: most words are none, and seen to be at once."""

_IN_WORD = re.compile(r"[\w']$")
_AFTER_NAME = re.compile(r"[A-Z][\w.]*\)? $")
_IN_ADDRESS = re.compile(r"[/.]$")


def recognise(text: str, at: int) -> Iterator[Candidate]:
    context = before(text, at, 1)
    if _IN_WORD.search(context):
        return
    first = text[at]
    if first in "#№" and (found := _HASH.match(text, at)):
        yield whole(found, SURE, "number")
    if first == "v" and (found := _AGAINST.match(text, at)) and _AFTER_NAME.search(before(text, at)):
        yield whole(found, SURE, "versus")
    if first == "w" and (found := _WITH.match(text, at)):
        yield whole(found, SURE, "with")
    if first in "fF" and (found := _F_STOP.match(text, at)):
        yield whole(found, SURE, "f")
    for form, context_before, words in _BEHIND_OF.get(first, ()):
        if (found := form.match(text, at)) and context_before.search(before(text, at)):
            said = words[found["word"].lower()]
            mark = "." * (found[0].endswith(".") and ends_sentence(text, found.end()))
            yield _said(found, found["word"], said.capitalize() if found["word"] == "No" else said, mark)
    begins = text[at : at + 2]
    if begins in _BEGIN_WORD and (found := _WORD.match(text, at)) and not _IN_ADDRESS.search(context):
        word = found[0].rstrip(",")
        comma = "," * (found["comma"] != "" or word in ("e.g.", "i.e.", "E.g.", "I.e.", "N.B."))
        yield _said(found, word, _WORDS[word], comma)
    if not first.isalpha():
        return
    if (found := _TITLE.match(text, at)) and _is_title(text, found):
        yield _said(found, found["word"], _TITLES[found["word"]], "")
    if found := _LETTERED.match(text, at):
        said = _BEFORE_NUMBER[found["word"].lower()]
        yield _said(found, found["word"], said.capitalize() if found["word"][0].isupper() else said, "")
    if (found := _FEATURING.match(text, at)) and _NAMED.search(before(text, at)):
        yield _said(found, found["word"], "featuring", "")
    if found := _PLURAL.match(text, at):
        yield whole(found, SURE, found["word"] + found["s"])
    if found := _TITLE_ALONE.match(text, at):
        mark = "." * ends_sentence(text, found.end())
        yield _said(found, found["word"], _TITLES[found["word"]], mark)
    if begins in _BEGIN_DOTTED and (found := _WITH_DOT.match(text, at)) and not _is_name(text, found):
        word = found["word"]
        is_end = not found["comma"] and (
            before_capital(text, found.end()) if word == "etc" else ends_sentence(text, found.end())
        )
        owner = found["owner"] or ""
        yield _said(found, word, _DOTTED[word] + owner, "." if is_end and not owner else found["comma"])
    if (found := _NUMBERED.match(text, at)) and (found["dot"] or found["word"].lower() not in _NEEDS_DOT):
        said = _BEFORE_NUMBER[found["word"].lower()]
        yield _said(found, found["word"], said.capitalize() if found["word"][0].isupper() else said, "")


def _is_title(text: str, found: re.Match[str]) -> bool:
    """Whether it stands before a name: not the Ft of feet, nor the St or Dr of a street, which `address` reads."""
    return bool(found["dot"]) or found["word"] in ("Mr", "Mrs", "Ms", "Dr", "Prof", "Mt", "St")


def _is_name(text: str, found: re.Match[str]) -> bool:
    """Whether it is a name at the end of a sentence: said Max."""
    is_within = re.search(r"[A-Za-z,] $", before(text, found.start(), 2)) is not None
    return found["word"] == "Max" and is_within and before_capital(text, found.end())


def _said(found: re.Match[str], word: str, said: str, mark: str) -> Candidate:
    start = found.start()
    made = [Piece(said, start, start + len(word))]
    if mark:
        made.append(Piece(mark, start + len(word), found.end()))
    return Candidate(found.end(), SURE / 2, tuple(made))


EXAMPLES = (
    ("a JSON file, JSON's, data.json", "a Jason file, Jason's, data dot json."),
    ("P/B and P/S", "P B and P S."),
    ("Dr. Smith and Mrs. O'Brien", "Doctor Smith and Missus O'Brien."),
    ("nuts, e.g. figs, i.e. fruit, etc.", "nuts, for example, figs, that is, fruit, et cetera."),
    ("Then Acme Inc. closed.", "Then Acme Incorporated closed."),
    ("Cats vs. dogs, No. 5, p. 12", "Cats versus dogs, Number five, page twelve."),
    ("w/o it; w/ it; and/or", "without it, with it, and or."),
    ("Approx. 5 in WWII", "Approximately five in World War Two."),
    ("Sr. Engineer, Op. 9", "Senior Engineer, Opus nine."),
    ("user(s) on the 21st Fl.", "users on the twenty first Floor."),
    ("MRS. RAVENEL, E.g. Ann ft. Bob", "Missus RAVENEL, For example, Ann featuring Bob."),
    ("Fig. 3 and #7", "Figure three and number seven."),
    ("part no. AB; your order no. He left", "part number ay B, your order number. He left."),
    ("S/N 123, up y/y", "serial number one hundred and twenty three, up year on year."),
)
