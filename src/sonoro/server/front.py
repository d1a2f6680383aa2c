"""A front process: the HTTP server of one of several processes, over engines that its parent keeps running.

Started by `server.fronts` with the facts it needs in the first line of its standard input; each later line is what has
changed of the engines. The end of the input is the end of the parent, and of this process."""

import asyncio
import os
import socket
import sys
import time
from pathlib import Path

import msgspec

from sonoro.core.config import is_log_json, log_level
from sonoro.core.errors import SonoroError
from sonoro.core.logs import configure_logging
from sonoro.server.app import serve
from sonoro.server.config import ServerConfig
from sonoro.server.shared import BEAT, ENDED, FrontFacts, Shared
from sonoro.transport.front_link import FrontFleet, essential
from sonoro.transport.launch import Limits

BEAT_S = 0.5


def main() -> None:
    """Serve until a signal, or the parent's end."""
    configure_logging(log_level("INFO"), is_json=is_log_json())
    try:
        asyncio.run(_serve())
    except SonoroError:
        sys.exit(ENDED)


async def _serve() -> None:
    told = asyncio.StreamReader(limit=2**24)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(told), sys.stdin)
    facts = msgspec.json.decode(await told.readline(), type=FrontFacts)
    config = ServerConfig.from_mapping(facts.config)
    shared = Shared.of(config, len(facts.devices), facts.count, facts.number, Path(facts.folder))
    limits = Limits.from_mapping(facts.limits)
    fleet = FrontFleet(facts.settings, facts.devices, limits, facts.name, shared.table)
    await fleet.tell(await told.readline())
    work = [essential(_listen(fleet, told)), essential(_beat(shared))]
    sockets = (socket.socket(fileno=listener) for listener in facts.listeners)
    await serve(fleet, config, *sockets, shared=shared)
    del work


async def _listen(fleet: FrontFleet, told: asyncio.StreamReader) -> None:
    """Take over what the parent tells, until it has ended."""
    while line := await told.readline():
        await fleet.tell(line)
    os._exit(ENDED)


async def _beat(shared: Shared) -> None:
    """Show the parent that the event loop runs."""
    while True:
        shared.table.set(BEAT, round(1000 * time.monotonic()))
        await asyncio.sleep(BEAT_S)


if __name__ == "__main__":
    main()
