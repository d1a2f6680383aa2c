"""Words from attention that is known: when each begins, pauses, lookahead, text that arrives."""

import numpy as np
import pytest

from sonoro.words.spans import SpokenWord
from sonoro.words.tracking import Limits, Pointing, SegmentClock, Tracker

FRAME_S, RATE = 0.08, 8000


def attention(starts: list[float], frames: int, slope: float = 0.5) -> np.ndarray:
    """Of `frames` to tokens that begin at `starts`, in frames: in even steps from one to the next."""
    later = np.clip(slope * (np.arange(frames)[:, None] - np.array(starts[1:])[None]) + 0.5, 0, 1)
    later = np.concatenate([np.ones((frames, 1)), later, np.zeros((frames, 1))], axis=1)
    return later[:, :-1] - later[:, 1:]


def tracked(shares: np.ndarray, lookahead: int = 0) -> Tracker:
    tracker = Tracker(lookahead, 0)
    for share in shares:
        tracker.add(share)
    tracker.finish()
    return tracker


def test_the_path_crosses_where_the_share_is_one_half() -> None:
    starts = [0.0, 2.3, 4.7, 9.1, 11.5]
    tracker = tracked(attention(starts, 15))
    assert tracker.crossings == pytest.approx(starts, abs=0.05)
    assert tracker.path[-1] == 4


@pytest.mark.parametrize("lookahead", [0, 2, 4])
def test_what_is_certain_is_never_taken_back_and_comes_as_late_as_the_lookahead(lookahead: int) -> None:
    shares = attention([0.0, 2.3, 4.7, 9.1, 11.5], 15, slope=0.3)
    tracker, known = Tracker(lookahead), []
    for frame, share in enumerate(shares):
        tracker.add(share)
        assert len(tracker.path) == max(0, frame + 1 - lookahead)
        assert tracker.crossings[: len(known)] == known
        known = list(tracker.crossings)
    tracker.finish()
    assert tracker.crossings[: len(known)] == known
    assert len(tracker.path) == 15


def test_a_frame_of_another_mind_is_revised_by_those_after_it() -> None:
    shares = attention([0.0, 3.0, 6.0, 9.0], 12)
    shares[4] = [0.02, 0.28, 0.7, 0.0]
    assert tracked(shares, lookahead=3).crossings == pytest.approx([0.0, 3.0, 6.0, 9.0], abs=0.3)
    assert tracked(shares, lookahead=0).crossings[2] < 5.0


def test_text_that_arrives_a_position_a_frame_is_tracked_as_text_that_was_there() -> None:
    shares = attention([0.0, 2.3, 4.7, 9.1, 11.5], 15)
    tracker = Tracker(0)
    for frame, share in enumerate(shares):
        tracker.add(share[: frame + 1])
    tracker.finish()
    assert tracker.crossings == pytest.approx(tracked(shares).crossings, abs=0.01)  # the floor is of fewer positions


def sound(*parts: tuple[float, int]) -> bytes:
    """PCM16 of parts, each some seconds at a loudness."""
    return np.concatenate([np.full(round(s * RATE), loud, "<i2") for s, loud in parts]).tobytes()


TEXT = "So, he said go."
WORDS = [SpokenWord(0, 2, 0, 1), SpokenWord(4, 6, 2, 3), SpokenWord(7, 11, 3, 4), SpokenWord(12, 14, 4, 5)]


def test_words_begin_where_attention_moves_on_and_pauses_are_where_it_is_silent() -> None:
    clock = SegmentClock(Pointing(layer=0, head=0, is_measured=True), FRAME_S, RATE, begins_s=10.0)
    clock.words = WORDS
    audio = sound((0.1, 0), (0.3, 9000), (0.2, 3), (0.68, 9000), (0.16, 20))
    told = []
    for frame, share in enumerate(attention([0.0, 5.0, 7.4, 10.0, 12.5, 17.0], 18)):
        clock.tracker.add(share)
        step = round(FRAME_S * RATE) * 2
        clock.add_audio(audio[frame * step : (frame + 1) * step])
        told.append(clock.take(TEXT))
    clock.finish()
    told.append(clock.take(TEXT))
    words = [word for each in told for word in each]
    assert [word.text for word in words] == ["So", "he", "said", "go"]
    assert [word.start_s for word in words] == pytest.approx([10.1, 10.6, 10.8, 11.0], abs=0.02)
    assert [word.end_s for word in words] == pytest.approx([10.4, 10.8, 11.0, 11.28], abs=0.02)
    assert not any(word.is_estimated for word in words)
    assert len([each for each in told if each]) > 2  # they are told while it is spoken


def test_a_head_that_reads_ahead_by_tokens_gives_the_same_times() -> None:
    ahead = attention([0.0, *np.interp(np.arange(1, 8) - 1.5, np.arange(6), [0.0, 5.0, 7.4, 10.0, 12.5, 17.0])], 18)
    clock = SegmentClock(Pointing(layer=0, head=0, shift=1.5, ramp=1.0), FRAME_S, RATE)
    clock.words = WORDS
    clock.add_audio(sound((0.1, 0), (0.3, 9000), (0.2, 3), (0.68, 9000), (0.16, 20)))
    for share in ahead:
        clock.tracker.add(share)
    clock.finish()
    words = clock.take(TEXT)
    assert [word.start_s for word in words] == pytest.approx([0.1, 0.6, 0.8, 1.0], abs=0.1)
    assert all(word.is_estimated for word in words)


def test_words_that_are_never_reached_end_with_the_sound_and_times_never_fall() -> None:
    clock = SegmentClock(Pointing(layer=0, head=0), FRAME_S, RATE)
    clock.words = WORDS
    clock.add_audio(sound((0.4, 9000)))
    for share in attention([0.0, 2.0, 9.0, 9.0, 9.0], 5):
        clock.tracker.add(share)
    clock.finish()
    words = clock.take(TEXT)
    times = [at_s for word in words for at_s in (word.start_s, word.end_s)]
    assert times == sorted(times)
    assert len(words) == len(WORDS)
    assert times[-1] <= 0.4


def test_a_segment_without_sound_or_attention_tells_words_of_no_time() -> None:
    clock = SegmentClock(Pointing(layer=0, head=0), FRAME_S, RATE)
    clock.words = WORDS[:1]
    clock.finish()
    (word,) = clock.take(TEXT)
    assert (word.start_s, word.end_s) == (0.0, 0.0)


def test_the_first_word_begins_as_long_before_it_is_noticed_as_was_measured() -> None:
    clock = SegmentClock(Pointing(layer=0, head=0, onset_s=-0.03), FRAME_S, RATE)
    clock.words = WORDS[:1]
    clock.add_audio(sound((0.1, 0), (0.3, 9000)))
    clock.finish()
    assert clock.take(TEXT)[0].start_s == pytest.approx(0.07)


def told_of(*sounds: tuple[float, int], finish: bool = True) -> list[tuple[float, float]]:
    """When three words without a mark between them are told, whose attention moves on at .4 and .8 s."""
    clock = SegmentClock(Pointing(layer=0, head=0), FRAME_S, RATE)
    clock.words = [SpokenWord(0, 2, 0, 1), SpokenWord(4, 6, 1, 2), SpokenWord(7, 11, 2, 3)]
    clock.add_audio(sound(*sounds))
    for share in attention([0.0, 5.0, 10.0], 25):
        clock.tracker.add(share)
    if finish:
        clock.finish()
    return [(word.start_s, word.end_s) for word in clock.take(TEXT)]


def test_a_pause_counts_where_no_mark_stands_and_a_sound_that_stops_for_a_moment_does_not() -> None:
    times = told_of((0.35, 9000), (0.3, 0), (0.2, 9000), (0.06, 0), (0.6, 9000))
    assert times[0][1] == pytest.approx(0.35, abs=0.02)
    assert times[1][0] == pytest.approx(0.65, abs=0.02)
    assert times[1][1] == times[2][0] == pytest.approx(0.8, abs=0.04)


def test_a_pause_that_goes_on_is_waited_for_but_not_for_ever() -> None:
    assert told_of((0.35, 9000), (0.36, 0), finish=False) == []
    assert told_of((0.35, 9000), (0.36, 0), (0.2, 9000), finish=False)[0][1] == pytest.approx(0.35, abs=0.02)
    assert told_of((0.35, 9000), (1.0, 0), finish=False)[0][1] == pytest.approx(0.35, abs=0.02)


STARTS = [0.0, 5.0, 7.4, 10.0, 12.5, 15.0]


def looks(*spans: tuple[float, float]) -> np.ndarray:
    """The attention of a voice that speaks stretches of `STARTS`, from frame to frame of the right reading."""
    whole = attention(STARTS, 18)[:, :6]
    return np.concatenate([whole[round(begin) : round(end)] for begin, end in spans])


@pytest.mark.parametrize(
    ("shares", "fault"),
    [
        (looks((0, 18)), None),
        (looks((0, 18), (17, 18), (17, 18)), None),
        (looks((0, 18), *[(17, 18)] * 12), "ending"),
        (looks((0, 12)), "unreached"),
        (looks((0, 6), *[(5, 6)] * 9, (6, 18)), "dwelling"),
        (looks((0, 13), (6, 18)), "straying"),
        (looks((0, 4), (11, 18)), "straying"),
    ],
)
def test_what_is_not_spoken_as_written_is_caught(shares: np.ndarray, fault: str | None) -> None:
    limits = Limits(end_frames=11.5, dwell_frames=10.0, strayed=0.6)
    clock = SegmentClock(Pointing(layer=0, head=0, limits=limits), FRAME_S, RATE)
    blind = SegmentClock(Pointing(layer=0, head=0), FRAME_S, RATE)
    for each in (clock, blind):
        each.words = WORDS
        for share in shares:
            each.tracker.add(share)
        each.finish()
    assert clock.fault == fault
    assert blind.fault is None


def test_of_what_is_broken_off_the_words_that_have_begun_are_told() -> None:
    clock = SegmentClock(Pointing(layer=0, head=0), FRAME_S, RATE)
    clock.words = WORDS
    for share in looks((0, 12)):
        clock.tracker.add(share)
    clock.add_audio(sound((0.9, 9000)))
    assert [word.start for word in clock.take(TEXT)] == [0]
    clock.stop()
    told = [(word.start, word.start_s) for word in clock.take(TEXT)]
    assert told == [(4, pytest.approx(0.59, abs=0.02)), (7, pytest.approx(0.8, abs=0.02))]


def test_a_long_reading_strays_no_more_than_a_short_one() -> None:
    """Of every frame a little is elsewhere."""
    strayed = []
    for tokens in (20, 200):
        shares = np.full((tokens, tokens), 0.15 / (tokens - 1))
        np.fill_diagonal(shares, 0.85)
        strayed.append(tracked(shares).strayed)
    assert strayed[0] == pytest.approx(strayed[1], abs=0.2)
    assert 0 < strayed[0] < 0.6


def faults_of(shares: np.ndarray, *, last: float, opening_frames: int = 0) -> str | None:
    """Of a text whose last word ends with token `last`."""
    limits = Limits(end_frames=11.5, dwell_frames=10.0, strayed=0.6, opening_frames=opening_frames)
    clock = SegmentClock(Pointing(layer=0, head=0, limits=limits), FRAME_S, RATE)
    clock.words = [SpokenWord(0, 3, 0.0, last)]
    for share in shares:
        clock.tracker.add(share)
    return clock.fault


@pytest.mark.parametrize(("at", "opening", "fault"), [(3, 0, "straying"), (3, 8, None), (9, 8, "straying")])
def test_straying_does_not_count_in_the_opening(at: int, opening: int, fault: str | None) -> None:
    shares = np.eye(18)
    shares[at : at + 2] = shares[at : at + 2] / 2 + np.roll(shares[at : at + 2], 6, axis=1) / 2
    assert faults_of(shares, last=17, opening_frames=opening) == fault


def test_what_only_a_jump_explains_is_straying() -> None:
    """Two tokens that are spoken again: no frame looks two tokens away from a path of short steps."""
    shares = 0.94 * np.eye(18)[[*range(10), 8, *range(9, 18)]] + 0.06 / 18
    tracker = tracked(shares)
    assert tracker.strayed < 0.6
    assert tracker.strayed + tracker.jumped > 0.6
    assert tracker.jumped_from in (10, 11)
    assert faults_of(shares, last=17) == "straying"


def test_what_short_steps_explain_is_no_jump() -> None:
    for visited in ([*range(0, 18, 2), 17], [*range(8), 8, 8, *range(8, 18)]):
        shares = 0.94 * np.eye(18)[visited] + 0.06 / 18
        assert tracked(shares).jumped < 0.01
        assert faults_of(shares, last=17) is None


@pytest.mark.parametrize(
    ("tokens", "frames", "fault"),
    [(13, 2, "straying"), (25, 2, None), (100, 2, None), (25, 4, "straying"), (100, 4, "straying")],
)
def test_of_more_than_a_sentence_more_may_stray_up_to_twice_as_much(
    tokens: int, frames: int, fault: str | None
) -> None:
    """Each of `frames` strays .4, where .6 may stray in a sentence."""
    shares = np.eye(tokens)
    shares[10 - frames : 10] = shares[10 - frames : 10] / 2 + np.roll(shares[10 - frames : 10], -8, axis=1) / 2
    assert faults_of(shares, last=tokens - 1) == fault


@pytest.mark.parametrize(("tokens", "opening", "fault"), [(2, 8, None), (2, 0, "straying"), (6, 8, "straying")])
def test_of_a_word_or_two_more_may_stray_after_the_opening(tokens: int, opening: int, fault: str | None) -> None:
    """Each of the last two frames strays .45, with .6 the limit."""
    shares = np.eye(tokens + 4)[[*np.repeat(range(tokens), 4), *[tokens - 1] * 4]]
    shares[-2:, tokens - 1], shares[-2:, -3:] = 0.45, 0.55 / 3
    assert faults_of(shares, last=tokens - 1, opening_frames=opening) == fault


@pytest.mark.parametrize(("frames", "fault"), [(1, "unreached"), (3, None)])
def test_a_last_word_that_only_the_last_frame_reaches_was_not_spoken(frames: int, fault: str | None) -> None:
    limits = Limits(end_frames=11.5, least_end_frames=2.0, dwell_frames=10.0, strayed=0.6)
    clock = SegmentClock(Pointing(layer=0, head=0, limits=limits), FRAME_S, RATE)
    clock.words = WORDS
    for share in np.eye(6)[[0, 0, 1, 2, 2, 3, 3, 4, *[5] * frames]]:
        clock.tracker.add(share)
    assert clock.trouble(is_over=False) is None
    found = clock.trouble(is_over=True)
    assert (None if found is None else (found.kind, found.word)) == (fault and (fault, len(WORDS) - 1))


@pytest.mark.parametrize(
    ("shares", "trouble"),
    [
        (looks((0, 18)), None),
        (looks((0, 18), *[(17, 18)] * 12), ("ending", len(WORDS))),
        (looks((0, 6), *[(5, 6)] * 12), ("dwelling", 0)),
        (looks((0, 13), *[(2, 3)] * 3), ("straying", 2)),
    ],
)
def test_trouble_is_known_while_it_is_spoken_and_from_which_word_on(shares: np.ndarray, trouble: object) -> None:
    limits = Limits(end_frames=11.5, dwell_frames=10.0, strayed=0.6)
    clock = SegmentClock(Pointing(layer=0, head=0, limits=limits), FRAME_S, RATE)
    clock.words = WORDS
    for share in shares:
        clock.tracker.add(share)
    found = clock.trouble(is_over=False)
    assert (None if found is None else (found.kind, found.word)) == trouble
    if found is not None:
        begins = [0.0, *(STARTS[int(word.first)] for word in WORDS[1:]), len(shares)]
        assert found.at_s == pytest.approx(begins[found.word] * FRAME_S, abs=FRAME_S)
