"""``kvcellar generate``: continue a text."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer

from kvcellar.cli import options
from kvcellar.cli.commands import add_command, option
from kvcellar.cli.groups import AnyCacheOptions, SamplingOptions
from kvcellar.cli.session import Bound, bound_model
from kvcellar.cli.terminal import print_note, print_warning, progress_bar, write
from kvcellar.engine import DEFAULTABLE, Generation, SamplingParams, encode_chat, generate
from kvcellar.errors import ConfigError
from kvcellar.models.options import DEMO
from kvcellar.valid import valid_text


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(
        app,
        "generate",
        generate_command,
        "kvcellar generate --prompt 'import os' --max-tokens 64",
        "kvcellar generate ~/models/Qwen3-0.6B --prompt 'Why is the sky blue?'",
        "cat notes.txt | kvcellar generate --prompt - --temperature 0.7 --seed 1",
        "kvcellar generate --prompt 'def ' --cache cells --json | jq .usage",
    )


def generate_command(
    model: options.Model = "demo",
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
    system: options.System = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object when all is done.")
    ] = False,
    sampling: SamplingOptions,
    loading: AnyCacheOptions,
) -> None:
    """Continue a text.

    The text streams to stdout as it comes. With --json one object is printed instead: text,
    token_ids, finish_reason (stop or length), finish_detail, usage, and sampling as it was done.
    """
    if system is not None and chat is False:
        raise ConfigError("a system message needs a chat template; leave --raw out")
    if loading.chat_template is not None and chat is False:
        raise ConfigError("--raw uses no chat template; leave --raw or --chat-template out")
    params = sampling.params()
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    with bound_model(loading.options_for(model), memory=loading.memory) as bound:
        params = params.for_model(bound.model.sampling)
        if chat is None:
            has_template = bool(getattr(bound.model.tokenizer, "chat_template", None))
            is_asked = system is not None or loading.chat_template is not None
            chat = is_asked or (has_template and model != DEMO)
        result = _run(bound, _encode(bound, text, chat, system), params, is_quiet=as_json)
    if as_json:
        write(json.dumps(as_object(result, params), ensure_ascii=False) + "\n")


def _encode(bound: Bound, text: str, is_chat: bool, system: str | None) -> list[int]:
    if not is_chat:
        return [int(token_id) for token_id in bound.model.tokenizer.encode(valid_text(text))]
    messages = [] if system is None else [{"role": "system", "content": system}]
    return encode_chat(bound.model.tokenizer, [*messages, {"role": "user", "content": text}])


def _run(
    bound: Bound, prompt_ids: list[int], params: SamplingParams, *, is_quiet: bool
) -> Generation:
    with progress_bar("reading the prompt") as report:
        events = generate(
            bound.runner,
            bound.cache,
            bound.model.tokenizer,
            prompt_ids,
            params,
            eos_token_ids=bound.model.eos_token_ids,
            on_prefill=lambda done, total: report(
                done / total, f"reading the prompt: {done} of {total} tokens"
            ),
        )
        result: Generation | None = None
        for event in events:
            if isinstance(event, Generation):
                result = event
            elif not is_quiet:
                write(event.text)
    assert result is not None
    if not is_quiet:
        write("\n")
        show_end(result)
    return result


def show_end(result: Generation) -> None:
    """Show what a text took, to a terminal; warn where it ends for want of room."""
    usage = result.usage
    n_prompt, n_cached = usage.prompt_tokens, usage.cached_tokens
    read = f"reused {n_cached} of {n_prompt} tokens" if n_cached else f"read {n_prompt} tokens"
    speed = "" if usage.tokens_per_second is None else f", {usage.tokens_per_second:.1f} tokens/s"
    end = f"; {result.finish.detail}" if result.finish.cause == "max_tokens" else ""
    print_note(
        f"{read}, first new one after {usage.time_to_first_token_s:.2f} s; "
        f"{usage.completion_tokens} new{speed}{end}"
    )
    if result.finish.cause == "cache_full":
        print_warning(f"the text is cut short: {result.finish.detail}")


def as_object(result: Generation, params: SamplingParams) -> dict[str, Any]:
    """Return what ``--json`` prints."""
    return {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish.reason,
        "finish_detail": result.finish.detail,
        "usage": asdict(result.usage),
        "sampling": {name: getattr(params, name) for name in sorted(DEFAULTABLE)},
    }
