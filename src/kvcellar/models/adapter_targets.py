"""Layers that a PEFT configuration names, by PEFT's rules of names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcellar.errors import ModelError

_ALL = "all-linear"


@dataclass(frozen=True, slots=True)
class Targets:
    """Rules by which layers are adapted.

    Attributes:
        named: a regular expression of whole names, or ends of names; ``all-linear`` for all but
            the head.
        excluded: the same, of layers that are not.
        layers: numbers of the layers; none: all of them.
        patterns: names of the lists that these number; none: the first that a name has.
    """

    named: str | tuple[str, ...]
    excluded: str | tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    patterns: tuple[str, ...] = ()

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Targets:
        """Read the rules of an adapter's settings.

        Raises:
            ModelError: they name no layers.
        """
        named = said.get("target_modules")
        if not named:
            raise ModelError("target_modules names no layers")
        layers = said.get("layers_to_transform")
        patterns = said.get("layers_pattern") or ()
        return cls(
            _names(named, "target_modules"),
            _names(said.get("exclude_modules") or (), "exclude_modules"),
            (layers,) if isinstance(layers, int) else tuple(layers or ()),
            (patterns,) if isinstance(patterns, str) else tuple(patterns),
        )

    def has(self, layer: str, *, is_head: bool = False) -> bool:
        """Return true if a linear layer is adapted.

        Args:
            layer: its name in the model that was trained.
            is_head: it is the last one, which says the logits.
        """
        if _is_in(layer, self.excluded):
            return False
        if isinstance(self.named, str):
            if self.named.lower() == _ALL:
                return not is_head
            return re.fullmatch(self.named, layer) is not None
        if layer in self.named:
            return True
        return _is_in(layer, self.named) and self._has_number(layer)

    def _has_number(self, layer: str) -> bool:
        if not self.layers:
            return True
        wanted = [rf"(?:^|.*?\.){one}\.(\d+)\." for one in self.patterns]
        for pattern in wanted or [r".*?\.[^.]*\.(\d+)\."]:
            found = re.match(pattern, layer)
            if found is not None:
                return int(found[1]) in self.layers
        return False


def of_pattern(patterns: Mapping[str, Any] | None, layer: str, otherwise: Any) -> Any:
    """Return what the first of some patterns that fits a layer's name says, or something else."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return value
    return otherwise


def _names(given: Any, what: str) -> str | tuple[str, ...]:
    """Return names as an expression, or as ends of names.

    Raises:
        ModelError: they are neither.
    """
    if isinstance(given, str):
        return given
    if isinstance(given, Sequence) and all(isinstance(one, str) for one in given):
        return tuple(given)
    raise ModelError(f"{what} is {str(given)[:80]}, which is neither an expression nor names")


def _is_in(layer: str, names: str | tuple[str, ...]) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, layer) is not None
    return layer in names or any(layer.endswith(f".{one}") for one in names)
