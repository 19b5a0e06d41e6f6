"""Make a turn durable at once: write it to the store's journal, and read it back from there.

An entry says what an agent's state has more than the state before it: tokens, messages and turns
behind what the two have in common, of which it has a digest. So an entry is as small as its turn,
and one that does not follow from what is stored is found out.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash

from kvcellar.agents.records.agent import AgentRecord
from kvcellar.agents.records.durable_marks import Mark
from kvcellar.errors import StoreError, UnknownReferenceError
from kvcellar.history import History
from kvcellar.hosting.messages import Messages, n_alike
from kvcellar.store import EventKind, Reference, Store
from kvcellar.store.values.facts import (
    BadFactError,
    items,
    object_of,
    parse_json,
    plain,
    text,
    whole,
)
from kvcellar.store.values.format import VERSION, DamagedError, Tensor, pack, read_from
from kvcellar.types import IntArray


def entry_of(agent: AgentRecord, before: Mark | None) -> tuple[bytes, Mark]:
    """Return what the journal takes of an agent's state, and the mark of that state.

    Args:
        agent: in no turn.
        before: a state that is durable; None: the entry says all.
    """
    if before is None:
        before = Mark(agent.name, 0, 0, History(), Messages(), (), (), None)
    n = before.tokens.common_prefix(agent.tokens)
    k = n_alike(
        list(zip(before.messages, before.stops, strict=True)),
        list(zip(agent.messages, agent.stops, strict=True)),
    )
    n_turns = n_alike(before.turns, agent.turns)
    tokens = before.token_hash if n == len(before.tokens) else None
    if tokens is None:
        tokens = xxhash.xxh3_128(_array(agent.tokens[:n]).tobytes())
    messages = before.message_hash if k == len(before.messages) else None
    if messages is None:
        messages = _hash_of(agent.messages[:k])
    kept = {
        "tokens": n,
        "tokens_digest": tokens.hexdigest(),
        "messages": k,
        "messages_digest": messages.hexdigest(),
        "turns": n_turns,
        "tools": agent.tools is before.tools,
    }
    new = _array(agent.tokens[n:])
    tokens = tokens.copy()
    tokens.update(new.tobytes())
    facts = agent.metadata()
    for part, n_kept in (("messages", k), ("stops", k), ("turns", n_turns)):
        facts[part] = facts[part][n_kept:]
    if kept["tools"]:
        del facts["tools"]
    metadata = {
        "kind": "entry",
        "version": VERSION,
        "fingerprint": agent.key.fingerprint,
        "layout": agent.key.layout.as_json,
        "facts": json.dumps(facts, allow_nan=False),
        "kept": json.dumps(kept),
        "lineage": json.dumps([agent.parent, agent.parent_position]),
    }
    file = pack({"tokens": Tensor("I64", new)}, metadata)
    return file.data.tobytes(), agent.marked(tokens, _hash_of(agent.messages[k:], messages))


def stored_state(store: Store, name: str) -> Reference:
    """Return the latest state of an agent that is durable: as published, and what follows it.

    An entry that cannot be used ends it, and an event of the store says so. For threads.

    Raises:
        UnknownReferenceError: there is none of that name.
        StoreError: it is damaged.
    """
    ref: Reference | None = None
    entries = store.recorded(name)  # first: what goes from here meanwhile is in the reference
    try:
        ref = store.get(name)
    except UnknownReferenceError:
        if not entries:
            raise
    for serial, payload in entries:
        if ref is not None and serial <= ref.serial:
            continue
        try:
            ref = _followed(ref, name, payload)
        except (DamagedError, BadFactError, KeyError) as error:
            said = f"what was recorded of agent {name!r} as {serial} does not follow ({error})"
            if ref is None:
                raise StoreError(f"{said}, and no state of it is published") from error
            store.report(EventKind.JOURNAL_DAMAGED, name, f"{said}; it is as it was before that")
            break
    if ref is None:  # published and deleted meanwhile
        raise UnknownReferenceError(f"no history {name!r} is in {store.path}")
    return ref


def _followed(ref: Reference | None, name: str, payload: bytes) -> Reference:
    """Return the state that an entry makes of the one before it.

    Raises:
        DamagedError, BadFactError, KeyError: it does not follow from that.
    """
    file = read_from(io.BytesIO(payload), len(payload))
    if file.metadata["kind"] != "entry":
        raise BadFactError("it is no entry")
    facts = object_of(parse_json(file.metadata["facts"], "facts"), "facts")
    kept = object_of(parse_json(file.metadata["kept"], "kept"), "kept")
    parent, position = items(parse_json(file.metadata["lineage"], "lineage"), "lineage")
    if ref is None:
        ref = Reference(
            name=name,
            fingerprint=text(file.metadata["fingerprint"], "fingerprint"),
            layout_json=text(file.metadata["layout"], "layout"),
            tokens=History(),
            metadata={"messages": [], "stops": [], "turns": [], "tools": None},
            revision=0,
        )
    before = ref.metadata
    n = whole(kept["tokens"], "kept.tokens", 0, len(ref.tokens))
    messages = items(before["messages"], "messages")
    k = whole(kept["messages"], "kept.messages", 0, len(messages))
    n_turns = whole(kept["turns"], "kept.turns", 0, len(items(before["turns"], "turns")))
    if xxhash.xxh3_128_hexdigest(_array(ref.tokens[:n]).tobytes()) != kept["tokens_digest"]:
        raise BadFactError("the tokens before it are others")
    if _hash_of(messages[:k]).hexdigest() != kept["messages_digest"]:
        raise BadFactError("the messages before it are others")
    for part, n_kept in (("messages", k), ("stops", k), ("turns", n_turns)):
        facts[part] = [*items(before[part], part)[:n_kept], *items(facts[part], part)]
    if kept["tools"]:
        facts["tools"] = before["tools"]
    tokens = ref.tokens.prefix(n)
    tokens.extend(file.tensors["tokens"])
    return replace(
        ref,
        tokens=tokens,
        n_stored=min(ref.n_stored, n),
        parent=None if parent is None else text(parent, "parent"),
        parent_position=None if position is None else whole(position, "parent_position"),
        metadata=plain(facts, "facts"),
    )


def _hash_of(messages: Sequence[Any], before: Any = None) -> Any:
    """Return a hash over messages, behind those that another one is over."""
    hasher = xxhash.xxh3_128() if before is None else before.copy()
    for message in messages:
        hasher.update(json.dumps(message, sort_keys=True).encode())
        hasher.update(b"\0")
    return hasher


def _array(tokens: Any) -> IntArray:
    return np.ascontiguousarray(tokens, dtype="<i8")
