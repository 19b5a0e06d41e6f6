"""``kvcellar agents``: histories with a name that outlive the process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcellar.cli import options
from kvcellar.cli.session import memory_plan
from kvcellar.cli.store import AsJson, Folder, size_text
from kvcellar.cli.terminal import (
    examples,
    help_of,
    print_error,
    print_note,
    print_warning,
    progress_bar,
    shown_warnings,
    write,
)
from kvcellar.engine import SamplingParams, TokenEvent
from kvcellar.errors import PromptError

if TYPE_CHECKING:
    from kvcellar.agents import AgentInfo, AgentManager, Miss, TurnEnd

AgentId = Annotated[str, typer.Argument(metavar="ID", help="The agent's name.")]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="As `kvcellar generate` takes it. Default: the agent's own, else `demo`.",
        rich_help_panel=options.LOADING,
    ),
]
NewId = Annotated[
    str | None, typer.Argument(metavar="NEW", help="Name of the new one. Default: made up.")
]
Position = Annotated[
    int | None, typer.Option(metavar="TOKENS", help="A place in the history, in tokens.")
]
TurnNumber = Annotated[
    int | None,
    typer.Option(
        "--turn", metavar="N", help="Or in turns from the beginning; negative: from the end."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(
        name="agents",
        help="Agents that outlive the process: fork, rewind, sleep, come back.",
    )
    for name, command, shown in (
        ("create", create_command, ("kvcellar agents create poet --system 'You write verse.'",)),
        ("list", list_command, ("kvcellar agents list", "kvcellar agents list --json | jq .[].id")),
        ("show", show_command, ("kvcellar agents show poet",)),
        (
            "chat",
            chat_command,
            ("kvcellar agents chat poet", "echo Hello! | kvcellar agents chat poet"),
        ),
        ("generate", generate_command, ("kvcellar agents generate poet 'A line about rain.'",)),
        (
            "fork",
            fork_command,
            ("kvcellar agents fork poet poet-2", "kvcellar agents fork poet --turn 1"),
        ),
        ("rewind", rewind_command, ("kvcellar agents rewind poet --turn -1",)),
        ("keep", keep_command, ("kvcellar agents keep poet-2",)),
        ("pause", pause_command, ("kvcellar agents pause poet",)),
        ("resume", resume_command, ("kvcellar agents resume poet",)),
        ("export", export_command, ("kvcellar agents export poet poet.kv",)),
        (
            "import",
            import_command,
            ("kvcellar agents import poet.kv", "kvcellar agents import poet.kv twin"),
        ),
        (
            "delete",
            delete_command,
            ("kvcellar agents delete poet-2", "kvcellar agents delete poet-2 --forever"),
        ),
        ("undo", undo_command, ("kvcellar agents undo poet",)),
        (
            "dropped",
            dropped_command,
            ("kvcellar agents dropped", "kvcellar agents dropped --empty"),
        ),
        ("why", why_command, ("kvcellar agents why poet",)),
    ):
        group.command(name=name, help=help_of(command), epilog=examples(*shown))(command)
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
    system: options.System = None,
    model: ModelName = None,
    store: Folder = None,
    as_json: AsJson = False,
    kv_dtype: options.KvDtype = None,
    backend: options.Backend = "torch",
    dtype: options.Dtype = None,
    weights: options.Weights = None,
    device: options.Device = None,
    chat_template: options.ChatTemplate = None,
) -> None:
    """Make an agent without a history."""
    loading = {
        "kv_dtype": kv_dtype,
        "backend": backend,
        "dtype": dtype,
        "weights": weights,
        "device": device,
        "chat_template": options.read_template(chat_template),
    }
    with _opened(store, loading) as agents:
        info = asyncio.run(agents.create(agent_id, model=_named(model), system=system))
    _show(info, as_json)


def list_command(store: Folder = None, as_json: AsJson = False) -> None:
    """List all agents, the one that was used last at the end."""
    with _opened(store) as agents:
        infos = agents.list()
    if as_json:
        write(json.dumps([_as_object(info) for info in infos]) + "\n")
        return
    width = max((len(info.agent_id) for info in infos), default=0)
    for info in infos:
        if info.damage is not None:
            write(f"{info.agent_id:<{width}}  {info.state:<9} {info.damage}\n")
            continue
        of = f", forked from {_parent(info)} at {info.parent_position}" if info.parent else ""
        write(
            f"{info.agent_id:<{width}}  {info.state:<9} {info.n_tokens:>7} tokens  "
            f"{info.n_turns:>3} turns  {info.model}{of}\n"
        )


def show_command(agent_id: AgentId, store: Folder = None, as_json: AsJson = False) -> None:
    """Show one agent: its history, its lineage, its conversation."""
    with _opened(store) as agents:
        info = asyncio.run(agents.describe(agent_id))
        messages = agents.conversation(agent_id)
    if as_json:
        write(json.dumps(_as_object(info) | {"messages": messages}, ensure_ascii=False) + "\n")
        return
    _show(info, as_json=False)
    for message in messages:
        write(f"\n{message['role']}: {message.get('content') or ''}\n")


def why_command(agent_id: AgentId, store: Folder = None, as_json: AsJson = False) -> None:
    """Say what the last turn had to compute again, and why."""
    with _opened(store) as agents:
        miss, said = agents.why(agent_id), agents.why_not(agent_id)
    if as_json:
        write(json.dumps(None if miss is None else _miss_object(miss), ensure_ascii=False) + "\n")
    elif miss is None:
        write(f"{said}\n")
    else:
        write(f"cause     {miss.cause}: {miss.advice}\n")
        write(f"lost      {miss.tokens_lost} tokens, from position {miss.position} on\n")
        if miss.was != miss.became:
            write(f"was       {miss.was!r}\nbecame    {miss.became!r}\n")


# Turns --------------------------------------------------------------------------------------------


def generate_command(
    agent_id: AgentId,
    text: Annotated[
        str, typer.Argument(metavar="TEXT", help="What is said to it; - reads it from stdin.")
    ],
    as_json: AsJson = False,
    is_new: Annotated[
        bool, typer.Option("--create", help="Make the agent if there is none of that name.")
    ] = False,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    store: Folder = None,
    model: ModelName = None,
    capacity: options.Capacity = None,
    memory: options.Memory = None,
    kv_dtype: options.KvDtype = None,
    backend: options.Backend = "torch",
    dtype: options.Dtype = None,
    weights: options.Weights = None,
    device: options.Device = None,
    chat_template: options.ChatTemplate = None,
    verify: options.Verify = "checksum",
    speculate: options.Speculate = None,
) -> None:
    """Say something to an agent; its answer streams to stdout and joins its history.

    With --json one object is printed instead: the text, its tokens, and in `usage` what was reused,
    restored and lost.
    """
    params = options.sampling(
        {
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
        },
        seed=seed,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
    )
    said = sys.stdin.read().removesuffix("\n") if text == "-" else text
    loading = {
        "capacity": capacity,
        "memory": memory,
        "speculate": speculate,
        "kv_dtype": kv_dtype,
        "backend": backend,
        "dtype": dtype,
        "weights": weights,
        "device": device,
        "chat_template": options.read_template(chat_template),
    }
    with _opened(store, loading, agent_id, verify) as agents:
        if is_new and agent_id not in {info.agent_id for info in agents.list()}:
            asyncio.run(agents.create(agent_id, model=_named(model)))
        end = asyncio.run(_turn(agents, agent_id, said, params, _named(model), is_quiet=as_json))
    _show_end(end, as_json)


def chat_command(
    agent_id: AgentId,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per answer, each on a line.")
    ] = False,
    system: options.System = None,
    max_tokens: options.MaxTokens = 1024,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    store: Folder = None,
    model: ModelName = None,
    capacity: options.Capacity = None,
    memory: options.Memory = None,
    kv_dtype: options.KvDtype = None,
    backend: options.Backend = "torch",
    dtype: options.Dtype = None,
    weights: options.Weights = None,
    device: options.Device = None,
    chat_template: options.ChatTemplate = None,
    verify: options.Verify = "checksum",
    speculate: options.Speculate = None,
) -> None:
    """Talk with an agent, turn by turn; it is made where there is none of that name.

    Ctrl-D leaves, and the agent stays. /undo takes back the last turn. In a pipe every line is one
    message.
    """
    params = options.sampling(
        {
            "temperature": temperature,
            "top_p": top_p,
        },
        usual=options.USUAL_IN_CHAT,
        seed=seed,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
    )
    loading = {
        "capacity": capacity,
        "memory": memory,
        "speculate": speculate,
        "kv_dtype": kv_dtype,
        "backend": backend,
        "dtype": dtype,
        "weights": weights,
        "device": device,
        "chat_template": options.read_template(chat_template),
    }
    with _opened(store, loading, agent_id, verify) as agents:
        if agent_id not in {info.agent_id for info in agents.list()}:
            asyncio.run(agents.create(agent_id, model=_named(model), system=system))
        is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
        for line in _lines(is_interactive):
            if line == "/undo":
                asyncio.run(agents.rewind(agent_id, turn=-1))
                print_note("took back the last turn")
            elif line in ("/quit", "/exit"):
                break
            elif line:
                try:
                    turn = _turn(agents, agent_id, line, params, _named(model), is_quiet=as_json)
                    _show_end(asyncio.run(turn), as_json)
                except PromptError as error:
                    if not is_interactive:
                        raise
                    print_error(f"{error}, or /undo")
                except KeyboardInterrupt:
                    if not is_interactive:
                        raise
                    print_note("\nstopped here")


def _lines(is_interactive: bool) -> Iterator[str]:
    if not is_interactive:
        yield from (line.strip() for line in sys.stdin)
        return
    with contextlib.suppress(EOFError):
        while True:
            yield input("> ").strip()


async def _turn(
    agents: AgentManager,
    agent_id: str,
    text: str,
    params: SamplingParams,
    model: str | None,
    *,
    is_quiet: bool,
) -> TurnEnd:
    end = None
    with progress_bar("reading") as report:
        events = agents.generate(agent_id, text, params=params, model=model, progress=report)
        async with contextlib.aclosing(events):
            async for event in events:
                if not isinstance(event, TokenEvent):
                    end = event
                elif not is_quiet:
                    report(1.0, "reading")
                    write(event.token.text)
    assert end is not None
    if end.finish.error is not None:
        raise end.finish.error
    return end


def _show_end(end: TurnEnd, as_json: bool) -> None:
    usage, finish = end.usage, end.finish
    if as_json:
        value = {
            "id": end.agent_id,
            "text": finish.text,
            "token_ids": list(finish.token_ids),
            "finish_reason": finish.reason,
            "usage": asdict(usage)
            | {"miss": None if usage.miss is None else _miss_object(usage.miss)},
        }
        write(json.dumps(value, ensure_ascii=False) + "\n")
        return
    write("\n")
    restored = f", {usage.restored_tokens} restored" if usage.restored_tokens else ""
    first = usage.time_to_first_token_s
    guessed = f"; {usage.accepted_tokens} of {usage.drafted_tokens} guesses were right"
    print_note(
        f"reused {usage.cached_tokens} of {usage.prompt_tokens} tokens{restored}"
        + (f"; first new one after {first:.2f} s" if first is not None else "")
        + (guessed if usage.drafted_tokens else "")
    )
    if usage.miss is not None and usage.miss.tokens_lost > 16:
        print_note(f"{usage.miss.tokens_lost} tokens were computed again: {usage.miss.advice}")


# Branches and sleep -------------------------------------------------------------------------------


def fork_command(
    agent_id: AgentId,
    new_id: NewId = None,
    position: Position = None,
    turn: TurnNumber = None,
    store: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Make an agent that shares the beginning of another; no KV is copied."""
    with _opened(store) as agents:
        info = asyncio.run(agents.fork(agent_id, new_id, position=position, turn=turn))
    _show(info, as_json)


def rewind_command(
    agent_id: AgentId,
    position: Position = None,
    turn: TurnNumber = None,
    store: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Go back to a place in the history; without one, to before the last turn."""
    with _opened(store) as agents:
        if position is None and turn is None:
            turn = -1
        info = asyncio.run(agents.rewind(agent_id, position=position, turn=turn))
    _show(info, as_json)
    if not as_json:
        print_note(f"`kvcellar agents undo {agent_id}` brings back what was dropped")


def keep_command(agent_id: AgentId, store: Folder = None, as_json: AsJson = False) -> None:
    """Keep this branch and delete its siblings, with all that was forked from them."""
    with _opened(store) as agents:
        gone = list(asyncio.run(agents.keep(agent_id)))
    if as_json:
        write(json.dumps({"id": agent_id, "deleted": gone}) + "\n")
    else:
        write(f"kept {agent_id}; deleted {', '.join(gone) or 'none'}\n")
    if gone and not as_json:
        print_note(f"`kvcellar agents undo {agent_id}` brings them back")


def pause_command(agent_id: AgentId, store: Folder = None, as_json: AsJson = False) -> None:
    """Have all of an agent on disk and none of it in memory."""
    with _opened(store) as agents, progress_bar("saving") as report:
        info = asyncio.run(agents.pause(agent_id, progress=report))
    _show(info, as_json)


def resume_command(
    agent_id: AgentId,
    store: Folder = None,
    as_json: AsJson = False,
    capacity: options.Capacity = None,
    memory: options.Memory = None,
    kv_dtype: options.KvDtype = None,
    backend: options.Backend = "torch",
    dtype: options.Dtype = None,
    weights: options.Weights = None,
    device: options.Device = None,
    chat_template: options.ChatTemplate = None,
    verify: options.Verify = "checksum",
) -> None:
    """Load an agent's KV into the cache and say how much came, from where, in what time."""
    loading = {
        "capacity": capacity,
        "memory": memory,
        "kv_dtype": kv_dtype,
        "backend": backend,
        "dtype": dtype,
        "weights": weights,
        "device": device,
        "chat_template": options.read_template(chat_template),
    }
    with _opened(store, loading, agent_id, verify) as agents:
        with progress_bar("loading") as report:
            back = asyncio.run(agents.resume(agent_id, progress=report))
        info = asyncio.run(agents.describe(agent_id))
    if back.trouble:
        print_warning(back.trouble)
    if as_json:
        value = _as_object(info) | {
            "restored_tokens": back.n_restored,
            "restored_from": dict(back.tiers),
            "restore_s": back.load_s,
        }
        write(json.dumps(value) + "\n")
    else:
        write(
            f"{agent_id}: {back.n_restored} of {info.n_tokens} tokens restored in "
            f"{back.load_s:.3f} s\n"
        )


# Files --------------------------------------------------------------------------------------------


def export_command(
    agent_id: AgentId,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it.")],
    store: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Write an agent with its KV to one file."""
    with _opened(store) as agents, progress_bar("exporting") as report:
        size = asyncio.run(agents.export(agent_id, file, progress=report))
    if as_json:
        write(json.dumps({"id": agent_id, "file": str(file), "size_bytes": size}) + "\n")
    else:
        write(f"{agent_id}: {size_text(size)} in {file}\n")


def import_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `export` wrote.")],
    new_id: NewId = None,
    store: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Take in an agent from a file; all of it is verified first."""
    with _opened(store) as agents, progress_bar("verifying") as report:
        info = asyncio.run(agents.import_file(file, new_id, progress=report))
    _show(info, as_json)


def delete_command(
    agent_id: AgentId,
    is_final: Annotated[
        bool, typer.Option("--forever", help="Keep nothing that undo could bring back.")
    ] = False,
    store: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Forget an agent; what others share with it stays. Undo brings it back for some time."""
    with _opened(store) as agents:
        asyncio.run(agents.delete(agent_id, is_final=is_final))
    write(json.dumps({"deleted": [agent_id]}) + "\n" if as_json else f"deleted {agent_id}\n")
    if not (is_final or as_json):
        print_note(f"`kvcellar agents undo {agent_id}` brings it back")


def undo_command(agent_id: AgentId, store: Folder = None, as_json: AsJson = False) -> None:
    """Bring back what rewind, keep, delete or a replaced history has dropped of an agent last.

    Where the agent has gone on since, it comes back as an agent of another name. Each call goes one
    step further back. What was dropped is kept until the store needs the room: the 100 last, for 30
    days.
    """
    with _opened(store) as agents:
        back = asyncio.run(agents.undo(agent_id))
    if as_json:
        write(json.dumps([_as_object(info) for info in back]) + "\n")
        return
    for info in back:
        write(f"{info.agent_id}: {info.n_tokens} tokens, {info.n_turns} turns\n")


def dropped_command(
    is_emptied: Annotated[
        bool, typer.Option("--empty", help="Delete all of it, so that undo finds nothing.")
    ] = False,
    store: Folder = None,
    as_json: AsJson = False,
) -> None:
    """List what undo can bring back, the latest at the end."""
    with _opened(store) as agents:
        if is_emptied:
            n = agents.forget_dropped()
            write(json.dumps({"deleted": n}) + "\n" if as_json else f"deleted {n} states\n")
            return
        states = agents.dropped()
    if as_json:
        write(json.dumps([asdict(state) for state in states]) + "\n")
        return
    for state in states:
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(state.at_s))
        of = "" if state.by == state.agent_id else f" of {state.by}"
        had = f"{state.n_tokens} tokens, {state.n_turns} turns"
        write(f"{state.agent_id}  {had}, dropped by {state.verb}{of} at {at}\n")


# Inside -------------------------------------------------------------------------------------------


@contextmanager
def _opened(
    folder: Path | None,
    loading: dict[str, Any] | None = None,
    agent_id: str | None = None,
    verify: str = "checksum",
) -> Iterator[AgentManager]:
    """The agents of a store, which is made where there is none; models are loaded when needed.

    Unless said otherwise K and V are stored as the agent of that name has them.
    """
    from kvcellar.agents import AgentManager, ModelHost, ModelRegistry, open_host
    from kvcellar.store import Store, StoreConfig, default_store

    wanted = dict(loading or {})
    memory = memory_plan(wanted.pop("memory", None), wanted)

    def settings_of(name: str) -> dict[str, Any]:
        mine = [i for i in agents.list() if (i.agent_id, i.model) == (agent_id, name)]
        kv_dtype = wanted.get("kv_dtype") or (mine[-1].kv_dtype if mine else None)
        return wanted | {"kv_dtype": kv_dtype}

    def size_of(name: str) -> int:
        assert memory is not None
        return memory.size_of(name, **settings_of(name))

    def load(name: str) -> ModelHost:
        settings = settings_of(name)
        if memory is not None:
            settings["memory_bytes"] = size_of(name)
        with shown_warnings(), progress_bar(f"loading {name}") as report:
            host = open_host(name, progress=report, **settings)
        if host.template is not None:
            for found in host.template.findings:
                print_note(f"chat template: {found}")
        return host

    config = StoreConfig()
    if memory is not None:
        config = StoreConfig(warm_bytes=memory.warm_bytes, queue_bytes=memory.queue_bytes)
    with Store((folder or default_store()).expanduser(), config) as store:
        models = ModelRegistry(
            load,
            budget_bytes=None if memory is None else memory.models_bytes,
            size_of=None if memory is None else size_of,
        )
        try:
            agents = AgentManager(store, models, verify=verify)
            yield agents
            models.close()
            store.flush()
        finally:
            models.close()
            for event in store.take_events():
                print_warning(f"{event.subject}: {event.detail}")


def _named(model: str | None) -> str | None:
    """A folder by its full path, so that the agent finds it again from wherever."""
    if model is None or model == "demo":
        return model
    path = Path(model).expanduser()
    return str(path.resolve()) if path.is_dir() else model


def _as_object(info: AgentInfo) -> dict[str, Any]:
    value = asdict(info)
    value["id"] = value.pop("agent_id")
    value["miss"] = None if info.miss is None else _miss_object(info.miss)
    return value


def _parent(info: AgentInfo) -> str:
    return f"{info.parent} (deleted)" if info.is_parent_gone else str(info.parent)


def _miss_object(miss: Miss) -> dict[str, Any]:
    return miss.as_json() | {"advice": miss.advice}


def _show(info: AgentInfo, as_json: bool) -> None:
    if as_json:
        write(json.dumps(_as_object(info)) + "\n")
        return
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(info.used_s))
    lines = [
        ("agent", info.agent_id),
        ("state", info.state),
        ("model", f"{info.model}, K and V in {info.kv_dtype}"),
        ("history", f"{info.n_tokens} tokens, {info.n_turns} turns, {info.n_messages} messages"),
        ("stored", f"{info.n_stored} tokens"),
        ("used", used),
    ]
    if info.parent is not None:
        lines.append(("forked from", f"{_parent(info)} at token {info.parent_position}"))
    for name, text in lines:
        write(f"{name:<12}{text}\n")
