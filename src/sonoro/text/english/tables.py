"""How tables of words are written: as one string, so that many fit on a line."""

MONTHS = "January February March April May June July August September October November December".split()  # noqa: SIM905
NUMBERED = (
    r"account|acct\.?|batch|case|catalogu?e|contract|flight|invoice|item|licen[cs]e|lot|model|order|part|passport|patent|"
    r"phone|policy|ref\.?|reference|registration|serial|ticket|tracking|vat"
)
"""What a number is of, in an expression."""


def listed(text: str) -> frozenset[str]:
    """The words of `text`, which are separated by white space."""
    return frozenset(text.split())


def pairs(text: str) -> dict[str, str]:
    """Written to spoken forms, from "& = and | c/o = care of"."""
    return {key: said for key, _, said in (row.partition(" = ") for row in text.split(" | "))}
