"""A border stops errors, hands them over while they are handled, and lets everything else pass."""

import sys

import pytest

from sonoro.core.errors import border


def test_an_error_is_told_and_ends_the_block_alone() -> None:
    told: list[tuple[Exception, BaseException | None]] = []
    reached = False
    error = ValueError("hm")
    with border(lambda one: told.append((one, sys.exception()))):
        raise error
    with border(lambda one: told.append((one, None))):
        reached = True
    assert reached
    assert told == [(error, error)]


def test_another_error_may_be_raised_in_place_of_it_and_exits_pass() -> None:
    def refuse(error: Exception) -> None:
        raise KeyError("told") from error

    with pytest.raises(KeyError) as raised, border(refuse):
        raise ValueError("hm")
    assert isinstance(raised.value.__cause__, ValueError)
    with pytest.raises(SystemExit), border(refuse):
        sys.exit(3)
