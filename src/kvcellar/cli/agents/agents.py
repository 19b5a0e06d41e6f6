"""``kvcellar agents``: histories with a name that outlive the process."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcellar.cli.agents.agent_store import (
    AgentId,
    ModelName,
    asked_agents,
    listed_agents,
    opened_agents,
    parent_of,
    shared_by,
    show_agent,
)
from kvcellar.cli.agents.agent_turns import chat_command, generate_command
from kvcellar.cli.common import options
from kvcellar.cli.common.commands import add_command, examples, option
from kvcellar.cli.common.groups import CacheOptions, ModelOptions
from kvcellar.cli.common.terminal import (
    counted,
    print_line,
    print_note,
    print_warning,
    progress_bar,
    shown_answer,
    write,
)
from kvcellar.cli.store.store import HOME_STORE, AsJson, StorePlace, size_text
from kvcellar.errors import ConfigError

_TRANSCRIPTS = {".md": "markdown", ".json": "json"}
"""Endings of files that ``export`` writes for readers, not for ``import``."""

NewId = Annotated[
    str | None, typer.Argument(metavar="NEW", help="Name of the new one. Default: made up.")
]
Position = Annotated[int | None, option("TOKENS", "A place in the history, in tokens.")]
TurnNumber = Annotated[
    int | None,
    option("N", "Or in turns from the beginning; negative: from the end.", "--turn"),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(
        name="agents",
        help="Agents that outlive the process: fork, rewind, sleep, come back.",
    )
    for name, command, *shown in (
        ("create", create_command, "kvcellar agents create poet --system 'You write verse.'"),
        ("list", list_command, "kvcellar agents list", "kvcellar agents list --json | jq .[].id"),
        ("show", show_command, "kvcellar agents show poet"),
        ("rename", rename_command, "kvcellar agents rename poet 'Verses about rain'"),
        (
            "chat",
            chat_command,
            "kvcellar agents chat poet",
            "echo Hello! | kvcellar agents chat poet",
        ),
        ("generate", generate_command, "kvcellar agents generate poet 'A line about rain.'"),
        (
            "fork",
            fork_command,
            "kvcellar agents fork poet poet-2",
            "kvcellar agents fork poet --turn 1",
        ),
        ("rewind", rewind_command, "kvcellar agents rewind poet --turn -1"),
        ("keep", keep_command, "kvcellar agents keep poet-2"),
        ("pause", pause_command, "kvcellar agents pause poet"),
        ("resume", resume_command, "kvcellar agents resume poet"),
        (
            "export",
            export_command,
            "kvcellar agents export poet poet.kv",
            "kvcellar agents export poet poet.md",
        ),
        (
            "import",
            import_command,
            "kvcellar agents import poet.kv",
            "kvcellar agents import poet.kv twin",
        ),
        (
            "delete",
            delete_command,
            "kvcellar agents delete poet-2",
            "kvcellar agents delete poet-2 --forever",
        ),
        ("undo", undo_command, "kvcellar agents undo poet"),
        (
            "dropped",
            dropped_command,
            "kvcellar agents dropped",
            "kvcellar agents dropped --empty",
        ),
        ("why", why_command, "kvcellar agents why poet"),
    ):
        add_command(group, name, command, *shown)
    app.add_typer(
        group,
        epilog=examples(
            "kvcellar agents create poet",
            "kvcellar agents generate poet 'A line about rain.'",
            "kvcellar agents fork poet poet-2",
            "kvcellar agents list",
        ),
        no_args_is_help=True,
    )


# Who there is -------------------------------------------------------------------------------------


def create_command(
    agent_id: Annotated[
        str | None, typer.Argument(metavar="ID", help="Its name. Default: made up.")
    ] = None,
    *,
    system: options.System = None,
    model: ModelName = None,
    store: StorePlace = HOME_STORE,
    as_json: AsJson = False,
    alone: options.Alone = False,
    loading: ModelOptions,
) -> None:
    """Make an agent without a history."""
    with asked_agents(
        store, loading, is_alone=alone, model=model, agent_id="", is_speaking=True, is_made=True
    ) as (agents, path):
        info = agents.ask("create", agent_id=agent_id, model=path, system=system)
    show_agent(info, as_json)


def list_command(
    store: StorePlace = HOME_STORE, as_json: AsJson = False, alone: options.Alone = False
) -> None:
    """List all agents, the one that was used last at the end."""
    infos = listed_agents(store, is_alone=alone)
    if as_json:
        write(json.dumps(infos) + "\n")
        return
    if not infos:
        print_line(f"no agents in {store.path}; make one with: kvcellar agents create poet")
    width = max((len(info["id"]) for info in infos), default=0)
    for info in infos:
        if info["damage"] is not None:
            write(f"{info['id']:<{width}}  {info['state']:<9} {info['damage']}\n")
            continue
        of = f", forked from {parent_of(info)}{shared_by(info)}" if info["parent"] else ""
        title = f"  “{info['title']}”" if info["title"] else ""
        write(
            f"{info['id']:<{width}}  {info['state']:<9} {info['n_tokens']:>7} tokens  "
            f"{counted(info['n_turns'], 'turn'):>9}  {info['model']}{of}{title}\n"
        )


def show_command(
    agent_id: AgentId,
    store: StorePlace = HOME_STORE,
    as_json: AsJson = False,
    alone: options.Alone = False,
) -> None:
    """Show one agent: its history, its lineage, its conversation."""
    with asked_agents(store, is_alone=alone) as (agents, _):
        shown = agents.ask("show", agent_id=agent_id)
    if as_json:
        write(json.dumps(shown, ensure_ascii=False) + "\n")
        return
    show_agent(shown, as_json=False)
    for message in shown["messages"]:
        thought, calls = message.get("reasoning_content"), message.get("tool_calls") or ()
        lines = [f"({thought.strip()})"] if thought else []
        lines += [str(message["content"])] if message.get("content") else []
        lines += [f"calls {function_text(call['function'])}" for call in calls]
        write(f"\n{message['role']}: {chr(10).join(lines)}\n")


def function_text(function: Mapping[str, Any]) -> str:
    """Return a call as one line: the name of the tool, and what it is given."""
    given = function.get("arguments", "")
    return f"{function['name']} {given if isinstance(given, str) else json.dumps(given)}"


def rename_command(
    agent_id: AgentId,
    title: Annotated[
        str, typer.Argument(metavar="TITLE", help="Any text; empty: the first words said.")
    ],
    store: StorePlace = HOME_STORE,
    as_json: AsJson = False,
    alone: options.Alone = False,
) -> None:
    """Give an agent another title, for people; its name stays."""
    with asked_agents(store, is_alone=alone) as (agents, _):
        info = agents.ask("rename", agent_id=agent_id, title=title)
    show_agent(info, as_json)


def why_command(
    agent_id: AgentId,
    store: StorePlace = HOME_STORE,
    as_json: AsJson = False,
    alone: options.Alone = False,
) -> None:
    """Say what the last turn had to compute again, and why."""
    with asked_agents(store, is_alone=alone) as (agents, _):
        found = agents.ask("why", agent_id=agent_id)
    miss = found["miss"]
    if as_json:
        write(json.dumps(miss, ensure_ascii=False) + "\n")
    elif miss is None:
        write(f"{found['said']}\n")
    else:
        write(f"cause     {miss['cause']}: {miss['advice']}\n")
        at, differs = f"from position {miss['position']} on", miss["was"] != miss["became"]
        where = f"where the texts differ {at}" if differs else at
        write(f"lost      {miss['tokens_lost']} tokens, {where}\n")
        if differs:
            write(f"was       {miss['was']!r}\nbecame    {miss['became']!r}\n")


# Branches and sleep -------------------------------------------------------------------------------


def fork_command(
    agent_id: AgentId,
    new_id: NewId = None,
    position: Position = None,
    turn: TurnNumber = None,
    store: StorePlace = HOME_STORE,
    as_json: AsJson = False,
    alone: options.Alone = False,
) -> None:
    """Make an agent that shares the beginning of another; no KV is copied."""
    with asked_agents(store, is_alone=alone) as (agents, _):
        info = agents.ask("fork", agent_id=agent_id, new_id=new_id, position=position, turn=turn)
    show_agent(info, as_json)


def rewind_command(
    agent_id: AgentId,
    position: Position = None,
    turn: TurnNumber = None,
    store: StorePlace = HOME_STORE,
    as_json: AsJson = False,
    alone: options.Alone = False,
) -> None:
    """Go back to a place in the history; without one, to before the last turn."""
    with asked_agents(store, is_alone=alone) as (agents, _):
        info = agents.ask("rewind", agent_id=agent_id, position=position, turn=turn)
    show_agent(info, as_json)
    if not as_json:
        print_note(f"`kvcellar agents undo {agent_id}` brings back what was dropped")


def keep_command(
    agent_id: AgentId,
    store: StorePlace = HOME_STORE,
    as_json: AsJson = False,
    alone: options.Alone = False,
) -> None:
    """Keep this branch and delete its siblings, with all that was forked from them."""
    with asked_agents(store, is_alone=alone) as (agents, _):
        gone = agents.ask("keep", agent_id=agent_id)
    if as_json:
        write(json.dumps({"id": agent_id, "deleted": gone}) + "\n")
    else:
        write(f"kept {agent_id}; deleted {', '.join(gone) or 'none'}\n")
    if gone and not as_json:
        print_note(f"`kvcellar agents undo {agent_id}` brings them back")


def pause_command(
    agent_id: AgentId,
    store: StorePlace = HOME_STORE,
    as_json: AsJson = False,
    alone: options.Alone = False,
) -> None:
    """Have all of an agent on disk and none of it in memory."""
    with (
        asked_agents(store, is_alone=alone) as (agents, _),
        shown_answer("saving", is_quiet=True) as tell,
    ):
        info = agents.ask("pause", tell, agent_id=agent_id)
    show_agent(info, as_json)


def resume_command(
    agent_id: AgentId,
    *,
    store: StorePlace = HOME_STORE,
    as_json: AsJson = False,
    alone: options.Alone = False,
    loading: CacheOptions,
    verify: options.Verify = "checksum",
) -> None:
    """Load an agent's KV into the cache and say how much came, from where, in what time."""
    with (
        asked_agents(
            store, loading, is_alone=alone, agent_id=agent_id, is_speaking=True, verify=verify
        ) as (agents, _),
        shown_answer("loading", is_quiet=True) as tell,
    ):
        back = agents.ask("resume", tell, agent_id=agent_id)
    if back["trouble"]:
        print_warning(back["trouble"])
    info = back["agent"]
    if as_json:
        write(json.dumps(info) + "\n")
    else:
        write(
            f"{agent_id}: {info['restored_tokens']} of {info['n_tokens']} tokens restored in "
            f"{info['restore_s']:.3f} s\n"
        )


# Files --------------------------------------------------------------------------------------------


def export_command(
    agent_id: AgentId,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it.")],
    store: StorePlace = HOME_STORE,
    as_json: AsJson = False,
) -> None:
    """Write an agent with its KV to one file; to FILE.md or FILE.json what was said, to be read."""
    from kvcellar.agents.text.reading import conversation_apart
    from kvcellar.agents.text.transcripts import write_transcript

    kind = _TRANSCRIPTS.get(file.suffix.lower())
    if kind is not None:
        with opened_agents(store) as own:
            directory = own.manager.directory
            info = asyncio.run(directory.describe(agent_id))
            text = write_transcript(info, conversation_apart(directory.agent(agent_id), None), kind)
        file.write_text(text, encoding="utf-8")
        show_export(agent_id, file, file.stat().st_size, as_json)
        return
    with opened_agents(store) as own, progress_bar("exporting") as report:
        size = asyncio.run(own.manager.sleep.export(agent_id, file, progress=report))
    show_export(agent_id, file, size, as_json)


def show_export(agent_id: str, file: Path, size: int, as_json: bool) -> None:
    """Print whose file was written, where, and how many bytes it has."""
    if as_json:
        write(json.dumps({"id": agent_id, "file": str(file), "size_bytes": size}) + "\n")
    else:
        write(f"{agent_id}: {size_text(size)} in {file}\n")


def import_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `export` wrote.")],
    new_id: NewId = None,
    store: StorePlace = HOME_STORE,
    as_json: AsJson = False,
) -> None:
    """Take in an agent from a file; all of it is verified first."""
    if not file.is_file():
        raise ConfigError(f"there is no file {file}; give one that `kvcellar agents export` wrote")
    with opened_agents(store) as own, progress_bar("verifying") as report:
        info = asyncio.run(own.manager.sleep.import_file(file, new_id, progress=report))
    show_agent(info.as_json(), as_json)


def delete_command(
    agent_id: AgentId,
    is_final: Annotated[
        bool, typer.Option("--forever", help="Keep nothing that undo could bring back.")
    ] = False,
    store: StorePlace = HOME_STORE,
    as_json: AsJson = False,
    alone: options.Alone = False,
) -> None:
    """Forget an agent; what others share with it stays. Undo brings it back for some time."""
    with asked_agents(store, is_alone=alone) as (agents, _):
        agents.ask("delete", agent_id=agent_id, is_final=is_final)
    write(json.dumps({"deleted": [agent_id]}) + "\n" if as_json else f"deleted {agent_id}\n")
    if not (is_final or as_json):
        print_note(f"`kvcellar agents undo {agent_id}` brings it back")


def undo_command(
    agent_id: AgentId,
    store: StorePlace = HOME_STORE,
    as_json: AsJson = False,
    alone: options.Alone = False,
) -> None:
    """Bring back what rewind, keep, delete or a replaced history has dropped of an agent last.

    Where the agent has gone on since, it comes back as an agent of another name. Each call goes one
    step further back. What was dropped is kept until the store needs the room: the 100 last, for 30
    days.
    """
    with asked_agents(store, is_alone=alone) as (agents, _):
        back = agents.ask("undo", agent_id=agent_id)
    if as_json:
        write(json.dumps(back) + "\n")
        return
    for info in back:
        write(f"{info['id']}: {_had(info)}\n")


def _had(info: Mapping[str, Any]) -> str:
    """Write how long a history is."""
    return f"{counted(info['n_tokens'], 'token')}, {counted(info['n_turns'], 'turn')}"


def dropped_command(
    is_emptied: Annotated[
        bool, typer.Option("--empty", help="Delete all of it, so that undo finds nothing.")
    ] = False,
    store: StorePlace = HOME_STORE,
    as_json: AsJson = False,
    alone: options.Alone = False,
) -> None:
    """List what undo can bring back, the latest at the end."""
    with asked_agents(store, is_alone=alone) as (agents, _):
        if is_emptied:
            n = agents.ask("forget")
            write(json.dumps({"deleted": n}) + "\n" if as_json else f"deleted {n} states\n")
            return
        states = agents.ask("dropped")
    if as_json:
        write(json.dumps(states) + "\n")
        return
    if not states:
        print_line("nothing was dropped that undo could bring back")
    for state in states:
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(state["at_s"]))
        of = "" if state["by"] == state["agent_id"] else f" of {state['by']}"
        write(f"{state['agent_id']}  {_had(state)}, dropped by {state['verb']}{of} at {at}\n")
