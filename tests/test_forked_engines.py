"""That no forked process outlives what started it."""

import json
import os
import socket
import subprocess
import sys

import forked_engines
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks cannot be adopted")


def test_a_fork_ends_whose_parent_ended_meanwhile() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    made = forked_engines.Stem()
    reads, writes = os.pipe()
    begun = {"command": ["-c", ""], "folder": os.getcwd(), "environment": {}, "has_session": False}
    asked = json.dumps([ended.pid, [], begun]).encode()
    try:
        socket.send_fds(made._socket, [len(asked).to_bytes(4, "big")], [writes] * 3)
        made._socket.sendall(asked)
        os.close(writes)
        with open(reads, "rb") as pipe:
            assert pipe.read() == b""
    finally:
        made.close()
