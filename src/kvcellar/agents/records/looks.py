"""Looks at pictures, as an agent remembers them: it goes on although a picture itself was lost.

What stands in a prompt for a picture is known by the look at it, so no prompt with it could be made
any more without, though K and V of its rows are still there.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kvcellar.errors import PictureLostError
from kvcellar.models.seeing import Look
from kvcellar.models.text.pictures import names_in
from kvcellar.models.text.prompts import Looks
from kvcellar.store.values.facts import BadFactError, items, text, whole

if TYPE_CHECKING:
    from kvcellar.agents.records.agent import AgentRecord

_MOST_TEXT = 4 << 20
"""Bytes of a look's text; a row of a picture takes some 15."""

_MOST = 1 << 31


class RecalledLooks:
    """Looks of a model at pictures, and those that an agent remembers where one was lost."""

    def __init__(self, own: Looks, agent: AgentRecord) -> None:
        """Look as a model does, for the next prompt of an agent of that model."""
        self._own, self._agent = own, agent

    @property
    def written(self) -> str:
        """The text that the model's chat template writes where a picture stands."""
        return self._own.written

    @property
    def in_text(self) -> str:
        """The text that stands for a picture where the template writes messages' text alone."""
        return self._own.in_text

    @property
    def token_id(self) -> int:
        """Id of the placeholder for a row of a picture."""
        return self._own.token_id

    def look(self, name: str) -> Look:
        """Return what stands in the prompt for a picture.

        Raises:
            PictureError: it is not here any more and was never looked at, or the model cannot read
                it.
        """
        try:
            return self._own.look(name)
        except PictureLostError as error:
            found = self._agent.looks.get(name)
            if found is None:
                say_turn(error, self._agent)
                raise
            return found


def recalled(looks: Looks | None, agent: AgentRecord | None) -> Looks | None:
    """Return a model's looks with those that an agent remembers; None: it reads text alone."""
    return looks if looks is None or agent is None else RecalledLooks(looks, agent)


def say_turn(error: PictureLostError, agent: AgentRecord) -> None:
    """Have an error say in which turn of an agent the picture stands that was lost."""
    for n, (turn, end) in enumerate(agent.turns_with_ends()):
        if error.name in names_in(agent.messages[turn.n_messages : end]):
            error.say_turn(agent.agent_id, n)
            return


# As the store keeps them --------------------------------------------------------------------------


def looks_as_json(looks: Mapping[str, Look], names: Iterable[str]) -> dict[str, Any]:
    """Return looks at some pictures as the store keeps them, of those that are known.

    One whose text is longer than is read again is left out.
    """
    found = {name: looks[name] for name in names if name in looks}
    return {
        name: [_packed(one.text), one.n_rows, *one.grid]
        for name, one in found.items()
        if len(one.text.encode()) < _MOST_TEXT
    }


def looks_of(value: Mapping[str, Any]) -> dict[str, Look]:
    """Return looks of which ``looks_as_json`` gave the value.

    Raises:
        BadFactError: there is something else.
    """
    return {name: _look(look, f"the look at {name[:40]!r}") for name, look in value.items()}


def _look(value: Any, where: str) -> Look:
    parts = items(value, where)
    if len(parts) != 4:
        raise BadFactError(f"{where} has to have 4 parts, not {len(parts)}")
    n_rows, *grid = (whole(part, where, 0, _MOST) for part in parts[1:])
    return Look(_unpacked(text(parts[0], where), where), n_rows, (grid[0], grid[1]))


def _packed(said: str) -> str:
    """Return a text that repeats itself in few characters."""
    return base64.b64encode(zlib.compress(said.encode())).decode()


def _unpacked(packed: str, where: str) -> str:
    try:
        reader = zlib.decompressobj()
        said = reader.decompress(base64.b64decode(packed, validate=True), _MOST_TEXT)
        if not reader.eof:
            raise BadFactError(f"{where} is cut off, or too long")
        return said.decode()
    except (binascii.Error, zlib.error, ValueError) as error:
        raise BadFactError(f"{where} cannot be read ({error})") from error
