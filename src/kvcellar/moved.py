"""Names that went elsewhere: a caller of an old one is told the new one."""

from __future__ import annotations

_AGENTS = "kvcellar.agents.AgentManager"

MOVED = {
    f"{_AGENTS}.{verb}": f"{part}.{verb}"
    for part, verbs in {
        "lifecycle": "create fork branch rewind keep finish delete forget",
        "dropped": "undo",
        "sleep": "pause resume wait export import_file",
        "directory": "has describe conversation why why_not refresh histories text_around silent",
        "lookup": "join expect place_of",
        "turns": "generate prompt_of",
    }.items()
    for verb in verbs.split()
} | {
    f"{_AGENTS}.forget_dropped": "dropped.forget",
    f"{_AGENTS}.identify": "lookup.place",
    f"{_AGENTS}.list": "directory.listed",
    f"{_AGENTS}.listed": "directory.listed",
}
"""Name that was public, with its owner's -> where it is now, in the owner."""


def no_such_name(owner: str, name: str) -> AttributeError:
    """Return the error for a name that an owner does not have, which says where it went.

    Args:
        owner: of the name, a module or a class with its module's name.
        name: as it was asked for.
    """
    place = MOVED.get(f"{owner}.{name}")
    said = f"; it is {place} now, of the same object" if place is not None else ""
    return AttributeError(f"{owner} has no {name!r}{said}", name=name)
