"""Updates of a network's linear layers by adapters, computed beside what the layers compute."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from kvcellar.backends.torch.adapters.placing import Sizes, place_of
from kvcellar.backends.torch.bind.active_adapters import Active, Rows, is_active, rows_for
from kvcellar.backends.torch.cpu.modules.parts import Parts
from kvcellar.errors import ConfigError, ModelError
from kvcellar.models.adapters import WEIGHTS, Adapter
from kvcellar.models.files.checkpoint import few
from kvcellar.types import IntArray

_WRAPPED = (("model.language_model.", "model."), ("language_model.model.", "model."))
"""How names in a model beside towers differ from those of its language model alone."""


class _Part(NamedTuple):
    """Updates of some outputs by all adapters, their ranks side by side.

    Attributes:
        first: of the outputs.
        a: ``[n_in, ranks]``: every A, turned.
        b: ``[ranks, n_out]``: every B, turned and scaled.
        columns: which ranks are an adapter's, by its number.
        owners: ``[ranks]``: the number of each one's adapter.
    """

    first: int
    a: Tensor
    b: Tensor
    columns: Mapping[int, slice]
    owners: Tensor


class Updated:
    """Hook behind a module that multiplies: adds the updates of each token's adapter."""

    def __init__(self, n_in: int, *, is_head: bool) -> None:
        """Update nothing yet."""
        self._n_in, self._is_head = n_in, is_head
        self._given: dict[int, list[tuple[int, Tensor, Tensor]]] = {}
        self._parts: list[_Part] = []
        self.n_calls = 0
        """Calls in forwards that had tokens of adapters."""

    def add(self, number: int, first: int, a: Tensor, b: Tensor) -> None:
        """Have an adapter update outputs: by A ``[rank, n_in]`` and a scaled B ``[n_out, rank]``.

        Args:
            number: of the adapter.
            first: of the outputs, of which no adapter updates others that overlap.
            a: A.
            b: B times its scale.
        """
        self._given.setdefault(first, []).append((number, a, b))

    def join(self) -> None:
        """Put the updates of all adapters side by side; none are added afterwards."""
        for first, given in self._given.items():
            columns, at = {}, 0
            for number, a, _ in given:
                columns[number] = slice(at, at + len(a))
                at += len(a)
            a_side = torch.cat([a for _, a, _ in given]).T.contiguous()
            b_side = torch.cat([b for _, _, b in given], dim=1).T.contiguous()
            owners = [number for number, a, _ in given for _ in range(len(a))]
            made = torch.tensor(owners, device=a_side.device)
            self._parts.append(_Part(first, a_side, b_side, columns, made))
        self._given.clear()

    def __call__(
        self, module: nn.Module, given: tuple[Tensor, ...], named: Mapping[str, Any], out: Tensor
    ) -> None:
        """Add to the outputs ``[..., n_out]``, in place, for the rows of adapters.

        A layer on a card may be given a norm of its inputs, and something that is added already.
        """
        if not is_active():
            return
        self.n_calls += 1
        norm = named.get("norm")
        x = given[0] if norm is None else norm(given[0])
        x, said = x.reshape(-1, self._n_in), out.view(-1, out.shape[-1])
        rows = rows_for(len(x), is_head=self._is_head)
        if len(rows.groups) > 1:
            self._add_all(x, said, rows.numbers)
        else:
            for number, one in rows.groups:
                self._add_one(x, said, number, one)

    def _add_one(self, x: Tensor, said: Tensor, number: int, rows: Rows) -> None:
        """Add the updates of the only adapter that there is to its rows."""
        for first, a, b, columns, _ in self._parts:
            if number in columns:
                own = columns[number]
                said[rows, first : first + b.shape[1]] += x[rows].to(a.dtype) @ a[:, own] @ b[own]

    def _add_all(self, x: Tensor, said: Tensor, numbers: Tensor) -> None:
        """Add to every row the updates of its own adapter: those of others count nothing.

        Some products of all rows are quicker than more of them of few rows each.
        """
        for first, a, b, _, owners in self._parts:
            inner = (x.to(a.dtype) @ a).mul_(numbers[:, None] == owners)
            said[:, first : first + b.shape[1]] += inner @ b


@dataclass(frozen=True, slots=True, eq=False)
class Adapters:
    """Adapters that are loaded beside a network.

    Attributes:
        names: of them; the number of an adapter is its place, from 1 on.
        hooks: behind the modules that are updated, by their names in the network.
        size_bytes: of all A and B.
        device: of the network.
    """

    names: tuple[str, ...]
    hooks: Mapping[str, Updated]
    size_bytes: int
    device: torch.device

    def numbers_of(self, runs: Sequence[tuple[str, int]]) -> IntArray | None:
        """Return each token's adapter, 0 for none; None where all tokens have none.

        Args:
            runs: names, empty for none, and how many tokens each has.

        Raises:
            ConfigError: one is not loaded.
        """
        if not any(name for name, _ in runs):
            return None
        numbers = {"": 0, **{name: i for i, name in enumerate(self.names, 1)}}
        for name, _ in runs:
            if name not in numbers:
                raise ConfigError(
                    f"adapter {name!r} is not loaded; there are: {', '.join(self.names) or 'none'}"
                )
        found: IntArray = np.repeat([numbers[name] for name, _ in runs], [n for _, n in runs])
        return found

    def active(self, numbers: IntArray, kept: IntArray) -> Active:
        """Have the network's layers compute tokens with adapters while a ``with`` lasts."""
        return Active(numbers, kept, self.device)


NO_ADAPTERS = Adapters((), {}, 0, torch.device("cpu"))


def named_in(layers: Sizes, adapter: Adapter, heads: Collection[str]) -> dict[str, str]:
    """Return what the layers that an adapter updates are called in a network.

    Args:
        layers: of the network.
        adapter: its settings and weights were found to be of one training.
        heads: the layers that say the logits.

    Raises:
        ModelError: the network has no such layers, of such sizes, or more than have an update.
    """
    names: dict[str, str] = {}
    for layer, update in adapter.updates.items():
        known = [layer, *(layer.replace(old, new, 1) for old, new in _WRAPPED)]
        found = next((one for one in known if one in layers), None)
        if found is None:
            raise ModelError(
                f"adapter {adapter.name!r} updates {layer}, which is no linear layer of this "
                f"model; it was trained on another one, or on a part that is not loaded"
            )
        if layers[found] != (update.n_in, update.n_out):
            raise ModelError(
                f"adapter {adapter.name!r} updates {layer} of {update.n_in} inputs and "
                f"{update.n_out} outputs; this model's has {layers[found][0]} and "
                f"{layers[found][1]}: it was trained on another model"
            )
        names[layer] = found
    there = set(names.values())
    lost = [
        name
        for name in layers
        if name not in there and adapter.targets.has(name, is_head=name in heads)
    ]
    if lost:
        raise ModelError(
            f"adapter {adapter.name!r} has no weights for {few(lost)}, which its target_modules "
            f"name; its file is not whole, or of another model"
        )
    return names


def hang_updates(
    network: Any, parts: Parts, layers: Sizes, adapters: Sequence[Adapter], heads: Collection[str]
) -> Adapters:
    """Have a network's linear layers be updated by adapters, for the tokens that have one.

    Args:
        network: with its weights, wherever they are held.
        parts: that the CPU kernel computes.
        layers: its linear layers, as they were before.
        adapters: to be loaded.
        heads: names of the layers that say the logits.

    Raises:
        ModelError: an adapter is not for this network, or for a layer that is not run as one.
    """
    hooks: dict[str, Updated] = {}
    for number, adapter in enumerate(adapters, 1):
        names = named_in(layers, adapter, heads)
        with safe_open(adapter.folder / WEIGHTS, framework="pt") as file:
            for layer, update in adapter.updates.items():
                name = names[layer]
                place = place_of(network, parts, layers, name)
                if place is None or ".experts." in name:
                    raise ModelError(_not_run(adapter, [layer]))
                if place.module not in hooks:
                    hooks[place.module] = Updated(update.n_in, is_head=name in heads)
                a, b = (file.get_tensor(key).to(network.device).float() for key in update.keys)
                hooks[place.module].add(number, place.first, a, b * update.scale)
    for name, hook in hooks.items():
        hook.join()
        network.get_submodule(name).register_forward_hook(hook, with_kwargs=True)
    n_bytes = sum(one.size_bytes for one in adapters)
    return Adapters(tuple(one.name for one in adapters), hooks, n_bytes, network.device)


def check_run(adapters: Adapters, loaded: Sequence[Adapter]) -> None:
    """Make sure that a forward has run every layer that is updated.

    Raises:
        ModelError: it has not.
    """
    idle = [name for name, hook in adapters.hooks.items() if not hook.n_calls]
    if idle:
        raise ModelError(_not_run(loaded[0], idle))


def _not_run(adapter: Adapter, layers: Sequence[str]) -> str:
    return (
        f"adapter {adapter.name!r} updates {few(list(layers))}, which this model does not run as a "
        f"linear layer of all tokens (an expert, or weights that are read otherwise); merge the "
        f"adapter into the model with PEFT's merge_and_unload, and load what that saves"
    )
