"""Turns of agents from the command line: ``kvcellar agents generate`` and ``agents chat``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from kvcellar.cli.agents.agent_store import AgentId, ModelName, asked_agents
from kvcellar.cli.common import options
from kvcellar.cli.common.groups import CacheOptions, ChatSampling, SamplingOptions
from kvcellar.cli.common.images import read_images
from kvcellar.cli.common.terminal import ShownAnswer, print_note, shown_answer, write
from kvcellar.cli.store.store import HOME_STORE, AsJson, StorePlace
from kvcellar.cli.talk.talking import ChosenImages, Command, Talk, talk


def generate_command(
    agent_id: AgentId,
    text: Annotated[
        str, typer.Argument(metavar="TEXT", help="What is said to it; - reads it from stdin.")
    ],
    *,
    images: options.Images = None,
    as_json: AsJson = False,
    is_new: Annotated[
        bool, typer.Option("--create", help="Make the agent if there is none of that name.")
    ] = False,
    alone: options.Alone = False,
    sampling: SamplingOptions,
    store: StorePlace = HOME_STORE,
    model: ModelName = None,
    loading: CacheOptions,
    verify: options.Verify = "checksum",
    speculate: options.Speculate = None,
) -> None:
    """Say something to an agent; its answer streams to stdout and joins its history.

    With --json one object is printed instead: the text, its tokens, and in `usage` what was reused,
    restored and lost. What a model thinks is apart: dim at a terminal, `reasoning` with --json, and
    not in a pipe.
    """
    said = sys.stdin.read().removesuffix("\n") if text == "-" else text
    pictures = {"images": read_images(images, loading.backend)} if images else {}
    with asked_agents(
        store,
        loading,
        is_alone=alone,
        model=model,
        agent_id=agent_id,
        is_speaking=True,
        is_made=is_new,
        verify=verify,
        speculate=speculate,
    ) as (agents, path):
        if is_new:
            agents.ask("ensure", agent_id=agent_id, model=path, system=None)
        with shown_answer("reading", is_quiet=as_json) as tell:
            value = agents.ask(
                "turn",
                tell,
                agent_id=agent_id,
                text=said,
                model=path,
                sampling=sampling.as_json(),
                **pictures,
            )
    if as_json:
        write(json.dumps(value, ensure_ascii=False) + "\n")
    else:
        write("\n")
        _show_end(value)


def chat_command(
    agent_id: AgentId,
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per answer, each on a line.")
    ] = False,
    system: options.System = None,
    alone: options.Alone = False,
    sampling: ChatSampling,
    store: StorePlace = HOME_STORE,
    model: ModelName = None,
    loading: CacheOptions,
    verify: options.Verify = "checksum",
    speculate: options.Speculate = None,
) -> None:
    """Talk with an agent, turn by turn; it is made where there is none of that name.

    Ctrl-D leaves, and the agent stays. Commands: /image FILE, /undo, /help, /quit. In a pipe every
    line is one message. Lines between two lines of \"\"\" are one message, as are those that end
    with a backslash and the next.
    """
    sampling.params()
    with asked_agents(
        store,
        loading,
        is_alone=alone,
        model=model,
        agent_id=agent_id,
        is_speaking=True,
        is_made=True,
        verify=verify,
        speculate=speculate,
    ) as (agents, path):
        agents.ask("ensure", agent_id=agent_id, model=path, system=system)

        pictures = ChosenImages()

        def say(text: str, tell: ShownAnswer) -> dict[str, Any]:
            nonlocal agent_id
            value: dict[str, Any] = agents.ask(
                "turn",
                tell,
                agent_id=agent_id,
                text=text,
                model=path,
                sampling=sampling.as_json(),
                **pictures.fields(),
            )
            pictures.clear()
            agent_id = value["id"]  # a branch, where another process talks with it too
            return value

        def undo() -> str:
            said = agents.ask("take_back", agent_id=agent_id)
            if said is None:
                return "there is no turn to take back"
            lost = f"; {n} of its pictures are lost" if (n := said["n_lost"]) else ""
            return f"took back: {said['text']}{pictures.give_back(said['images'])}{lost}"

        commands = {"/undo": Command("take back the last turn", undo)}
        way_back = f"`kvcellar agents chat {agent_id}` goes on with it"
        talk(Talk(say, _show_end, pictures, commands, way_back), as_json=as_json)


def _show_end(value: Mapping[str, Any]) -> None:
    """Show what a turn took, to a terminal."""
    usage = value["usage"]
    restored = f", {usage['restored_tokens']} restored" if usage["restored_tokens"] else ""
    first = usage["time_to_first_token_s"]
    guessed = f"; {usage['accepted_tokens']} of {usage['drafted_tokens']} guesses were right"
    print_note(
        f"reused {usage['cached_tokens']} of {usage['prompt_tokens']} tokens{restored}"
        + (f"; first new one after {first:.2f} s" if first is not None else "")
        + (guessed if usage["drafted_tokens"] else "")
    )
    for note in usage["notes"]:
        print_note(note)
    miss = usage["miss"]
    if miss is not None and miss["tokens_lost"] > 16:
        print_note(f"{miss['tokens_lost']} tokens were computed again: {miss['advice']}")
