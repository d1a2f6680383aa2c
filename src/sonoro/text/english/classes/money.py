"""Amounts of money: $2.50, £1.20, €5-10k, $1-2 million, 50 EUR, US$76.3 trillion, $20/mo."""

import re
from collections.abc import Iterator

from sonoro.text.english.line import LIKELY, SURE, Candidate, before
from sonoro.text.english.numbers import cardinal, count, decade, decimal
from sonoro.text.english.tables import pairs

from .common import DASH, NUMBER, ends_sentence, is_attributive, pieces, whole
from .initialism import spell
from .units import SMALL, currency, names

STARTS = ("sign", "digit", "letter")

_SIGN = r"(?P<sign>[$£€¥₹₩₽₺₫₪₿]|Rs\.?(?=\s?\d))"
_SCALE = (
    r"(?:(?:\s?|-(?=[a-z]{7}))(?P<scale>"
    r"(?i:hundred|thousand|million|billion|trillion|lakh|crore|bn|tn|mn|mio)|MM|[kKmMbBtT])(?![\w]))"
)
_AMOUNT = rf"(?P<amount>{NUMBER})"
_PREFIXED = re.compile(
    rf"(?P<minus>-)?(?P<land>(?:(?:US|U\.S\.|CA|AU|NZ|HK|NT|MX)\s?|[CARS])(?=\$))?{_SIGN}\s?(?P<inner>-)?{_AMOUNT}{_SCALE}?(?!\d)(?:\s(?P<code>USD|GBP|EUR|CAD|AUD)\b)?"
)
_RANGE = re.compile(
    rf"{_SIGN}\s?{_AMOUNT}{_SCALE}?(?P<to>{DASH}|\sto\s|(?<=\d)\sand\s(?=[$£€]))(?P<sign2>[$£€¥₹₩])?\s?(?P<amount2>{NUMBER})(?:\s?(?P<scale2>(?i:hundred|thousand|million|billion|trillion|bn|tn|mn)|[kKmMbBtT])(?![\w]))?(?![\d-])"
)
_SUFFIXED = re.compile(
    rf"(?P<amount>\d{{1,3}}(?: \d{{3}}){{1,4}}|{NUMBER}|\d{{1,3}}(?:\.\d{{3}})+(?:,\d\d)?|\d+,\d\d)(?P<scale>)"
    r"\s?(?P<sign>[$£€¥₹₩₽₺]|zl|kr\b)(?![\d\w])"
)
_CODED = re.compile(
    rf"(?P<amount>{NUMBER}|\d+,\d\d){_SCALE}?\s?(?P<sign>USD|EUR|GBP|JPY|CNY|INR|CAD|AUD|NZD|CHF|SEK|NOK|DKK|KRW|BRL|MXN|RUB|ZAR|SGD|HKD|TRY|PLN|THB|AED|SAR|ILS|CZK|HUF)(?![\w])"
)
_CODE_FIRST = re.compile(
    rf"(?P<sign>USD|EUR|GBP|JPY|CNY|INR|CAD|AUD|NZD|CHF|SEK|NOK|DKK|KRW|BRL|MXN|RUB|ZAR|SGD|HKD|TRY|PLN|THB|AED|SAR)\s?{_AMOUNT}{_SCALE}?(?!,?\d)"
)
_CONTINENTAL = re.compile(
    r"(?P<sign>[$£€¥₹₩]|EUR(?=\s?\d)|CHF(?=\s?\d))\s?(?P<amount>\d{1,3}(?:\.\d{3})++(?:,\d\d)?|\d+,\d\d)(?P<scale>)(?![.,]?\d)"
)
_SCALES = pairs(
    "k = thousand | m = million | mm = million | mn = million | mio = million | "
    "b = billion | bn = billion | t = trillion | "
    "tn = trillion"
)
_LANDS = pairs(
    "US = U S | CA = Canadian | C = Canadian | AU = Australian | A = Australian | NZ = New Zealand | HK = Hong Kong | "
    "S = Singapore | NT = New Taiwan | USD = U S | CAD = Canadian | AUD = Australian"
)
_SHILLINGS = re.compile(r"(?:£(?P<pounds>\d{1,6}),? )?(?P<s>1?\d)s\.?(?:,? (?P<d>1?\d)d\.?)?(?!\w)")
_LOSS = re.compile(rf"(?P<sign>[$£€])\((?P<amount>{NUMBER})\){_SCALE}?(?!\d)")
"""An amount below zero, as accounts write it."""

_PAIR = re.compile(r"(?P<one>[A-Z]{3})/(?P<two>[A-Z]{3})(?![\w/])")
_CODES_OF_LANDS = {"R": "BRL", "MX": "MXN"}
_SMALL_COIN = re.compile(
    r"(?!(?:144|240|360|480|540|576|720)p)(?P<amount>\d{1,3}(?:\.\d)?)(?P<sign>[pc])"
    r"(?:(?<=p)(?![\w/]|-\w| (?:video|footage|mode|frames|film|orbitals?)\b)"
    r"|(?=(?:\s(?:each|coins?|a piece|apiece|off|per|stamps?|piece)\b)|,? [£$]\d|,? or \d{1,2}[pc]\b))"
    r"|(?<=[£$]\d, )(?P<amount2>\d{1,2})(?P<sign2>[pc])(?!\w)"
)
_BANKNOTE = re.compile(r" (?:bills?|notes?|coins?|homes?|houses?)\b")
_BANKNOTES = re.compile(r"[$£€](?P<value>1|5|10|20|50|100)s(?!\w)")
_PER = re.compile(
    r"\s?/\s?(?P<per>mo|month|yr|year|wk|week|d|day|hr|hour|h|min|minute|s|sec|lb|kg|oz|gal|gallon|L|l|mi|km|person|night|user|seat|unit|GB|kWh|share|head|barrel|bbl|ton)(?![\w])(?:\.(?=\s+[a-z&+(]))?"
)
_PERIODS = pairs(
    "bbl = barrel | mo = month | yr = year | wk = week | d = day | hr = hour | h = hour | min = minute | s = second | "
    "sec = second | lb = pound | kg = kilogram | oz = ounce | gal = gallon | L = liter | l = liter | "
    "mi = mile | km = kilometer | "
    "GB = gigabyte | kWh = kilowatt hour"
)
_BETWEEN = re.compile(r"\b[Bb]etween $")
_IN_NUMBER = re.compile(r"[\d.,$£€]$")
_IN_WORD = re.compile(r"\w$|[A-Z]/$")
_AFTER_OPERAND = re.compile(r"[\w)]$|[\d)]\s$")


def recognise(text: str, at: int) -> Iterator[Candidate]:
    context = before(text, at, 1)
    if (found := _SHILLINGS.match(text, at)) and (found["pounds"] or found["d"]) and not _IN_NUMBER.search(context):
        yield _old_amount(text, found)
    if text[at].isdecimal():
        if not _IN_NUMBER.search(context):
            if found := _SMALL_COIN.match(text, at):
                yield _small(found)
            for form in (_SUFFIXED, _CODED):
                if found := form.match(text, at):
                    yield _with_period(text, _amount(text, found, _plain_number(found["amount"])))
        return
    if _IN_WORD.search(before(text, at, 2)) or (text[at] == "-" and _AFTER_OPERAND.search(before(text, at, 2))):
        return
    if (found := _PAIR.match(text, at)) and currency(found["one"]) and currency(found["two"]):
        yield pieces(found, SURE, (spell(found["one"]), "one"), (spell(found["two"]), "two"))
    if found := _LOSS.match(text, at):
        said = said_amount(found["sign"], found["amount"], found["scale"] or "")
        yield whole(found, SURE, f"minus {said}")
    if found := _BANKNOTES.match(text, at):
        yield whole(found, SURE, decade(found["value"]).removeprefix("one "))
    if (found := _RANGE.match(text, at)) and ("a" not in found["to"] or _BETWEEN.search(before(text, at))):
        yield _with_period(text, _range(found))
    # Dollars with three decimals are no thousands.
    if (found := _CONTINENTAL.match(text, at)) and (found["sign"] in ("€", "EUR") or "," in found["amount"]):
        yield _with_period(text, _amount(text, found, _plain_number(found["amount"])), SURE)
    for form in (_PREFIXED, _CODE_FIRST):
        if found := form.match(text, at):
            yield _with_period(text, _amount(text, found, found["amount"]))


def _old_amount(text: str, found: re.Match[str]) -> Candidate:
    """Pounds, shillings and pence of before 1971: £2 10s. 6d."""
    named = (("pounds", "pound", "pounds"), ("s", "shilling", "shillings"), ("d", "penny", "pence"))
    parts = [(count(found[group], one, many), group) for group, one, many in named if found[group]]
    return pieces(found, SURE / 2, *parts, mark="." * (found[0][-1] == "." and ends_sentence(text, found.end())))


def _small(found: re.Match[str]) -> Candidate:
    """Pence and cents by their letter: 20p, 5c each."""
    group = "amount" if found["amount"] else "amount2"
    amount, sign = found[group], found["sign"] or found["sign2"]
    low = names(SMALL["£" if sign == "p" else "$"])
    return whole(found, SURE, f"{decimal(amount)} {low[amount != '1']}")


def _plain_number(amount: str) -> str:
    """`amount` with a decimal point, where its commas and dots are the Continent's."""
    if re.fullmatch(r"\d{1,3}(?:\.\d{3})+(?:,\d\d)?", amount) or re.fullmatch(r"\d+,\d\d", amount):
        return amount.replace(".", "").replace(",", ".")
    return amount.replace(" ", "")


def _amount(text: str, found: re.Match[str], number: str) -> Candidate:
    groups = found.groupdict()
    minus = "minus " * bool(groups.get("minus") or groups.get("inner"))
    land = _LANDS.get((groups.get("land") or groups.get("code") or "").strip().replace(".", ""), "")
    sign = _CODES_OF_LANDS.get((groups.get("land") or "").strip(), found["sign"])
    said = said_amount(sign, number, groups.get("scale") or "", land)
    if is_attributive(text, found.start(), found.end(), is_close=True) or _BANKNOTE.match(text, found.end()):
        said = _singular(said)
    return whole(found, LIKELY - 1, minus + said)


def _singular(said: str) -> str:
    """What an amount of whole units is before a noun: a five dollar bill."""
    is_whole = " and " not in said[-20:] and said.endswith(("dollars", "pounds", "euros", "rupees"))
    return said.removesuffix("s") if is_whole else said


def said_amount(sign: str, number: str, scale: str = "", land: str = "") -> str:
    """An amount in words: two dollars and five cents; two point five million dollars."""
    sign = "₹" if sign.startswith("Rs") else sign
    known = currency(sign)
    assert known is not None, sign
    one, many = (f"{land} {name}".strip() for name in known)
    if scale:
        return f"{decimal(number)} {_SCALES.get(scale.lower(), scale.lower())} {many}"
    main, _, cents = number.partition(".")
    trimmed = cents.rstrip("0")
    if len(trimmed) > 2 or (trimmed and sign not in SMALL):
        return f"{decimal(number if len(cents) > 2 else f'{main}.{trimmed}')} {many}"
    small = trimmed.ljust(2, "0")
    parts = [f"{cardinal(main or '0')} {one if main == '1' else many}"] if main.strip("0,") or not trimmed else []
    if trimmed:
        low = names(SMALL[sign])
        parts.append(f"{cardinal(str(int(small)))} {low[0] if small == '01' else low[1]}")
    return " and ".join(parts)


def _range(found: re.Match[str]) -> Candidate:
    sign, one, two = found["sign"], found["amount"], found["amount2"]
    scale2 = found["scale2"] or ""
    high = said_amount(found["sign2"] or sign, two, scale2)
    if is_attributive(found.string, found.start(), found.end()):
        high = _singular(high)
    is_shared = bool(scale2) and not found["scale"] and _value(one) < _value(two)
    to = found["to"].strip() if "a" in found["to"] else "to"
    if found["sign2"] and not is_shared:
        low = said_amount(sign, one, found["scale"] or "")
        return pieces(found, SURE, (low, "amount"), (to, "to"), (high, "amount2"))
    low = decimal(one) + (
        f" {_SCALES.get(found['scale'].lower(), found['scale'])}" if found["scale"] and found["scale"] != scale2 else ""
    )
    return pieces(found, SURE, (low, "amount"), (to, "to"), (high, "amount2"))


def _value(amount: str) -> float:
    return float(amount.replace(",", ""))


def _with_period(text: str, made: Candidate, cost: float | None = None) -> Candidate:
    """`made`, and the times or measures behind slashes that it is for."""
    cost = made.cost if cost is None else cost
    end, parts = made.end, list(made.pieces)
    while found := _PER.match(text, end):
        end = found.end()
        parts += whole(found, 0.0, f"per {_PERIODS.get(found['per'], found['per'])}").pieces
    return Candidate(end, cost, tuple(parts))


EXAMPLES = (
    ("$3.50 or £2.01 or €1", "three dollars and fifty cents or two pounds and one penny or one euro."),
    (
        "$1-2 million; €5-10k; $4.5tn",
        "one to two million dollars, five to ten thousand euros, four point five trillion dollars.",
    ),
    ("$250-$300", "two hundred and fifty dollars to three hundred dollars."),
    ("₩460 billion, ¥30b", "four hundred and sixty billion won, thirty billion yen."),
    ("US$76.3 trillion", "seventy six point three trillion U S dollars."),
    ("$20/mo and $0.5/hr", "twenty dollars per month and fifty cents per hour."),
    ("$.01, $20.506", "one cent, twenty point five zero six dollars."),
    ("2.500,00 € or 19,99 EUR", "two thousand five hundred euros or nineteen point nine nine euros."),
    ("$-5 and -$5", "minus five dollars and minus five dollars."),
    (
        "$10/user/mo, ₹1,50,000, Rs 2.5 crore",
        "ten dollars per user per month, one hundred and fifty thousand rupees, two point five crore rupees.",
    ),
    (
        "from $1.2 to $1.5 billion, the $12bn plan",
        "from one point two to one point five billion dollars, the twelve billion dollar plan.",
    ),
    ("a $5 bill, $100 USD", "a five dollar bill, one hundred U S dollars."),
    ("A $1.2-billion deal, A$5", "A one point two billion dollar deal, five Australian dollars."),
    ("CHF 12.50, EUR 1.200,50", "twelve point five Swiss francs, one thousand two hundred point five euros."),
    ("£3, 20p or 5c each", "three pounds, twenty pence or five cents each."),
    ("It costs 50p; 24p video", "It costs fifty pence, twenty four p video."),
    (
        "142.9p a litre, up to 412p",
        "one hundred and forty two point nine pence a litre, up to four hundred and twelve pence.",
    ),
    ("10 000 €, 100 zł, R$ 25", "ten thousand euros, one hundred zlotys, twenty five Brazilian reals."),
    ("50 GBP", "fifty British pounds."),
)
