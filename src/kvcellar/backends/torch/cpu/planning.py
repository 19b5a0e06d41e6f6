"""The plan of a network, read off a run of it; see :mod:`kvcellar.models.plans.plan`.

A trial (``find/trial.py``) keeps what every module was given and what it said. A plan is a claim
about these: that one module's result is another one's input, that a sum is of these two, that a
norm adds so much to its weight. Each is tried on the numbers, in float32 and, where rounding
decides, in bfloat16; what no plan can say of has none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from kvcellar.backends.torch.cpu.find.finding import PartFinder, is_such_a_norm
from kvcellar.backends.torch.cpu.find.finding_recurrent import rounds_between
from kvcellar.backends.torch.cpu.find.trial import (
    IDS,
    AnyExperts,
    Attended,
    LinearStandIn,
    ModuleCall,
    Trial,
)
from kvcellar.backends.torch.cpu.modules.mixtures import find_gate
from kvcellar.backends.torch.cpu.modules.parts import MlpPart, read_eps
from kvcellar.backends.torch.cpu.modules.recurrent import MixerPart
from kvcellar.backends.torch.cpu.modules.rotations import Rotation, possible_rotations
from kvcellar.backends.torch.cpu.planning_latents import find_attention, latent_layer
from kvcellar.backends.torch.cpu.planning_mixtures import find_mixture
from kvcellar.backends.torch.cpu.planning_recurrent import plan_recurrent
from kvcellar.models.facts import ModelFacts
from kvcellar.models.plans.plan import (
    GELU_TANH,
    SILU,
    Gate,
    LatentPlan,
    LayerPlan,
    LinearPlan,
    MixturePlan,
    ModelPlan,
    NormPlan,
    RopePlan,
)

_PLACES = (0, 1, 2, 3, 17, 255, 1000, 4095)
"""Positions at which frequencies are held against the module that they were read of."""

_NEAR = 1e-4
"""Relative distance within which a factor that was measured is a number of the config."""


_NEAREST = 1e-6
"""Relative distance likewise, where the number is a ratio of two of the config's: there are many
ratios, so that one of them is near by chance."""


class _UnsaidError(Exception):
    """A network does something that a plan cannot say."""


def plan_of(network: Any, finder: PartFinder, facts: ModelFacts) -> ModelPlan | None:
    """Make the plan of a network, before its parts are replaced.

    Args:
        network: of transformers, on a CPU.
        finder: that has run it, and found its parts.
        facts: of the model.

    Returns:
        The plan; None where the network has something that a plan cannot say.
    """
    if not facts.rope.is_fixed or facts.others:
        return None
    bare = tuple(replace(one, askers=(), by_token=False) for one in facts.states)
    try:
        return _Planner(network, finder).plan(replace(facts, states=bare))
    except _UnsaidError:
        return None


class _Planner:
    """Names the tensors of a network, and says what it makes of them."""

    def __init__(self, network: Any, finder: PartFinder) -> None:
        self._network, self._finder, self._exact = network, finder, finder.exact
        self._rounded = finder.own if finder.own is not finder.exact else finder.in_bfloat16()
        self._names = {id(one): name for name, one in reversed(list(network.named_parameters()))}
        self._ropes: list[RopePlan] = []

    def plan(self, facts: ModelFacts) -> ModelPlan:
        """Make the plan.

        Raises:
            _UnsaidError: there is none.
        """
        mixing: dict[str, Attended | MixerPart] = {one.module: one for one in self._exact.attended}
        parts = self._finder.parts
        mixing |= {name: one for name, one in parts.items() if isinstance(one, MixerPart)}
        inside = [name for name in self._exact.calls if name in mixing]
        names = [name.rpartition(".")[0] for name in inside]
        are_states = [number in facts.state_numbers for number in range(facts.n_layers)]
        if not names or len(set(names)) != len(names):
            raise _UnsaidError
        if [isinstance(mixing[name], MixerPart) for name in inside] != are_states:
            raise _UnsaidError
        x = self._call(names[0]).first()
        embedding, scale, rounds = self._embedding(names[0])
        layers = []
        for name, at in zip(names, inside, strict=True):
            if not _is_one(self._call(name).first(), x):
                raise _UnsaidError
            layers.append(self._layer(name, at, mixing[at]))
            x = _said(self._call(name))
        if not facts.states and any(one.is_gated for one in layers):
            raise _UnsaidError  # models are run layer by layer where some keep states
        found = self._who_takes(list(self._exact.calls), x, self._is_norm)
        head, before = self._head(self._call(found).result)
        logit_scale, cap = self._logits(self._call(head).result)
        if before != 1.0 and (cap is not None or any(self._linear([head]).biases)):
            raise _UnsaidError
        return ModelPlan(
            facts=facts,
            embedding=embedding,
            layers=tuple(layers),
            norm=self._norm(found),
            head=self._linear([head]),
            ropes=tuple(self._ropes),
            embedding_scale=scale,
            rounds_scale=rounds,
            logit_scale=before * logit_scale,
            logit_cap=cap,
        )

    # From one module to the next ----------------------------------------------------------------

    def _call(self, name: str, trial: Trial | None = None) -> ModuleCall:
        """Return the only call of a module."""
        calls = (trial or self._exact).calls.get(name, ())
        if len(calls) != 1:
            raise _UnsaidError
        return calls[0]

    def _is_norm(self, name: str) -> bool:
        own = list(self._exact.module(name).parameters())
        return len(own) == 1 and own[0].dim() == 1

    def _is_linear(self, name: str) -> bool:
        return isinstance(self._exact.module(name), LinearStandIn)

    def _who_takes(self, names: Sequence[str], x: Any, is_kind: Any) -> str:
        """Return the module of a kind that is given x and nothing else."""
        for name in names:
            calls = self._exact.calls[name]
            if len(calls) == 1 and is_kind(name) and _is_one(calls[0].first(), x):
                return name
        raise _UnsaidError

    def _norm_to(self, names: Sequence[str], x: Any) -> str | None:
        """Return the norm whose result is x; None: there is none."""
        found = (name for name in names if _is_one(self._exact.calls[name][0].result, x))
        return next(found, None)

    def _norm_of(self, names: Sequence[str], x: Any) -> str | None:
        """Return the norm that is given x; None: there is none."""
        found = (name for name in names if _is_one(self._exact.calls[name][0].first(), x))
        return next(found, None)

    def _linear(self, names: Sequence[str]) -> LinearPlan:
        """Plan linear layers whose outputs lie one behind the other."""
        modules = [self._network.get_submodule(name) for name in names]
        own = [list(one.parameters(recurse=False)) for one in modules]
        if any(isinstance(one, nn.Linear) is False for one in modules):
            raise _UnsaidError  # its matrix may be turned
        biases = [self._names[id(one[1])] if len(one) > 1 else None for one in own]
        return LinearPlan(tuple(self._names[id(one[0])] for one in own), tuple(biases))

    # Parts --------------------------------------------------------------------------------------

    def _norm(self, name: str) -> NormPlan:
        """Plan a norm."""
        module = self._exact.module(name)
        (own,) = module.parameters()
        dim = own.shape[0]
        try:
            eps = read_eps(module, dim)
        except Exception:  # it takes something else than one tensor
            raise _UnsaidError from None
        for offset, in_floats in itertools.product((0.0, 1.0), (False, True)):
            if all(
                is_such_a_norm(
                    trial, name, _PlannedNorm(trial.module(name), eps, offset, in_floats)
                )
                for trial in (self._exact, self._rounded)
            ):
                (weight,) = self._network.get_submodule(name).parameters()
                return NormPlan(self._names[id(weight)], eps, offset, in_floats)
        raise _UnsaidError

    def _optional(self, name: str | None) -> NormPlan | None:
        return None if name is None else self._norm(name)

    def _layer(self, name: str, at: str, one: Attended | MixerPart) -> LayerPlan:
        """Plan a decoder layer, inside of which a module has attention or is recurrent."""
        call = self._call(name)
        x, given, said = call.first(), self._call(at).first(), _said(self._call(at))
        inside = [each for each in self._exact.calls if each.startswith(f"{name}.")]
        mlps = [each for each in inside if isinstance(self._finder.parts.get(each), MlpPart)]
        experts = [each for each in inside if isinstance(self._exact.module(each), AnyExperts)]
        blocks = [each.rpartition(".")[0] for each in experts] or mlps
        norms = [
            each
            for each in inside
            if self._is_norm(each) and not each.startswith((f"{at}.", *(f"{m}." for m in blocks)))
        ]
        if len(blocks) != 1 or any(len(self._exact.calls[each]) != 1 for each in norms):
            raise _UnsaidError
        beside = [each for each in mlps if not f"{each}.".startswith(f"{blocks[0]}.")]
        if len(beside) > 1 or (beside and len(mlps) > 1):
            raise _UnsaidError
        before = None if _is_one(given, x) else self._norm_to(norms, given)
        if before is None and not _is_one(given, x):
            raise _UnsaidError
        if before is not None and not _is_one(self._call(before).first(), x):
            raise _UnsaidError
        mixer = self._call(blocks[0])
        between = self._norm_to(norms, mixer.first())
        middle = mixer.first() if between is None else self._call(between).first()
        attended, residual = self._added(norms, said, x, middle)
        mixing = _said(mixer)
        if beside:
            if not _is_one(self._call(beside[0]).first(), mixer.first()):
                raise _UnsaidError
            mixing = mixing + _said(self._call(beside[0]))
        mixed, other = self._added(norms, mixing, middle, _said(call))
        if residual != other:
            raise _UnsaidError
        return LayerPlan(
            before=self._optional(before),
            between=self._optional(between),
            **self._mixture(experts[0], mlps, beside) if experts else self._mlp(mlps[0]),
            attended=self._optional(attended),
            mixed=self._optional(mixed),
            residual=residual,
            **self._between(at, one, given, said),
        )

    def _between(self, at: str, one: Attended | MixerPart, given: Any, said: Any) -> dict[str, Any]:
        """Plan attention or a recurrent module, as fields of a layer."""
        if not isinstance(one, MixerPart):
            return self._attention(one, given, said)
        own = self._network.get_submodule(at)
        rounds = rounds_between(self._rounded, at, one)
        found = plan_recurrent(own, one, self._names, rounds=rounds)
        if found is None:
            raise _UnsaidError
        inputs = [f"{at}.{each}" for each in one.inputs]
        return {
            "qkv": self._linear(inputs),
            "o": self._linear([f"{at}.{one.out}"]),
            "q_norm": None,
            "k_norm": None,
            "heads": (0, 0, 0),
            "scale": 1.0,
            "rope": None,
            "recurrent": found,
        }

    def _added(
        self, norms: Sequence[str], said: Any, x: Any, total: Any
    ) -> tuple[str | None, float]:
        """Return which norm comes before what is said is added to x, and times what it is."""
        norm = self._norm_of(norms, said)
        added = said if norm is None else self._call(norm).result
        if not all(isinstance(each, Tensor) for each in (added, x, total)):
            raise _UnsaidError
        factor = self._known(_ratio(total - x, added))
        if not self._exact.alike(x + added * factor, total):
            raise _UnsaidError
        return norm, factor

    def _mixture(self, experts: str, mlps: Sequence[str], beside: Sequence[str]) -> dict[str, Any]:
        """Plan a mixture and the MLP in it, or beside it in the layer, as fields of a layer."""
        inside = [each for each in mlps if each not in beside]
        found = find_mixture(self._network, self._exact, self._rounded, experts, inside)
        if found is None:
            raise _UnsaidError
        gate = self._gate(found.gate)
        fields = {"gate_up": None, "down": None, "gate": gate}
        if found.mlp is not None or beside:
            fields = self._mlp(found.mlp or beside[0])
        if fields["gate"] != gate:
            raise _UnsaidError
        weight, *bias = found.router
        router = LinearPlan((weight,), (bias[0] if bias else None,))
        up, down = (f"{experts}.{each}_proj" for each in ("gate_up", "down"))
        mixture = MixturePlan(
            router=router,
            n_chosen=found.n_chosen,
            is_normalised=found.is_normalised,
            rounds_shares=found.rounds_shares,
            gate_up=up,
            down=down,
            scale=self._known(found.scale),
            biases=(f"{up}_bias", f"{down}_bias") if found.has_biases else None,
            is_crossed=found.is_crossed,
            is_sigmoid=found.is_sigmoid,
            correction=found.correction,
            rounds_logits=found.rounds_logits,
            groups=found.groups,
            share=None if found.share is None else self._linear([found.share]),
        )
        return {**fields, "mixture": mixture}

    def _mlp(self, name: str) -> dict[str, Any]:
        """Plan a gated MLP, as fields of a layer."""
        part = self._finder.parts[name]
        assert isinstance(part, MlpPart), "it was looked for"
        gate: Gate | None = SILU
        if part.act is not None:
            act: Any = self._exact.module(f"{name}.{part.act}")

            def between(x: Tensor) -> Tensor:
                first, second = x.chunk(2, -1)
                made: Tensor = act(first) * second
                return made

            gate, _ = find_gate(between, is_interleaved=False)
        if gate is None:
            raise _UnsaidError
        gate = self._gate(gate)
        up = self._linear([f"{name}.{each}" for each in part.gate_up])
        return {"gate_up": up, "down": self._linear([f"{name}.{part.down}"]), "gate": gate}

    def _gate(self, found: Gate) -> Gate:
        """Return a gate that was measured, with the numbers that it is known to have."""
        for known in (SILU, GELU_TANH):
            if max(abs(a - b) for a, b in zip(found, known, strict=True)) < _NEAR:
                return known
        alpha, cubic, shift, limit = (self._known(one) if one else 0.0 for one in found)
        return alpha, cubic, shift, limit

    def _attention(self, one: Attended, given: Any, said: Any) -> dict[str, Any]:
        """Plan attention, as fields of a layer."""
        at, trial = one.module, self._exact
        mixes = [f"{at}.{each}" for each in self._finder.mixes(at)]
        calls = {each: self._call(each) for each in mixes}
        n_heads, n_kv_heads, dim = one.q.shape[1], one.k.shape[1], int(one.q.shape[-1])
        if latent_layer(trial, at) is not None:
            return self._latent(one, given, said)
        if one.k.shape != one.v.shape or one.k.shape[-1] != dim or not mixes:
            raise _UnsaidError
        if not self._finder.ignores_the_past(at, one):
            raise _UnsaidError
        o = next((each for each in mixes if _flat(calls[each].result, said)), None)
        others = [each for each in mixes if each != o and _is_one(calls[each].first(), given)]
        if o is None or len(others) + 1 != len(mixes):
            raise _UnsaidError
        behind = one.result.transpose(1, 2)
        is_gated = not _flat(calls[o].first(), behind)
        sizes = [n_heads, n_kv_heads, n_kv_heads]
        (call,) = trial.calls[at]
        sides = [each for each in (*call.args, *call.kwargs.values()) if type(each) is tuple]
        for qkv in itertools.permutations(others):
            rows = [calls[each].result for each in qkv]
            if is_gated:
                ungated = self._ungated(rows[0], behind, calls[o].first())
                if ungated is None:
                    continue
                rows[0] = ungated
            joined = torch.cat(rows, -1)
            if joined.shape[-1] != sum(sizes) * dim:
                continue
            q, k, v = joined.view(1, len(IDS), -1, dim).split(sizes, 2)
            if not _flat(v, one.v.transpose(1, 2)):
                continue
            (q_norm, q, together), (k_norm, k, k_together) = (
                self._normed(at, q),
                self._normed(at, k),
            )
            rotation = self._rotation(q, k, one, sides[0] if sides else None)
            if rotation is None or (q_norm and k_norm and together != k_together):
                continue
            return {
                "qkv": self._linear(qkv),
                "o": self._linear([o]),
                "q_norm": self._optional(q_norm),
                "k_norm": self._optional(k_norm),
                "heads": (n_heads, n_kv_heads, dim),
                "scale": one.scale,
                "norms_together": together or k_together,
                "rope": self._rope(sides[0], rotation.n_turned) if rotation.n_turned else None,
                "sinks": self._sinks(one),
                "is_gated": is_gated,
            }
        raise _UnsaidError

    def _latent(self, one: Attended, given: Any, said: Any) -> dict[str, Any]:
        """Plan attention over latents, as fields of a layer."""
        (call,) = self._exact.calls[one.module]
        inside = [each for each in self._exact.calls if each.startswith(f"{one.module}.")]
        kinds = LinearStandIn | nn.Linear  # the latter of those that are not packed
        mixes = [each for each in inside if isinstance(self._exact.module(each), kinds)]
        turns = [each for each in (*call.args, *call.kwargs.values()) if _once(each) is not None]
        o = next((each for each in mixes if _flat(self._call(each).result, said)), None)
        if o is None or not turns or not self._finder.ignores_the_past(one.module, one):
            raise _UnsaidError
        sides = _once(turns[0])
        found = find_attention(self._exact, one, mixes, given, o, sides)
        if found is None:
            raise _UnsaidError
        norms = [self._optional(each) for each in (found.norm, found.q_norm)]
        if norms[0] is None or any(each is not None and each.in_floats for each in norms):
            raise _UnsaidError
        first, _ = found.inputs
        return {
            "qkv": self._linear(found.inputs),
            "o": self._linear([o]),
            "q_norm": None,
            "k_norm": None,
            "heads": (0, 0, 0),
            "scale": one.scale,
            "rope": self._rope(turns[0], found.shape.rotary_dim),
            "latent": LatentPlan(
                shape=found.shape,
                expand=f"{found.expand}.weight",
                norm=norms[0],
                turned=found.turned,
                q=None if found.q is None else self._linear([found.q]),
                q_norm=norms[1],
                q_size=0 if found.q is None else int(self._call(first).result.shape[-1]),
            ),
        }

    def _ungated(self, rows: Tensor, attended: Tensor, given: Any) -> Tensor | None:
        """Return rows of q, where gates lie behind each head by which ``given`` is made.

        None: there are no such gates in these rows.
        """
        if rows.numel() != 2 * attended.numel():
            return None
        q, gates = rows.view(*attended.shape[:3], 2, -1).unbind(3)
        is_such = isinstance(given, Tensor) and self._exact.alike(
            (attended * gates.sigmoid()).flatten(2), given.reshape(*rows.shape[:2], -1)
        )
        return q.flatten(2) if is_such else None

    def _normed(self, at: str, rows: Tensor) -> tuple[str | None, Tensor, bool]:
        """Return what norms rows ``[1, T, heads, dim]``, its results, and if all heads together."""
        n_heads, dim = rows.shape[2:]
        for name in [each for each in self._exact.calls if each.startswith(f"{at}.")]:
            for call in self._exact.calls[name] if self._is_norm(name) else ():
                x, result = call.first(), call.result
                if x is None or x.numel() != rows.numel() or not isinstance(result, Tensor):
                    continue
                if x.shape[-1] == n_heads * dim and _flat(x, rows):
                    return name, result.reshape(rows.shape), n_heads > 1
                if x.shape[-1] != dim:
                    continue
                if _flat(x, rows):
                    return name, result.reshape(rows.shape), False
                if x.dim() == 4 and _flat(x.transpose(1, 2), rows):
                    return name, result.transpose(1, 2), False
        return None, rows, False

    def _rotation(self, q: Tensor, k: Tensor, one: Attended, sides: Any) -> Rotation | None:
        """Return how q and k ``[1, T, heads, dim]`` are turned; None: as the kernel does not."""
        for rotation in possible_rotations(sides, q.shape[-1]):
            if rotation.is_paired or rotation.layout == "repeated":
                continue
            turned = [each.clone(memory_format=torch.contiguous_format) for each in (q, k)]
            for each in turned:
                rotation.apply(each, sides)
            heads = [each.transpose(1, 2) for each in turned]
            if self._exact.alike(heads, [one.q, one.k]):
                return rotation
        return None

    def _sinks(self, one: Attended) -> str | None:
        """Return the tensor of a logit per head."""
        if not one.has_sinks:
            return None
        own = self._network.get_submodule(one.module).named_parameters(recurse=False)
        found = [each for name, each in own if each.shape == one.q.shape[1:2] and "sink" in name]
        if len(found) != 1:
            raise _UnsaidError
        (sinks,) = found
        return str(self._names[id(sinks)])

    def _rope(self, sides: Any, n_turned: int) -> int:
        """Return the number of the rotary positions that make cosines and sines."""
        for name, calls in self._exact.calls.items():
            for call in calls:
                is_it = type(call.result) is type(sides) and self._exact.alike(call.result, sides)
                if not is_it or any(self._exact.module(name).parameters()):
                    continue
                for rope in self._ropes_of(self._exact.module(name), call, n_turned):
                    if rope not in self._ropes:
                        self._ropes.append(rope)
                    return self._ropes.index(rope)
        raise _UnsaidError

    def _ropes_of(self, module: Any, call: ModuleCall, n_turned: int) -> Iterator[RopePlan]:
        """Read frequencies off a rotary embedding, where they say what it makes of a call."""
        places = torch.tensor(_PLACES)[None]

        def moved(one: Any) -> Any:
            if not isinstance(one, Tensor):
                return one
            return torch.empty(0) if one.is_floating_point() else places

        args = [moved(one) for one in call.args]
        kwargs = {name: moved(one) for name, one in call.kwargs.items()}
        with torch.inference_mode():
            made = module(*args, **kwargs)
        if isinstance(made, Tensor):
            made = (made.real, made.imag) if made.is_complex() else ()
        sides = [side.double().numpy() for side in made]
        if len(sides) != 2:
            return
        scales = {1.0, *(v for v in vars(module).values() if isinstance(v, float))}
        for frequencies in module.buffers():
            if frequencies.shape != (n_turned // 2,):
                continue
            angles = places[0, :, None].float().numpy() * frequencies.float().numpy()
            doubled = np.concatenate((angles, angles), axis=1)
            once = sides[0].shape[-1] == angles.shape[1]
            turns = (angles if once else doubled).astype(np.float64)
            for scale in scales:
                want = np.cos(turns) * scale, np.sin(turns) * scale
                if all(
                    side.shape == (1, *turns.shape) and np.allclose(side[0], of, atol=1e-5)
                    for side, of in zip(sides, want, strict=True)
                ):
                    yield RopePlan(tuple(map(float, frequencies.tolist())), scale)

    # Around the layers --------------------------------------------------------------------------

    def _embedding(self, layer: str) -> tuple[str, float, bool]:
        """Return the tensor of the embedding, the factor on its rows, and if that is rounded."""
        for name in self._exact.calls:
            module = self._exact.module(name)
            ids = self._exact.calls[name][0].first()
            if not isinstance(module, nn.Embedding) or not _flat(ids, torch.tensor(IDS)):
                continue
            rows = [_rows(trial, name) for trial in (self._exact, self._rounded)]
            given = [self._call(layer, trial).first() for trial in (self._exact, self._rounded)]
            x = [one for one in given if one is not None and one.shape == rows[0].shape]
            if len(x) != len(given):
                raise _UnsaidError
            scale = self._known(_ratio(x[0], rows[0]))
            if not self._exact.alike(rows[0] * scale, x[0]):
                raise _UnsaidError
            factor = torch.tensor(scale)
            is_same = {
                rounds: self._rounded.alike(
                    rows[1] * (factor.to(rows[1].dtype) if rounds else scale), x[1]
                )
                for rounds in (False, True)
            }
            if not any(is_same.values()):
                raise _UnsaidError
            weight = self._network.get_submodule(name).weight
            return self._names[id(weight)], scale, not is_same[False]
        raise _UnsaidError

    def _head(self, x: Tensor) -> tuple[str, float]:
        """Return the last linear layer, and the factor on its input."""
        names = [name for name in self._exact.calls if self._is_linear(name)]
        name = names[-1] if names else ""
        given = self._call(name).first()
        if given is None or given.shape != x.shape:
            raise _UnsaidError
        factor = self._known(_ratio(given, x))
        if not self._exact.alike(x * factor, given):
            raise _UnsaidError
        return name, factor

    def _logits(self, said: Tensor) -> tuple[float, float | None]:
        """Return the factor on what the head says, and the cap on that."""
        result = self._exact.result
        scale = self._known(_ratio(result, said))
        if self._exact.alike(said * scale, result):
            return scale, None
        for cap in self._numbers():
            if cap > 0 and self._exact.alike(cap * torch.tanh(said / cap), result):
                return 1.0, cap
        raise _UnsaidError

    def _numbers(self) -> Iterator[float]:
        """Yield the numbers of the network's config."""
        config = self._network.config.get_text_config()
        for value in vars(config).values():
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield float(value)

    def _known(self, factor: float) -> float:
        """Return a factor that was measured as the config has it, where it does."""
        known = [1.0]
        for number in self._numbers():
            if number > 0:
                known += [number, 1 / number, number**0.5]
        near = [one for one in known if abs(one - factor) <= _NEAR * abs(factor)]
        if not near:
            pairs = itertools.permutations([one for one in self._numbers() if one > 0], 2)
            ratios = (a / under for a, b in pairs for under in (b, b**0.5))
            near = [one for one in ratios if abs(one - factor) <= _NEAREST * abs(factor)]
        return min(near, key=lambda one: abs(one - factor)) if near else factor


class _PlannedNorm:
    """RMSNorm as a plan says it, by torch."""

    def __init__(self, own: nn.Module, eps: float, offset: float, in_floats: bool) -> None:
        (self._weight,) = own.parameters()
        self._eps, self._offset, self._in_floats = eps, offset, in_floats

    def __call__(self, x: Tensor) -> Tensor:
        floats = x.float()
        floats = floats * torch.rsqrt(floats.square().mean(-1, keepdim=True) + self._eps)
        if self._in_floats:
            return (floats * (self._weight.float() + self._offset)).to(x.dtype)
        return floats.to(x.dtype) * (self._weight + self._offset)


def _said(call: ModuleCall) -> Any:
    """Return the first of what a module said."""
    return call.result[0] if isinstance(call.result, tuple) else call.result


def _is_one(a: Any, b: Any) -> bool:
    return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)


def _once(sides: Any) -> tuple[Tensor, Tensor] | None:
    """Return cosines and sines of each pair once, of a module's argument; None: it is another."""
    if isinstance(sides, Tensor) and sides.is_complex():
        return sides.real, sides.imag
    is_pair = type(sides) is tuple and len(sides) == 2
    if not is_pair or not all(isinstance(side, Tensor) and side.dim() == 3 for side in sides):
        return None
    cos, sin = (side.chunk(2, -1)[0] for side in sides)
    return cos, sin


def _flat(a: Any, b: Any) -> bool:
    """Return true if two tensors have the same numbers, in whatever shapes."""
    is_one = isinstance(a, Tensor) and isinstance(b, Tensor) and a.numel() == b.numel()
    return is_one and torch.equal(a.reshape(-1), b.reshape(-1))


def _rows(trial: Trial, name: str) -> Tensor:
    """Return the rows that an embedding looks up, before anything is made of them."""
    module: Any = trial.module(name)
    with torch.inference_mode():
        return F.embedding(torch.tensor([IDS]), module.weight)


def _ratio(a: Tensor, b: Tensor) -> float:
    """Return how many times b is a, by the larger half of b's numbers."""
    a, b = a.double().flatten(), b.double().flatten()
    if a.numel() != b.numel():
        raise _UnsaidError
    is_large = b.abs() >= b.abs().median()
    return float((a[is_large] / b[is_large]).median())
