"""What the lines of a text are: who speaks, tasks, notes, formulas, prompts, bounds."""

import pytest

from sonoro.text import read

READ = (
    ("Alice: Hi\nBob: Hello there\nMary Ann: How are you?", "Alice, Hi. Bob, Hello there. Mary Ann, How are you?"),
    ("Q: What's 2+2?\nA: 4.", "Q, What's two plus two? A, four."),
    ("It goes on\nand on: that is it.", "It goes on and on, that is it."),
    ("- [ ] Buy milk\n- [x] Call mom", "Buy milk. Call mom."),
    ("A note[^1].\n\n[^1]: Its text.", "A note. Its text."),
    ("Let $x^2 = 4$ and $$y_1 = 2$$.", "Let x squared equals four and y one equals two."),
    ("It was $5 = £4, then $6.", "It was five dollars equals four pounds, then six dollars."),
    ("$ pip install foo", "pip install foo."),
    (">90% of users\n>5 things", "more than ninety percent of users more than five things."),
    ("> quoted\n\nafter", "quoted. after."),
)


@pytest.mark.parametrize(("text", "said"), READ)
def test_a_line_is_read_as_what_it_is(text: str, said: str) -> None:
    assert read(text).text == said
