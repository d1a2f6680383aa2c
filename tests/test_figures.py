"""tools/figures.py: what it counts in a package of a few lines."""

import figures

BODY = """
def speak(text, voice, *, speed):
    one = text
    two = voice
    three = speed
    try:
        return one, two, three
    except {caught}:
        return None
"""


def test_figures_of_a_small_package(tmp_path):
    (tmp_path / "models").mkdir()
    protocol = "class SpeechModel(Protocol):\n    spec: int\n\n    def frame(self): ...\n"
    (tmp_path / "models" / "base.py").write_text(protocol)
    (tmp_path / "one.py").write_text(BODY.format(caught="(OSError, Exception)"))
    (tmp_path / "two.py").write_text("import os\n" + BODY.format(caught="OSError"))

    counted = figures.static(tmp_path)

    assert counted["lines"] == {"all": 23, "(top)": 19, "models": 4}
    assert counted["function_lines"] == {"p90": 8, "max": 8}
    assert counted["function_parameters"] == {"p90": 3, "max": 3}
    assert counted["speech_model_members"] == 2
    assert counted["broad_excepts"] == 1
    # The first six lines of the function are alike, the seventh is not.
    assert counted["duplicate_pairs"] == 1


def test_the_way_of_a_request_and_of_a_frame_is_short() -> None:
    counted = figures.traced()

    assert counted["calls_from_loop_to_replay"] <= 5
    assert len(counted["modules_in_server"]) <= 12, counted["modules_in_server"]
    assert len(counted["modules_in_engine"]) <= 25, counted["modules_in_engine"]
