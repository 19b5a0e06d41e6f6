"""Names: what agents and their histories may be called, and ids that are made up."""

from __future__ import annotations

import itertools
import re
import unicodedata
import uuid
from collections.abc import Iterator

from kvcellar.errors import AgentNameError
from kvcellar.store import ModelKey

MAX_ID_CHARS = 128
_SALT = re.compile(r"~([0-9a-f]{32})(?![0-9a-f])")
_ID = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{MAX_ID_CHARS - 1}}}(~[0-9a-f]{{32}})?")
_UNNAMED = "chat-"
_MOST_OF_TITLE = 40
_MADE_UP = re.compile("(chat-[0-9a-f]{12}|resp_[0-9a-f]{32})(~[0-9a-f]{32})?")

_MADE_UP_OR_FORKED = re.compile(
    r"(chat-[0-9a-f]{12}|resp_[0-9a-f]{32}|agent-[0-9a-f]{8})([-.].*)?|.*-[0-9a-f]{6}"
)


def reference_name(agent_id: str, tag: str) -> str:
    """Return the name of an agent's history with one model."""
    return f"{agent_id}@{tag}"


def model_tag(key: ModelKey) -> str:
    """Return 12 characters that stand for a model and the way its K and V are stored."""
    return key.root.hex()[:12]


def salted_id(agent_id: str, salt: str) -> str:
    """Return the id of the agent that those who share a salt call by a name.

    Args:
        agent_id: what they call it.
        salt: 32 hexadecimal digits; empty: everybody's.
    """
    return f"{agent_id}~{salt}" if salt else agent_id


def salt_of(agent_id: str) -> str:
    """Return the salt of an agent's id; empty: it is everybody's."""
    found = _SALT.search(agent_id)
    return found[1] if found is not None and found.end() == len(agent_id) else ""


def without_salt(text: str) -> str:
    """Return a text in which agents are called what those who share their salt call them."""
    return _SALT.sub("", text)


def checked_id(agent_id: str) -> str:
    """Return a name that a new agent may have: a file name everywhere, and no option of a shell.

    Agents of other names, from before this was checked, are still listed and can be deleted.

    Raises:
        AgentNameError: it may not.
    """
    if not _ID.fullmatch(agent_id):
        raise AgentNameError(
            f"{agent_id[:40]!r} cannot name an agent; choose 1 to {MAX_ID_CHARS} letters, digits "
            f"and . _ -, the first a letter, a digit or _"
        )
    return agent_id


def new_ids(title: str, salt: str = "") -> Iterator[str]:
    """Yield ids for an agent that nobody named, without an end: after its title, where it has one.

    Args:
        title: ``My chat`` makes ``my-chat``, ``my-chat-2``, ...; a title that is a name is taken as
            it is.
        salt: of those who share it.
    """
    plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode().lower()
    words = re.sub("[^a-z0-9]+", "-", plain)[:_MOST_OF_TITLE].strip("-")
    stem = title if len(title) <= _MOST_OF_TITLE and _ID.fullmatch(title) else words
    if stem and not is_made_up(stem) and not salt_of(stem):
        yield salted_id(stem, salt)
        for number in itertools.count(2):
            yield salted_id(f"{stem}-{number}", salt)
    while True:
        yield salted_id(f"agent-{uuid.uuid4().hex[:8]}", salt)


def is_chosen(agent_id: str) -> bool:
    """Tell whether a person or a client chose an id, and none was made up for it or its fork."""
    return _MADE_UP_OR_FORKED.fullmatch(without_salt(agent_id)) is None


def unnamed_id() -> str:
    """Make up the id of a conversation that nobody named."""
    return f"{_UNNAMED}{uuid.uuid4().hex[:12]}"


def is_unnamed(agent_id: str) -> bool:
    """Tell whether ``unnamed_id`` made an id; ``chat-bot`` is a name that a person gave."""
    return is_made_up(agent_id) and agent_id.startswith(_UNNAMED)


def is_response(agent_id: str) -> bool:
    """Tell whether an id was made up for a stored response."""
    return is_made_up(agent_id) and not agent_id.startswith(_UNNAMED)


def is_made_up(agent_id: str) -> bool:
    """Tell whether an id was made up for a conversation or a response; no person gave it."""
    return _MADE_UP.fullmatch(agent_id) is not None


def derived_id(agent_id: str, end: str) -> str:
    """Make a name from another agent's and an ending; what cannot stand in a name becomes ``_``."""
    name, salt = without_salt(agent_id), salt_of(agent_id)
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".-") or "agent"
    return checked_id(salted_id(stem[: MAX_ID_CHARS - len(end)] + end, salt))
