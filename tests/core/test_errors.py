"""The error tree: one base, stable codes, messages that name field, value and limit."""

import pytest

from sonoro.core import errors
from sonoro.core.errors import (
    CheckpointNotFound,
    ConfigError,
    EngineBusy,
    EngineCrashed,
    EngineError,
    ErrorFacts,
    InvalidReference,
    InvalidRequest,
    SonoroError,
)


def test_every_error_is_one_of_ours_with_a_code_of_its_own() -> None:
    public = [value for name, value in vars(errors).items() if not name.startswith("_")]
    kinds = [kind for kind in public if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) > 10
    assert all(issubclass(kind, SonoroError) for kind in kinds)
    assert len({kind.code for kind in kinds}) == len(kinds)


@pytest.mark.parametrize("kind", [InvalidRequest, InvalidReference, ConfigError])
def test_field_errors_name_field_value_and_limit(kind: type) -> None:
    error = kind("top_k", -3, "it must be at least 0")
    assert str(error) == "top_k: -3 is not allowed; it must be at least 0"
    assert (error.field, error.value, error.limit) == ("top_k", -3, "it must be at least 0")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "text: nothing was given; why"),
        ("given", "text was given; why"),
        ("5000 characters", "text: 5000 characters; why"),
        ("2.5 s", "text: 2.5 s; why"),
        ("", "text: '' is not allowed; why"),
        ("characters", "text: 'characters' is not allowed; why"),
    ],
)
def test_what_was_given_is_said_in_words(value: object, message: str) -> None:
    assert str(InvalidRequest("text", value, "why")) == message


def test_a_long_value_is_shortened() -> None:
    message = str(InvalidRequest("text", "x" * 10_000, "too long"))
    assert len(message) < 200
    assert "10002 characters" in message


def test_a_busy_engine_is_an_engine_error_of_its_own_code() -> None:
    error = EngineBusy("7 requests are waiting")
    assert isinstance(error, EngineError)
    assert (error.code, str(error)) == ("engine_busy", "7 requests are waiting")


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("slots", 0, "it must be at least 1"),
        InvalidReference("ref_audio", "x" * 1000, "too long"),
        CheckpointNotFound("there is no such folder"),
        EngineCrashed("it ended"),
    ],
)
def test_an_error_is_itself_again_after_it_was_taken_apart(error: SonoroError) -> None:
    again = ErrorFacts(*ErrorFacts.of(error)).error
    assert (type(again), str(again)) == (type(error), str(error))
    if isinstance(error, ConfigError | InvalidRequest):
        assert (again.field, again.limit) == (error.field, error.limit)
        assert again.value in str(error)


def test_an_error_that_is_not_ours_is_an_engine_error_with_its_name() -> None:
    again = ErrorFacts.of(ZeroDivisionError("by zero")).error
    assert (type(again), str(again)) == (EngineError, "ZeroDivisionError: by zero")
    assert type(ErrorFacts("a code of the future", "hm").error) is EngineError
