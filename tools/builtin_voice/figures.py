"""Random numbers, dates, times, prices, addresses and codes, as people write them."""

from __future__ import annotations

import random
import string
from pathlib import Path

LISTS = {
    name: values.split(" | ")
    for name, _, values in (
        line.partition(": ") for line in Path(__file__).with_name("lists.txt").read_text("utf-8").splitlines()
    )
}
KINDS = ["small", "digit", "int", "large", "price", "time", "hour", "date", "year", "decade", "phone", "percent"]
KINDS += ["temp", "code", "decimal", "fraction", "ordinal", "measure", "height", "weight", "url", "email", "flight"]
KINDS += ["gate", "zip", "model", "letter", "letters"]
"""What `Figures` can write, by the names of its methods."""


class Figures:
    """Generates a random number or code of a kind per call, from `rng`."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def _of(self, *choices: str) -> str:
        return self._rng.choice(choices)

    def digit(self) -> str:
        return str(self._rng.randint(0, 9))

    def small(self) -> str:
        return str(self._rng.randint(2, 20) if self._rng.random() < 0.6 else self._rng.randint(2, 100))

    def int(self) -> str:
        rng = self._rng
        ranges = (rng.randint(1, 99), rng.randint(100, 999), rng.randint(1000, 9999), 10 ** rng.randint(1, 5))
        return f"{rng.choice(ranges):,}"

    def large(self) -> str:
        rng = self._rng
        number = rng.choice((rng.randint(1000, 99_999), rng.randint(100_000, 9_999_999), rng.randint(1, 99) * 1000))
        return self._of(
            f"{number:,}", f"{number:,}", f"{rng.randint(1, 999)} {self._of('thousand', 'million', 'billion')}"
        )

    def price(self) -> str:
        rng = self._rng
        sign, amount = (
            rng.choice("$$$$££€€"),
            rng.choice((rng.randint(1, 20), rng.randint(1, 999), rng.randint(1, 9999))),
        )
        return self._of(
            f"{sign}{amount}.{rng.randint(0, 99):02d}",
            f"{sign}{amount}.99",
            f"{sign}{amount:,}",
            f"{sign}{amount}",
            f"{amount} {self._of('dollars', 'euros', 'pounds')}",
            f"{rng.randint(2, 99)} cents",
            f"{sign}{rng.randint(1, 90)}{self._of('k', ',000', ' million')}",
        )

    def hour(self) -> str:
        return str(self._rng.randint(1, 12))

    def time(self) -> str:
        rng, hour = self._rng, self._rng.randint(1, 12)
        minute = rng.choice((0, 15, 30, 45, rng.randint(0, 59)))
        half = self._of("am", "pm", " am", " pm", " a.m.", " p.m.", " AM", " PM")
        return self._of(
            f"{hour}:{minute:02d}",
            f"{hour}:{minute:02d}{half}",
            f"{hour}{half}",
            f"{hour} o'clock",
            f"{rng.randint(13, 23)}:{minute:02d}",
            f"half past {hour}",
            f"quarter to {hour}",
            f"{rng.randint(1, 29)} minutes past {hour}",
            self._of("noon", "midnight"),
        )

    def year(self) -> str:
        rng = self._rng
        return str(rng.choice((rng.randint(1900, 2030), rng.randint(1900, 2030), rng.randint(1100, 2099))))

    def decade(self) -> str:
        return self._of(f"{self._rng.randint(11, 20)}{self._rng.randint(1, 9)}0s", f"'{self._rng.randint(2, 9)}0s")

    def date(self) -> str:
        rng, month = self._rng, self._rng.choice(LISTS["month"])
        day, year = rng.randint(1, 28), self.year()
        short = {"May": "May", "June": "June", "July": "July"}.get(month, f"{month[:3]}.")
        return self._of(
            f"{month} {day}",
            f"{month} {day}, {year}",
            f"{month} {ordinal(day)}",
            f"{day} {month}",
            f"{day} {month} {year}",
            f"the {ordinal(day)} of {month}",
            f"{short} {day}",
            f"{month} {year}",
            f"{rng.randint(1, 12)}/{day}/{year}",
            f"{year}-{rng.randint(1, 12):02d}-{day:02d}",
        )

    def phone(self) -> str:
        rng = self._rng
        area, middle, last = rng.randint(201, 989), rng.randint(200, 999), f"{rng.randint(0, 9999):04d}"
        return self._of(
            f"({area}) {middle}-{last}",
            f"{area}-{middle}-{last}",
            f"{middle}-{last}",
            f"1-800-{middle}-{last}",
            f"+1 {area} {middle} {last}",
            f"0{rng.randint(20, 99)} {last} {rng.randint(1000, 9999)}",
            f"+44 {rng.randint(20, 99)} {last} {rng.randint(1000, 9999)}",
            self._of("911", "411", "999"),
        )

    def percent(self) -> str:
        number = self._of(self.small(), f"{self._rng.randint(0, 99)}.{self.digit()}", "100", "50")
        return self._of(f"{number}%", f"{number}%", f"{number} percent")

    def temp(self) -> str:
        rng = self._rng
        return self._of(
            f"{rng.randint(-30, 45)}°C",
            f"{rng.randint(0, 110)}°F",
            f"{rng.randint(2, 99)} degrees",
            f"{rng.randint(-20, 99)}°",
        )

    def code(self) -> str:
        rng = self._rng
        digits = "".join(rng.choices(string.digits, k=rng.randint(3, 7)))
        return self._of(digits, digits, "-".join(digits), f"{self.letter()}{digits[:3]}", " ".join(digits))

    def decimal(self) -> str:
        return f"{self._rng.choice((0, self._rng.randint(1, 9), self._rng.randint(1, 99)))}.{self._rng.randint(1, 99)}"

    def fraction(self) -> str:
        return self._of(
            "1/2", "1/3", "2/3", "1/4", "3/4", "1/5", "4/5", "1/8", "7/8", "5/6", "½", "¼", "¾", "1 1/2", "2 3/4"
        )

    def ordinal(self) -> str:
        return ordinal(
            self._rng.choice((self._rng.randint(1, 12), self._rng.randint(1, 31), self._rng.randint(1, 120)))
        )

    def measure(self) -> str:
        number = self._of(self.small(), self.small(), self.int(), self.decimal())
        unit = self._of(
            "kg",
            "g",
            "km",
            "m",
            "cm",
            "mm",
            "lbs",
            "oz",
            "ft",
            "inches",
            "miles",
            "liters",
            "ml",
            "gallons",
            "GB",
            "MB",
            "cups",
            "tablespoons",
            "teaspoons",
            "feet",
            "yards",
            "acres",
            "watts",
            "tons",
        )
        return f"{number} {unit}"

    def height(self) -> str:
        rng = self._rng
        return self._of(
            f"{rng.randint(4, 6)} feet {rng.randint(1, 11)}",
            f"{rng.randint(4, 6)}'{rng.randint(1, 11)}\"",
            f"{rng.randint(1, 2)}.{rng.randint(10, 99)} m",
            f"{rng.randint(90, 210)} cm",
        )

    def weight(self) -> str:
        return f"{self._rng.randint(2, 250)} {self._of('kg', 'lbs', 'pounds', 'kilos')}"

    def url(self) -> str:
        site = self._of(
            "example", "weather", "news", "mycity", "openmaps", "books", "cooking", "travel", "health", "music"
        )
        return self._of(f"{site}.com", f"www.{site}.org", f"{site}.net", f"https://{site}.co.uk", f"{site}.gov/help")

    def email(self) -> str:
        who = self._of("info", "help", "anna", "john.smith", "support", "contact", "sales", "mary")
        return f"{who}@{self._of('example', 'mail', 'company', 'school')}.{self._of('com', 'org', 'edu', 'net')}"

    def flight(self) -> str:
        return f"{self.letter()}{self.letter()}{self._of('', ' ')}{self._rng.randint(10, 9999)}"

    def gate(self) -> str:
        return f"{self._of('A', 'B', 'C', 'D', '')}{self._rng.randint(1, 60)}"

    def zip(self) -> str:
        return f"{self._rng.randint(1001, 99950):05d}"

    def house(self) -> str:
        rng = self._rng
        return str(
            rng.choice((rng.randint(1, 99), rng.randint(100, 999), rng.randint(1000, 9999), f"{rng.randint(1, 40)}B"))
        )

    def model(self) -> str:
        return f"{self.letter()}{self._rng.choice(('', '-'))}{self._rng.randint(1, 900)}{self._of('', '', 'S', 'X')}"

    def letter(self) -> str:
        return self._rng.choice(string.ascii_uppercase)

    def letters(self) -> str:
        return self._of(" ", "-", ", ", "", ".").join(
            self._rng.choices(string.ascii_uppercase, k=self._rng.randint(2, 6))
        )


def ordinal(number: int) -> str:
    ending = "th" if 10 < number % 100 < 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
