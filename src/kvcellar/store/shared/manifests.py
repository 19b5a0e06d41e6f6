"""An agent's state as the shared tier has it: its reference, and what its blocks are there."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvcellar.store.values.blocks import Info, Kind, address_of
from kvcellar.store.values.facts import MOST_INT, BadFactError, object_of, parse_json, whole
from kvcellar.store.values.format import DamagedError, FileBytes, Tensor, read_from
from kvcellar.store.values.layout import root_address
from kvcellar.store.values.references import Reference, file_stem, unpack_reference
from kvcellar.types import IntArray

TOMBSTONE = b"deleted"
"""The state of a history that was deleted; no file that was cut short reads like that."""

MOST_BEHIND = 64


@dataclass(frozen=True, slots=True)
class Manifest:
    """An agent's state in the shared tier.

    Attributes:
        ref: the state, on the blocks that the tier has.
        infos: these blocks and boundary states.
        behind: serial numbers of the states that it was handed in behind, the latest first; by
            them a machine finds out whether its own is one of these.
    """

    ref: Reference
    infos: tuple[Info, ...]
    behind: tuple[int, ...]


def register_of(name: str) -> str:
    """Return the register of a history, in a folder of those whose names differ behind an @."""
    return f"{folder_of(name.rpartition('@')[0] or name)}/{file_stem(name)}"


_REGISTER = re.compile("agents/[0-9a-f]{32}/[0-9a-f]{32}")


def is_register(name: str) -> bool:
    """Return whether a register can be a history's; others are somebody's own."""
    return _REGISTER.fullmatch(name) is not None


def folder_of(agent_id: str) -> str:
    """Return the folder of the registers of one agent, which it has one of for each model."""
    return f"agents/{file_stem(agent_id)}"


def pack_manifest(ref: Reference, infos: Mapping[bytes, Info], behind: Sequence[int]) -> bytes:
    """Make the bytes of a manifest from a state on blocks all of which are known."""
    kept = [infos[b] for b in ref.blocks], [infos[b.address] for b in ref.boundaries]
    facts = np.array([[info.size_bytes, info.first] for info in (*kept[0], *kept[1])], np.int64)
    more = {"there": facts.reshape(-1), "behind": np.array(behind[:MOST_BEHIND], np.int64)}
    return ref.pack({name: Tensor("I64", array) for name, array in more.items()}).data.tobytes()


def unpack_manifest(register: str, data: bytes) -> Manifest:
    """Read and verify a manifest.

    Raises:
        DamagedError: it is not as it was written, or another's.
    """
    file = read_from(io.BytesIO(data), len(data))
    ref = unpack_reference(file)
    if register_of(ref.name) != register:
        raise DamagedError(f"it is the state of {ref.name!r}")
    return Manifest(ref, tuple(_infos(ref, _there(file, ref))), _behind(file))


def _behind(file: FileBytes) -> tuple[int, ...]:
    behind = file.tensors.get("behind")
    if behind is None or behind.dtype != np.int64 or behind.ndim != 1 or len(behind) > MOST_BEHIND:
        raise DamagedError("it does not say which states it follows")
    return tuple(behind.tolist())


def _there(file: FileBytes, ref: Reference) -> IntArray:
    facts = file.tensors.get("there")
    n = len(ref.blocks) + len(ref.boundaries)
    if facts is None or facts.dtype != np.int64 or facts.shape != (2 * n,):
        raise DamagedError("it does not say what its blocks are")
    if len(facts) and not 0 <= int(facts.min()) <= int(facts.max()) <= MOST_INT:
        raise DamagedError("its blocks have sizes that cannot be")
    return facts.reshape(n, 2)


def block_tokens_of(ref: Reference) -> int:
    """Return how many tokens a block of a state has.

    Raises:
        DamagedError: its layout does not say.
    """
    try:
        layout = object_of(parse_json(ref.layout_json, "layout"), "layout")
        return whole(layout["block_tokens"], "block_tokens", 1)
    except (BadFactError, KeyError) as error:
        raise DamagedError(f"its layout cannot be read: {error}") from error


def _infos(ref: Reference, facts: IntArray) -> list[Info]:
    """Say where each block lies, as its history and its place in it tell.

    Raises:
        DamagedError: the layout does not say how long a block is.
    """
    size = block_tokens_of(ref)
    root = root_address(ref.fingerprint, ref.layout_json)
    parents = [root]
    for start in range(0, len(ref.tokens) - size + 1, size):
        parents.append(address_of(Kind.BLOCK, parents[-1], ref.tokens[start : start + size]))
    found, rows = [], iter(facts.tolist())

    def add(kind: Kind, address: bytes, n_before: int, stop: int) -> None:
        start = n_before * size
        size_bytes, first = next(rows)
        tokens = ref.tokens[start:stop]
        parent = parents[n_before]
        found.append(Info(kind, address, root, parent, start, tokens, first, True, size_bytes, ""))

    for i, address in enumerate(ref.blocks):
        if i >= len(parents):
            raise DamagedError("it has more blocks than tokens")
        add(Kind.BLOCK, address, i, min((i + 1) * size, ref.n_stored))
    for boundary in ref.boundaries:
        add(Kind.BOUNDARY, boundary.address, boundary.length // size, boundary.length)
    return found
