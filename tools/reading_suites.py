"""How a suite of written and spoken texts is read: `python tools/reading_suites.py CLONE [--out FILE] [--misses]`.

CLONE is a local clone of NVIDIA/NeMo-text-processing, of which nothing is kept here. Each distinct text of its English
suite counts once; a reading counts if it is one of those accepted there. Ignored are "and", "oh" for "zero", case,
hyphens, marks and spaces. `reading_purposes.json` lists the texts that we read otherwise on purpose, each with its
reason.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from sonoro.bench.machine import commit_of_checkout
from sonoro.text.english.reader import read

FOLDER = "tests/nemo_text_processing/en/data_text_normalization"
ALIKE = {"oh": "zero", "ay": "a"}
PURPOSES = Path(__file__).with_name("reading_purposes.json")


class Case(NamedTuple):
    """A `text` of the suite's file `name`, and the readings that it accepts."""

    name: str
    text: str
    accepted: set[str]


def cases(clone: Path) -> list[Case]:
    """The distinct cases of the suite."""
    found: dict[str, Case] = {}
    for path in sorted((clone / FOLDER).glob("test_cases_*.txt")):
        name, written = path.stem.removeprefix("test_cases_"), ""
        for line in path.read_text(encoding="utf-8").splitlines():
            if name != "normalize_with_audio" and "~" in line:
                written, _, said = line.partition("~")
            elif name == "normalize_with_audio" and not line.startswith("~"):
                said = line
            else:
                written = line.strip("~")
                continue
            if written.strip() and said.strip():
                found.setdefault(written, Case(name, written, set())).accepted.add(said)
    return list(found.values())


def words(text: str) -> str:
    """The letters of a reading, without what is ignored."""
    plain = re.sub(r"(?<![a-z])'|'(?![a-z])|[^a-z']", " ", text.lower().replace("’", "'"))
    return "".join(ALIKE.get(word, word) for word in plain.split() if word != "and")


def main() -> None:
    """Print the score by class, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clone", type=Path)
    parser.add_argument("--out", type=Path, help="write the scores to this file")
    parser.add_argument("--misses", action="store_true", help="print each text that is read otherwise")
    options = parser.parse_args()
    purposes: dict[str, str] = json.loads(PURPOSES.read_text(encoding="utf-8")) if PURPOSES.exists() else {}
    total, accepted, on_purpose = Counter[str](), Counter[str](), Counter[str]()
    for case in cases(options.clone):
        total[case.name] += 1
        said = read(case.text).text
        if words(said) in {words(reading) for reading in case.accepted}:
            accepted[case.name] += 1
        elif case.text in purposes:
            on_purpose[case.name] += 1
        elif options.misses:
            print(f"{case.name}: {case.text}\n  said   {said}\n  wanted {min(case.accepted)}")
    rows = {name: {"cases": total[name], "accepted": accepted[name], "on_purpose": on_purpose[name]} for name in total}
    result = {
        "suite": "NVIDIA/NeMo-text-processing, English text normalization",
        "commit": commit_of_checkout(),
        "cases": total.total(),
        "accepted_share": round(accepted.total() / total.total(), 4),
        "with_purposes_share": round((accepted.total() + on_purpose.total()) / total.total(), 4),
        "classes": rows,
        "purposes": purposes,
    }
    for name, row in rows.items():
        print(f"{name:24}{row['accepted']:4} of {row['cases']}, {row['on_purpose']} otherwise on purpose")
    if options.out:
        options.out.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in result.items() if key not in ("classes", "purposes")}))


if __name__ == "__main__":
    main()
