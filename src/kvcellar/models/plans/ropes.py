"""Rotary positions of a plan by a ``config.json`` alone, and which layer has which.

Frequencies are rounded where a network of transformers rounds them, so that hardly any number
differs in its last bit from what is read off one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcellar.models.plans.plan import RopePlan

Ropes = tuple[tuple[RopePlan, ...], tuple[int | None, ...]]
"""Rotary positions, and by layer the number of its own; None: it is not turned."""

Floats = NDArray[np.float64]

_LLAMA3 = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)
_YARN = {
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "truncate",
    "mscale",
    "mscale_all_dim",
}
_KEPT = {"original_max_position_embeddings", "max_position_embeddings"}
"""Fields that plain rotary positions may have, and that change nothing of them."""


def one_rope(raw: Mapping[str, Any], head_dim: int) -> Ropes | None:
    """Return the rotary positions that all layers have; None: a kind that no rule here knows."""
    found = _of_fields(_fields(raw), head_dim)
    return None if found is None else ((found,), (0,) * raw["num_hidden_layers"])


def said_rope(raw: Mapping[str, Any], head_dim: int) -> Ropes | None:
    """Return what ``one_rope`` does where a config says it all; None where its class does."""
    is_said = raw.get("rope_parameters") or raw.get("rope_scaling")
    return one_rope(raw, head_dim) if is_said else None


def rope_but_in(field: str) -> Callable[[Mapping[str, Any], int], Ropes | None]:
    """Make a rule by which a field of a config has a 0 for each layer that is not turned."""

    def rule(raw: Mapping[str, Any], head_dim: int) -> Ropes | None:
        found, turns, n_layers = one_rope(raw, head_dim), raw.get(field), raw["num_hidden_layers"]
        if turns is None:
            period = raw.get(f"{field.removesuffix('s')}_interval", 4)
            turns = [int((at + 1) % period != 0) for at in range(n_layers)]
        if found is None or len(turns) != n_layers:
            return None
        return found[0], tuple(0 if one else None for one in turns)

    return rule


def rope_by_kind(
    kinds: Callable[[Mapping[str, Any]], Sequence[str]],
    widths: Callable[[Mapping[str, Any]], Mapping[str, int]] | None = None,
) -> Callable[[Mapping[str, Any], int], Ropes | None]:
    """Make a rule by which each kind of layer has rotary positions of its own, as in Gemma 3.

    Args:
        kinds: of a config's layers.
        widths: numbers of a head by kind; None: all are of one width.
    """

    def rule(raw: Mapping[str, Any], head_dim: int) -> Ropes | None:
        of_layers, given = kinds(raw), raw.get("rope_parameters") or {}
        dims = {} if widths is None else widths(raw)
        ropes = []
        for kind in dict.fromkeys(of_layers):
            if kind in given:
                fields = dict(given[kind])
            elif given:
                return None
            elif kind == "full_attention":
                fields = {"rope_theta": 1e6, **_fields(raw)}
            else:
                fields = {"rope_theta": raw.get("rope_local_base_freq", 1e4)}
            ropes.append((kind, _of_fields(fields, dims.get(kind, head_dim))))
        found = dict[Any, int]()
        for _, rope in ropes:
            if rope is None:
                return None
            found.setdefault(rope, len(found))
        by_kind = {kind: found[rope] for kind, rope in ropes}
        return tuple(found), tuple(by_kind[kind] for kind in of_layers)

    return rule


def _fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a config says of rotary positions, in one place or in another."""
    said = {**(raw.get("rope_parameters") or {}), **(raw.get("rope_scaling") or {})}
    for name in ("rope_theta", "partial_rotary_factor"):
        if raw.get(name) is not None:
            said.setdefault(name, raw[name])
    return said


def _of_fields(rope: dict[str, Any], head_dim: int) -> RopePlan | None:
    """Return rotary positions by their fields; None: a kind that no rule here knows.

    Of the kind ``proportional`` all halves of a head turn, most of them by nothing.
    """
    theta, share = float(rope.pop("rope_theta")), rope.pop("partial_rotary_factor", None)
    kind = {rope.pop(name) for name in ("rope_type", "type") if name in rope} or {"default"}
    n_turned = int(head_dim * (1.0 if share is None else share))
    is_proportional = kind == {"proportional"}
    n_turned -= n_turned % 2 if is_proportional else 0
    if n_turned % 2 or not 0 < n_turned <= head_dim:
        return None
    width = head_dim if is_proportional else n_turned
    exponents = np.arange(0, n_turned, 2).astype(np.float32) / np.float32(width)
    powers = (theta ** exponents.astype(np.float64)).astype(np.float32)
    found, scale = (np.float32(1) / powers).astype(np.float64), 1.0
    if is_proportional and rope.keys() <= {"factor"}:
        found = found / float(rope.get("factor", 1.0))
        found = np.concatenate((found, np.zeros((head_dim - n_turned) // 2)))
    elif kind == {"linear"} and rope.keys() == {"factor"}:
        found = found / float(rope["factor"])
    elif kind == {"llama3"} and rope.keys() == {*_LLAMA3}:
        factor, low, high, original = (float(rope[name]) for name in _LLAMA3)
        # Turns within the original context, between which two the stretching sets in.
        turns = original * found / (2 * math.pi)
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        found = found * (kept + (1 - kept) / factor)
    elif kind == {"yarn"} and rope.keys() <= _YARN:
        found, scale = _by_yarn(found, powers, rope, theta)
    elif kind != {"default"} or not rope.keys() <= _KEPT:
        return None
    return RopePlan(tuple(map(float, found.astype(np.float32))), scale)


def yarn_scale(factor: float, times: float | None = 1.0) -> float:
    """Return by how much YaRN makes logits larger, in a text that is a factor longer."""
    return 0.1 * float(times or 0.0) * math.log(factor) + 1.0 if factor > 1 else 1.0


def _by_yarn(
    found: Floats, powers: NDArray[np.float32], rope: Mapping[str, Any], theta: float
) -> tuple[Floats, float]:
    """Return frequencies of YaRN, and the factor on cosines and sines.

    Fast ones stay, slow ones are divided by the factor, and those between are mixed of both.
    """
    factor, n_turned = float(rope["factor"]), 2 * len(found)
    original = float(rope["original_max_position_embeddings"])

    def pair_of(turns: float) -> float:
        """Return which pair turns so many times within the original context."""
        return n_turned * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = (
        pair_of(float(rope.get(name) or n)) for name, n in (("beta_fast", 32), ("beta_slow", 1))
    )
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, n_turned - 1)
    ramp = (np.arange(len(found)) - low) / ((high if high != low else high + 0.001) - low)
    slow = np.clip(ramp.astype(np.float32), 0, 1).astype(np.float64)
    stretched = (np.float32(1) / (np.float32(factor) * powers)).astype(np.float64)
    scale = rope.get("attention_factor")
    if scale is None:
        times = rope.get("mscale"), rope.get("mscale_all_dim")
        scale = yarn_scale(factor)
        if all(times):
            scale = yarn_scale(factor, times[0]) / yarn_scale(factor, times[1])
    return stretched * slow + found * (1 - slow), float(scale)
