"""The plan of attention over latents, read off a run whose latents are bound.

Which rows came of which layer, and how rotary numbers were turned, shows in what reached the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcellar.backends.torch.bind.latent import LatentLinear
from kvcellar.backends.torch.cpu.find.trial import IDS, Attended, Trial
from kvcellar.models.latents import Latents
from kvcellar.models.plans.plan import HALVES, PAIRS, PARTED


class FoundLatents(NamedTuple):
    """Attention over latents, by names of modules within the network.

    Attributes:
        shape: how latents would be expanded.
        expand: module that would.
        inputs: linear layers of the layer's rows: of queries, and of latents and rotary numbers.
        q: linear layer from short queries; None: there is none.
        q_norm: norm of short queries; None: there is none.
        norm: of latents.
        turned: how rotary numbers lie.
    """

    shape: Latents
    expand: str
    inputs: tuple[str, str]
    q: str | None
    q_norm: str | None
    norm: str
    turned: str


def latent_layer(trial: Trial, at: str) -> str | None:
    """Return the module by which an attention module hands latents on; None: it has none."""
    inside = (name for name in trial.calls if name.startswith(f"{at}."))
    return next((name for name in inside if isinstance(trial.module(name), LatentLinear)), None)


def find_attention(
    trial: Trial, one: Attended, mixes: list[str], given: Any, o: str, sides: Any
) -> FoundLatents | None:
    """Find out how an attention module makes queries, latents and rotary rows.

    Args:
        trial: a run of the network in float32.
        one: what its attention was asked.
        mixes: its linear layers, each called once.
        given: what the module was given.
        o: the one that is last.
        sides: cosines and sines ``[1, T, rotary_dim / 2]``.

    Returns:
        None where it is something that a plan cannot say.
    """
    expand = latent_layer(trial, one.module)
    assert expand is not None, "it was looked for"
    bound: Any = trial.module(expand)
    shape: Latents = bound.latents
    is_usual = shape.is_by_head and shape.is_k_first and not shape.is_rotary_first
    heads = shape.n_kv_heads, shape.plain_dim + shape.rotary_dim
    if not is_usual or one.q.shape[1] != heads[0] or one.has_sinks:
        return None
    latent = trial.calls[expand][0].first()
    with torch.inference_mode():
        said = bound.expand(one.result).transpose(1, 2).flatten(2)
    if not _is_same(one.v, latent) or not trial.alike(_first(trial, o), said):
        return None
    of_input = [name for name in mixes if name != o and _is_same(_first(trial, name), given)]
    both = [name for name in of_input if _splits(trial, name, shape)]
    others = [name for name in mixes if name not in (o, *both)]
    for down, first in ((a, b) for a in both for b in of_input if a != b):
        rows = trial.calls[down][0].result
        norm = _norm_between(trial, one.module, rows[..., : shape.latent_dim], latent)
        behind = [name for name in others if name != first]
        if norm is None or len(behind) > 1:
            continue
        queries, q_norm = trial.calls[first][0].result, None
        if behind:
            short = _first(trial, behind[0])
            q_norm = _norm_between(trial, one.module, queries, short)
            if q_norm is None:
                continue
            queries = trial.calls[behind[0]][0].result
        if queries.shape[-1] != heads[0] * heads[1]:
            continue
        q = queries.view(1, len(IDS), *heads).transpose(1, 2)
        turned = _turned(trial, q, rows[:, None, :, shape.latent_dim :], one, bound, sides)
        if turned is not None:
            q_name = behind[0] if behind else None
            return FoundLatents(shape, expand, (first, down), q_name, q_norm, norm, turned)
    return None


def _turned(
    trial: Trial, q: Tensor, shared: Tensor, one: Attended, bound: Any, sides: Any
) -> str | None:
    """Return how rotary numbers lie, so that q and k are what the cache was given."""
    shape = bound.latents
    plain, rotary = q.split((shape.plain_dim, shape.rotary_dim), dim=-1)
    absorbed = torch.bmm(plain.reshape(shape.n_kv_heads, -1, shape.plain_dim), bound.up_k)
    if not trial.alike(absorbed[None], one.q[..., : shape.latent_dim].contiguous()):
        return None
    for name, turn in _ways(*sides):
        got = turn(rotary), turn(shared)
        want = one.q[..., shape.latent_dim :], one.k
        if all(trial.alike(a, b.contiguous()) for a, b in zip(got, want, strict=True)):
            return name
    return None


def _ways(cos: Tensor, sin: Tensor) -> Iterator[tuple[str, Any]]:
    """Yield ways to turn rows ``[1, heads, T, rotary_dim]`` by their names in a plan."""
    cos, sin = cos[:, None], sin[:, None]

    def both(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a * cos - b * sin, b * cos + a * sin

    def pairs(x: Tensor) -> tuple[Tensor, Tensor]:
        return both(x[..., 0::2], x[..., 1::2])

    yield HALVES, lambda x: torch.cat(both(*x.chunk(2, -1)), -1)
    yield PARTED, lambda x: torch.cat(pairs(x), -1)
    yield PAIRS, lambda x: torch.stack(pairs(x), -1).flatten(-2)


def _first(trial: Trial, name: str) -> Any:
    return trial.calls[name][0].first()


def _splits(trial: Trial, name: str, shape: Latents) -> bool:
    """Return true if a linear layer says as much as a latent and a rotary row."""
    n_said: int = trial.calls[name][0].result.shape[-1]
    return n_said == shape.latent_dim + shape.rotary_dim


def _norm_between(trial: Trial, at: str, given: Tensor, result: Any) -> str | None:
    """Return the module with one vector of parameters that makes one of the other."""
    for name, calls in trial.calls.items():
        own = list(trial.module(name).parameters()) if name.startswith(f"{at}.") else []
        if len(own) == 1 and own[0].dim() == 1 and len(calls) == 1:
            call = calls[0]
            if _is_same(call.first(), given) and _is_same(call.result, result):
                return name
    return None


def _is_same(a: Any, b: Any) -> bool:
    """Return true if two tensors have the same numbers, in whatever shapes."""
    is_one = isinstance(a, Tensor) and isinstance(b, Tensor) and a.numel() == b.numel()
    return is_one and torch.equal(a.reshape(-1), b.reshape(-1))
