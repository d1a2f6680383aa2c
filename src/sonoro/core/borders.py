"""Borders that an error of any kind does not cross: that of a request, of a start, of a library's plain exceptions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["border"]


@contextmanager
def border(tell: Callable[[Exception], object]) -> Iterator[None]:
    """Within, an error ends the block and is given to `tell`, which says so to whom it concerns, or raises another.

    `tell` runs while the error is handled, so that it may log or raise it again.
    """
    try:
        yield
    except Exception as error:
        tell(error)
