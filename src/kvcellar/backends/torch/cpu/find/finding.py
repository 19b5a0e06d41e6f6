"""Parts of a network that the kernel computes, found by running them.

A part is described from what a module has: its linear layers, its parameters, how they are called.
The kernel's module of that description then runs beside the module itself, on a copy with random
weights (``trial.py``), and is taken only where they agree, in float32 and in the network's own
type. No name of a class or a family decides anything.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvcellar.backends.torch.cpu.find.finding_recurrent import Known, does_the_same, mixer_parts
from kvcellar.backends.torch.cpu.find.trial import (
    AnyExperts,
    Attended,
    IsLinear,
    LinearStandIn,
    LongPast,
    Mixes,
    ModuleCall,
    Recorder,
    Trial,
    recorded,
    run,
)
from kvcellar.backends.torch.cpu.modules.parts import (
    AttentionPart,
    LayerPart,
    MlpPart,
    NormPart,
    Part,
    build,
    read_eps,
    read_weight,
)
from kvcellar.backends.torch.cpu.modules.recurrent import KernelMixer, MixerPart
from kvcellar.backends.torch.cpu.modules.rotations import possible_rotations
from kvcellar.errors import ConfigError


class PartFinder:
    """Looks for parts of one network, from the smallest to the largest.

    Attributes:
        parts: what was found, by name.
        exact: the network in float32.
        own: in its own type.
    """

    def __init__(self, network: Any, is_linear: IsLinear) -> None:
        """Run copies of a network; it stays as it is.

        Raises:
            Exception: whatever the network raises where it cannot be copied or run like this.
        """
        self.parts: dict[str, Part] = {}
        self._known: Known = {}
        self._again = network, is_linear
        self.exact = Trial(network, torch.float32, is_linear)
        is_exact = network.dtype == torch.float32
        self.own = self.exact if is_exact else Trial(network, network.dtype, is_linear)

    def find(self) -> None:
        """Fill ``parts``; what lies around them runs with them, or nothing is found."""
        names = list(self.exact.calls)
        self._find_mixers()
        for name in names:
            self._take_first(name, self._norms(name))
        for name in names:
            self._take_first(name, self._mlps(name))
        for name in dict.fromkeys(one.module for one in self.exact.attended):
            self._take_first(name, self._attentions(name))
        for name in [name for name, part in self.parts.items() if isinstance(part, AttentionPart)]:
            parent = name.rpartition(".")[0]
            self._take_first(parent, self._layers(parent))
        if not self._run_whole():
            self.parts.clear()

    def in_bfloat16(self) -> Trial:
        """Run the network in bfloat16, of which only what is rounded differs."""
        network, is_linear = self._again
        return Trial(network, torch.bfloat16, is_linear)

    def find_mixers(self) -> None:
        """Fill ``parts`` with recurrent modules alone."""
        self._find_mixers()
        if not self._run_whole():
            self.parts.clear()

    def _find_mixers(self) -> None:
        before: list[MixerPart] = []
        for name in list(self.exact.calls):
            self._take_first(name, mixer_parts(self.exact, self.own, name, before))
            before += [part for part in [self.parts.get(name)] if isinstance(part, MixerPart)]

    def _take_first(self, name: str, candidates: Iterator[Part]) -> None:
        """Keep the first candidate that does what the module does."""
        for part in candidates:
            self.parts[name] = part
            if all(self._is_right(name, trial) for trial in {self.exact, self.own}):
                return
            del self.parts[name]

    def _is_right(self, name: str, trial: Trial) -> bool:
        module = trial.module(name)
        try:
            candidate = build(name, module, self.parts, _joined).eval()
        except (ConfigError, AttributeError):  # sizes or parameters that are not the kernel's
            return False
        if isinstance(candidate, KernelMixer):
            return does_the_same(trial, name, candidate, self._known)
        if isinstance(self.parts[name], NormPart) and not is_such_a_norm(trial, name, candidate):
            return False
        return trial.agrees(name, candidate)

    def _norms(self, name: str) -> Iterator[NormPart]:
        module, call = self.exact.module(name), self.exact.calls[name][0]
        x, weights = call.first(), list(module.parameters())
        if x is None or any(module.children()) or [w.shape for w in weights] != [x.shape[-1:]]:
            return
        dim = int(x.shape[-1])
        try:
            eps, weight = read_eps(module, dim), read_weight(module, dim)
        except Exception:  # not a function of one tensor: no norm
            return
        if 0 <= eps < 1 and bool(weight.isfinite().all()):
            is_own = torch.allclose(weight, weights[0], rtol=1e-6, atol=0)
            if is_own or self.own is self.exact:  # what is read off would be rounded
                yield NormPart(dim, eps, is_own)

    def _mlps(self, name: str) -> Iterator[MlpPart]:
        mixes = self.mixes(name)
        if len(mixes) not in (2, 3) or self.exact.within(name) or not self._is_covered(name):
            return
        down = self._said_last(name, mixes)
        if down is None:
            return
        others = [one for one in mixes if one != down]
        acts = [one for one in self._called_inside(name) if one not in mixes]
        for order, act in itertools.product(itertools.permutations(others), [None, *acts]):
            yield MlpPart(order, down, act)

    def _attentions(self, name: str) -> Iterator[AttentionPart]:
        seen = self.exact.within(name)
        mixes = self.mixes(name)
        if len(seen) != 1 or not 2 <= len(mixes) <= 4 or not name:
            return
        one = seen[0]
        heads = (one.q.shape[1], one.k.shape[1], int(one.q.shape[-1]))
        is_plain = one.k.shape == one.v.shape and one.q.shape[-1] == one.k.shape[-1]
        o = self._said_last(name, mixes)
        if not is_plain or one.has_sinks or o is None or not self._is_covered(name):
            return
        if not self.ignores_the_past(name, one):
            return
        call = self.exact.calls[name][0]
        for qkv in itertools.permutations([mix for mix in mixes if mix != o]):
            if not self._ends_with(name, qkv, one.v):
                continue
            sides = [side for side in (*call.args, *call.kwargs.values()) if type(side) is tuple]
            rotations = possible_rotations(sides[0] if sides else None, heads[2])
            for rotation, norms in itertools.product(list(rotations), self._pairs(name, heads[2])):
                yield AttentionPart(qkv, o, norms, heads, one.scale, rotation)

    def _layers(self, name: str) -> Iterator[LayerPart]:
        inside = {
            one[len(name) + 1 :]: part
            for one, part in self.parts.items()
            if one.startswith(f"{name}.") and "." not in one[len(name) + 1 :]
        }
        attentions = [one for one, part in inside.items() if isinstance(part, AttentionPart)]
        mlps = [one for one, part in inside.items() if isinstance(part, MlpPart) and not part.act]
        mlps += [
            one for one, child in self.exact.module(name).named_children() if _has_experts(child)
        ]
        norms = [one for one, part in inside.items() if isinstance(part, NormPart)]
        if len(attentions) != 1 or len(mlps) != 1 or not self._is_covered(name):
            return
        attention = self.parts[f"{name}.{attentions[0]}"]
        assert isinstance(attention, AttentionPart)
        of_heads = [f"{name}.{attentions[0]}.{one}" for one in attention.norms or ()]
        if all(isinstance(self.parts.get(one), NormPart) for one in of_heads):
            for before, between in itertools.permutations(norms, 2):
                yield LayerPart(before, attentions[0], between, mlps[0])

    def mixes(self, name: str) -> list[str]:
        """Return linear layers inside a module, in the order of their calls, if one each."""
        inside = self._called_inside(name)
        found = [one for one in inside if isinstance(self._inner(name, one), LinearStandIn)]
        modules = self.exact.module(name).modules()
        is_all = len(found) == sum(isinstance(module, LinearStandIn) for module in modules)
        return found if is_all else []

    def _called_inside(self, name: str) -> list[str]:
        """Return modules inside another that have none inside, in the order of their calls."""
        prefix = f"{name}."
        return [
            one[len(prefix) :]
            for one in self.exact.calls
            if one.startswith(prefix) and not any(self.exact.module(one).children())
        ]

    def _inner(self, name: str, relative: str) -> nn.Module:
        return self.exact.module(f"{name}.{relative}")

    def _calls(self, name: str, relative: str) -> list[ModuleCall]:
        return self.exact.calls[f"{name}.{relative}"]

    def _is_covered(self, name: str) -> bool:
        """Return true if a module's parameters are all of modules that have none inside."""
        known = {
            id(parameter)
            for relative in self._called_inside(name)
            for parameter in self._inner(name, relative).parameters()
        }
        return all(id(parameter) in known for parameter in self.exact.module(name).parameters())

    def _said_last(self, name: str, mixes: Sequence[str]) -> str | None:
        """Return the linear layer whose result is the module's."""
        result = self.exact.calls[name][0].result
        result = result[0] if isinstance(result, tuple) else result
        for one in mixes:
            said = self._calls(name, one)[0].result
            is_tensor = isinstance(result, Tensor) and said.numel() == result.numel()
            if is_tensor and torch.equal(said.view(-1), result.reshape(-1)):
                return one
        return None

    def _ends_with(self, name: str, qkv: Sequence[str], v: Tensor) -> bool:
        """Return true if linear layers say v last."""
        said = torch.cat([self._calls(name, one)[0].result for one in qkv], -1)
        flat = v.transpose(1, 2).flatten(2)
        said = said.view(1, flat.shape[1], -1)
        return said.shape[-1] > flat.shape[-1] and torch.equal(said[..., -flat.shape[-1] :], flat)

    def _pairs(self, name: str, head_dim: int) -> list[tuple[str, str] | None]:
        """Return which modules may be norms of q's and k's heads."""
        norms = []
        for one in self._called_inside(name):
            call = self._calls(name, one)[0]
            x, is_mix = call.first(), isinstance(self._inner(name, one), LinearStandIn)
            is_same = x is not None and isinstance(call.result, Tensor) and not is_mix
            if is_same and x is not None and call.result.shape == x.shape:
                norms += [one] * (x.shape[-1] == head_dim)
        pairs = list(itertools.permutations(norms, 2))
        pairs += [(one, one) for one in norms if len(self._calls(name, one)) == 2]
        return [*pairs, None]

    def ignores_the_past(self, name: str, one: Attended) -> bool:
        """Return true if q and k are the same behind a long past that the module can ask."""
        module, call = self.exact.module(name), self.exact.calls[name][0]
        bound = inspect.signature(module.forward).bind(*call.args, **call.kwargs)
        if "past_key_values" not in inspect.signature(module.forward).parameters:
            return True
        bound.arguments["past_key_values"] = LongPast()
        recorder = Recorder()
        try:
            with recorded(recorder, self.exact.positions):
                module(*bound.args, **bound.kwargs)
        except Exception:  # it asks for more than its length
            return False
        got = recorder.seen
        return len(got) == 1 and self.exact.alike([got[0].q, got[0].k], [one.q, one.k])

    def _run_whole(self) -> bool:
        """Return true if the network runs with all that was found in its place."""
        network = self.exact.network
        try:
            for name in outermost(self.parts):
                module = build(name, self.exact.module(name), self.parts, _joined)
                network.set_submodule(name, module)
            logits = run(network, self.exact.positions, Recorder())
        except Exception:  # something around a part asks for what only the module has
            return False
        return logits.shape == self.exact.result.shape


def outermost(names: Any) -> list[str]:
    """Return the names of modules that lie in none of the others."""
    there = set(names)
    return [name for name in names if not any(above in there for above in _above(name))]


def _above(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _has_experts(module: nn.Module) -> bool:
    """Return true if a module is a mixture's block: experts lie in it, beside what chooses them."""
    return any(isinstance(one, AnyExperts) for one in module.modules() if one is not module)


def _joined(mixes: Sequence[nn.Module]) -> nn.Module:
    return mixes[0] if len(mixes) == 1 else Mixes(mixes)


def is_such_a_norm(trial: Trial, name: str, candidate: Callable[[Tensor], Tensor]) -> bool:
    """Compare a norm on rows of any size: what is added to the squares shows in small ones."""
    shape = trial.calls[name][0].result.shape
    generator = torch.Generator().manual_seed(3)
    sizes = 10.0 ** torch.linspace(-4, 3, shape[1]).view(-1, *[1] * (len(shape) - 2))
    x = (sizes * torch.randn(shape, generator=generator)).to(trial.dtype)
    with torch.inference_mode():
        return trial.alike(candidate(x), trial.module(name)(x))
