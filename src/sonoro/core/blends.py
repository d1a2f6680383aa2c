"""Blends of voices as names: `nora(2)+edith`, `.7*nora+.3*edith`, `nora*.7+edith*.3`. Knows no model."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

MAX_BLENDED = 5

_NUMBER = r"\d{1,4}(?:\.\d{0,6})?|\.\d{1,6}"
_TERM = re.compile(
    rf"\s*(?:(?P<before>{_NUMBER})\s*\*\s*)?(?P<name>[a-z_][^\s*+()]{{0,99}})"
    rf"(?:\s*\*\s*(?P<after>{_NUMBER})|\((?P<times>{_NUMBER})\))?\s*"
)


def read_blend(name: str) -> dict[str, float] | None:
    """The weights, of sum 1, of the voices that `name` blends, in order of their names; None if it is no blend."""
    weights: dict[str, float] = {}
    terms = [_TERM.fullmatch(term) for term in name.lower().split("+")]
    if len(terms) > MAX_BLENDED or not any(mark in name for mark in "+*("):
        return None
    for term in terms:
        given = [] if term is None else [weight for weight in term.group("before", "after", "times") if weight]
        weight = float(given[0]) if given else 1.0
        if term is None or len(given) > 1 or not weight:
            return None
        weights[term["name"]] = weights.get(term["name"], 0.0) + weight
    total = sum(weights.values())
    return {one: weights[one] / total for one in sorted(weights)}


def find_voice(name: str, voices: Collection[str], aliases: Mapping[str, str], *, can_blend: bool) -> str | None:
    """The one of `voices` that `name` or its alias names, or the one name of a blend of them; None if there is none."""

    def known(one: str) -> str | None:
        called = aliases.get(one, one)
        return called if called in voices else None

    if (found := known(name.lower())) is not None or not can_blend:
        return found
    weights: dict[str, float] = {}
    for one, weight in (read_blend(name) or {}).items():
        if (called := known(one)) is None:
            return None
        weights[called] = weights.get(called, 0.0) + weight
    weights = {one: round(weights[one], 6) for one in sorted(weights)}
    named = [f"{weight:.6f}".rstrip("0") + f"*{one}" for one, weight in weights.items() if weight]
    return "+".join(named) if len(named) > 1 else max(weights, key=weights.__getitem__, default=None)
