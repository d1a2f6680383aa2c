"""Engine processes forked from one that has imported what they need: two seconds of a processor less for each.

From there on they run, end and are killed as those that `sonoro.transport.launch` starts. An engine in the place of
one that ended badly is started as always; so is every one where forks cannot be adopted, which takes Linux.
"""

import asyncio
import ctypes
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sonoro.transport import launch

__all__ = ["Forked", "Stem"]

_ADOPT = 36
"""PR_SET_CHILD_SUBREAPER: whose descendants lose their parent becomes the parent."""


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


class Stem:
    """The process that engines are forked from; it ends with this one."""

    def __init__(self) -> None:
        self._socket, end = socket.socketpair()
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        with end:
            # What its forks are called too, so that they are found by the name of their module.
            command = (sys.executable, "-P", "-m", "forked_engines", str(end.fileno()), launch.MODULE)
            self._process = subprocess.Popen(
                command, pass_fds=[end.fileno()], env={**os.environ, "PYTHONPATH": path}, start_new_session=True
            )
        self.pid = self._process.pid

    def close(self) -> None:
        self._socket.close()
        self._process.wait()

    def launcher(self) -> Callable[[Sequence[str], int], "asyncio.Future[launch.Process]"]:
        """What `launch.spawn` is for a while: it forks until the first of its engines has ended badly."""
        forked: list[Forked] = []
        start = launch.spawn

        async def spawn(arguments: Sequence[str], output: int) -> launch.Process:
            if any(process.returncode for process in forked):
                return await start(arguments, output)
            forked.append(self._fork(arguments, output))
            return forked[-1]

        return spawn

    def _fork(self, arguments: Sequence[str], output: int) -> Forked:
        begun = {"folder": os.getcwd(), "environment": dict(os.environ), "arguments": list(arguments)}
        asked = json.dumps([os.getpid(), begun]).encode()
        adopt(True)
        try:
            socket.send_fds(self._socket, [len(asked).to_bytes(4, "big")], [output])
            self._socket.sendall(asked)
            pid = int.from_bytes(self._socket.recv(4, socket.MSG_WAITALL), "big")
        finally:
            adopt(False)
        return Forked(pid)


def adopt(is_on: bool) -> None:
    """Whether a process whose parent ends, and that descends from this one, becomes its child."""
    if ctypes.CDLL(None).prctl(_ADOPT, int(is_on), 0, 0, 0):
        raise OSError("PR_SET_CHILD_SUBREAPER")


def main() -> None:
    """Fork when asked to; only a fork returns."""
    asking = socket.socket(fileno=int(sys.argv[1]))
    gc.freeze()
    while True:
        head, handles, *_ = socket.recv_fds(asking, 4, 1)
        if not head:
            sys.exit()
        asked = json.loads(asking.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL))
        if not (middle := os.fork()):
            if os.fork():
                os._exit(0)
            become(asking, handles[0], *asked)
            return
        os.waitpid(middle, 0)
        os.close(handles[0])


def become(asking: socket.socket, output: int, parent: int, begun: dict[str, Any]) -> None:
    """Make a fork what a process would be that `parent` had started with that folder, environment and arguments."""
    while os.getppid() != parent:
        time.sleep(0.001)
    os.setsid()
    for handle in (1, 2):
        os.dup2(output, handle)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for handle in (output, nothing):
        os.close(handle)
    os.chdir(begun["folder"])
    os.environ.clear()
    os.environ.update(begun["environment"])
    sys.argv[1:] = begun["arguments"]
    with asking:
        asking.sendall(os.getpid().to_bytes(4, "big"))


if __name__ == "__main__":
    importlib.import_module("fakes.sine_worker")
    importlib.import_module(launch.MODULE)
    # To be run by its name, as `python -m` does.
    del sys.modules[launch.MODULE]
    main()
    runpy.run_module(launch.MODULE, run_name="__main__", alter_sys=True)
