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
    (
        "[2018-03-12 10:46:28] <sarang> hi\n[10:47] <bob> yes?\n12/03/2018, 10:48 - Al: ok",
        "ten forty six, sarang, hi. ten forty seven, bob, yes? ten forty eight, Al, ok.",
    ),
    (
        "     I. THE PINES     1\n    II. A MEETING    15\n   III. KIND   29",
        "one, THE PINES, one. two, A MEETING, fifteen. three, KIND, twenty nine.",
    ),
    ("x + 5 = 10\nx = 5", "x plus five equals ten. x equals five."),
    ("## A. How?\n\n### 1. Who\n\nII\n\nIt", "ay, How? one, Who. two. It."),
    ("---\ntitle: 'A cake'\ndate: 2021-04-15\n---\n\nMix.", "A cake. Mix."),
    (
        "Put `<b>` in `.profile`, run `ls -l --all` or `*.c`.",
        "Put b in dot profile, run ls dash l dash dash all or star dot c.",
    ),
    ("<!DOCTYPE html>\n<p>====</p>\n<img alt='cat'\nsrc='a.png'>", "cat."),
    (r"It is $\frac{a+b}{2} \le \sqrt{x_1}$.", "It is, ay plus b, over two is at most the square root of x one."),
    (r"So \(O(n \log n)\) and $$\sum_{i=1}^{n} x_i$$.", "So O of n log n, and the sum from i equals one to n of x i."),
    (
        r"At $90^\circ$, $x_{n+1} \approx \alpha^{-1}$.",
        "At ninety degrees, x n plus one is about alpha to the power of minus one.",
    ),
    ("[T]he Ph[oe]nicians, arr[i]", "The Phoenicians, arr, i."),
    ("So nice :D and :)", "So nice, and."),
    (">90% of users\n>5 things", "more than ninety percent of users more than five things."),
    ("> quoted\n\nafter", "quoted. after."),
)


@pytest.mark.parametrize(("text", "said"), READ)
def test_a_line_is_read_as_what_it_is(text: str, said: str) -> None:
    assert read(text).text == said
