"""``kvcellar chat``: talk with a model, turn by turn."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from kvcellar.cli import options
from kvcellar.cli.commands import add_command
from kvcellar.cli.generate import as_object, show_end
from kvcellar.cli.groups import AnyCacheOptions, ChatSampling
from kvcellar.cli.session import Bound, bound_model
from kvcellar.cli.terminal import print_error, print_note, progress_bar, write
from kvcellar.engine import Conversation, Generation, SamplingParams
from kvcellar.errors import ModelError, PromptError
from kvcellar.models.options import DEMO
from kvcellar.models.snapshots import what_resumes

HELP = """\
/undo   take back the last turn
/reset  start again
/help   this list
/quit   leave, as does Ctrl-D
Ctrl-C ends an answer early; at the prompt it leaves."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(
        app,
        "chat",
        chat_command,
        "kvcellar chat",
        "kvcellar chat ~/models/Qwen3-0.6B --system 'Answer in one sentence.'",
        "printf 'Hello!\\nThanks!\\n' | kvcellar chat --seed 1",
    )


def chat_command(
    model: options.Model = "demo",
    *,
    system: options.System = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per answer, each on a line.")
    ] = False,
    sampling: ChatSampling,
    loading: AnyCacheOptions,
) -> None:
    """Talk with a model; only what is new is computed in each turn.

    The model reads what its template makes of all that was said. Commands: /undo, /reset,
    /help, /quit. In a pipe every line is one message.
    """
    params = sampling.params()
    with bound_model(loading.options_for(model), memory=loading.memory) as bound:
        _check_chats(bound)
        conversation = Conversation(
            bound.runner,
            bound.cache,
            bound.model.tokenizer,
            system=system,
            eos_token_ids=bound.model.eos_token_ids,
        )
        params = params.for_model(bound.model.sampling)
        is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
        if is_interactive:
            _greet(bound, loading.cache, loading.backend, params)
        for line in _typed_lines() if is_interactive else _piped_lines():
            if line.startswith("/"):
                if line.split()[0] in ("/quit", "/exit"):
                    break
                _command(conversation, line.split()[0])
            elif line:
                _turn(conversation, line, params, as_json, is_interactive)


def _check_chats(bound: Bound) -> None:
    """Refuse a model that was not made for conversations, before anything is typed.

    Raises:
        ModelError: it has no chat template.
    """
    if not bound.model.tokenizer.chat_template:
        raise ModelError(
            f"{bound.model.name} has no chat template, so it is a base model and no chat model; "
            f"have it go on with a text by 'kvcellar generate {bound.model.name} -p TEXT', or give "
            f"a template with --chat-template"
        )


def _greet(bound: Bound, kind: str, backend: str, params: SamplingParams) -> None:
    """Say with what and how one talks."""
    print_note(
        f"{bound.model.name}, {bound.model.held_as} on {backend}; {kind} "
        f"cache of {bound.cache.capacity} tokens ({bound.capacity.why}) in "
        f"{bound.cache.config.kv_dtype}; temperature {params.temperature:g}, top_p "
        f"{params.top_p:g}; /help"
    )
    if bound.model.name == DEMO:
        print_note(options.DEMO_NOTE)
    resumes = what_resumes(bound.cache.config, 1)
    if resumes:
        print_note(resumes)


def _typed_lines() -> Iterator[str]:
    with contextlib.suppress(ImportError):  # not on every system
        import readline  # noqa: F401 - arrow keys and history for input()
    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            print_note("")
            return


def _piped_lines() -> Iterator[str]:
    for line in sys.stdin:
        yield line.strip()


def _command(conversation: Conversation, command: str) -> None:
    if command == "/undo":
        said = conversation.undo()
        if said is None:
            print_note("there is no turn to take back")
        else:
            print_note(
                f"took back: {said} ({conversation.cached_tokens} of {len(conversation.tokens)} "
                f"tokens are still cached)"
            )
    elif command == "/reset":
        conversation.reset()
        print_note("a new conversation")
    elif command == "/help":
        for line in HELP.splitlines():
            print_note(line)
    else:
        print_error(f"there is no command {command}; /help lists them")


def _turn(
    conversation: Conversation,
    text: str,
    params: SamplingParams,
    as_json: bool,
    is_interactive: bool,
) -> None:
    """Say a message and show its answer.

    At a terminal neither Ctrl-C nor a full cache ends the chat.
    """
    try:
        with progress_bar("reading") as report:
            events = conversation.say(
                text,
                params,
                on_prefill=lambda done, total: report(
                    done / total, f"reading {done} of {total} new tokens"
                ),
            )
            for event in events:
                if not isinstance(event, Generation):
                    write("" if as_json else event.text)
                elif as_json:
                    write(json.dumps(as_object(event, params), ensure_ascii=False) + "\n")
                else:
                    write("\n")
                    show_end(event)
    except PromptError as error:
        if not is_interactive:
            raise
        print_error(f"{error}, or /undo, or /reset")
    except KeyboardInterrupt:
        if not is_interactive:
            raise
        write("\n")
        print_note("stopped here")
