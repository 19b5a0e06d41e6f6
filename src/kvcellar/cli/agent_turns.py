"""Turns of agents from the command line: ``kvcellar agents generate`` and ``agents chat``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from kvcellar.cli import options
from kvcellar.cli.agent_store import AgentId, ModelName, miss_object, model_for, opened_agents
from kvcellar.cli.groups import CacheOptions, ChatSampling, SamplingOptions
from kvcellar.cli.store import HOME_STORE, AsJson, StorePlace
from kvcellar.cli.terminal import print_error, print_note, progress_bar, write
from kvcellar.engine import SamplingParams, TokenEvent
from kvcellar.errors import PromptError

if TYPE_CHECKING:
    from kvcellar.agents import AgentManager, TurnEnd


def generate_command(
    agent_id: AgentId,
    text: Annotated[
        str, typer.Argument(metavar="TEXT", help="What is said to it; - reads it from stdin.")
    ],
    *,
    as_json: AsJson = False,
    is_new: Annotated[
        bool, typer.Option("--create", help="Make the agent if there is none of that name.")
    ] = False,
    sampling: SamplingOptions,
    store: StorePlace = HOME_STORE,
    model: ModelName = None,
    loading: CacheOptions,
    verify: options.Verify = "checksum",
    speculate: options.Speculate = None,
) -> None:
    """Say something to an agent; its answer streams to stdout and joins its history.

    With --json one object is printed instead: the text, its tokens, and in `usage` what was reused,
    restored and lost.
    """
    params = sampling.params()
    said = sys.stdin.read().removesuffix("\n") if text == "-" else text
    settings = replace(loading.options_for(), speculate=speculate)
    with opened_agents(
        store, settings, memory=loading.memory, agent_id=agent_id, verify=verify
    ) as agents:
        path = model_for(agents, agent_id, model, loading)
        if is_new and agent_id not in {info.agent_id for info in agents.directory.infos()}:
            asyncio.run(agents.lifecycle.create(agent_id, model=path))
        turn = _turn(agents, agent_id, said, params, path, is_quiet=as_json)
        end = asyncio.run(turn)
    _show_end(end, as_json)


def chat_command(
    agent_id: AgentId,
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per answer, each on a line.")
    ] = False,
    system: options.System = None,
    sampling: ChatSampling,
    store: StorePlace = HOME_STORE,
    model: ModelName = None,
    loading: CacheOptions,
    verify: options.Verify = "checksum",
    speculate: options.Speculate = None,
) -> None:
    """Talk with an agent, turn by turn; it is made where there is none of that name.

    Ctrl-D leaves, and the agent stays. /undo takes back the last turn. In a pipe every line is one
    message.
    """
    params = sampling.params()
    settings = replace(loading.options_for(), speculate=speculate)
    with opened_agents(
        store, settings, memory=loading.memory, agent_id=agent_id, verify=verify
    ) as agents:
        path = model_for(agents, agent_id, model, loading)
        if agent_id not in {info.agent_id for info in agents.directory.infos()}:
            asyncio.run(agents.lifecycle.create(agent_id, model=path, system=system))
        is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
        for line in _lines(is_interactive):
            if line == "/undo":
                asyncio.run(agents.lifecycle.rewind(agent_id, turn=-1))
                print_note("took back the last turn")
            elif line in ("/quit", "/exit"):
                break
            elif line:
                turn = _turn(agents, agent_id, line, params, path, is_quiet=as_json)
                with _going_on(is_interactive):
                    end = asyncio.run(turn)
                    agent_id = end.agent_id  # a branch, where another process talks with it too
                    _show_end(end, as_json)


@contextlib.contextmanager
def _going_on(is_interactive: bool) -> Iterator[None]:
    """Let neither Ctrl-C nor a full cache end a chat at a terminal."""
    try:
        yield
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
    from kvcellar.agents import Turn

    end = None
    with progress_bar("reading") as report:
        turn = Turn(agent_id, text, params=params, model=model, progress=report)
        events = agents.turns.generate(turn)
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
            | {"miss": None if usage.miss is None else miss_object(usage.miss)},
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
    for note in usage.notes:
        print_note(note)
    if usage.miss is not None and usage.miss.tokens_lost > 16:
        print_note(f"{usage.miss.tokens_lost} tokens were computed again: {usage.miss.advice}")
