"""tools/growth.py: what a line is counted as, and for what a commit was."""

import growth

SOURCE = '''"""A module
of a few lines."""

__all__ = [
    "speak",
]


def speak():
    """Speak."""
    # A reason.
    return "a string is no docstring"
'''


def test_lines_by_kind():
    assert growth.kinds(SOURCE) == {"code": 2, "docstrings, comments": 4, "`__all__`": 3, "blank": 3}


def test_purposes_of_commits():
    listed = growth.purposes("speed\n  aaaa bbbb\n  cccc\nwords\n  dddd\n")

    assert listed == {"aaaa": "speed", "bbbb": "speed", "cccc": "speed", "dddd": "words"}
