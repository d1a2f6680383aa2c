"""Where the lines of src came from since a commit: `python tools/growth.py`, in a clone with its history.

`growth.txt` beside this file says what each commit since `BASE` was for; a commit counts whole for one purpose, the
first that its subject names, one that is not listed for none. What a purpose cost is what its commits added less
what they took away, so the purposes sum to the difference of the two trees, and a line that one purpose wrote and
another rewrote is counted once.
"""

from __future__ import annotations

import ast
import subprocess
from collections import Counter, defaultdict
from pathlib import Path

BASE = "000c52d"
FOLDER = "src"
UNLISTED = "not listed"

KINDS = ("code", "docstrings, comments", "`__all__`", "blank")


def purposes(text: str) -> dict[str, str]:
    """Parse growth.txt: the purpose of each commit (a line with a purpose, then indented lines of commits)."""
    found, purpose = {}, ""
    for line in text.splitlines():
        if line.startswith(" "):
            found.update(dict.fromkeys(line.split(), purpose))
        else:
            purpose = line
    return found


def kinds(text: str) -> Counter[str]:
    """Number of lines of Python source of each of `KINDS`."""
    lines = text.splitlines()
    of = dict.fromkeys(range(1, len(lines) + 1), "code")
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("#"):
            of[number] = "docstrings, comments"
    for node in ast.walk(ast.parse(text)):
        kind = "docstrings, comments" if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else ""
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            kind = "`__all__`"
        if kind:
            of.update(dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), kind))
    of.update({number: "blank" for number, line in enumerate(lines, 1) if not line.strip()})
    return Counter(of.values())


def growth(of_commit: dict[str, str]) -> tuple[Counter[str], dict[str, Counter[str]]]:
    """Lines at `BASE` by kind, and the lines that each purpose has added since."""
    blobs = _Blobs()
    base = Counter[str]()
    for line in _git("ls-tree", "-r", BASE, FOLDER).splitlines():
        entry, path = line.split("\t")
        if path.endswith(".py"):
            base.update(blobs.kinds(entry.split()[2]))
    added: dict[str, Counter[str]] = defaultdict(Counter)
    purpose = UNLISTED
    log = ("log", "--raw", "--no-renames", "--abbrev=40", "--abbrev-commit", "--format=@%H", f"{BASE}..HEAD")
    for line in _git(*log, "--", FOLDER).splitlines():
        if line.startswith("@"):
            purpose = next((of_commit[known] for known in of_commit if line[1:].startswith(known)), UNLISTED)
        elif line.endswith(".py"):
            _, _, before, after, _ = line.split("\t")[0].split()
            added[purpose].update(blobs.kinds(after))
            added[purpose].subtract(blobs.kinds(before))
    return base, added


class _Blobs:
    """Line counts of git blobs, cached by id."""

    def __init__(self) -> None:
        self._known: dict[str, Counter[str]] = {}

    def kinds(self, blob: str) -> Counter[str]:
        if not blob.strip("0"):
            return Counter()  # a file that was not there
        if blob not in self._known:
            self._known[blob] = kinds(_git("cat-file", "blob", blob))
        return self._known[blob]


def standing() -> int:
    """Number of present lines that were last written at `BASE` or before, moves within a commit included."""
    count = 0
    for path in _git("ls-files", f"{FOLDER}/*.py").split():
        lines = _git("blame", "-w", "-M", "-C", "-s", "--abbrev=6", f"{BASE}..HEAD", "--", path).splitlines()
        count += sum(line.startswith("^") for line in lines)
    return count


def _git(*words: str) -> str:
    root = Path(__file__).parent.parent
    return subprocess.run(("git", *words), cwd=root, check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Print the table of `docs/design.md`."""
    of_commit = purposes(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8"))
    base, added = growth(of_commit)
    columns = {f"at {BASE}": base} | {purpose: added[purpose] for purpose in dict.fromkeys(of_commit.values())}
    if UNLISTED in added:
        columns[UNLISTED] = added[UNLISTED]
    columns["now"] = sum(columns.values(), Counter())
    print(f"| | {' | '.join(columns)} |")
    print("|---" * (len(columns) + 1) + "|")
    print(f"| lines of src | {' | '.join(f'{sum(counted.values()):,}' for counted in columns.values())} |")
    for kind in KINDS:
        print(f"| {kind} | {' | '.join(f'{counted[kind]:,}' for counted in columns.values())} |")
    print(f"\n{standing():,} of the {sum(base.values()):,} lines at {BASE} stand as they were written.")


if __name__ == "__main__":
    main()
