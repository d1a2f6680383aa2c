"""Values in markup: times, rates, volumes. Each function returns None for what is no such value."""

import re
from functools import lru_cache

_TIME = re.compile(r"\+?(\d+(?:\.\d*)?|\.\d+)(ms|s)", re.IGNORECASE)
_PERCENT = re.compile(r"([+-]?)(\d+(?:\.\d*)?|\.\d+)%")
_DECIBEL = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+))dB", re.IGNORECASE)
_NUMBER = re.compile(r"\d+(?:\.\d*)?|\.\d+")

STRENGTHS = {"none": 0.0, "x-weak": 0.0, "weak": 0.25, "medium": 0.5, "strong": 1.0, "x-strong": 1.5}
RATES = {"x-slow": 0.5, "slow": 0.75, "medium": 1.0, "default": 1.0, "fast": 1.25, "x-fast": 1.75}
VOLUMES = {"silent": 0.0, "x-soft": 0.25, "soft": 0.5, "medium": 1.0, "default": 1.0, "loud": 1.5, "x-loud": 2.0}


@lru_cache
def seconds_of(text: str) -> float | None:
    """A time of CSS, with its unit: 250ms, 1.5s."""
    found = _TIME.fullmatch(text.strip())
    return None if found is None else float(found[1]) / (1000 if found[2].lower() == "ms" else 1)


def rate_of(text: str) -> float | None:
    """A factor of the tempo: slow, 80%, +20%, 1.2."""
    text = text.strip()
    if text in RATES:
        return RATES[text]
    if found := _PERCENT.fullmatch(text):
        share = float(found[2]) / 100
        return share if not found[1] else max(1 + share if found[1] == "+" else 1 - share, 0.0)
    return number_of(text)


def gain_of(text: str) -> float | None:
    """A factor of the amplitude: soft, -6dB."""
    text = text.strip()
    if text in VOLUMES:
        return VOLUMES[text]
    found = _DECIBEL.fullmatch(text)
    return None if found is None else float(10 ** (min(float(found[1]), 200.0) / 20))


def number_of(text: str) -> float | None:
    return float(text) if _NUMBER.fullmatch(text.strip()) else None
