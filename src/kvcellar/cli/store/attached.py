"""A running server of a store's folder, asked by commands in place of a model of their own.

Nothing of a runtime is imported here, which is what makes such a command quick.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from kvcellar import errors
from kvcellar.cli.common.terminal import print_line
from kvcellar.cli.store.store import StorePlace
from kvcellar.server.commands.presence import Presence, find_server
from kvcellar.version import __version__

if TYPE_CHECKING:
    from kvcellar.cli.common.groups import ModelOptions
    from kvcellar.server.commands.verbs import Tell

SILENT_S = 120.0
"""A server that says nothing for so long has gone: it tells every few seconds that it lives."""


class Asked(Protocol):
    """Protocol of whom a command asks: agents of its own, or those of a server."""

    def ask(self, verb: str, tell: Tell | None = None, **given: Any) -> Any:
        """Do a verb of :mod:`kvcellar.server.commands.verbs` and return its value.

        Args:
            verb: its name.
            tell: told what comes meanwhile; None: nobody.
            given: its arguments.

        Raises:
            KVCellarError: as the verb does.
        """
        ...


class RunningServer:
    """A server of this machine that has said in its store's folder how it is reached."""

    def __init__(self, folder: Path, presence: Presence) -> None:
        """Refer to the server of a store's folder; nothing is asked yet."""
        self._folder = folder
        self._presence = presence

    @property
    def url(self) -> str:
        """Its address for this machine."""
        return self._presence.reached_at

    def ask(self, verb: str, tell: Tell | None = None, **given: Any) -> Any:
        """Do a verb there; see :class:`Asked`. Whoever is interrupted ends it there, too.

        Raises:
            KVCellarError: as the verb does.
            EngineClosedError: the server has gone meanwhile.
        """
        from http.client import HTTPException

        self._presence = find_server(self._folder) or self._presence  # it may have begun anew
        try:
            for event in self._events(verb, given):
                if "value" in event:
                    return event["value"]
                if "error" in event:
                    raise _error(event)
                if tell is not None:
                    tell(event)
        except (OSError, HTTPException, ValueError) as error:
            if isinstance(error, errors.KVCellarError):
                raise
            raise errors.EngineClosedError(
                f"the server at {self.url} does not answer ({error or type(error).__name__}); ask "
                f"again, or do it without the server by --alone"
            ) from error
        raise errors.EngineClosedError(
            f"the server at {self.url} has gone before the end; ask again when it is back, or do "
            f"it without the server by --alone"
        )

    def _events(self, verb: str, given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        from http.client import OK, HTTPConnection

        parts = urlsplit(self.url)
        connection = HTTPConnection(str(parts.hostname), parts.port, timeout=SILENT_S)
        with closing(connection):
            connection.request(
                "POST",
                f"/folder/{verb}",
                json.dumps(given, ensure_ascii=True).encode(),
                {
                    "Authorization": f"Bearer {self._presence.token}",
                    "Content-Type": "application/json",
                },
            )
            response = connection.getresponse()
            if response.status != OK:
                yield {"error": "ConfigError", "message": _message(response.read())}
                return
            while line := response.readline():
                if line.strip():
                    yield json.loads(line)


def _message(body: bytes) -> str:
    """Return what an error of the server says."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode("utf-8", "replace")[:500]


def _error(event: Mapping[str, Any]) -> errors.KVCellarError:
    """Return the error that a server tells of, of the same class as there."""
    kind = getattr(errors, str(event["error"]), None)
    if not (isinstance(kind, type) and issubclass(kind, errors.KVCellarError)):
        kind = errors.ConfigError
    error = kind.__new__(kind)
    error.args = (event["message"],)
    return error


def running_server(
    place: StorePlace,
    *,
    is_alone: bool,
    model: str | None = None,
    agent_id: str | None = None,
    is_made: bool = False,
    loading: ModelOptions | None = None,
    more: Mapping[str, Any] | None = None,
) -> tuple[RunningServer, str | None] | None:
    """Find the server of a store that does for a command what it would do by itself.

    Where there is a server and it does not, one line says why.

    Args:
        place: of the store.
        is_alone: look for none.
        model: that is asked for; None: the agent's own, or none.
        agent_id: of the agent that speaks; None: none does.
        is_made: it is made where there is none of that name.
        loading: options of loading it; what was given of them has to be as the server has it.
        more: the same of options that are in no group, those that are not as by default.

    Returns:
        The server, and what it calls the model; None: the command does it by itself.
    """
    presence = None if is_alone else find_server(place.path)
    if presence is None:
        return None
    server = RunningServer(place.path, presence)
    given = {} if loading is None else loading.given()
    given |= {name: value for name, value in (more or {}).items() if value is not None}
    if place.shared is not None:
        given["shared"] = place.shared
    if presence.version != __version__:
        lacks = f"is of version {presence.version}, and this is {__version__}"
    else:
        try:
            found = server.ask(
                "fits", model=model, agent_id=agent_id, is_made=is_made, loading=given
            )
        except errors.KVCellarError as error:
            found = {"lacks": f"does not answer ({error})"}
        lacks = found["lacks"]
    if lacks:
        print_line(f"the server at {server.url} {lacks}; this is done without it")
        return None
    return server, found["model"]
