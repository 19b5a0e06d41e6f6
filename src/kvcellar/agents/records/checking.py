"""Check what a reference says of its agent: every type and range that the rest relies on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvcellar.agents.records.looks import looks_of
from kvcellar.agents.records.misses import CAUSES
from kvcellar.agents.records.titles import MOST_CHARS
from kvcellar.errors import KVCellarError, PictureError, PromptError, StoreError
from kvcellar.history import History
from kvcellar.kv_dtype import parse_kv_dtype
from kvcellar.pictures.placed_text import pictures_of
from kvcellar.pictures.tokens import check_pictures, ids_of, pictures_in
from kvcellar.states import StateGroup, StateShape
from kvcellar.store import ModelKey, Reference, RowLayout
from kvcellar.store.values.facts import (
    BadFactError,
    flag,
    items,
    number,
    object_of,
    parse_json,
    plain,
    text,
    whole,
)
from kvcellar.store.values.references import SERIAL
from kvcellar.types import LayerGroup

KIND = "kvcellar_agent"
VERSION = 1

MOST_TOKEN = (1 << 31) - 1
"""No vocabulary has more tokens; tokenizers take no larger numbers."""

MOST_SIZE = (1 << 31) - 1


def is_agent(ref: Reference) -> bool:
    """Tell whether a history is an agent's, as this version knows them."""
    return ref.metadata.get(KIND) == VERSION


def check_agent(ref: Reference) -> None:
    """Make sure that a history is no agent's, or one that can be used.

    Raises:
        StoreError: it is an agent's and says what cannot be.
    """
    if is_agent(ref):
        checked_facts(ref)
        key_of(ref)


def checked_facts(ref: Reference) -> dict[str, Any]:
    """Return what a reference says of its agent, every fact of it checked.

    Raises:
        StoreError: a fact is missing, of another type, or outside its range.
    """
    try:
        facts = dict(plain(dict(ref.metadata), "its metadata"))
        _check(facts, len(ref.tokens))
        if len(ref.tokens) and int(ids_of(ref.tokens.tokens).max()) > MOST_TOKEN:
            raise BadFactError(f"a token is above {MOST_TOKEN}")
        check_pictures(ref.tokens.tokens)
    except (BadFactError, KeyError, PictureError) as error:
        said = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise StoreError(f"what is known of agent {ref.name!r} is damaged: {said}") from error
    return facts


def pictures_named(tokens: History, messages: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names of the pictures in a history's tokens and its messages."""
    in_tokens = {one.name for one in pictures_in(tokens.tokens)}
    return in_tokens | {name for message in messages for name, _ in pictures_of(message)}


def key_of(ref: Reference) -> ModelKey:
    """Return the model key that a reference was saved with.

    Raises:
        StoreError: its layout cannot be read.
    """
    try:
        value = object_of(parse_json(ref.layout_json, "layout"), "layout")
        kv_dtype = text(ref.metadata["kv_dtype"], "kv_dtype")
        parse_kv_dtype(kv_dtype)
        groups = tuple(_group(group) for group in items(value["groups"], "groups"))
        block_tokens = whole(value["block_tokens"], "block_tokens", 1, MOST_SIZE)
        layout = RowLayout(groups, kv_dtype, block_tokens, _states(value))
        key = ModelKey(ref.fingerprint, layout)
    except (KVCellarError, BadFactError, KeyError) as error:
        raise StoreError(f"the layout of history {ref.name!r} cannot be read ({error})") from error
    if key.layout.as_json != ref.layout_json:
        raise StoreError(
            f"the layout of history {ref.name!r} is of another version; open it with the version "
            f"of kvcellar that saved it"
        )
    return key.for_any_length()


def check_said(
    messages: Sequence[Mapping[str, Any]] | None,
    tools: Sequence[Mapping[str, Any]] | None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Make sure that what a turn brings can be kept, and read again.

    Raises:
        PromptError: a message or a tool is none.
    """
    try:
        for i, message in enumerate(messages or ()):
            _check_message(plain(dict(message), f"messages[{i}]"), f"messages[{i}]")
        for i, tool in enumerate(tools or ()):
            plain(dict(tool), f"tools[{i}]")
        plain(dict(template_kwargs or {}), "template_kwargs")
    except (BadFactError, KeyError, TypeError, ValueError) as error:
        said = f"a message has no {error}" if isinstance(error, KeyError) else str(error)
        raise PromptError(f"this conversation cannot be kept: {said}") from error


def _states(layout: dict[str, Any]) -> StateGroup | None:
    if "states" not in layout:
        return None
    layers = [items(layer, "states") for layer in items(layout["states"], "states")]
    return StateGroup(tuple(tuple(map(_state, layer)) for layer in layers))


def _state(value: Any) -> StateShape:
    state = items(value, "a state")
    if len(state) != 2:
        raise BadFactError("a state has to be a kind and a shape")
    lengths = items(state[1], "the shape of a state")
    return StateShape(
        text(state[0], "the kind of a state"),
        tuple(whole(length, "a length of a state", 1, MOST_SIZE) for length in lengths),
    )


def _group(value: Any) -> LayerGroup:
    group = object_of(value, "a layer group")
    window, chunk = group["window"], group.get("chunk")
    return LayerGroup(
        tuple(whole(layer, "a layer", 0, MOST_SIZE) for layer in items(group["layers"], "layers")),
        whole(group["n_kv_heads"], "n_kv_heads", 1, MOST_SIZE),
        whole(object_of(group["k"], "k")["dim"], "k.dim", 1, MOST_SIZE),
        whole(object_of(group["v"], "v")["dim"], "v.dim", 1, MOST_SIZE),
        None if window is None else whole(window, "window", 1, MOST_SIZE),
        chunk=None if chunk is None else whole(chunk, "chunk", 1, MOST_SIZE),
    )


def _check(facts: dict[str, Any], n_tokens: int) -> None:
    text(facts["id"], "id", 400)
    if not facts["id"] or not facts["id"].isprintable():
        raise BadFactError("id has to be a name")
    if SERIAL in facts:
        whole(facts[SERIAL], SERIAL)
    if "title" in facts:
        text(facts["title"], "title", MOST_CHARS)
    text(facts["model"], "model")
    text(facts["kv_dtype"], "kv_dtype")
    messages = items(facts["messages"], "messages")
    for i, message in enumerate(messages):
        _check_message(message, f"messages[{i}]")
    stops = items(facts["stops"], "stops")
    if len(stops) != len(messages):
        raise BadFactError(f"there are {len(messages)} messages and {len(stops)} stops")
    for i, stop in enumerate(stops):
        if stop is not None:
            whole(stop, f"stops[{i}]", 0, n_tokens)
    if facts["tools"] is not None:
        for i, tool in enumerate(items(facts["tools"], "tools")):
            object_of(tool, f"tools[{i}]")
    object_of(facts.get("template_kwargs", {}), "template_kwargs")
    looks_of(object_of(facts.get("looks", {}), "looks"))
    for i, turn in enumerate(items(facts["turns"], "turns")):
        _check_turn(turn, f"turns[{i}]", n_tokens)
    for name in ("created_s", "used_s"):
        number(facts[name], name)
    if facts.get("parent_created_s") is not None:
        number(facts["parent_created_s"], "parent_created_s")
    for name in ("is_waiting", "is_paused", "is_finished"):
        flag(facts[name], name)
    for note in items(facts["notes"], "notes"):
        text(note, "a note")
    for name, rate in object_of(facts["rates"], "rates").items():
        if rate is not None:
            number(rate, f"rates.{name}")
    if facts["miss"] is not None:
        _check_miss(object_of(facts["miss"], "miss"))


def _check_message(value: Any, where: str) -> None:
    message = object_of(value, where)
    text(message["role"], f"{where}.role", 64)
    pictures_of(message)
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, str):
                object_of(part, f"a part of {where}.content")
    elif content is not None:
        text(content, f"{where}.content")
    for name in ("name", "tool_call_id", "reasoning_content"):
        if message.get(name) is not None:
            text(message[name], f"{where}.{name}")
    if message.get("tool_calls") is not None:
        for call in items(message["tool_calls"], f"{where}.tool_calls"):
            function = object_of(object_of(call, "a call")["function"], "a call's function")
            text(function["name"], "a call's name")


def _check_turn(value: Any, where: str, n_tokens: int) -> None:
    turn = items(value, where)
    if len(turn) not in (5, 6):
        raise BadFactError(f"{where} has to have 5 or 6 parts, not {len(turn)}")
    start, n_prompt, stop, n_messages, reason = turn[:5]
    whole(stop, f"{where}.stop", 0, n_tokens)
    whole(n_prompt, f"{where}.n_prompt", 0, stop)
    whole(start, f"{where}.start", 0, n_prompt)
    whole(n_messages, f"{where}.n_messages", 0, MOST_SIZE)
    text(reason, f"{where}.reason", 64)
    if len(turn) > 5:
        _check_took(turn[5], f"what {where} took")


def _check_took(value: Any, where: str) -> None:
    took = items(value, where)
    if len(took) != 6:
        raise BadFactError(f"{where} has to have 6 parts, not {len(took)}")
    n_cached, n_restored, first_s, total_s, n_lost, cause = took
    whole(n_cached, f"{where}, cached", 0, MOST_SIZE)
    whole(n_restored, f"{where}, restored", 0, MOST_SIZE)
    if first_s is not None:
        number(first_s, f"{where}, to the first token")
    number(total_s, f"{where}, in all")
    whole(n_lost, f"{where}, lost", 0, MOST_SIZE)
    if text(cause, f"{where}, the cause", 64) and cause not in CAUSES:
        raise BadFactError(f"the cause of {where} is not known")


def _check_miss(miss: dict[str, Any]) -> None:
    if set(miss) != {"cause", "tokens_lost", "position", "was", "became"}:
        raise BadFactError("miss has to say a cause, tokens_lost, position, was and became")
    if text(miss["cause"], "miss.cause") not in CAUSES:
        raise BadFactError("miss.cause is not known")
    whole(miss["tokens_lost"], "miss.tokens_lost")
    whole(miss["position"], "miss.position")
    text(miss["was"], "miss.was")
    text(miss["became"], "miss.became")
