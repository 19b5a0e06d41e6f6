"""Our caches for users of transformers: ``model.generate(past_key_values=make_cache(model))``.

::

    cache = make_cache(model, kv_dtype="int8")
    model.generate(**inputs, past_key_values=cache)

The model needs no change: its own attention reads what the cache gives it. Batches are padded on
the left, as ``generate`` wants them; beams share what they have in common. K and V may be quantised
from the first token on, and a layer with a window can be cut back by ``rollback`` tokens.

States of recurrent layers are transformers' own: one for each row, as many bytes for any length, so
that nothing is to be saved, and nothing can be cut back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer, LinearAttentionLayer

from kvcellar.backends.torch.cache.batch import TorchBatchCache
from kvcellar.backends.torch.loading import model_facts
from kvcellar.cache_config import CacheConfig, make_config
from kvcellar.errors import ConfigError
from kvcellar.kv_dtype import FLOAT_KV_DTYPES
from kvcellar.models.facts import ModelFacts
from kvcellar.types import ModelCacheParams

__all__ = ["make_cache"]


def make_cache(
    model: Any,
    capacity: int | None = None,
    *,
    kv_dtype: str | None = None,
    rollback: int = 64,
) -> Cache:
    """Make a cache of ours for ``model.generate(past_key_values=...)``, for any number of rows.

    Args:
        model: of transformers.
        capacity: the most tokens of a row; None: as many as the model was made for. A full
            cache raises, it does not forget.
        kv_dtype: how K and V are stored (``int8``, ``k8v4``, ``int4:rot:first4:last64`` ...);
            None: as the model computes them.
        rollback: by how many tokens the layers with a window can be cut back.

    Raises:
        ModelError: of an architecture that is not supported.
        ConfigError: no such ``kv_dtype``.
    """
    facts = model_facts(model.config.to_dict())
    computed = str(model.dtype).removeprefix("torch.")
    config = make_config(
        _for_masks(facts.params),
        capacity or facts.max_positions,
        kv_dtype or (computed if computed in FLOAT_KV_DTYPES else "float32"),
        window_slack=rollback,
    )
    return Cache(layers=_layers(facts, BatchRows(config)))


def _layers(facts: ModelFacts, rows: BatchRows) -> list[Any]:
    """Return what each layer of a model keeps its past in.

    Where no layer is recurrent, those that share rows, the last ones, have none.
    """
    if not facts.states:
        return [CellLayer(rows, layer) for layer in range(rows.config.params.n_layers)]
    numbers = facts.attention_numbers
    n_states = {at.layer: max(at.indices) + 1 for at in facts.states}
    found: list[Any] = []
    for layer in range(facts.n_layers):
        if layer in numbers and layer in n_states:
            found.append(RecurrentCellLayer(rows, numbers[layer], n_states[layer]))
        elif layer in numbers:
            found.append(CellLayer(rows, numbers[layer]))
        elif layer in n_states:
            found.append(LinearAttentionLayer(n_states[layer]))
        else:
            found.append(DummyLayer())  # type: ignore[no-untyped-call]
    return found


def _for_masks(params: ModelCacheParams) -> ModelCacheParams:
    """Return what a cache must know whose model attends by its own masks.

    Layers that share rows are left out, since transformers hands those on by itself. Chunks are as
    windows of their length: where they begin depends on the padding of each row, as masks know.

    Raises:
        ConfigError: a layer that stores rows comes behind one that shares them.
    """
    n_stored = params.n_layers - len(params.shared)
    if any(layer < n_stored for layer, _ in params.shared):
        raise ConfigError(
            f"layers {[layer for layer, _ in params.shared]} of this model share rows and are not "
            f"its last ones; use kvcellar's own sessions for it"
        )
    groups = (
        group if group.chunk is None else replace(group, window=group.chunk, chunk=None)
        for group in params.groups
    )
    return ModelCacheParams(n_stored, groups=tuple(groups))


class BatchRows:
    """The cache that all layers share; made when the first forward says how many rows there are."""

    def __init__(self, config: CacheConfig) -> None:
        """Create rows without a cache; ``config.capacity`` is that of one row."""
        self.config = config
        self.cache: TorchBatchCache | None = None

    @property
    def length(self) -> int:
        """Tokens of each row."""
        return 0 if self.cache is None else self.cache.length

    def of(self, n_rows: int) -> TorchBatchCache:
        """Return the cache; an empty one is made anew where it has another number of rows."""
        cache = self.cache
        if cache is None or (len(cache.rows) != n_rows and not cache.is_step_open | cache.length):
            config = replace(self.config, capacity=n_rows * self.config.capacity)
            cache = self.cache = TorchBatchCache(config, n_rows)
        return cache


class CellLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's view of a cache that all layers share: transformers' protocol.

    ``keys`` and ``values`` are copies of what the layer can still attend, None before the first
    token; what a program writes into them changes nothing.
    """

    is_croppable = True
    supports_early_init = False

    def __init__(self, rows: BatchRows, layer: int) -> None:
        """Create the face of one layer."""
        self._rows = rows
        self._layer = layer
        self._dtype = torch.float32
        params = rows.config.params
        group = params.groups[params.group_of[layer]]
        self._sight, self._is_latent = group.sight, group.is_latent
        self.is_sliding = not self._sight.is_full
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: pools are made where the first K comes."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store ``[n_rows, n_kv_heads, T, dim]``; return what the T queries read together.

        Of latent attention (MLA), transformers has the latent as K and the rotary part as V.

        Raises:
            ConfigError: somebody wants gradients through K and V; nothing was written.
        """
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise ConfigError(
                "this cache keeps K and V without what gradients need, so that training through "
                "it would learn nothing; run the model under torch.no_grad() or "
                "torch.inference_mode(), or train without past_key_values"
            )
        self._dtype = key_states.dtype
        with torch.no_grad():
            cache = self._rows.of(key_states.shape[0])
            if not self._is_latent:
                return cache.update_batch(self._layer, key_states, value_states)
            rotary, latent = cache.update_batch(self._layer, value_states, key_states)
            return latent, rotary

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """K ``[n_rows, n_kv_heads, L, head_dim]`` of what the layer can still attend."""
        found = self._read()
        return None if found is None else found[0]

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """V of the same."""
        found = self._read()
        return None if found is None else found[1]

    def _read(self) -> tuple[Tensor, Tensor] | None:
        cache = self._rows.cache
        found = None if cache is None else cache.read_batch(self._layer, self._dtype)
        return found[::-1] if found is not None and self._is_latent else found

    @property
    def batch_size(self) -> int:
        """Rows; -1 before the first forward says how many there are."""
        cache = self._rows.cache
        return -1 if cache is None else len(cache.rows)

    def offload(self) -> None:
        """Do nothing where K and V are in main memory already.

        Raises:
            ConfigError: they are not.
        """
        cache = self._rows.cache
        device = None if cache is None else cache.pools.of_layer[self._layer].device
        if device is not None and device.type != "cpu":
            raise ConfigError(
                f"K and V stay on {device}, where all layers share their cells; for less "
                f"memory give make_cache a kv_dtype, such as int8"
            )

    def prefetch(self) -> None:
        """Do nothing: what is never offloaded is there."""

    def get_seq_length(self) -> int:
        """Tokens before the forward that is under way, padding included."""
        return self._rows.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many cells the next ``update`` returns, and the first one's position."""
        length = self._rows.length
        first = self._sight.first_seen(length)
        return length + query_length - first, first

    def get_max_length(self) -> int:
        """Return the most tokens of a row."""
        return self._rows.config.capacity

    def reset(self) -> None:
        """Forget all tokens, in all layers; the next batch may have another number of rows."""
        if self._rows.cache is not None:
            self._rows.cache.clear()

    def crop(self, tokens_to_remove: int) -> None:
        """Cut back by ``-tokens_to_remove`` tokens, in all layers; called for each.

        Raises:
            RewindError: a window has let go of what it would need; nothing was changed.
        """
        if tokens_to_remove > 0:
            raise ConfigError(
                f"crop takes what to remove as a negative number, got {tokens_to_remove}"
            )
        if not self._layer and self._rows.cache is not None:
            self._rows.cache.rewind(max(0, self._rows.length + tokens_to_remove))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i goes on from row ``beam_idx[i]``, in all layers; called for each; no copy."""
        if not self._layer and self._rows.cache is not None:
            self._rows.cache.take_rows(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, given by number or by a mask; as ``reorder_cache``."""
        if indices.dtype is torch.bool:
            indices = indices.nonzero().flatten()
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times, one after the other; as ``reorder_cache``."""
        if self._rows.cache is not None:
            n_rows = len(self._rows.cache.rows) if not self._layer else 0
            self.reorder_cache(torch.arange(n_rows).repeat_interleave(repeats))


class RecurrentCellLayer(LinearAttentionLayer, CellLayer):
    """The view of a layer that has attention and states: ours for K and V, transformers' for them.

    transformers asks for each verb once; both do it.
    """

    is_compileable = False
    supports_early_init = False
    is_croppable = False

    def __init__(self, rows: BatchRows, layer: int, n_states: int) -> None:
        """Create the face of one layer with so many states of each kind."""
        CellLayer.__init__(self, rows, layer)
        LinearAttentionLayer.__init__(self, n_states)  # type: ignore[no-untyped-call]

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Make states where the first one comes; pools are made by themselves."""
        if kwargs:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def get_max_length(self) -> int:
        """Return the most tokens of a row."""
        return CellLayer.get_max_length(self)

    def offload(self) -> None:
        """Offload both; see :meth:`CellLayer.offload`."""
        CellLayer.offload(self)
        LinearAttentionLayer.offload(self)  # type: ignore[no-untyped-call]

    def reset(self) -> None:
        """Forget all tokens."""
        CellLayer.reset(self)
        LinearAttentionLayer.reset(self)

    def crop(self, tokens_to_remove: int) -> None:
        """Cut back by ``-tokens_to_remove`` tokens, where transformers has recorded the states.

        Raises:
            RuntimeError: it has not; nothing was changed.
            RewindError: a window has let go of what it would need.
        """
        LinearAttentionLayer.crop(self, tokens_to_remove)
        CellLayer.crop(self, tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i goes on from row ``beam_idx[i]``."""
        LinearAttentionLayer.reorder_cache(self, beam_idx)  # type: ignore[arg-type]
        CellLayer.reorder_cache(self, beam_idx)
