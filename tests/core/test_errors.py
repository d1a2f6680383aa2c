"""The error tree: one base, stable codes, messages that name field, value and limit."""

import pytest

from sonoro.core import errors
from sonoro.core.errors import ConfigError, InvalidReference, InvalidRequest, SonoroError


def test_every_error_is_one_of_ours_with_a_code_of_its_own() -> None:
    kinds = [getattr(errors, name) for name in errors.__all__]
    assert all(issubclass(kind, SonoroError) for kind in kinds)
    assert len({kind.code for kind in kinds}) == len(kinds)


@pytest.mark.parametrize("kind", [InvalidRequest, InvalidReference, ConfigError])
def test_field_errors_name_field_value_and_limit(kind: type) -> None:
    error = kind("top_k", -3, "it must be at least 0")
    assert str(error) == "top_k: -3 is not allowed; it must be at least 0"
    assert (error.field, error.value, error.limit) == ("top_k", -3, "it must be at least 0")


def test_a_long_value_is_shortened() -> None:
    message = str(InvalidRequest("text", "x" * 10_000, "too long"))
    assert len(message) < 200
    assert "10002 characters" in message
