"""API keys: finds the caller behind the key of a connection. Knows no route."""

import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import Depends
from fastapi.params import Depends as Dependency
from starlette.requests import HTTPConnection

from sonoro.server.config import ServerConfig
from sonoro.server.errors import Unauthorized
from sonoro.server.quotas.limits import key_name, owner_of
from sonoro.transport.encoded_voice import VoiceFacts

KEY_PROTOCOL = "openai-insecure-api-key."
"""The prefix of a WebSocket subprotocol that carries a key, as sent by OpenAI's clients in browsers."""


@dataclass(frozen=True)
class Caller:
    """The client behind an API key: `owner` of its voices ("" for everybody's), and the `name` of the key in logs."""

    owner: str
    is_admin: bool = False
    name: str | None = None

    def sees(self, facts: VoiceFacts) -> bool:
        """Whether the caller may see and use a voice."""
        return self.is_admin or (facts.owner in ("", self.owner) and self is not ANONYMOUS)

    def may_delete(self, facts: VoiceFacts) -> bool:
        """Whether the caller may delete a voice."""
        return self.is_admin or facts.owner == self.owner


UNKEYED = Caller("")
"""Every caller of a server without keys."""

ANONYMOUS = Caller("stranger")
"""A caller without a key on a server with keys: sees no uploaded voice."""


class Keys:
    """The keys of a server. `keyless` is the caller of a connection that has shown no key."""

    def __init__(self, config: ServerConfig) -> None:
        self._callers = {key.encode(): Caller(owner_of(key), name=key_name(key)) for key in config.api_keys}
        self._callers |= {key.encode(): Caller("", is_admin=True, name=key_name(key)) for key in config.admin_keys}
        self.owners = len({caller.owner for caller in self._callers.values()}) or 1
        """How many owners of voices there are; all admin keys are one."""
        self.ids = tuple(dict.fromkeys(("", ANONYMOUS.owner, *(caller.owner for caller in self._callers.values()))))
        """The owners of requests, in an order that depends on the configuration alone."""
        self.keyless = ANONYMOUS if self._callers else UNKEYED

    @property
    def required(self) -> Sequence[Dependency]:
        """The dependencies of a route that needs a key: none on a server without keys."""
        return [Depends(self.authorise)] if self._callers else []

    @property
    def optional(self) -> Sequence[Dependency]:
        """The dependencies of a route that shows more to a caller with a key."""
        return [Depends(self.identify)] if self._callers else []

    async def authorise(self, connection: HTTPConnection) -> None:
        """Check the connection's API key, if the server has keys, and set `caller` in its state.
        Raises `Unauthorized`. Browsers cannot set headers of a WebSocket: an offered subprotocol may carry the key."""
        self.check(connection, ("bearer",))

    def check(self, connection: HTTPConnection, schemes: Sequence[str]) -> None:
        """As `authorise`, with the key in any of the `schemes` of the header `Authorization`."""
        scheme, _, given = connection.headers.get("authorization", "").partition(" ")
        for protocol in connection.scope.get("subprotocols", ()):
            if protocol.startswith(KEY_PROTOCOL):
                scheme, given = schemes[0], protocol.removeprefix(KEY_PROTOCOL)
        self.admit(connection, given if scheme.lower() in schemes else "")

    async def identify(self, connection: HTTPConnection) -> None:
        """As `authorise`, but a connection without a key stays `keyless` instead of being refused."""
        if "authorization" in connection.headers:
            await self.authorise(connection)

    def admit(self, connection: HTTPConnection, given: str) -> None:
        """As `authorise`, with the key `given` ("" if none)."""
        if not self._callers:
            return
        # A header holds the key's bytes as Latin-1, a message its characters, whatever they are.
        spellings = {given.strip().encode(name, "replace") for name in ("latin-1", "utf-8")}
        # Compare all keys, each in constant time, so that timing reveals nothing.
        matches = [key for key in self._callers for each in spellings if hmac.compare_digest(each, key)]
        if not matches:
            raise Unauthorized("give one of the API keys of this server, as Authorization: Bearer KEY")
        connection.state.caller = caller = self._callers[matches[0]]
        connection.state.facts["key"] = caller.name
