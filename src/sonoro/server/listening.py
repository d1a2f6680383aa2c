"""The listening socket. Imports no server, so that engines can be started before that is loaded."""

import socket

from sonoro.core.errors import ConfigError
from sonoro.server.config import ServerConfig

SEND_BUFFER_BYTES = 65536
"""Size of the kernel's send buffer: about a second of audio, so that a slow reader is noticed soon."""


def listen(config: ServerConfig) -> socket.socket:
    """Listen on the host and port of `config`. Raises `ConfigError` naming the one that fails.
    Accepted connections inherit the options: no delay of small packets, and a timeout for unread data."""
    try:
        family, *_, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError("host", config.host, f"it must be a name or an address of this machine ({error})") from error
    try:
        sock = socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise ConfigError("port", config.port, f"cannot listen there: {error.strerror}") from error
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    # The event loop sets it only on sockets that name their protocol, which those of `create_server` do not.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # Without it a closed connection waits for ever for its last bytes to be read. Twice the server's own timeout,
        # so that the server drops and logs a slow reader before the kernel does.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(2000 * config.slow_reader_timeout_s))
    return sock
