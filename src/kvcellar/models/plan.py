"""The plan of a model: which parts it has, in what order, of which tensors, as plain values.

A backend that runs networks learns it, as it learns a model's facts, and whoever runs models
without a network reads it. It is of models that are an embedding, decoder layers one behind the
other, a norm and a head, where each layer is two norms, attention whose heads are turned whole, and
a gated MLP with silu.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from kvcellar.home import default_home
from kvcellar.models.facts import ModelFacts
from kvcellar.models.fingerprint import VOLATILE
from kvcellar.models.known import keep, read_kept

VERSION = 1
"""Version of how plans are made and written; those of another one are made again."""


@dataclass(frozen=True, slots=True)
class NormPlan:
    """RMSNorm: the tensor of its weight, and what is added to the mean of squares."""

    weight: str
    eps: float


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
class LayerPlan:
    """A decoder layer.

    Attributes:
        before: norm of its input.
        qkv: from there to q, k and v.
        q_norm: of q's heads before they are turned; None: there is none.
        k_norm: of k's.
        o: behind the attention.
        between: norm of what comes after attention.
        gate_up: gate and up of the MLP.
        down: its last layer.
        heads: query heads, KV heads, and numbers of a head.
        scale: factor on the logits of attention.
    """

    before: NormPlan
    qkv: LinearPlan
    q_norm: NormPlan | None
    k_norm: NormPlan | None
    o: LinearPlan
    between: NormPlan
    gate_up: LinearPlan
    down: LinearPlan
    heads: tuple[int, int, int]
    scale: float


@dataclass(frozen=True, slots=True)
class RopePlan:
    """Rotary positions: halves of a head turn against each other.

    Attributes:
        frequencies: radians per position, of each pair of numbers.
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
        rope: of all layers.
    """

    facts: ModelFacts
    embedding: str
    layers: tuple[LayerPlan, ...]
    norm: NormPlan
    head: LinearPlan
    rope: RopePlan

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of all tensors of the model, each once."""
        norms, linears = [self.norm], [self.head]
        for one in self.layers:
            norms += [n for n in (one.before, one.q_norm, one.k_norm, one.between) if n is not None]
            linears += [one.qkv, one.o, one.gate_up, one.down]
        of_linears = (name for one in linears for name in (*one.weights, *one.biases) if name)
        return tuple(dict.fromkeys((self.embedding, *(one.weight for one in norms), *of_linears)))

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
            rope = value["rope"]
            return cls(
                facts=ModelFacts.from_json(value["facts"]),
                embedding=str(value["embedding"]),
                layers=tuple(map(_layer, value["layers"])),
                norm=NormPlan(**value["norm"]),
                head=_linear(value["head"]),
                rope=RopePlan(tuple(map(float, rope["frequencies"])), float(rope["scale"])),
            )
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"this is no plan of a model: {error}") from error


def _layer(value: Mapping[str, Any]) -> LayerPlan:
    norms = {
        name: None if value[name] is None else NormPlan(**value[name])
        for name in ("before", "q_norm", "k_norm", "between")
    }
    linears = {name: _linear(value[name]) for name in ("qkv", "o", "gate_up", "down")}
    n_heads, n_kv_heads, head_dim = map(int, value["heads"])
    heads = n_heads, n_kv_heads, head_dim
    return LayerPlan(**norms, **linears, heads=heads, scale=float(value["scale"]))  # type: ignore[arg-type]


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
