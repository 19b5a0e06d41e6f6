"""``kvcellar generate``: continue a text."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcellar.cli.common import options
from kvcellar.cli.common.commands import add_command, option
from kvcellar.cli.common.groups import AnyCacheOptions, SamplingOptions
from kvcellar.cli.common.images import eyes_of, read_images, shelved
from kvcellar.cli.common.terminal import (
    print_note,
    print_warning,
    shown_answer,
    write,
)
from kvcellar.cli.store.attached import RunningServer, running_server
from kvcellar.cli.store.store import StorePlace
from kvcellar.cli.talk.session import Bound, bound_model
from kvcellar.errors import ConfigError
from kvcellar.history import History
from kvcellar.models.files.places import full_path
from kvcellar.models.options import DEMO
from kvcellar.valid import valid_text

if TYPE_CHECKING:
    from kvcellar.engine import GeneratedToken, Generation, SamplingParams
    from kvcellar.server.commands.thoughts import ReadAnswer
    from kvcellar.server.commands.verbs import Tell


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(
        app,
        "generate",
        generate_command,
        "kvcellar generate --prompt 'import os' --max-tokens 64",
        "kvcellar generate ~/models/Qwen3-0.6B --prompt 'Why is the sky blue?'",
        "cat notes.txt | kvcellar generate --prompt - --temperature 0.7 --seed 1",
        "kvcellar generate ~/models/Qwen2.5-VL-3B-Instruct --image a.png --prompt 'What is it?'",
        "kvcellar generate --prompt 'def ' --cache cells --json | jq .usage",
    )


def generate_command(
    model: options.ServersModel = None,
    *,
    prompt: Annotated[
        str,
        option("TEXT", "The text to continue; - for stdin.", "--prompt", "-p"),
    ],
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Put the prompt in the model's chat template, or continue it as it is. Default: "
            "in the template where the model has one; `demo` continues.",
            show_default=False,
        ),
    ] = None,
    images: options.Images = None,
    system: options.System = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object when all is done.")
    ] = False,
    alone: options.Alone = False,
    store: options.ServersStore = None,
    sampling: SamplingOptions,
    loading: AnyCacheOptions,
) -> None:
    """Continue a text.

    The text streams to stdout as it comes; what a chat model thinks comes dim at a terminal, and in
    a pipe not at all. With --json one object is printed instead: text, reasoning, token_ids,
    finish_reason (stop or length), finish_cause, finish_detail, usage, and sampling as it was done.
    """
    if system is not None and chat is False:
        raise ConfigError("a system message needs a chat template; leave --raw out")
    if loading.chat_template is not None and chat is False:
        raise ConfigError("--raw uses no chat template; leave --raw or --chat-template out")
    if images and chat is False:
        raise ConfigError("a picture goes into a message of a chat template; leave --raw out")
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    pictures = read_images(images, loading.backend)
    server = running_server(
        StorePlace(store=store), is_alone=alone, model=model and full_path(model), loading=loading
    )
    if server is not None:
        with shown_answer("reading the prompt", is_quiet=as_json) as tell:
            value = _asked(*server, text, pictures, chat, system, sampling, tell)
    else:
        model, params = model or DEMO, sampling.params()
        with bound_model(loading.options_for(model), memory=loading.memory) as bound:
            if chat is None:
                is_asked = bool(pictures) or system is not None or loading.chat_template is not None
                chat = is_asked or (_has_template(bound) and model != DEMO)
            with shown_answer("reading the prompt", is_quiet=as_json) as tell:
                value = _run(bound, text, pictures, chat, system, params, tell)
    if as_json:
        write(json.dumps(value, ensure_ascii=False) + "\n")
    else:
        write("\n")
        show_end(value)


def _has_template(bound: Bound) -> bool:
    return bool(getattr(bound.model.tokenizer, "chat_template", None))


def _messages(text: str, system: str | None, images: Sequence[str] = ()) -> list[dict[str, Any]]:
    opening = [] if system is None else [{"role": "system", "content": system}]
    pictures = {"images": list(images)} if images else {}
    return [*opening, {"role": "user", "content": text, **pictures}]


def _asked(
    server: RunningServer,
    model: str | None,
    text: str,
    images: Sequence[str],
    is_chat: bool | None,
    system: str | None,
    sampling: SamplingOptions,
    tell: Tell,
) -> dict[str, Any]:
    """Have a running server answer."""
    if is_chat is None:
        is_chat = bool(images or system is not None) or (
            model != DEMO and server.ask("model", model=model)["has_template"]
        )
    said = {"messages": _messages(text, system, images)} if is_chat else {"prompt": text}
    value: dict[str, Any] = server.ask(
        "complete", tell, model=model, sampling=sampling.as_json(), **said
    )
    return value


def _run(
    bound: Bound,
    text: str,
    images: Sequence[str],
    is_chat: bool,
    system: str | None,
    params: SamplingParams,
    tell: Tell,
) -> dict[str, Any]:
    """Answer with a model of this process."""
    from kvcellar.engine import encode_chat, generate
    from kvcellar.hosting.given_pictures import with_pictures
    from kvcellar.server.commands.thoughts import ReadAnswer, reading_for, stops_for

    tokenizer = bound.model.tokenizer
    reading = reading_for(tokenizer if is_chat else None)
    eyes = eyes_of(bound.model)
    if is_chat:
        messages, pictures = _messages(text, system), shelved(bound.model, eyes, images)
        messages[-1] = with_pictures(messages[-1], pictures)
        prompt_ids = encode_chat(tokenizer, messages, looks=eyes)
    else:
        prompt_ids = [int(token_id) for token_id in tokenizer.encode(valid_text(text))]
    if reading is not None:
        reading.begin(tokenizer, History(prompt_ids))
    params = params.for_model(bound.model.sampling)
    events = generate(
        bound.runner,
        bound.cache,
        tokenizer,
        prompt_ids,
        replace(params, stop=stops_for(reading, params.stop)),
        eos_token_ids=bound.model.eos_token_ids,
        on_prefill=told_prefill(tell, "reading the prompt: {} of {} tokens"),
        marks=None if reading is None else reading.marks,
        encode=None if eyes is None else eyes.encode,
    )
    return followed(events, ReadAnswer(reading), params, tell)


def told_prefill(tell: Tell, what: str) -> Callable[[int, int], None]:
    """Return what takes how many tokens of how many are read, and tells it in words."""
    return lambda done, total: tell({"report": [done / total, what.format(done, total)]})


def followed(
    events: Iterator[GeneratedToken | Generation],
    read: ReadAnswer,
    params: SamplingParams,
    tell: Tell,
) -> dict[str, Any]:
    """Tell an answer as it comes, and return what ``--json`` prints of it.

    Args:
        events: of ``generate``; closed in any case.
        read: reads it.
        params: how it is sampled.
        tell: told its pieces.
    """
    from kvcellar.engine import Generation
    from kvcellar.server.commands.asked import generation_object

    result = None
    with closing(events):  # type: ignore[type-var]  # a generator, as all iterators of generate
        for event in events:
            if isinstance(event, Generation):
                result = event
            else:
                for piece in read.push(event.text):
                    tell(piece)
    assert result is not None, "generate ends with a Generation"
    for piece in read.end(result.text):
        tell(piece)
    return generation_object(result, read, params)


def show_end(value: Mapping[str, Any]) -> None:
    """Show what a text took, to a terminal; warn where it ends for want of room."""
    usage, cause = value["usage"], value["finish_cause"]
    n_prompt, n_cached = usage["prompt_tokens"], usage["cached_tokens"]
    read = f"reused {n_cached} of {n_prompt} tokens" if n_cached else f"read {n_prompt} tokens"
    rate = usage["tokens_per_second"]
    speed = "" if rate is None else f", {rate:.1f} tokens/s"
    end = f"; {value['finish_detail']}" if cause == "max_tokens" else ""
    print_note(
        f"{read}, first new one after {usage['time_to_first_token_s']:.2f} s; "
        f"{usage['completion_tokens']} new{speed}{end}"
    )
    if cause == "cache_full":
        print_warning(f"the text is cut short: {value['finish_detail']}")
