"""``kvcellar chat``: talk with a model, turn by turn."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from kvcellar.cli import options
from kvcellar.cli.generate import as_object, show_end
from kvcellar.cli.session import bound_model
from kvcellar.cli.terminal import examples, help_of, print_error, print_note, progress_bar, write
from kvcellar.engine import Conversation, Generation, SamplingParams
from kvcellar.errors import PromptError

HELP = """\
/undo   take back the last turn
/reset  start again
/help   this list
/quit   leave, as does Ctrl-D
Ctrl-C ends an answer early; at the prompt it leaves."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        name="chat",
        help=help_of(chat_command),
        epilog=examples(
            "kvcellar chat",
            "kvcellar chat ~/models/Qwen3-0.6B --system 'Answer in one sentence.'",
            "printf 'Hello!\\nThanks!\\n' | kvcellar chat --seed 1",
        ),
    )(chat_command)


def chat_command(
    model: options.Model = "demo",
    system: options.System = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per answer, each on a line.")
    ] = False,
    max_tokens: options.MaxTokens = 1024,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    cache: options.Cache = "contiguous",
    capacity: options.Capacity = None,
    memory: options.Memory = None,
    kv_dtype: options.KvDtype = None,
    backend: options.Backend = "torch",
    dtype: options.Dtype = None,
    weights: options.Weights = None,
    device: options.Device = None,
    chat_template: options.ChatTemplate = None,
) -> None:
    """Talk with a model; only what is new is computed in each turn.

    The model reads what its template makes of all that was said. Commands: /undo, /reset,
    /help, /quit. In a pipe every line is one message.
    """
    params = options.sampling(
        {
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
        },
        usual=options.USUAL_IN_CHAT,
        seed=seed,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
    )
    with bound_model(
        model,
        kind=cache,
        backend=backend,
        capacity=capacity,
        memory=memory,
        kv_dtype=kv_dtype,
        dtype=dtype,
        weights=weights,
        device=device,
        chat_template=options.read_template(chat_template),
    ) as bound:
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
            print_note(
                f"{bound.model.name}, {bound.model.weights or bound.model.dtype} on {backend}; "
                f"{cache} cache of {bound.cache.capacity} tokens ({bound.capacity.why}) in "
                f"{bound.cache.config.kv_dtype}; temperature {params.temperature:g}, top_p "
                f"{params.top_p:g}; /help"
            )
        for line in _typed_lines() if is_interactive else _piped_lines():
            if line.startswith("/"):
                if line.split()[0] in ("/quit", "/exit"):
                    break
                _command(conversation, line.split()[0])
            elif line:
                _turn(conversation, line, params, as_json, is_interactive)


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
    """One message and its answer; at a terminal neither Ctrl-C nor a full cache ends the chat."""
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
