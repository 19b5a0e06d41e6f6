"""Recurrent parts of a network that the kernel computes, found by running them with states.

A candidate is made of what a module has: the shapes of its states say how many heads there are and
how large they are, its linear layers and parameters what can be a gate, a decay or a step, and what
its norm makes of random rows how the norm and its gate are computed. It is taken where it does what
the module does, without a past and with one, and comes to the same states.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvcellar.backends.torch.bind.mixers import Mixer, time_limit_of
from kvcellar.backends.torch.cache.kernel import address_of, dtype_of
from kvcellar.backends.torch.cache.state_pools import Stretches
from kvcellar.backends.torch.cpu.find.trial import LinearStandIn, Recorder, Trial, recorded
from kvcellar.backends.torch.cpu.modules.recurrent import KernelMixer, MixerPart
from kvcellar.kernel import levels
from kvcellar.kernel import recurrent as native
from kvcellar.states import NO_SLOT, Advance

ADVANCES = (
    Advance(0, 5, NO_SLOT, 0),
    Advance(5, 1, 0, 1),
    Advance(6, 4, 1, 2),
    Advance(10, 1, 2, 3),
    Advance(11, 4, NO_SLOT, 4),
)
"""Tokens on which a candidate is tried: behind nothing and behind states, one and several."""

_N_TOKENS = 15

_LINEAR = (LinearStandIn, nn.Linear)
"""Linear layers in a trial: stand-ins, and those that are too small to be held."""

_APART = 1e-4
"""Most that results and states may differ in float32, as a share of a row's usual size."""

_NO_WORSE = 2.0
"""Most that a candidate may be further from float32 than the module is, in a type of few bits."""


class _Norm(NamedTuple):
    """A norm, and what it and its gate compute."""

    name: str
    gating: tuple[bool, ...]
    eps: float
    group: int


@dataclass(frozen=True)
class _Module:
    """A recurrent module in a trial, and what is known of it."""

    trial: Trial
    in_own_type: Trial
    name: str
    own: nn.Module
    conv: str
    width: int
    """Channels of the convolution."""
    state: tuple[int, ...]
    """Shape of the recurrent state; empty: there is none."""
    direct: tuple[str, ...]
    """Linear layers of the module's input."""
    scale: float
    """Factor on that input."""
    behind: dict[str, str]
    """Linear layers of the output of one of these, and of which one."""
    out: str

    def outputs(self, name: str) -> int:
        """Return how many outputs a linear layer has."""
        found: Any = self.own.get_submodule(name)
        return int(found.out_features)


Known = dict[tuple[Trial, str], list[list[Tensor]]]
"""Results of modules and their states, in their own type and in float32."""


def mixer_parts(
    exact: Trial, own: Trial, name: str, before: Sequence[MixerPart]
) -> Iterator[MixerPart]:
    """Yield what a module may be, if it is bound to states of its own.

    Args:
        exact: the network in float32.
        own: in its own type.
        name: of the module.
        before: what others were found to be; layers of a model are mostly alike.
    """
    found = _look_at(exact, own, name)
    if found is None or not levels.is_available():
        return
    yield from before[-1:]
    if not found.state:
        yield from _convolutions(found)
    elif len(found.state) == 3:
        yield from _deltas(found)
        yield from _scans(found)


def does_the_same(trial: Trial, name: str, candidate: KernelMixer, known: Known) -> bool:
    """Return true if a candidate does what a module does, and comes to the same states.

    Args:
        trial: in which the module ran.
        name: of it.
        candidate: to be tried.
        known: results of modules by trial and name, which are put here once they are known.
    """
    try:
        with recorded(Recorder(), trial.positions):
            if (trial, name) not in known:
                own = trial.module(name)
                is_exact = trial.dtype == torch.float32
                modules = (own,) if is_exact else (own, copy.deepcopy(own).float())
                known[trial, name] = [_run_module(trial, name, one) for one in modules]
            got = _run_candidate(trial, name, candidate)
    except Exception:  # other shapes, another signature: it is not the same
        return False
    want, exact = known[trial, name][0], known[trial, name][-1]
    pairs = zip(got, want, exact, strict=True)  # in float32 the module is its own measure
    return all(_apart(a, c) <= _NO_WORSE * _apart(b, c) + _APART for a, b, c in pairs)


def _inputs(trial: Trial, name: str, dtype: torch.dtype) -> Tensor:
    """Return tokens ``[1, T, hidden]`` of all sizes: functions of exponents show in small ones.

    Those of the last advance are large: limits on decays and steps show there.
    """
    first = trial.calls[name][0].first()
    assert first is not None, "a module has an input"
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(_N_TOKENS, first.shape[-1], generator=generator)
    sizes = 10.0 ** -(torch.arange(_N_TOKENS) % 3)
    sizes[ADVANCES[-1].q_start :] = 10.0
    return (0.3 * sizes[:, None] * x).to(trial.dtype).to(dtype)[None]


def _run_module(trial: Trial, name: str, module: nn.Module) -> list[Tensor]:
    """Run a module as it is bound; return its results and states."""
    bound = vars(module)["forward"]
    dtype = next(module.parameters()).dtype
    x = _inputs(trial, name, dtype)
    states = [torch.zeros(len(ADVANCES), *shape) for shape in bound.shapes]
    call, results = trial.calls[name][0], []
    named = bound.named(call.args, call.kwargs)
    hidden = next(key for key, value in named.items() if isinstance(value, Tensor))
    for one in ADVANCES:
        src = None if one.src == NO_SLOT else torch.tensor([one.src])
        tokens = slice(one.q_start, one.q_start + one.n_tokens)
        own = Stretches(1, one.n_tokens, tokens, src, torch.tensor([one.dst]))
        found = bound.advance(own, states, {**named, hidden: x}, x)
        results.append(found[0])
    return [torch.cat(results).float(), *states]


def _run_candidate(trial: Trial, name: str, candidate: KernelMixer) -> list[Tensor]:
    x = _inputs(trial, name, trial.dtype)
    states = [torch.zeros(len(ADVANCES), *shape) for shape in candidate.shapes]
    batch = native.StateBatch(_N_TOKENS, dtype_of(x.dtype), ADVANCES)
    return [candidate.advance(x, states, batch)[0].float(), *states]


def _apart(got: Tensor, want: Tensor) -> float:
    """Return the largest difference of two rows, or states of a head, as a share of their size."""
    got, want = got.flatten(2 if got.dim() > 3 else 1), want.flatten(2 if want.dim() > 3 else 1)
    usual = want.square().mean(-1).sqrt()
    usual = usual + 1e-6 * usual.max() + 1e-12
    found = ((got - want).square().mean(-1).sqrt() / usual).max()
    return float(found) if bool(found.isfinite()) else float("inf")


# What a module has ------------------------------------------------------------------------------


def _look_at(trial: Trial, in_own_type: Trial, name: str) -> _Module | None:
    own, call = trial.module(name), trial.calls[name][0]
    bound = vars(own).get("forward")
    x = call.first()
    if not isinstance(bound, Mixer) or not bound.is_alone or x is None:
        return None
    if not isinstance(call.result, Tensor) or time_limit_of(own) is not None:
        return None  # the kernel's scan keeps no limit
    convs = [key for key, one in own.named_modules() if isinstance(one, nn.Conv1d)]
    mixes = [key for key, one in own.named_modules() if isinstance(one, _LINEAR)]
    of_conv = bound.places.get(("convolution", 0))
    if len(convs) != 1 or of_conv is None or len(bound.shapes) > 2:
        return None
    said = {key: trial.calls[f"{name}.{key}"] for key in mixes}
    if any(len(calls) != 1 for calls in said.values()):
        return None
    out = [
        key for key in mixes if torch.equal(said[key][0].result.flatten(), call.result.flatten())
    ]
    given = {key: said[key][0].first() for key in mixes if key not in out}
    scale = next((found for one in given.values() if (found := _ratio(one, x))), 1.0)
    direct = [key for key, one in given.items() if _ratio(one, x) == scale]
    behind = {
        key: of
        for key, one in given.items()
        for of in direct
        if key not in direct and one is not None and torch.equal(one, said[of][0].result)
    }
    if len(out) != 1 or set(given) != {*direct, *behind}:
        return None
    of_state = bound.places.get(("recurrent", 0))
    return _Module(
        trial,
        in_own_type,
        name,
        own,
        convs[0],
        bound.shapes[of_conv][0],
        () if of_state is None else tuple(bound.shapes[of_state]),
        tuple(direct),
        scale,
        behind,
        out[0],
    )


def _ratio(one: Tensor | None, x: Tensor) -> float | None:
    """Return by which factor a tensor is another one; None: by none."""
    if one is None or one.shape != x.shape:
        return None
    factor = float(f"{float((one * x).sum() / x.square().sum()):.5g}")
    return factor if torch.allclose(one, x * factor, rtol=1e-4, atol=0) else None


def _scales(found: _Module, n: int) -> list[str]:
    """Return buffers of a module that may be factors on its linear layers' outputs, or none."""
    return [key for key, one in found.own.named_buffers(recurse=False) if one.numel() == n] or [""]


def _norms(found: _Module, inner: int) -> Iterator[_Norm]:
    """Yield norms that do what the module's own does, or a gate alone where it has none."""
    gatings = list(itertools.product((False, True), repeat=3))
    prefix, trial = f"{found.name}.", found.trial
    names = [
        key
        for key, one in found.own.named_children()
        if [p.dim() for p in one.parameters()] == [1]
        and not any(one.children())
        and not isinstance(one, _LINEAR)
    ]
    names = [key for key in names if len(trial.calls[prefix + key]) == 1]
    if len(names) != 1:
        yield from (_Norm("", gating, 0.0, inner) for gating in gatings if not any(gating[::2]))
        return
    norm = found.own.get_submodule(names[0])
    args = trial.calls[prefix + names[0]][0].args
    n_weights = next(norm.parameters()).numel()
    if len(args) != 2 or inner % n_weights or not all(isinstance(one, Tensor) for one in args):
        return
    values = [value for value in vars(norm).values() if isinstance(value, float) and 0 < value < 1]
    groups = [n_weights]
    groups += [n for n in vars(norm).values() if type(n) is int and 1 < n < n_weights]
    groups += [n_weights // n for n in vars(norm).values() if type(n) is int and 1 < n < n_weights]
    for group, gating, eps in itertools.product(dict.fromkeys(groups), gatings, values or [1e-6]):
        one = _Norm(names[0], gating, eps, group)
        trials = {trial, found.in_own_type}
        if n_weights % group == 0 and all(_is_norm(each, prefix, one) for each in trials):
            yield one


def _is_norm(trial: Trial, prefix: str, one: _Norm) -> bool:
    """Return true if the kernel's norm makes of rows what a module makes of them."""
    norm, args = trial.module(prefix + one.name), trial.calls[prefix + one.name][0].args
    shape = args[0].shape
    generator = torch.Generator().manual_seed(9)
    x, gates = (torch.randn(shape, generator=generator).to(trial.dtype) for _ in range(2))
    gates = gates.view(args[1].shape)
    weight = next(norm.parameters()).detach().float()
    gates_first, is_sigmoid, rounds = one.gating
    made = native.GatedNorm(
        shape[-1],
        one.group,
        address_of(weight),
        weight.numel(),
        eps=one.eps,
        gates_first=gates_first,
        is_sigmoid=is_sigmoid,
        rounds=rounds,
    )
    out = torch.empty_like(x)
    n, dtype = x.numel() // shape[-1], dtype_of(x.dtype)
    made.run(n, dtype, address_of(x), address_of(gates), shape[-1], address_of(out))
    with torch.inference_mode():
        want: Tensor = norm(x, gates)
    return trial.alike(out.view(want.shape), want)


def rounds_between(in_bfloat16: Trial, name: str, part: MixerPart) -> bool:
    """Return true if the norm of a part rounds before its weight, which float32 does not show.

    Args:
        in_bfloat16: trial of the network.
        name: of the module.
        part: what it was found to be.
    """
    if not part.norm:
        return False
    gates_first, is_sigmoid, _ = part.gating
    one = _Norm(part.norm, (gates_first, is_sigmoid, False), part.eps, part.group)
    return not _is_norm(in_bfloat16, f"{name}.", one)


def _vectors(found: _Module, sizes: Sequence[int], norm: str) -> Iterator[tuple[str, ...]]:
    """Yield a module's own parameters of these sizes, in any order; all others are known."""
    known: list[nn.Module] = [
        one for one in found.own.modules() if isinstance(one, (*_LINEAR, nn.Conv1d))
    ]
    known += [found.own.get_submodule(norm)] if norm else []
    ids = {id(parameter) for one in known for parameter in one.parameters()}
    own = [(key, p.numel()) for key, p in found.own.named_parameters() if id(p) not in ids]
    for order in itertools.permutations(own):
        if [size for _, size in order] == list(sizes):
            yield tuple(key for key, _ in order)


# Candidates -------------------------------------------------------------------------------------


def _convolutions(found: _Module) -> Iterator[MixerPart]:
    """Yield short convolutions between two factors, as LFM2 has them."""
    n = found.width
    if len(found.direct) != 1 or found.outputs(found.direct[0]) != 3 * n or found.behind:
        return
    for at in itertools.permutations((2 * n, 0, n)):
        yield _part(found, "convolution", found.direct, at, (n, 1, 1, 1))


def _scans(found: _Module) -> Iterator[MixerPart]:
    """Yield Mamba 2: one linear layer says a gate, what is convolved, and steps."""
    n_heads, head_dim, dim = found.state
    inner = n_heads * head_dim
    n_groups, rest = divmod(found.width - inner, 2 * dim)
    is_one = len(found.direct) == 1 and not found.behind
    if rest or n_groups < 1 or n_heads % n_groups or not is_one:
        return
    if found.outputs(found.direct[0]) != inner + found.width + n_heads:
        return
    at = (inner, 0, inner + found.width)
    for norm in _norms(found, inner):
        for rates, shifts, skips in _vectors(found, [n_heads] * 3, norm.name):
            part = _part(found, "scan", found.direct, at, (n_heads, n_groups, head_dim, dim), norm)
            part = replace(part, rates=rates, shifts=shifts, skips=skips, has_silu=True)
            for scales in _scales(found, inner + found.width + n_heads):
                yield replace(part, scales=scales)


def _deltas(found: _Module) -> Iterator[MixerPart]:
    """Yield gated delta rules, with linear layers for each of what they read or for several."""
    n_heads, k_dim, v_dim = found.state
    inner = n_heads * v_dim
    n_keys, rest = divmod(found.width - inner, 2 * k_dim)
    if rest or n_keys < 1 or n_heads % n_keys:
        return
    heads = n_heads, n_keys, k_dim, v_dim
    norms = list(_norms(found, inner))
    for inputs, at, gate, decay, is_by_head in _layouts(found, heads):
        n_decays = found.outputs(decay[1]) // n_heads if decay else 1
        for norm, scale in itertools.product(norms, (1.0, 2.0)):
            for rates, shifts in _vectors(found, [n_heads, n_heads * n_decays], norm.name):
                yield replace(
                    _part(found, "delta", inputs, at, heads, norm),
                    gate=gate,
                    decay=decay,
                    is_by_head=is_by_head,
                    rates=rates,
                    shifts=shifts,
                    has_silu=True,
                    beta_scale=scale,
                )


Layout = tuple[tuple[str, ...], tuple[int, ...], tuple[str, ...], tuple[str, ...], bool]


def _layouts(found: _Module, heads: tuple[int, int, int, int]) -> Iterator[Layout]:
    """Yield which linear layers may say q, k, v, gates, decays and beta, and where they are."""
    n_heads, _, k_dim, v_dim = heads
    wide, inner = found.width, n_heads * v_dim
    if [found.outputs(one) for one in found.direct] == [wide + inner, 2 * n_heads]:
        at = wide
        yield found.direct, (0, at, at + inner + n_heads, at + inner), (), (), True
    firsts = set(found.behind.values())
    terminal = [one for one in (*found.direct, *found.behind) if one not in firsts]
    for gate, decay, beta in itertools.permutations(terminal, 3):
        channels = [one for one in terminal if one not in (gate, decay, beta)]
        sizes = [found.outputs(one) for one in (gate, beta)]
        if sizes != [inner, n_heads] or found.outputs(decay) not in (n_heads, n_heads * k_dim):
            continue
        if sum(map(found.outputs, channels)) != wide or beta in found.behind:
            continue
        for order in itertools.permutations(channels):
            if not any(one in found.behind for one in order):
                yield _layout(found, order, gate, decay, beta)


def _layout(found: _Module, channels: Sequence[str], gate: str, decay: str, beta: str) -> Layout:
    """Put linear layers behind one another: q, k and v first."""
    behind = [(found.behind[one], one) if one in found.behind else () for one in (gate, decay)]
    firsts = [chain[0] if chain else one for chain, one in zip(behind, (gate, decay), strict=True)]
    inputs = (*channels, *firsts, beta)
    ends = list(itertools.accumulate(map(found.outputs, inputs)))
    starts = dict(zip(inputs, [0, *ends], strict=False))
    at = [-1 if chain else starts[one] for chain, one in zip(behind, (gate, decay), strict=True)]
    return inputs, (0, *at, starts[beta]), behind[0], behind[1], False


def _part(
    found: _Module,
    kind: str,
    inputs: tuple[str, ...],
    at: tuple[int, ...],
    heads: tuple[int, ...],
    norm: _Norm | None = None,
) -> MixerPart:
    """Describe a part whose recurrence has no parameters yet."""
    name, gating, eps, group = norm or _Norm("", (False, False, False), 0.0, 1)
    return MixerPart(
        kind=kind,
        inputs=inputs,
        scale=found.scale,
        scales="",
        at=at,
        gate=(),
        decay=(),
        is_by_head=False,
        heads=heads,
        conv=found.conv,
        has_silu=False,
        rates="",
        shifts="",
        skips="",
        beta_scale=1.0,
        norm=name,
        gating=gating,
        eps=eps,
        group=group,
        out=found.out,
    )
