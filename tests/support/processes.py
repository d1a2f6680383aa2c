"""Processes that tests start: forked from one that has imported what they need, and the command line.

A fork takes two seconds of a core less than a new interpreter that imports PyTorch. Where forks cannot be adopted,
which takes Linux, processes are started as always.
"""

import asyncio
import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

from sonoro.cli.main import main
from sonoro.transport import launch

GUARD_S = 60
"""How long a test waits before it says that something hangs. Never what is tested: a busy machine may be slow."""

Run = Callable[..., tuple[int, str, str]]

_ADOPT = 36
"""PR_SET_CHILD_SUBREAPER: descendants that lose their parent become children of this process."""


@pytest.fixture(scope="module")
def interruptible() -> Iterator[None]:
    """A shell starts its background jobs with interrupts ignored, which children inherit; a handler they do not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def sonoro(capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command line in an empty folder; its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        out, err = capfdbinary.readouterr()
        return end.value.code, out.decode("latin-1"), err.decode()

    return run


def assert_refused(code: int, out: str, err: str, words: list[str]) -> None:
    assert (code, out) == (2, "")
    assert re.fullmatch(r"error: [^\n]+\n", err), err
    for word in words:
        assert word in err


@contextlib.contextmanager
def server(
    folder: Path, *arguments: str, device: str = "--device=cpu", log_level: str = "WARNING"
) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """A running `sonoro serve`, in a group of its own, what it printed, and its address; it is gone with the block."""
    command = (sys.executable, "-m", "sonoro", "serve", "--port", "0", device, *arguments)
    environment = {**os.environ, "SONORO_LOG_LEVEL": log_level}
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "process_group": 0}
    with subprocess.Popen(command, cwd=folder, env=environment, **piped) as process:
        try:
            printed = ""
            while "listening on" not in printed:
                line = process.stdout.readline()
                assert line, process.stderr.read()
                printed += line
            yield process, printed, printed.rpartition(" ")[2].strip()
        finally:
            process.kill()


class Forked:
    """A child of this process: as much of an `asyncio.subprocess.Process` as a link to an engine needs."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None
        self._loop, self._handle = asyncio.get_running_loop(), os.pidfd_open(pid)
        self._ended = self._loop.create_future()
        self._loop.add_reader(self._handle, self._reap)

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def _reap(self) -> None:
        self._loop.remove_reader(self._handle)
        os.close(self._handle)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set_result(self.returncode)


class Command(subprocess.Popen[Any]):
    """`subprocess.Popen` of Python with `-c` or `-m` or a script, forked after `imports` were imported."""

    def __init__(self, command: Sequence[str], imports: Sequence[str], **options: Any) -> None:
        self._imports = imports
        super().__init__(command, **options)

    def _execute_child(self, *given: Any) -> None:  # type: ignore[override]
        """Start the child. `Popen` passes everything by position, the two ends of each pipe after each other."""
        command, folder, environment, pipes = given[0], given[5], given[6], given[10:16]
        streams = [end if end >= 0 else number for number, end in enumerate((pipes[0], pipes[3], pipes[5]))]
        settings = os.environ if environment is None else environment
        self.pid = stem().fork(command, streams, self._imports, folder, settings, has_session=False)
        self._child_created = True
        self._close_pipe_fds(*pipes)


class Stem:
    """The process that others are forked from; it ends with this one."""

    def __init__(self) -> None:
        self._socket, end = socket.socketpair()
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        # Its forks keep its command line: the name of the engine's module is in it.
        command = (sys.executable, "-P", "-m", "processes", str(end.fileno()), launch.MODULE)
        with end:
            self._process = subprocess.Popen(
                command, pass_fds=[end.fileno()], env={**os.environ, "PYTHONPATH": path}, start_new_session=True
            )
        self.pid = self._process.pid

    def close(self) -> None:
        self._socket.close()
        self._process.wait()

    def launcher(
        self, *, is_always: bool = False
    ) -> Callable[[Sequence[str], int], "asyncio.Future[Process | Forked]"]:
        """A stand-in for `launch.spawn` that forks: always, or until one of its engines has ended badly."""
        forked: list[Forked] = []
        start = launch.spawn

        async def spawn(arguments: Sequence[str], output: int) -> "Process | Forked":
            if not is_always and any(process.returncode for process in forked):
                return await start(arguments, output)
            with open(os.devnull, "rb") as nothing:
                streams = (nothing.fileno(), output, output)
                forked.append(Forked(self.fork(("python", "-m", launch.MODULE, *arguments), streams)))
            return forked[-1]

        return spawn

    def fork(
        self,
        command: Sequence[str | Path],
        streams: Sequence[int],
        imports: Sequence[str] = (),
        folder: str | Path | None = None,
        environment: Mapping[str, str] = os.environ,
        *,
        has_session: bool = True,
    ) -> int:
        """Start a child of this process that runs `command` with three standard streams, in a session of its own or
        else in the stem's; return its number."""
        begun = {
            "command": [str(part) for part in command],
            "folder": str(folder or os.getcwd()),
            "environment": dict(environment),
            "has_session": has_session,
        }
        asked = json.dumps([os.getpid(), imports, begun]).encode()
        adopt(True)
        try:
            socket.send_fds(self._socket, [len(asked).to_bytes(4, "big")], streams)
            self._socket.sendall(asked)
            return int.from_bytes(self._socket.recv(4, socket.MSG_WAITALL), "big")
        finally:
            adopt(False)


@functools.cache
def stem() -> Stem:
    """The stem of this process; it lasts as long."""
    made = Stem()
    atexit.register(made.close)
    return made


def begin_command(
    command: Sequence[str | Path], imports: Sequence[str] = (), **options: Any
) -> "subprocess.Popen[Any]":
    """`subprocess.Popen` of a command of Python's, forked if it can be; it finds `imports` imported."""
    if sys.platform == "linux":
        return Command(command, imports, **options)
    return subprocess.Popen(command, **options)


def run_command(
    command: Sequence[str | Path], imports: Sequence[str] = (), **options: Any
) -> "subprocess.CompletedProcess[str]":
    """`subprocess.run` of such a command, which captures its output as text."""
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with begin_command(command, imports, **piped, **options) as process:
        printed, logged = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, printed, logged)


def run_without_triton(code: str) -> "subprocess.CompletedProcess[str]":
    """`run_command` of `code`, for which Triton is not installed."""
    hidden = (
        "import sys; sys.modules['triton'] = None\n"
        # What the stem has imported knows of it.
        "for name in [name for name in sys.modules if name.partition('.')[0] == 'sonoro']: del sys.modules[name]\n"
    )
    return run_command([sys.executable, "-c", hidden + code])


def adopt(is_on: bool) -> None:
    """Whether a descendant whose parent ends becomes a child of this process."""
    if ctypes.CDLL(None).prctl(_ADOPT, int(is_on), 0, 0, 0):
        raise OSError("PR_SET_CHILD_SUBREAPER")


def serve_forks() -> list[str]:
    """Fork whenever asked to. Returns in a fork alone: what it is to run."""
    asking = socket.socket(fileno=int(sys.argv[1]))
    gc.freeze()
    while True:
        head, handles, *_ = socket.recv_fds(asking, 4, 3)
        if not head:
            sys.exit()
        parent, imports, begun = json.loads(asking.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL))
        if new := [name for name in imports if name not in sys.modules]:
            for name in new:
                importlib.import_module(name)
            gc.freeze()
        if not (middle := os.fork()):
            if os.fork():
                os._exit(0)
            become(asking, handles, parent, begun)
            return list(begun["command"])
        os.waitpid(middle, 0)
        for handle in handles:
            os.close(handle)


def become(asking: socket.socket, streams: Sequence[int], parent: int, begun: dict[str, Any]) -> None:
    """Make a fork what a process would be that `parent` had started; end it if `parent` has ended."""
    while os.getppid() != parent:
        if not Path(f"/proc/{parent}").exists():
            os._exit(0)
        time.sleep(0.001)
    if begun["has_session"]:
        os.setsid()
    for number, handle in enumerate(streams):
        os.dup2(handle, number)
        os.close(handle)
    # The stem's own know whether its streams are terminals and can be sought in.
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(begun["folder"])
    os.environ.clear()
    os.environ.update(begun["environment"])
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    with asking:
        asking.sendall(os.getpid().to_bytes(4, "big"))


def run(what: str, *arguments: str) -> None:
    """Do what the interpreter does with such arguments: `-m` and a module, `-c` and code, or the path of a script."""
    if what == "-m":
        module, *sys.argv[1:] = arguments
        if not hasattr(sys.modules.get(module), "__path__"):
            # Run by its name again, though the stem may have imported it.
            sys.modules.pop(module, None)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    elif what == "-c":
        code, *sys.argv[1:] = arguments
        sys.modules["__main__"] = module = ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), vars(module))
    else:
        sys.argv[:] = what, *arguments
        sys.path.insert(0, str(Path(what).parent))
        runpy.run_path(what, run_name="__main__")


def end() -> NoReturn:
    """End this process as the interpreter does, without freeing what it holds: that takes a third of a second."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    with contextlib.suppress(ImportError):
        # First: without a GPU, kernels are left out unless it is there, and forks compile some.
        importlib.import_module("triton")
    importlib.import_module("sine_models")
    importlib.import_module(launch.MODULE)
    _, *options = serve_forks()
    what, *more = (option for option in options if option != "-P")
    run(what, *more)
    if what != "-m":
        end()
