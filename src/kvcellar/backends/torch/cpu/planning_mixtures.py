"""The plan of a mixture's block, read off what it computes; see :mod:`kvcellar.models.plans.plan`.

A block is run on rows of its own, with experts that keep what they are asked for and answer with
random rows: which of the planned ways to choose them it is shows in what was asked, and what it
adds to their answer in its result.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from kvcellar.backends.torch.cpu.find.trial import AnyExperts, LinearStandIn, Trial
from kvcellar.backends.torch.cpu.modules.mixtures import find_experts, is_mixture
from kvcellar.backends.torch.cpu.modules.routed import RecordingExperts
from kvcellar.models.plans.plan import ONE_GROUP, Gate

_ROWS = 256
"""Rows that a block is run on, the smallest first: of the largest one expert may take all."""

_SMALL = {"n_experts": 3, "hidden": 8, "inner": 6}
"""Sizes of the experts that are tried in the place of a network's own."""


class FoundMixture(NamedTuple):
    """Mixture's block, as it computes, by names of modules and parameters within the network.

    Attributes:
        router: parameters of the router: its weight, and its bias where it has one.
        n_chosen: experts of a token.
        is_normalised: true if shares are divided by their sum.
        rounds_shares: true if shares are rounded to the type of the rows.
        scale: factor on shares.
        experts: module of the experts.
        gate: between their products.
        is_crossed: true if their matrices are the other way round, gate and up by turns.
        has_biases: true if both of their products have biases.
        mlp: module of an MLP that is added; None: nothing is.
        share: linear layer, the sigmoid of whose result the MLP is multiplied with.
        is_sigmoid: true if scores are sigmoids of logits.
        correction: buffer that is added to scores only to choose; None: nothing is.
        rounds_logits: true if logits are rounded to the type of the rows.
        groups: of experts, as in a plan.
    """

    router: tuple[str, ...]
    n_chosen: int
    is_normalised: bool
    rounds_shares: bool
    scale: float
    experts: str
    gate: Gate
    is_crossed: bool
    has_biases: bool
    mlp: str | None
    share: str | None
    is_sigmoid: bool
    correction: str | None
    rounds_logits: bool
    groups: tuple[int, int, int]


def find_mixture(
    network: Any, exact: Trial, rounded: Trial, experts: str, mlps: Sequence[str]
) -> FoundMixture | None:
    """Find out what the block around a module of experts computes.

    Args:
        network: of transformers; only its experts' class and fields are looked at.
        exact: a run of its copy in float32.
        rounded: one in bfloat16.
        experts: name of the module.
        mlps: names of gated MLPs in the block.

    Returns:
        None where it is something that a plan cannot say.
    """
    module = network.get_submodule(experts)
    block = experts.rpartition(".")[0]
    own = _own_experts(module)
    if own is None or not block or len(mlps) > 1:
        return None
    gate, is_crossed = own
    asked = _asked(exact, block, experts)
    beside = _asked(rounded, block, experts)
    if asked is None or beside is None:
        return None
    router = _router(exact.module(block), experts[len(block) + 1 :], asked, int(module.num_experts))
    if router is None:
        return None
    names = router.names
    added = _added(exact, block, asked, mlps)
    if added is None:
        return None
    return FoundMixture(
        router=tuple(f"{block}.{name}" for name in names),
        n_chosen=int(asked.recorded.chosen.shape[-1]),
        is_normalised=router.is_normalised,
        rounds_shares=beside.recorded.shares.dtype == torch.bfloat16,
        scale=router.scale,
        experts=experts,
        gate=gate,
        is_crossed=is_crossed,
        has_biases=bool(module.has_bias),
        mlp=added[0],
        share=added[1],
        is_sigmoid=router.is_sigmoid,
        correction=None if router.correction is None else f"{block}.{router.correction}",
        rounds_logits=_rounds_logits(rounded.module(block), router, beside),
        groups=router.groups,
    )


def _own_experts(module: Any) -> tuple[Gate, bool] | None:
    """Return the gate of experts, and if their matrices are crossed; None: a plan has no such.

    Experts of the same class with few and small matrices are held against what they were taken for.
    """
    if not is_mixture(module) or not module.has_gate or module.has_post_expert_norm:
        return None
    is_crossed = bool(module.is_transposed)
    if is_crossed == bool(module.is_concatenated):
        return None
    n_experts, hidden, inner = _SMALL.values()
    shapes = {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}
    small = copy.copy(module)
    generator = torch.Generator().manual_seed(5)
    parameters = {}
    for name, shape in shapes.items():
        sizes: dict[str, tuple[int, ...]] = {name: shape[::-1] if is_crossed else shape}
        if module.has_bias:
            sizes[f"{name}_bias"] = shape[:1]
        for each, size in sizes.items():
            numbers = torch.randn((n_experts, *size), generator=generator)
            parameters[each] = nn.Parameter(numbers, requires_grad=False)
    vars(small).update(_parameters=parameters, num_experts=n_experts)
    found = find_experts(small, {})
    if found is None or found.gate_numbers is None:
        return None
    return found.gate_numbers, is_crossed


class _BlockCall(NamedTuple):
    """A call of a block: its rows ``[T, hidden]``, what it asked its experts for, its result."""

    x: Tensor
    recorded: RecordingExperts
    result: Tensor


def _asked(trial: Trial, block: str, experts: str) -> _BlockCall | None:
    """Run a block on some rows; None: it is called otherwise, or its experts are given others."""
    module: Any = trial.module(block)
    inside: Any = trial.module(experts)
    given = trial.calls[block][0].first()
    if given is None or not isinstance(inside, AnyExperts):
        return None
    recorded = RecordingExperts()
    generator = torch.Generator().manual_seed(4)
    for own in module.modules():  # whose buffers the network shares, and may be zeros
        for name, one in own.named_buffers(recurse=False):
            if one.is_floating_point() and one.dim() == 1:
                setattr(own, name, torch.randn(one.shape, generator=generator).to(one.dtype) * 0.2)
    x = torch.randn((1, _ROWS, given.shape[-1]), generator=generator)
    sizes = 10.0 ** torch.linspace(-1.5, 0, _ROWS)
    x = (x * sizes[:, None] * given.shape[-1] ** -0.5).to(trial.dtype)
    vars(inside)["forward"] = recorded
    try:
        with torch.inference_mode():
            result = module(x)
    except Exception:  # it takes something else than rows
        return None
    finally:
        del vars(inside)["forward"]
    result = result[0] if isinstance(result, tuple) else result
    if recorded.n_calls != 1 or not torch.equal(recorded.x, x[0]):
        return None
    return _BlockCall(x[0], recorded, result.reshape(x.shape[1:]))


class _FoundRouter(NamedTuple):
    """Router of a block, by names within it; fields as of :class:`FoundMixture`."""

    names: tuple[str, ...]
    is_normalised: bool
    scale: float
    is_sigmoid: bool
    correction: str | None
    groups: tuple[int, int, int]


def _router(
    block: nn.Module, experts: str, asked: _BlockCall, n_experts: int
) -> _FoundRouter | None:
    """Return what chooses a block's experts; None: no plan can say it, or two can."""
    own = {name: one for name, one in _own(block).items() if not name.startswith(f"{experts}.")}
    weights = [name for name, one in own.items() if one.shape == (n_experts, asked.x.shape[-1])]
    numbers = [name for name, one in own.items() if one.shape == (n_experts,)]
    want, order = asked.recorded.chosen.sort(-1)
    shares = asked.recorded.shares.float().gather(-1, order)
    ways = [(None, None)] if not numbers else [(numbers[0], None), (None, numbers[0])]
    if len(numbers) > 1:
        return None
    ways_to_group = _groupings(block, n_experts, want.shape[-1])
    for weight, (bias, correction), is_sigmoid in itertools.product(weights, ways, (False, True)):
        logits = F.linear(asked.x, own[weight], None if bias is None else own[bias])
        every = logits.sigmoid() if is_sigmoid else logits.softmax(-1)
        corrected = every if correction is None else every + own[correction]
        groups = [one for one in ways_to_group if torch.equal(_chosen(corrected, one, want), want)]
        if len(groups) != 1:
            continue
        scores = every.gather(-1, want)
        for is_normalised in (True, False):
            found = scores / scores.sum(-1, keepdim=True) if is_normalised else scores
            scale = float((shares / found).median())
            scale = 1.0 if abs(scale - 1) < 1e-5 else scale
            if torch.allclose(found * scale, shares, rtol=1e-4, atol=1e-7):
                names = (weight,) if bias is None else (weight, bias)
                return _FoundRouter(names, is_normalised, scale, is_sigmoid, correction, groups[0])
    return None


def _groupings(block: nn.Module, n_experts: int, n_chosen: int) -> list[tuple[int, int, int]]:
    """Return the groups in which a block may choose, by the whole numbers that its modules keep."""
    kept = {one for module in block.modules() for one in vars(module).values() if type(one) is int}
    found = [ONE_GROUP]
    for n_groups, n_kept, n_best in itertools.product(sorted(kept), sorted(kept), (1, 2)):
        if n_best == 1 and n_kept >= n_chosen:
            continue  # the best experts are in the best groups
        if 0 < n_kept < n_groups and not n_experts % n_groups:
            in_each = n_experts // n_groups
            if in_each > 1 and in_each * n_kept >= n_chosen:
                found.append((n_groups, n_kept, n_best))
    return found


def _chosen(scores: Tensor, groups: tuple[int, int, int], like: Tensor) -> Tensor:
    """Return the experts with the highest scores in the best groups, sorted by their numbers."""
    n_groups, n_kept, n_best = groups
    grouped = scores.unflatten(-1, (n_groups, -1))
    kept = grouped.topk(n_best, dim=-1).values.sum(-1).topk(n_kept, dim=-1).indices
    is_kept = torch.zeros(grouped.shape[:-1], dtype=torch.bool).scatter_(-1, kept, True)
    left = grouped.masked_fill(~is_kept[..., None], -torch.inf).flatten(-2)
    found: Tensor = left.topk(like.shape[-1], dim=-1).indices.sort(-1).values
    return found


def _rounds_logits(block: nn.Module, router: _FoundRouter, asked: _BlockCall) -> bool:
    """Return true if shares are those of logits that are rounded, in a block that rounds."""
    own = _own(block)
    parameters = [own[name] for name in router.names]
    if any(one.dtype != asked.x.dtype for one in parameters):
        return False
    off = []
    for rounds, in_floats in ((True, True), (True, False), (False, True)):
        given = [asked.x, *parameters] if rounds else [asked.x.float(), *map(_floats, parameters)]
        logits = F.linear(*given)
        logits = logits.float() if in_floats else logits  # else scores are rounded as well
        every = logits.sigmoid() if router.is_sigmoid else logits.softmax(-1)
        scores = every.gather(-1, asked.recorded.chosen)
        if router.is_normalised:
            scores = scores / scores.sum(-1, keepdim=True)
        shares = (scores * router.scale).to(asked.recorded.shares.dtype)
        off.append(float((shares.float() - asked.recorded.shares.float()).abs().mean()))
    return min(off[:2]) <= off[2]


def _floats(one: Tensor) -> Tensor:
    return one.float()


def _own(block: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a block, by their names in it."""
    return dict((*block.named_parameters(), *block.named_buffers()))


def _added(
    trial: Trial, block: str, asked: _BlockCall, mlps: Sequence[str]
) -> tuple[str | None, str | None] | None:
    """Return which MLP a block adds to its experts' answer, and what its share is the sigmoid of.

    None: it does something else.
    """
    answer = asked.recorded.answer
    if not mlps:
        return (None, None) if torch.equal(asked.result, answer) else None

    def run(name: str) -> Any:
        return trial.module(name)(asked.x)

    with torch.inference_mode():
        said = run(mlps[0])
        for share in (None, *_shares(trial, block)):
            part = said if share is None else torch.sigmoid(run(share)) * said
            if trial.alike(answer + part, asked.result):
                return mlps[0], share
    return None


def _shares(trial: Trial, block: str) -> Iterator[str]:
    """Yield names of linear layers in a block that say one number of each row."""
    for name, one in trial.module(block).named_modules():
        if isinstance(one, LinearStandIn | nn.Linear) and one.out_features == 1:
            yield f"{block}.{name}"
