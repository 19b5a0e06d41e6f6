"""Settings of a server."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcellar.agents import DEFAULT_RULES, RULES
from kvcellar.dialects import DIALECTS
from kvcellar.errors import ConfigError
from kvcellar.server.origins import checked_host, checked_origin

DEFAULT_PORT = 8642

MOST_SECONDS = 1e8
"""Three years."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Policy of a server.

    Attributes:
        host: address to listen on.
        port: 0: any that is free.
        api_key: what clients must bring; None: nothing.
        guest_keys: what others may bring, each of whom is a stranger to the others.
        allowed_hosts: names by which the server may be called besides its own and this machine's.
        allowed_origins: origins of web pages elsewhere that may call it, as ``https://name:port``.
        allowed_fetches: hosts from which pictures may be fetched, as ``HOST`` or ``HOST:PORT``.
        max_body_bytes: of one request.
        max_import_bytes: of an agent that is imported.
        max_requests: generations that wait or run at a time; more are told to come back later.
        max_connections: that are open at a time; None: twice as many as ``max_requests``, and 256.
        max_of_one_address: of these, from one address; None: ``max_requests`` and 128.
        wait_s: longest time that a request may wait for room in the cache.
        send_timeout_s: seconds after which a client that does not read counts as gone.
        head_timeout_s: seconds in which a request's first line and headers have to be there.
        idle_timeout_s: seconds that a connection may be idle between two requests.
        ping_s: seconds of silence after which a stream says that it is alive.
        shutdown_s: seconds that running answers have to end when the server is stopped; then
            they end with an error.
        max_tokens: of an answer for which a client sets no limit.
        max_unnamed: conversations without a name that are remembered.
        takes_any_model: answer with the first model whatever name a client asks for.
        logs_text: let prompts and answers into the log.
        rules: which of ``agents.RULES`` change what clients sent.
        control_tokens_in_text: let text of messages spell the model's control tokens.
        folder_token: what a command of this machine brings that has read it in the store's folder,
            and is the owner by; empty: there is none.
        dialect: name of the dialect that all models speak; None: what each one's template shows.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    api_key: str | None = None
    guest_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allowed_fetches: tuple[str, ...] = ()
    max_body_bytes: int = 32 << 20
    max_import_bytes: int = 4 << 30
    max_requests: int = 256
    max_connections: int | None = None
    max_of_one_address: int | None = None
    wait_s: float = 120.0
    send_timeout_s: float = 30.0
    head_timeout_s: float = 20.0
    idle_timeout_s: float = 75.0
    ping_s: float = 10.0
    shutdown_s: float = 5.0
    max_tokens: int = 1024
    max_unnamed: int = 256
    takes_any_model: bool = False
    logs_text: bool = False
    rules: tuple[str, ...] = DEFAULT_RULES
    control_tokens_in_text: bool = False
    dialect: str | None = None
    folder_token: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.rules) - RULES.keys())
        if unknown:
            raise ConfigError(f"there is no rule {unknown[0]!r}; there are: {', '.join(RULES)}")
        if self.dialect is not None and self.dialect not in DIALECTS:
            raise ConfigError(
                f"there is no dialect {self.dialect!r}; there are: {', '.join(DIALECTS)}"
            )
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be 0 to 65535, got {self.port}")
        self._check_keys()
        for origin in self.allowed_origins:
            checked_origin(origin)
        for host in self.allowed_fetches:
            checked_host(host)
        for name in ("max_body_bytes", "max_import_bytes", "max_requests", "max_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_unnamed < 0:
            raise ConfigError(f"max_unnamed must be 0 or more, got {self.max_unnamed}")
        for name in ("max_connections", "max_of_one_address"):
            most = getattr(self, name)
            if most is not None and most < 1:
                raise ConfigError(f"{name} must be at least 1, got {most}")
        for name in (
            "wait_s",
            "send_timeout_s",
            "head_timeout_s",
            "idle_timeout_s",
            "ping_s",
            "shutdown_s",
        ):
            if not 0 < getattr(self, name) < MOST_SECONDS:
                raise ConfigError(
                    f"{name} must be above 0 and below {MOST_SECONDS:g} seconds, got "
                    f"{getattr(self, name)}"
                )

    def _check_keys(self) -> None:
        if self.guest_keys and self.api_key is None:
            raise ConfigError("guests have keys, and the owner has none; give an API key")
        keys = [*([] if self.api_key is None else [self.api_key]), *self.guest_keys]
        if any(not (key.isascii() and key.isprintable()) for key in keys):
            raise ConfigError("an API key is printable ASCII, since it travels in a header")
        if "" in keys:
            raise ConfigError("the API key is empty; leave it out, or give one")
        if len(set(keys)) < len(keys):
            raise ConfigError("two API keys are the same; give each once")

    @property
    def most_connections(self) -> int:
        """Connections that may be open at a time."""
        return self.max_connections or 2 * self.max_requests + 256

    @property
    def most_of_one_address(self) -> int:
        """Connections that may be open at a time from one address."""
        return min(self.max_of_one_address or self.max_requests + 128, self.most_connections)
