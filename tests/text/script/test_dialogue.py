"""Dialogues: cues become one text with tags, and a play is read by the names of its speakers."""

import pytest
from scripts import spoken

from sonoro.core.errors import InvalidRequest
from sonoro.text.script import Cue, dialogue
from sonoro.text.script.dialogue import owners, read_play

PLAY = """ALICE: Hi there,
how are you?

Bob: Fine. It is 5: all is well.
@Carol: Me too.
"""


def test_cues_are_lines_of_their_voices_with_pauses_between() -> None:
    text = dialogue([Cue("Hi.", "nora"), Cue("Yes. [pause:1s] No.", "hugh", 1.2), Cue("Oh!", "nora")], 0.5)
    said = "nora: hi. |500| hugh rate 1.2: yes. |1000| hugh rate 1.2: no. |500| nora: oh!"
    assert spoken(text, markup="voices") == said
    assert spoken(dialogue([Cue("Hi."), Cue("Yes.")], 0), markup="voices") == "hi. yes."


def test_each_character_of_a_dialogue_has_an_owner() -> None:
    cues = [Cue("Hi.", "nora"), Cue("", "hugh"), Cue("nora", "nora", 1.2)]
    for between_s in (0.0, 0.3):
        text, owned = dialogue(cues, between_s), owners(cues, between_s)
        assert len(owned) == len(text)
        said = ["".join(one for one, owner in zip(text, owned, strict=True) if owner == number) for number in range(3)]
        assert said == [cue.text for cue in cues]


def test_a_play_is_read_by_its_names() -> None:
    cues = read_play(PLAY, {"alice": "nora", "BOB": "hugh", "carol": "edith"})
    assert cues == [
        Cue("Hi there, how are you?", "nora"),
        Cue("Fine. It is 5: all is well.", "hugh"),
        Cue("Me too.", "edith"),
    ]


@pytest.mark.parametrize(
    ("play", "reason"), [("EVE: Hi.", "line 1.*no voice"), ("Once upon a time.", "line 1.*NAME"), ("", "1 to 256")]
)
def test_a_play_that_cannot_be_cast_is_refused(play: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        dialogue(read_play(play, {"alice": "nora"}))


@pytest.mark.parametrize(
    ("cues", "reason"),
    [
        ([Cue("a")] * 257, "1 to 256"),
        ([Cue("a", f"v{number}") for number in range(17)], "at most 16"),
        ([Cue("a", "no]ra")], "no voice"),
        ([Cue("a", "nora"), Cue("b")], "each a voice"),
    ],
)
def test_what_is_no_dialogue_is_refused(cues: list[Cue], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        dialogue(cues)
