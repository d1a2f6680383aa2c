"""Install a wheel, or a source distribution, into an empty environment, and let the command speak there.

    python tools/try_wheel.py dist/sonoro-*.whl [--python python3.13] [--borrow]

What the package depends on is installed too, or, to spare that, borrowed from the environment that runs this. Prints
one line: interpreter, seconds of audio, and the compiled code that spoke."""

import argparse
import re
import site
import subprocess
import sys
import tempfile
import wave
from pathlib import Path

TEXT = "Good morning."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--borrow", action="store_true", help="dependencies of this environment, which installs none")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(tried(options.package.resolve(), options.python, Path(folder), is_borrowing=options.borrow))


def tried(package: Path, python: str, folder: Path, *, is_borrowing: bool) -> str:
    """Install `package` for `python` below `folder`, and say there what came of it."""
    run(python, "-m", "venv", folder / "venv")
    binaries = folder / "venv" / ("Scripts" if sys.platform == "win32" else "bin")
    own = Path(run(binaries / "python", "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip())
    if is_borrowing:
        # After its own folder, so that the package is the installed one.
        (own / "borrowed.pth").write_text("\n".join(site.getsitepackages()))
    run(binaries / "pip", "install", "--quiet", "--no-input", *["--no-deps"] * is_borrowing, package)
    home = run(binaries / "python", "-c", "import sonoro; print(sonoro.__file__)", at=folder).strip()
    assert Path(home).is_relative_to(own), f"{home} is not what was installed"
    ran = subprocess.run(
        [binaries / "sonoro", "-v", "say", TEXT, "--no-server", "-o", "out.wav"],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    with wave.open(str(folder / "out.wav")) as file:
        audio_s = file.getnframes() / file.getframerate()
    assert "-linux_" not in package.name, "the index refuses such a tag"
    assert 0.5 < audio_s < 3, f"{audio_s} s for {TEXT!r}"
    code = re.search(r"event=native code=(\S+)", ran.stderr)
    version = run(binaries / "python", "--version").strip()
    return f"{package.name} with {version}: {audio_s:.2f} s of speech, code={code[1] if code else 'unknown'}"


def run(*command: str | Path, at: Path | None = None) -> str:
    """What `command` prints. Raises `SystemExit` with all of its output if it fails."""
    ran = subprocess.run(command, cwd=at, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{ran.stdout}")
    return ran.stdout


if __name__ == "__main__":
    main()
