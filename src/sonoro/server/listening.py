"""The listening sockets. Imports no server, so that engines can be started before that is loaded."""

import contextlib
import dataclasses
import logging
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from sonoro.core.errors import ConfigError
from sonoro.core.folders import run_folder
from sonoro.core.nearby import SUFFIX, is_offered, is_private, own_sockets
from sonoro.server.config import ServerConfig
from sonoro.transport.messages import WorkerSettings

logger = logging.getLogger(__name__)

SEND_BUFFER_BYTES = 65536
"""Size of the kernel's send buffer: about a second of audio, so that a slow reader is noticed soon."""


def listen_often(config: ServerConfig, count: int) -> list[socket.socket]:
    """As `listen`, `count` sockets at one address: the system gives each connection to one of them, and keeps it while
    the process that accepts there is replaced. Raises `ConfigError` if another server listens there."""
    listen(config).close()  # which sockets that may share an address with another server's would not find out
    sockets = [listen(config, is_shared=True)]
    config = dataclasses.replace(config, port=sockets[0].getsockname()[1])
    return sockets + [listen(config, is_shared=True) for _ in range(count - 1)]


def listen(config: ServerConfig, *, is_shared: bool = False) -> socket.socket:
    """Listen on the host and port of `config`. Raises `ConfigError` naming the one that fails.
    Accepted connections inherit the options: no delay of small packets, and a timeout for unread data."""
    try:
        family, *_, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError("host", config.host, f"it must be a name or an address of this machine ({error})") from error
    try:
        sock = socket.create_server(address[:2], family=family, backlog=2048, reuse_port=is_shared)
    except OSError as error:
        raise ConfigError("port", config.port, f"cannot listen there: {error.strerror}; try another, or 0") from error
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    # The event loop sets it only on sockets that name their protocol, which those of `create_server` do not.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # Without it a closed connection waits for ever for its last bytes to be read. Twice the server's own timeout,
        # so that the server drops and logs a slow reader before the kernel does.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(2000 * config.slow_reader_timeout_s))
    return sock


@contextlib.contextmanager
def listen_locally(settings: WorkerSettings, config: ServerConfig) -> Iterator[list[socket.socket]]:
    """A socket on which the user's own `sonoro say` finds this server, gone with the block. None for another model than
    the built-in voice, for a server with keys, and if it cannot be made, which the log says."""
    path, sock = f"{run_folder()}/{os.getpid()}{SUFFIX}", None
    is_plain = settings.model in (None, "builtin") and not config.api_keys and not config.admin_keys
    try:
        sock = _bound(path) if is_plain and is_offered() else None
    except OSError as error:
        logger.warning("event=no_local_socket path=%s reason=%r", path, error.strerror or str(error))
    if sock is None:
        yield []
        return
    try:
        with sock:
            yield [sock]
    finally:
        Path(path).unlink(missing_ok=True)


def _bound(path: str) -> socket.socket:
    """A socket that listens on `path`, in a folder of the user's own, cleared of what dead servers left. Raises
    `OSError`."""
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if not is_private(folder, stat.S_ISDIR):
        raise OSError(f"{folder} must be a folder of this user alone (chmod 700)")
    _clear(path)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(path)
        os.chmod(path, 0o700)
        sock.listen(128)
    except OSError:
        sock.close()
        raise
    return sock


def _clear(path: str) -> None:
    """Delete `path`, and the sockets of servers that died."""
    for left in own_sockets():
        with socket.socket(socket.AF_UNIX) as tried:
            if left == path or tried.connect_ex(left):
                Path(left).unlink(missing_ok=True)
