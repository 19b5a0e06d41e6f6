"""The agents of a store, opened for one command, and how an agent is shown."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcellar.cli import options
from kvcellar.cli.hosting import hosting_of, open_shown
from kvcellar.cli.store import StorePlace
from kvcellar.cli.terminal import print_warning, progress_bar, write
from kvcellar.errors import UnknownAgentError
from kvcellar.models.options import DEMO, LoadOptions

if TYPE_CHECKING:
    from kvcellar.agents import AgentInfo, AgentManager, Miss
    from kvcellar.cli.groups import ModelOptions

AgentId = Annotated[str, typer.Argument(metavar="ID", help="The agent's name.")]
ModelName = Annotated[
    str | None,
    options.in_loading(
        "MODEL",
        "As `kvcellar generate` takes it. Default: the agent's own, else `demo`.",
        "--model",
    ),
]


@contextmanager
def opened_agents(
    place: StorePlace,
    loading: LoadOptions | None = None,
    *,
    memory: str | None = None,
    agent_id: str | None = None,
    verify: str = "checksum",
) -> Iterator[AgentManager]:
    """Open the agents of a store, which is made where there is none; models load when needed.

    Args:
        place: where the store is, and what it shares.
        loading: how models are loaded; None: as by default.
        memory: what the whole process may hold, as a text.
        agent_id: whose type of K and V is taken where ``loading`` names none.
        verify: as ``AgentManager`` takes it.
    """
    from kvcellar.agents import AgentManager, ModelRegistry

    def kv_dtype_of(name: str) -> str | None:
        mine = [i for i in agents.directory.infos() if i.agent_id == agent_id]
        of_model = [i for i in mine if hosting.split(i.model)[0] == name]
        return of_model[-1].kv_dtype if of_model else None

    hosting = hosting_of(loading or LoadOptions(), memory)
    hosting.kv_dtype_of = kv_dtype_of
    with place.open(hosting.store) as store:
        if store.shared is not None:
            store.shared.pull_all()
        models = ModelRegistry(
            lambda name: open_shown(hosting, name, progress_bar(f"loading {name}")),
            **hosting.registry,
        )
        try:
            agents = AgentManager(store, models, verify=verify)
            yield agents
            models.close()
            store.flush()
        except UnknownAgentError as error:
            raise UnknownAgentError(f"{error}; `kvcellar agents create` makes one") from error
        finally:
            models.close()
            for event in store.take_events():
                print_warning(f"{event.subject}: {event.detail}")


def model_for(
    agents: AgentManager, agent_id: str | None, model: str | None, loading: ModelOptions
) -> str | None:
    """Return what an agent's model is called, with the adapter that is asked for.

    None: nothing was said of either, so it is the agent's own.

    Raises:
        ConfigError: several adapters were asked for.
    """
    from kvcellar.models.adapter_names import MARK, adapted
    from kvcellar.models.places import full_path

    adapter = options.one_adapter(options.read_adapters(loading.adapter))
    if model is None and adapter:
        own = [info.model for info in agents.directory.infos() if info.agent_id == agent_id]
        return adapted(own[-1].removesuffix(f"{MARK}{adapter}") if own else DEMO, adapter)
    return model and adapted(full_path(model), adapter)


def agent_object(info: AgentInfo) -> dict[str, Any]:
    """Return an agent as ``--json`` prints it."""
    value = asdict(info)
    value["id"] = value.pop("agent_id")
    value["miss"] = None if info.miss is None else miss_object(info.miss)
    return value


def parent_of(info: AgentInfo) -> str:
    """Name the agent that one was forked from, and say if it is gone."""
    return f"{info.parent} (deleted)" if info.is_parent_gone else str(info.parent)


def shared_by(info: AgentInfo) -> str:
    """Say how many tokens an agent that was forked has in common, and with whom."""
    if info.parted_at is None:
        return f" at {info.parent_position}"
    whose = "" if info.parted_from == info.parent else f" with {info.parted_from}"
    return f", {info.parted_at} tokens shared{whose}"


def miss_object(miss: Miss) -> dict[str, Any]:
    """Return what a turn lost as ``--json`` prints it, with advice."""
    return miss.as_json() | {"advice": miss.advice}


def show_agent(info: AgentInfo, as_json: bool) -> None:
    """Print one agent: one JSON object, or a line per fact."""
    if as_json:
        write(json.dumps(agent_object(info)) + "\n")
        return
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(info.used_s))
    lines = [
        ("agent", info.agent_id),
        ("title", info.title or "(nothing was said yet)"),
        ("state", info.state),
        ("model", f"{info.model}, K and V in {info.kv_dtype}"),
        ("history", f"{info.n_tokens} tokens, {info.n_turns} turns, {info.n_messages} messages"),
        ("stored", f"{info.n_stored} tokens"),
        ("used", used),
    ]
    if info.parent is not None:
        lines.append(("forked from", f"{parent_of(info)} at token {info.parent_position}"))
    for name, text in lines:
        write(f"{name:<12}{text}\n")
