"""The agents of a store, opened for one command, and how an agent is shown."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcellar.cli.common import options
from kvcellar.cli.common.hosting import hosting_of, open_shown
from kvcellar.cli.common.options import one_adapter, read_adapters
from kvcellar.cli.common.terminal import counted, print_warning, progress_bar, write
from kvcellar.cli.store.attached import Asked, running_server
from kvcellar.cli.store.store import StorePlace
from kvcellar.errors import UnknownAgentError
from kvcellar.models.options import DEMO, LoadOptions

if TYPE_CHECKING:
    from kvcellar.agents import AgentManager
    from kvcellar.cli.common.groups import ModelOptions
    from kvcellar.server.commands.verbs import Tell
    from kvcellar.store import Store, StoreConfig

AgentId = Annotated[str, typer.Argument(metavar="ID", help="The agent's name.")]
ModelName = Annotated[
    str | None,
    options.in_loading(
        "MODEL",
        "As `kvcellar generate` takes it. Default: the agent's own; of a new agent the first of "
        "the server that runs on the store, else `demo`.",
        "--model",
    ),
]


class OwnAgents:
    """The agents of a store that this process has opened."""

    def __init__(self, manager: AgentManager) -> None:
        """Ask a manager of agents."""
        self.manager = manager

    def ask(self, verb: str, tell: Tell | None = None, **given: Any) -> Any:
        """Do a verb; see :class:`kvcellar.cli.store.attached.Asked`."""
        from kvcellar.server.commands.verbs import VERBS

        return asyncio.run(_done(VERBS[verb](self.manager, tell or _to_nobody, **given)))


async def _done(verb: Awaitable[Any]) -> Any:
    return await verb


def _to_nobody(event: dict[str, Any]) -> None:
    """Tell nobody."""


@contextmanager
def asked_agents(
    place: StorePlace,
    loading: ModelOptions | None = None,
    *,
    is_alone: bool,
    model: str | None = None,
    agent_id: str | None = None,
    is_speaking: bool = False,
    is_made: bool = False,
    verify: str = "checksum",
    speculate: str | None = None,
) -> Iterator[tuple[Asked, str | None]]:
    """Give the agents of a store: those of its running server, else those of this process.

    Args:
        place: where the store is, and what it shares.
        loading: how models are loaded; None: as by default, and none is.
        is_alone: ask no server.
        model: what the command calls the agent's model; None: the agent's own.
        agent_id: whose type of K and V is taken where ``loading`` names none.
        is_speaking: the agent's model is needed, and not only its history.
        is_made: the agent is made where there is none of that name.
        verify: as ``AgentManager`` takes it.
        speculate: who guesses tokens.

    Yields:
        Whom to ask, and what they call the model; None: it is the agent's own.
    """
    server = running_server(
        place,
        is_alone=is_alone,
        model=_named(model, loading),
        agent_id=agent_id if is_speaking else None,
        is_made=is_made,
        loading=loading,
        more={"verify": None if verify == "checksum" else verify, "speculate": speculate},
    )
    if server is not None:
        with _way_out():
            yield server[0], model and server[1]
        return
    with opened_agents(
        place,
        replace(LoadOptions() if loading is None else loading.options_for(), speculate=speculate),
        memory=getattr(loading, "memory", None),
        agent_id=agent_id,
        verify=verify,
        known=() if model is None or loading is None else [loading.options_for(model)],
    ) as agents:
        yield agents, _model_for(agents, agent_id, model, loading)


@contextmanager
def _way_out() -> Iterator[None]:
    """Say with an unknown agent how there comes to be one."""
    try:
        yield
    except UnknownAgentError as error:
        raise UnknownAgentError(f"{error}; `kvcellar agents create` makes one") from error


@contextmanager
def opened_agents(
    place: StorePlace,
    loading: LoadOptions | None = None,
    *,
    memory: str | None = None,
    agent_id: str | None = None,
    verify: str = "checksum",
    known: Sequence[LoadOptions] = (),
) -> Iterator[OwnAgents]:
    """Open the agents of a store, which is made where there is none; models load when needed.

    Args:
        place: where the store is, and what it shares.
        loading: how models are loaded; None: as by default.
        memory: what the whole process may hold, as a text.
        agent_id: whose type of K and V is taken where ``loading`` names none.
        verify: as ``AgentManager`` takes it.
        known: options of all models that will be loaded; none: they are not known.
    """
    from kvcellar.agents import AgentManager, ModelRegistry

    def kv_dtype_of(name: str) -> str | None:
        mine = [i for i in manager.directory.infos() if i.agent_id == agent_id]
        of_model = [i for i in mine if hosting.split(i.model)[0] == name]
        return of_model[-1].kv_dtype if of_model else None

    hosting = hosting_of(loading or LoadOptions(), memory, models=known)
    hosting.kv_dtype_of = kv_dtype_of
    with _way_out(), _opened_store(place, hosting.store) as store:
        models = ModelRegistry(
            lambda name: open_shown(hosting, name, progress_bar(f"loading {name}")),
            **hosting.registry,
        )
        try:
            manager = AgentManager(store, models, verify=verify)
            yield OwnAgents(manager)
            models.close()
            store.flush()
        finally:
            models.close()


def listed_agents(place: StorePlace, *, is_alone: bool) -> list[dict[str, Any]]:
    """List all agents of a store, as its running server has them, else as their records say.

    Neither models nor an engine are imported for that.
    """
    server = running_server(place, is_alone=is_alone)
    if server is not None:
        found: list[dict[str, Any]] = server[0].ask("list")
        return found
    from kvcellar.agents.directory import Directory
    from kvcellar.agents.publishing import Publisher
    from kvcellar.hosting.models import ModelRegistry
    from kvcellar.store import StoreConfig

    with _opened_store(place, StoreConfig()) as store:
        models = ModelRegistry()
        directory = Directory(store, models, Publisher(store, models.shelf))
        return [info.as_json() for info in directory.parted()]


@contextmanager
def _opened_store(place: StorePlace, config: StoreConfig) -> Iterator[Store]:
    """Open a store, take in what others share, and print at the end what happened in it."""
    with place.open(config) as store:
        if store.shared is not None:
            store.shared.pull_all()
        try:
            yield store
        finally:
            for event in store.take_events():
                print_warning(f"{event.subject}: {event.detail}")


def _named(model: str | None, loading: ModelOptions | None) -> str | None:
    """Return what a registry calls a model with the adapter that is asked for; None: its own."""
    from kvcellar.models.adapter_names import adapted
    from kvcellar.models.files.places import full_path

    adapter = "" if loading is None else one_adapter(read_adapters(loading.adapter))
    return model and adapted(full_path(model), adapter)


def _model_for(
    agents: OwnAgents, agent_id: str | None, model: str | None, loading: ModelOptions | None
) -> str | None:
    """Return what an agent's model is called, with the adapter that is asked for.

    None: nothing was said of either, so it is the agent's own.

    Raises:
        ConfigError: several adapters were asked for.
    """
    adapter = "" if loading is None else one_adapter(read_adapters(loading.adapter))
    if model is None and adapter:
        from kvcellar.models.adapter_names import MARK, adapted

        infos = agents.manager.directory.infos()
        own = [info.model for info in infos if info.agent_id == agent_id]
        return adapted(own[-1].removesuffix(f"{MARK}{adapter}") if own else DEMO, adapter)
    return _named(model, loading)


def parent_of(info: Mapping[str, Any]) -> str:
    """Name the agent that one was forked from, and say if it is gone."""
    return f"{info['parent']} (deleted)" if info["is_parent_gone"] else str(info["parent"])


def shared_by(info: Mapping[str, Any]) -> str:
    """Say how many tokens an agent that was forked has in common, and with whom."""
    if info["parted_at"] is None:
        return f" at {info['parent_position']}"
    whose = "" if info["parted_from"] == info["parent"] else f" with {info['parted_from']}"
    return f", {info['parted_at']} tokens shared{whose}"


def show_agent(info: Mapping[str, Any], as_json: bool) -> None:
    """Print one agent: one JSON object, or a line per fact."""
    if as_json:
        write(json.dumps(info) + "\n")
        return
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(info["used_s"]))
    has = ", ".join(counted(info[f"n_{one}s"], one) for one in ("token", "turn", "message"))
    lines = [
        ("agent", info["id"]),
        ("title", info["title"] or "(nothing was said yet)"),
        ("state", info["state"]),
        ("model", f"{info['model']}, K and V in {info['kv_dtype']}"),
        ("history", has),
        ("stored", counted(info["n_stored"], "token")),
        ("used", used),
    ]
    if info["parent"] is not None:
        lines.append(("forked from", f"{parent_of(info)} at token {info['parent_position']}"))
    lines += [("note", note) for note in info["notes"]]
    for name, text in lines:
        write(f"{name:<12}{text}\n")
