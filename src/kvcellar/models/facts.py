"""Facts of a model that a cache and a budget need, as the model itself was seen to have them.

A backend that runs models learns them (:mod:`kvcellar.backends.torch.learn.probe`), and they are
kept (:mod:`kvcellar.models.known`), so that a later look at the same model runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from kvcellar.errors import ConfigError, ModelError
from kvcellar.models.latents import Latents
from kvcellar.states import StateGroup, StateShape
from kvcellar.types import LayerGroup, ModelCacheParams

VERSION = 3
"""Version of what is learnt and how it is written; facts of another one are learnt again."""

ROPES = ("none", "fixed", "longrope", "dynamic")
"""Kinds of rotary positions. The last two turn every position otherwise in longer texts."""


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """Facts of one layer's attention.

    Attributes:
        layer: id of the layer.
        n_heads: query heads.
        n_kv_heads: KV heads.
        head_dim: length of a K row.
        v_head_dim: length of a V row.
        scale: factor on the logits.
        window: positions that a query sees, its own included; None: no window.
        chunk: a query sees the positions of its chunk of so many; None: no chunks.
        softcap: cap on the logits; None: no cap.
        has_sinks: true if there is a logit per head beside those of the tokens.
        is_latent: true for latent rows; see :class:`~kvcellar.types.LayerGroup`.
        source: an earlier layer whose K and V this one attends over; None: its own.
        latents: how the model expands the latents that are cached; None: it does not, or whoever
            runs it never has it do so.
    """

    layer: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    is_latent: bool = False
    source: int | None = None
    latents: Latents | None = None


@dataclass(frozen=True, slots=True)
class StateFacts:
    """Facts of one recurrent layer.

    Attributes:
        layer: the model's number of it; it may have attention besides.
        shapes: of its states.
        indices: per state, its number among those of its kind in the runtime's own cache.
        askers: ``(path, argument)`` of the modules of the network that ask the cache for them, and
            of the argument by which the cache reaches them; none where the runtime binds otherwise.
        by_token: true if these go on from a past by single tokens alone.
    """

    layer: int
    shapes: tuple[StateShape, ...]
    indices: tuple[int, ...]
    askers: tuple[tuple[str, str], ...] = ()
    by_token: bool = False

    def __post_init__(self) -> None:
        if len(self.shapes) != len(self.indices):
            raise TypeError(f"{len(self.shapes)} states have {len(self.indices)} numbers")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions of a model.

    Attributes:
        kind: one of ``ROPES``.
        original: positions that the model was first made for; 0 where the kind is fixed.
    """

    kind: str = "none"
    original: int = 0

    @property
    def is_fixed(self) -> bool:
        """True if a position is turned the same way in every text."""
        return self.kind in ("none", "fixed")

    @property
    def exact_to(self) -> int | None:
        """Tokens of the longest text that is exact; None: texts of any length are."""
        return self.original if self.kind == "dynamic" else None

    def length_for(self, capacity: int) -> int:
        """Return the length of text whose factors a session of this capacity has to keep.

        Sessions with the same length turn every position the same way: 0 for all of a fixed kind.
        """
        if self.is_fixed:
            return 0
        if self.kind == "longrope":  # two sets of factors, for short texts and for long ones
            return self.original + (capacity > self.original)
        return max(self.original, capacity)

    def border_in(self, length: int) -> int:
        """Return the length of the longest text that is short in a session; 0: none is long.

        Args:
            length: of text whose factors the session's long texts have, by ``length_for``.
        """
        return self.original if length > self.original else 0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of a model.

    Attributes:
        family: ``model_type`` of its text part.
        layers: of its attention, ascending.
        others: ``(layer, kind)`` of layers that keep what no cache here can serve.
        n_layers: all of them.
        hidden_size: numbers per token between layers.
        inner_size: numbers per token inside of a layer's MLP, all its active experts together.
        vocab_size: logits per token.
        max_positions: the longest sequence that it was made for.
        rope: how positions are turned.
        states: of its recurrent layers, ascending.
    """

    family: str
    layers: tuple[LayerFacts, ...]
    others: tuple[tuple[int, str], ...]
    n_layers: int
    hidden_size: int
    inner_size: int
    vocab_size: int
    max_positions: int
    rope: Rope
    states: tuple[StateFacts, ...] = ()

    @property
    def n_heads(self) -> int:
        """The most query heads of a layer."""
        return max((layer.n_heads for layer in self.layers), default=0)

    @property
    def attention_numbers(self) -> dict[int, int]:
        """By the model's number of a layer that has attention, the number that caches know."""
        return {at.layer: number for number, at in enumerate(self.layers)}

    @property
    def state_numbers(self) -> dict[int, int]:
        """By the model's number of a recurrent layer, the number that caches know."""
        return {at.layer: number for number, at in enumerate(self.states)}

    @property
    def latents(self) -> dict[int, Latents]:
        """By layer, how the model expands the latents that are cached."""
        return {at.layer: at.latents for at in self.layers if at.latents is not None}

    @property
    def params(self) -> ModelCacheParams:
        """Facts for a cache: layers that keep the same history, in the order of their first.

        Raises:
            ModelError: layers that no cache here can serve.
        """
        self.check_served()
        numbers = self.attention_numbers
        alike: dict[tuple[Any, ...], list[int]] = {}
        for layer in self.layers:
            if layer.source is None:
                alike.setdefault(_kind_of(layer), []).append(numbers[layer.layer])
        shared = tuple(
            (numbers[at.layer], numbers[at.source]) for at in self.layers if at.source is not None
        )
        try:
            groups = tuple(LayerGroup(tuple(ids), *kind) for kind, ids in alike.items())
            state = StateGroup(tuple(at.shapes for at in self.states)) if self.states else None
            return ModelCacheParams(len(self.layers), groups=groups, shared=shared, state=state)
        except ConfigError as error:
            raise ModelError(
                f"the attention of {self.family!r} cannot be served: {error}; choose another model"
            ) from error

    def check_served(self) -> None:
        """Make sure that caches here keep all that the layers need of the past.

        Raises:
            ModelError: they do not; it names the layers and their kinds.
        """
        if self.others:
            kinds = sorted({kind for _, kind in self.others})
            raise ModelError(
                f"architecture {self.family!r} keeps something else than K and V per token, or a "
                f"state, in {len(self.others)} of {self.n_layers} layers ({', '.join(kinds)}), "
                f"which no cache here can serve; choose another model"
            )
        if not self.layers:
            raise ModelError(
                f"architecture {self.family!r} has no layer with attention, and caches here hold "
                f"the K and V of at least one; choose a model that has attention in some layers"
            )

    def to_json(self) -> dict[str, Any]:
        """Return the facts as a JSON object, for ``from_json``."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> ModelFacts:
        """Make facts of a JSON object.

        Raises:
            ValueError: it is none that ``to_json`` wrote.
        """
        try:
            own = _fields(cls, value)
            own["layers"] = tuple(_layer_facts(layer) for layer in own["layers"])
            own["others"] = tuple((_whole(layer), str(kind)) for layer, kind in own["others"])
            own["rope"] = Rope(**_fields(Rope, own["rope"]))
            own["states"] = tuple(_state_facts(layer) for layer in own["states"])
            made = cls(**own)
            for name in ("n_layers", "hidden_size", "inner_size", "vocab_size", "max_positions"):
                _whole(getattr(made, name))
            if not (made.layers or made.states or made.others):
                raise TypeError("no layer keeps anything")
            if made.layers and not made.others:
                made.params  # noqa: B018 (it checks the layers)
        except (TypeError, KeyError, AttributeError, ModelError) as error:
            raise ValueError(f"these are no facts of a model: {error}") from error
        return made


def _layer_facts(value: Mapping[str, Any]) -> LayerFacts:
    """Make facts of a layer from a JSON object."""
    own = _fields(LayerFacts, value)
    if own["latents"] is not None:
        own["latents"] = Latents(**_fields(Latents, own["latents"]))
    return LayerFacts(**own)


def _state_facts(value: Mapping[str, Any]) -> StateFacts:
    """Make facts of a recurrent layer from a JSON object."""
    own = _fields(StateFacts, value)
    return StateFacts(
        layer=_whole(own["layer"]),
        shapes=tuple(StateShape(str(kind), tuple(map(_whole, of))) for kind, of in own["shapes"]),
        indices=tuple(map(_whole, own["indices"])),
        askers=tuple((str(path), str(argument)) for path, argument in own["askers"]),
        by_token=bool(own["by_token"]),
    )


def _kind_of(layer: LayerFacts) -> tuple[Any, ...]:
    """Return what layers of one group have in common, as ``LayerGroup`` takes it."""
    return (
        layer.n_kv_heads,
        layer.head_dim,
        layer.v_head_dim,
        layer.window,
        layer.softcap,
        layer.chunk,
        layer.is_latent,
    )


def _fields(kind: type[Any], value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a dataclass from an object that has them all and no others."""
    names = {field.name for field in fields(kind)}
    if set(value) != names:
        raise TypeError(f"{kind.__name__} has the fields {sorted(names)}, not {sorted(value)}")
    return dict(value)


def _whole(value: Any) -> int:
    """Return a number that is whole and not negative."""
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} is no whole number")
    return value
