"""The plan of a model: which parts it has, in what order, of which tensors, as plain values.

A backend that runs networks learns it, as it learns a model's facts, and whoever runs models
without a network reads it. It is of models that are an embedding, decoder layers one behind the
other, a norm and a head, where each layer adds attention, or what a recurrent module says, and then
a gated MLP to what comes in, or a mixture of experts that are such MLPs.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from kvcellar.home import default_home
from kvcellar.models.facts import ModelFacts
from kvcellar.models.fingerprint import VOLATILE
from kvcellar.models.known import keep, read_kept
from kvcellar.models.latents import Latents
from kvcellar.models.plans.recurrent import RecurrentPlan, recurrent_plan

VERSION = 7
"""Version of how plans are made and written; those of another one are made again."""


Made = TypeVar("Made")

HALVES, PAIRS, PARTED = TURNED = "halves", "pairs", "parted"
"""How rotary numbers beside latents lie; see :class:`LatentPlan`."""

Gate = tuple[float, float, float, float]
"""``(up + shift) * x * sigmoid(x * (alpha + cubic * x^2))``, of a gate x that is at most a limit:
alpha, cubic, shift, and the limit, which up's magnitude has as well; 0: there is none."""

ONE_GROUP = 1, 1, 1
"""Experts that are in no groups; see :class:`MixturePlan`."""

SILU: Gate = (1.0, 0.0, 0.0, 0.0)
GELU_TANH: Gate = (2 * (2 / math.pi) ** 0.5, 2 * (2 / math.pi) ** 0.5 * 0.044715, 0.0, 0.0)
"""GELU in its form with tanh, which is a sigmoid of twice as much."""


@dataclass(frozen=True, slots=True)
class NormPlan:
    """RMSNorm.

    Attributes:
        weight: tensor of its weight.
        eps: what is added to the mean of squares.
        offset: what is added to the weight.
        in_floats: true if products with the weight are not rounded before that.
    """

    weight: str
    eps: float
    offset: float = 0.0
    in_floats: bool = False


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """Linear layers of one input, whose outputs lie one behind the other.

    Attributes:
        weights: tensors ``[n_out, n_in]``.
        biases: of each; None: it has none.
    """

    weights: tuple[str, ...]
    biases: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class ApartPlan:
    """Norms of a mixture beside an MLP, each of which reads for itself what comes after attention.

    Attributes:
        router: of what the router reads.
        router_scale: factor on that.
        experts: of what experts read.
        experts_said: of what experts say, together.
        mlp_said: of what the MLP says, before both are summed.
    """

    router: NormPlan
    router_scale: float
    experts: NormPlan
    experts_said: NormPlan
    mlp_said: NormPlan

    @property
    def norms(self) -> tuple[NormPlan, ...]:
        """All of them."""
        return self.router, self.experts, self.experts_said, self.mlp_said


@dataclass(frozen=True, slots=True)
class MixturePlan:
    """A mixture of experts: gated MLPs, of which each token has those with the highest scores.

    Scores are the softmax of logits, of which one of the highest alone is that, normalised, or each
    logit's sigmoid.

    Attributes:
        router: from the input to a logit for each expert.
        n_chosen: experts of a token.
        is_normalised: true if the shares of a token's experts are divided by their sum.
        rounds_shares: true if shares are rounded to the type of the rows.
        scale: factor on shares.
        gate_up: tensor ``[n_experts, 2 * inner, hidden]``, gate's outputs first, by the name of
            transformers' parameter: checkpoints have it in several forms.
        down: tensor ``[n_experts, hidden, inner]``, the same.
        biases: of both, ``[n_experts, outputs]``; None: there are none.
        is_crossed: true if the last two axes of both are the other way round, and gate's and up's
            outputs take turns, those of the bias too.
        share: beside an MLP, which all tokens have: from the input to a logit whose sigmoid that is
            multiplied with; None: it is added as it is.
        is_sigmoid: true if scores are sigmoids.
        correction: tensor of what is added to scores only to choose; None: nothing is.
        rounds_logits: true if logits are rounded to the type of the rows.
        groups: into how many experts are divided, one behind the other, among the experts of how
            many of them a token chooses, and the sum of how many of its highest scores, with what
            is added to choose, says which groups those are.
        factors: tensor of a factor on each expert's shares; None: there is none.
        apart: norms, where the MLP beside it reads other rows; None: both read the same.
    """

    router: LinearPlan
    n_chosen: int
    is_normalised: bool
    rounds_shares: bool
    gate_up: str
    down: str
    scale: float = 1.0
    biases: tuple[str, str] | None = None
    is_crossed: bool = False
    share: LinearPlan | None = None
    is_sigmoid: bool = False
    correction: str | None = None
    rounds_logits: bool = True
    groups: tuple[int, int, int] = ONE_GROUP
    factors: str | None = None
    apart: ApartPlan | None = None

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of what stays in the model's own type: all but experts' matrices."""
        beside = () if self.share is None else (self.share,)
        vectors = [one for one in (self.correction, self.factors) if one is not None]
        norms = [] if self.apart is None else [one.weight for one in self.apart.norms]
        return (*_tensors((self.router, *beside)), *(self.biases or ()), *vectors, *norms)


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """Attention over latents, between the linear layers before it and the one behind.

    Those before say short queries, or queries of all heads, then a latent and a row of rotary
    numbers that all heads share. Queries are multiplied by what would expand K, and what heads
    attend by what would expand V.

    Attributes:
        shape: how a matrix would expand latents, head after head and K first.
        expand: tensor of that matrix.
        norm: of latents.
        turned: rotary numbers that turn against each other: ``halves`` of them; neighbours,
            ``pairs``; or those, and what they turn to lies as halves, ``parted``.
        q: from short queries to those of all heads; None: there are no short ones.
        q_norm: of short queries; None: there are none.
        q_size: numbers of a short query; 0: there is none.
    """

    shape: Latents
    expand: str
    norm: NormPlan
    turned: str
    q: LinearPlan | None = None
    q_norm: NormPlan | None = None
    q_size: int = 0

    @property
    def key_dim(self) -> int:
        """Numbers of a head's query, rotary ones last."""
        return self.shape.plain_dim + self.shape.rotary_dim

    @property
    def n_in(self) -> int:
        """Numbers of a token that the linear layers before say."""
        n_queries = self.q_size or self.shape.n_kv_heads * self.key_dim
        return n_queries + self.shape.latent_dim + self.shape.rotary_dim


@dataclass(frozen=True, slots=True)
class OwnPlan:
    """A layer's use of rows of its own: ``x + norm(out(act(gate(x)) * rows))``.

    Attributes:
        gate: from the layer's sum to as many numbers as its rows have.
        out: from there to the sum.
        norm: of what that says.
    """

    gate: LinearPlan
    out: LinearPlan
    norm: NormPlan


@dataclass(frozen=True, slots=True)
class OwnRowsPlan:
    """Rows that layers have of their own: ``(norm(scale * project(x)) + own_scale * row) * mean``.

    Gemma 4 E2B and E4B have them, as per-layer embeddings.

    Attributes:
        size: numbers of a token in each layer.
        embedding: tensor ``[vocab_size, n_layers * size]``, of which a row is a token's.
        own_scale: factor on it.
        project: from x, the token's row of the model's embedding with its factor, to as many.
        scale: factor on what that says.
        norm: of each layer's numbers of it.
        mean: factor on the sum of both.
    """

    size: int
    embedding: str
    own_scale: float
    project: LinearPlan
    scale: float
    norm: NormPlan
    mean: float


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """A decoder layer.

    Attributes:
        before: norm of its input; None: there is none, as with all norms here.
        qkv: from there to q, k and v; or to q alone, where an earlier layer's K and V are read. V's
            matrix may be K's.
        q_norm: of q's heads before they are turned.
        k_norm: of k's.
        o: behind the attention.
        between: norm of what comes after attention.
        gate_up: gate and up of the MLP; None: there is none.
        down: its last layer; None: there is none.
        heads: query heads, KV heads of its own, none where an earlier layer's are read, and numbers
            of a head.
        scale: factor on the logits of attention.
        attended: norm of what the attention says, before it is added.
        mixed: norm of what the MLP says, before it is added.
        norms_together: true if all heads of q are normed together, and all of k.
        rope: number of the model's rotary positions that turn it; None: nothing does.
        residual: factor on what is added.
        gate: of the MLP, and of experts.
        sinks: tensor of a logit per head beside those of the tokens; None: there are none.
        mixture: in place of the MLP, or beside it; None: there is none.
        is_gated: true if Q's matrix has as many outputs more, behind those of each head, by whose
            sigmoid what its attention says is multiplied.
        recurrent: in place of attention, between ``qkv`` and ``o``; all that is said of heads is
            nothing then. None: there is attention.
        latent: attention over latents; what is said of heads is nothing then, too. None: K and V
            are cached as they are.
        turns_pairs: true if neighbours of a head turn against each other, and not halves.
        v_eps: what is added to the mean of squares of each head of v, which is normed without a
            weight; None: it is not.
        own: what it makes of rows of its own, behind all else; None: it has none.
        result: tensor of a number that what it says is multiplied by; None: there is none.
    """

    before: NormPlan | None
    qkv: LinearPlan
    q_norm: NormPlan | None
    k_norm: NormPlan | None
    o: LinearPlan
    between: NormPlan | None
    gate_up: LinearPlan | None
    down: LinearPlan | None
    heads: tuple[int, int, int]
    scale: float
    attended: NormPlan | None = None
    mixed: NormPlan | None = None
    norms_together: bool = False
    rope: int | None = 0
    residual: float = 1.0
    gate: Gate = SILU
    sinks: str | None = None
    mixture: MixturePlan | None = None
    is_gated: bool = False
    recurrent: RecurrentPlan | None = None
    latent: LatentPlan | None = None
    turns_pairs: bool = False
    v_eps: float | None = None
    own: OwnPlan | None = None
    result: str | None = None

    @property
    def linears(self) -> tuple[LinearPlan, ...]:
        """Linear layers that all tokens have, but a mixture's."""
        inside = None if self.latent is None else self.latent.q
        own = () if self.own is None else (self.own.gate, self.own.out)
        found = (self.qkv, inside, self.o, self.gate_up, self.down, *own)
        return tuple(one for one in found if one is not None)

    @property
    def norms(self) -> tuple[NormPlan, ...]:
        """All norms that there are."""
        inside = () if self.latent is None else (self.latent.q_norm, self.latent.norm)
        own = () if self.own is None else (self.own.norm,)
        found = (self.before, self.q_norm, self.k_norm, self.attended, self.between, self.mixed)
        return tuple(one for one in (*found, *inside, *own) if one is not None)


@dataclass(frozen=True, slots=True)
class RopePlan:
    """Rotary positions: halves of the first numbers of a head turn against each other.

    Attributes:
        frequencies: radians per position, of each pair of numbers that turn.
        scale: factor on cosines and sines.
    """

    frequencies: tuple[float, ...]
    scale: float


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """Parts of a model.

    Attributes:
        facts: what caches and budgets need.
        embedding: tensor ``[vocab_size, hidden_size]``.
        layers: decoder layers.
        norm: behind the last one.
        head: from there to logits; its weight is the embedding where they are tied.
        ropes: what turns the heads of layers, each by its number.
        embedding_scale: factor on rows of the embedding.
        rounds_scale: true if that factor is rounded to the type of the rows.
        logit_scale: factor on logits.
        logit_cap: ``cap * tanh(logit / cap)`` is said of what that makes; None: there is no cap.
        query_growth: of two numbers, a and n: a query at position p is multiplied by
            ``1 + a * log(1 + p // n)``; None: by nothing.
        own_rows: what layers have of their own; None: they have none.
    """

    facts: ModelFacts
    embedding: str
    layers: tuple[LayerPlan, ...]
    norm: NormPlan
    head: LinearPlan
    ropes: tuple[RopePlan, ...]
    embedding_scale: float = 1.0
    rounds_scale: bool = False
    logit_scale: float = 1.0
    logit_cap: float | None = None
    query_growth: tuple[float, int] | None = None
    own_rows: OwnRowsPlan | None = None

    @property
    def mixtures(self) -> tuple[MixturePlan, ...]:
        """Mixtures of all layers that have one."""
        return tuple(one.mixture for one in self.layers if one.mixture is not None)

    @property
    def is_hybrid(self) -> bool:
        """True if there is more in a layer than a call of the kernel for all of them has.

        That are recurrent layers, attention with a gate or over latents, and neighbours that turn.
        """
        return any(
            one.recurrent or one.is_gated or one.latent or one.turns_pairs for one in self.layers
        )

    @property
    def expansions(self) -> tuple[str, ...]:
        """Names of what expands latents: matrices that stay in the model's own type."""
        return tuple(one.latent.expand for one in self.layers if one.latent is not None)

    @property
    def matrices(self) -> tuple[str, ...]:
        """Names of all matrices of the model but those of mixtures, each once."""
        linears = [self.head, *(linear for one in self.layers for linear in one.linears)]
        names = [self.embedding]
        if self.own_rows is not None:
            names.append(self.own_rows.embedding)
            linears.append(self.own_rows.project)
        names += (name for linear in linears for name in linear.weights)
        return tuple(dict.fromkeys(names))

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of all tensors of the model but those of mixtures, each once."""
        norms, linears = [self.norm], [self.head]
        for one in self.layers:
            norms += one.norms
            linears += one.linears
        names = [self.embedding]
        if self.own_rows is not None:
            names.append(self.own_rows.embedding)
            norms.append(self.own_rows.norm)
            linears.append(self.own_rows.project)
        names += [*(one.weight for one in norms), *_tensors(linears)]
        names += [name for one in self.layers for name in (one.sinks, one.result) if name]
        names += self.expansions
        for one in self.layers:
            names += () if one.recurrent is None else one.recurrent.tensors
        return tuple(dict.fromkeys(names))

    def renamed(self, name: Callable[[str], str]) -> ModelPlan:
        """Return the plan with other names of tensors.

        Args:
            name: from a name to its other one; it is asked for words of a plan, too, such as how
                rotary numbers lie, and has to leave them.
        """

        def other(value: Any) -> Any:
            if isinstance(value, str):
                return name(value)
            if isinstance(value, dict):
                return {key: other(one) for key, one in value.items()}
            return [other(one) for one in value] if isinstance(value, list | tuple) else value

        return self.from_json(other(self.to_json()))

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON object, for ``from_json``."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> ModelPlan:
        """Make a plan of a JSON object.

        Raises:
            ValueError: it is none that ``to_json`` wrote.
        """
        try:
            known = {one.name for one in fields(cls)}
            if value.keys() != known:
                raise TypeError(f"a plan has the fields {sorted(known)}, not {sorted(value)}")
            cap, growth = value["logit_cap"], value["query_growth"]
            made = cls(
                facts=ModelFacts.from_json(value["facts"]),
                embedding=str(value["embedding"]),
                layers=tuple(map(_layer, value["layers"])),
                norm=_norm(value["norm"]),
                head=_linear(value["head"]),
                ropes=tuple(map(_rope, value["ropes"])),
                embedding_scale=float(value["embedding_scale"]),
                rounds_scale=bool(value["rounds_scale"]),
                logit_scale=float(value["logit_scale"]),
                logit_cap=None if cap is None else float(cap),
                query_growth=None if growth is None else (float(growth[0]), int(growth[1])),
                own_rows=_optional(_own_rows, value["own_rows"]),
            )
            if made.query_growth is not None and made.query_growth[1] < 1:
                raise TypeError("queries grow with stretches of no positions")
            if any(one.rope not in (None, *range(len(made.ropes))) for one in made.layers):
                raise TypeError("a layer is turned by what is not there")
            keeps_states = [one.recurrent is not None for one in made.layers]
            if keeps_states != [n in made.facts.state_numbers for n in range(len(keeps_states))]:
                raise TypeError("other layers are recurrent than those that keep states")
            shapes = [one.recurrent.shapes for one in made.layers if one.recurrent is not None]
            if shapes != [one.shapes for one in made.facts.states]:
                raise TypeError("a recurrent layer has states of other sizes")
            sources = {one.layer for one in made.facts.layers if one.source is not None}
            has_none = {n for n, one in enumerate(made.layers) if one.heads[0] and not one.heads[1]}
            if sources != has_none:
                raise TypeError("other layers have no KV heads than those that read an earlier's")
            readers = [made.layers[n] for n in has_none]
            if any(one.k_norm is not None or one.v_eps is not None for one in readers):
                raise TypeError("a layer norms K or V, and has none of its own")
            if {one.own is not None for one in made.layers} != {made.own_rows is not None}:
                raise TypeError("all layers have rows of their own, or none has")
            if made.is_hybrid and (sources or made.own_rows):
                raise TypeError("layers that the kernel runs in parts have all of their own")
            latents = {n: one.latent.shape for n, one in enumerate(made.layers) if one.latent}
            if latents != made.facts.latents:
                raise TypeError("other layers attend over latents than those that cache them")
            return made
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"this is no plan of a model: {error}") from error


def _tensors(linears: Iterable[LinearPlan]) -> list[str]:
    return [name for one in linears for name in (*one.weights, *one.biases) if name]


def _layer(value: Mapping[str, Any]) -> LayerPlan:
    of_norms = ("before", "q_norm", "k_norm", "between", "attended", "mixed")
    made = dict(value)
    made |= {name: _optional(_norm, value[name]) for name in of_norms}
    made |= {name: _linear(value[name]) for name in ("qkv", "o")}
    made |= {name: _optional(_linear, value[name]) for name in ("gate_up", "down")}
    made["mixture"] = _optional(_mixture, value["mixture"])
    made["recurrent"] = _optional(recurrent_plan, value["recurrent"])
    made["latent"] = _optional(_latent, value["latent"])
    made |= {"own": _optional(_own, value["own"]), "v_eps": _optional(float, value["v_eps"])}
    n_heads, n_kv_heads, head_dim = map(int, value["heads"])
    alpha, cubic, shift, limit = map(float, value["gate"])
    made |= {"heads": (n_heads, n_kv_heads, head_dim), "gate": (alpha, cubic, shift, limit)}
    made |= {name: float(value[name]) for name in ("scale", "residual")}
    layer = LayerPlan(**made)
    if (layer.gate_up is None) != (layer.down is None) or not (layer.down or layer.mixture):
        raise TypeError("a layer has neither an MLP nor a mixture")
    return layer


def _optional(make: Callable[[Any], Made], value: Any) -> Made | None:
    return None if value is None else make(value)


def _mixture(value: Mapping[str, Any]) -> MixturePlan:
    made = dict(value)
    made |= {"router": _linear(value["router"]), "share": _optional(_linear, value["share"])}
    made["biases"] = _optional(tuple, value["biases"])
    made |= {"n_chosen": int(value["n_chosen"]), "scale": float(value["scale"])}
    n_groups, n_kept, n_best = map(int, value.get("groups", ONE_GROUP))
    if not 0 < n_kept <= n_groups or n_best < 1:
        raise TypeError("groups of experts of which none is chosen")
    made["apart"] = _optional(_apart, value["apart"])
    return MixturePlan(**made | {"groups": (n_groups, n_kept, n_best)})


def _apart(value: Mapping[str, Any]) -> ApartPlan:
    norms = ("router", "experts", "experts_said", "mlp_said")
    return ApartPlan(**dict(value) | {name: _norm(value[name]) for name in norms})


def _own(value: Mapping[str, Any]) -> OwnPlan:
    return OwnPlan(_linear(value["gate"]), _linear(value["out"]), _norm(value["norm"]))


def _own_rows(value: Mapping[str, Any]) -> OwnRowsPlan:
    made = dict(value) | {"project": _linear(value["project"]), "norm": _norm(value["norm"])}
    plan = OwnRowsPlan(**made)
    if type(plan.size) is not int or plan.size < 1:
        raise TypeError("rows of layers' own that have no numbers")
    return plan


def _latent(value: Mapping[str, Any]) -> LatentPlan:
    made = dict(value) | {"shape": Latents(**value["shape"]), "norm": _norm(value["norm"])}
    made |= {"q": _optional(_linear, value["q"]), "q_norm": _optional(_norm, value["q_norm"])}
    plan = LatentPlan(**made)
    is_known = plan.shape.is_by_head and plan.shape.is_k_first and not plan.shape.is_rotary_first
    sizes = tuple(asdict(plan.shape).values())[4:]
    if (
        not is_known
        or plan.turned not in TURNED
        or not all(type(n) is int and n > 0 for n in sizes)
    ):
        raise TypeError("latents that lie as no rule here knows")
    if plan.norm.in_floats or (plan.q_norm is not None and plan.q_norm.in_floats):
        raise TypeError("norms of latents round before they multiply")
    if plan.shape.rotary_dim % 2 or (plan.q is None) != (plan.q_size == 0):
        raise TypeError("latents whose sizes do not fit")
    return plan


def _norm(value: Mapping[str, Any]) -> NormPlan:
    return NormPlan(**value)


def _rope(value: Mapping[str, Any]) -> RopePlan:
    return RopePlan(tuple(map(float, value["frequencies"])), float(value["scale"]))


def _linear(value: Mapping[str, Any]) -> LinearPlan:
    return LinearPlan(tuple(value["weights"]), tuple(value["biases"]))


def plan_path(raw: Mapping[str, Any]) -> Path:
    """Return where the plan of a model is kept, by the digest of its ``config.json``."""
    told = {key: value for key, value in raw.items() if key not in VOLATILE}
    text = json.dumps([told, VERSION], sort_keys=True, default=str)
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    return default_home() / "models" / f"{digest}.plan.json"


def keep_plan(raw: Mapping[str, Any], plan: ModelPlan) -> None:
    """Keep the plan of a model; a folder that cannot be written is no error."""
    keep(plan_path(raw), plan.to_json())


def kept_plan(raw: Mapping[str, Any]) -> ModelPlan | None:
    """Return the plan of a model by its ``config.json``; None: none is kept."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        return ModelPlan.from_json(read_kept(plan_path(raw)))
    return None
