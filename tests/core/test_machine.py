"""What results files say of the machine."""

from sonoro.core.machine import commit_of_checkout, processor, rounded


def test_the_commit_is_that_of_the_checkout() -> None:
    commit = commit_of_checkout()
    assert commit is None or len(commit.removesuffix("-dirty")) >= 7


def test_the_processor_has_a_name() -> None:
    assert processor()


def test_fractions_are_kept_to_four_digits_and_counts_whole() -> None:
    value = {"ms": 1.23456, "count": 123456, "parts": {"a": 0.00012345, "none": None}}
    assert rounded(value) == {"ms": 1.235, "count": 123456, "parts": {"a": 0.0001234, "none": None}}
