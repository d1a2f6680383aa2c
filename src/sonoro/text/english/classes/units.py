"""Names of units and currencies, from Unicode's CLDR (through Babel), and the symbols that it lacks. No class.

Loaded once, when the first amount is read.
"""

import re
from functools import cache
from importlib import import_module
from typing import Any

from sonoro.text.english.tables import listed, pairs

Names = tuple[str, str]

_OWN = pairs(
    "K = kelvin | kph = kilometer(s) per hour | cc = c c | fps = frame(s) per second | dB = decibel(s) | "
    "dBA = decibel(s) | bpm = beat(s) per minute | rpm = revolution(s) per minute | mph = mile(s) per hour | "
    "hp = horsepower | bhp = brake horsepower | ha = hectare(s) | psi = pound(s) per square inch | "
    "fl oz = fluid ounce(s) | yds = yard(s) | "
    "KB = kilobyte(s) | EB = exabyte(s) | KiB = kibibyte(s) | MiB = mebibyte(s) | GiB = gibibyte(s) | "
    "TiB = tebibyte(s) | bps = bit(s) per second | kbps = kilobit(s) per second | Kbps = kilobit(s) per second | "
    "Mbps = megabit(s) per second | mbps = megabit(s) per second | Gbps = gigabit(s) per second | "
    "Tbps = terabit(s) per second | sq ft = square foot/square feet | sq. ft. = square foot/square feet | "
    "sqft = square foot/square feet | sq m = square meter(s) | sq km = square kilometer(s) | sq mi = square mile(s) | "
    "cu ft = cubic foot/cubic feet | BTU = British thermal unit(s) | AU = astronomical unit(s) | "
    "lm = lumen(s) | deg C = degree(s) Celsius | deg F = degree(s) Fahrenheit | "
    "c = cup(s) | pcs = piece(s) | px = pixel(s) | pt = point(s) | pt. = pint(s) | "
    "° = degree(s) | °C = degree(s) Celsius | "
    "°F = degree(s) Fahrenheit | % = percent | ‰ = per mille | ¢ = cent(s) | lbs = pound(s) | ozs = ounce(s) | "
    "h = hour(s) | hr = hour(s) | hrs = hour(s) | min = minute(s) | mins = minute(s) | s = second(s) | "
    "sec = second(s) | secs = second(s) | wk = week(s) | wks = week(s) | yr = year(s) | yrs = year(s) | "
    "mo = month(s) | mos = month(s) | yo = year old | ppm = part(s) per million | ml = milliliter(s) | l = liter(s) | "
    "kn = knot(s) | kt = knot(s) | kts = knot(s) | mil = million | tbsp = tablespoon(s) | Tbsp = tablespoon(s) | "
    "mmHg = millimeter(s) of mercury | Å = angstrom(s) | pts = point(s) | cal = calorie(s) | mcg = microgram(s) | "
    "ft-lb = foot pound(s) | dBm = d B m | VDC = volt(s) D C | VAC = volt(s) ay C | "
    "uF = microfarad(s) | uH = microhenry/microhenries | uV = microvolt(s) | ug = microgram(s) | "
    "uL = microliter(s) | bp = base pair(s) | dpi = dot(s) per inch | kgs = kilogram(s) | "
    "Mbit = megabit(s) | Gbit = gigabit(s) | kbit = kilobit(s) | mIU = milli international unit(s) | BR = bedroom(s) | "
    "BA = bath(s) | kms = kilometer(s) | cms = centimeter(s) | M⊙ = solar mass(es)"
)
"""Symbols that CLDR lacks, or names otherwise: "(s)" is of the plural, as is what follows a slash."""

_SI = pairs(
    "A = ampere(s) | Ah = ampere hour(s) | Bq = becquerel(s) | F = farad(s) | Gy = gray(s) | H = henry/henries | "
    "Hz = hertz | J = joule(s) | L = liter(s) | l = liter(s) | mol = mole(s) | N = newton(s) | Nm = newton meter(s) | "
    "Pa = pascal(s) | Sv = sievert(s) | T = tesla | V = volt(s) | W = watt(s) | Wh = watt hour(s) | "
    "bar = bar(s) | eV = electronvolt(s) | g = gram(s) | m = meter(s) | s = second(s) | Ω = ohm(s)"
)
_PREFIXES = pairs("p = pico | n = nano | μ = micro | m = milli | k = kilo | M = mega | G = giga | T = tera")
"""Units that take prefixes: CLDR names the commonest of their pairs."""

_LEFT_OUT = listed("E e em a c R b B gr fth fur st dr bu d w y q p in ″ ′ item dot dec m3 pm am year night pH ks")
"""CLDR's symbols that are words or letters first. `in` is read by `measure`, which asks what follows."""


@cache
def _english() -> Any:
    # Imported when the first amount is read.
    return import_module("babel").Locale("en")._data


@cache
def units() -> dict[str, Names]:
    """The singular and plural name of each unit by its symbol."""
    found: dict[str, Names] = {}
    patterns = _english()["unit_patterns"]
    for key in patterns:
        forms = patterns[key]
        long: Any = forms.get("long", {})
        if "one" not in long or "other" not in long:
            continue
        both = _without_number(long["one"]), _without_number(long["other"])
        for length in ("short", "narrow") if not key.startswith("duration") else ("short",):
            for pattern in dict(forms.get(length, {})).values():
                symbol = pattern.replace("{0}", "").strip() if isinstance(pattern, str) else ""
                if symbol and symbol not in _LEFT_OUT and re.fullmatch(r"[A-Za-zμΩ°/]{1,8}", symbol):
                    found.setdefault(symbol, both)
    prefixed = {
        prefix + symbol: names(f"{said}{name}".replace("/", f"/{said}"))
        for symbol, name in _SI.items()
        for prefix, said in {"": "", **_PREFIXES}.items()
        # Two capitals are a name before they are a unit (MA, GT), but for MW, GJ and MV.
        if prefix + symbol not in _LEFT_OUT and (symbol in "WJVΩ" or not (prefix + symbol).isupper() or not prefix)
    }
    return prefixed | found | {symbol: names(name) for symbol, name in _OWN.items()}


def _without_number(name: str) -> str:
    return " ".join(name.replace("{0}", " ").replace("-", " ").split())


def names(name: str) -> Names:
    """The singular and the plural of a name with "(s)" or a slash."""
    one, _, many = name.partition("/")
    return re.sub(r"\(e?s\)", "", one), many or re.sub(r"\((e?s)\)", r"\1", one)


_FOLDED = pairs(
    "KG = kg | KM = km | CM = cm | MM = mm | ML = ml | LB = lb | LBS = lbs | OZ = oz | FT = ft | MPH = mph | KW = kW | "
    "KWH = kWh | khz = kHz | mhz = MHz | ghz = GHz | hz = Hz | HP = hp | gb = GB | tb = TB | kw = kW | MG = mg"
)


@cache
def unit(symbol: str) -> Names | None:
    """The names of the unit `symbol`, in its own spelling or, if that is none, in capitals (12KG) or small letters."""
    known = units()
    return known.get(symbol) or known.get(_FOLDED.get(symbol, ""))


CURRENCIES = pairs(
    "$ = USD | £ = GBP | € = EUR | ¥ = JPY | ₹ = INR | ₩ = KRW | ₽ = RUB | ₿ = BTC | ₺ = TRY | ₫ = VND | ₪ = ILS | "
    "zl = PLN | kr = SEK"
)
_PLAIN = pairs(
    "USD = dollar(s) | GBP = pound(s) | EUR = euro(s) | JPY = yen | INR = rupee(s) | KRW = won | RUB = ruble(s) | "
    "BTC = bitcoin(s) | TRY = lira | VND = dong | ILS = shekel(s) | PLN = zloty(s) | SEK = krona/kronor"
)
"""What a sign is called without the country that its code names."""

SMALL = pairs("$ = cent(s) | € = cent(s) | £ = penny/pence | ₹ = paisa/paise | ¥ = sen | ₽ = kopek(s)")
_CODES = listed(
    "USD EUR GBP JPY CNY INR CAD AUD NZD CHF SEK NOK DKK KRW BRL MXN RUB ZAR SGD HKD TRY PLN THB AED SAR ILS CZK HUF"
)


@cache
def currency(code: str) -> Names | None:
    """The names of a currency by its sign or its ISO code."""
    if code in CURRENCIES:
        return names(_PLAIN[CURRENCIES[code]])
    if code not in _CODES:
        return None
    forms = _english()["currency_names_plural"][code]
    return _lower(forms["one"]), _lower(forms["other"])


def _lower(name: str) -> str:
    """ "US dollars" stays, "Swiss francs" stays."""
    return re.sub(r"^(US|UAE)\b", lambda found: " ".join(found[0]), str(name))
