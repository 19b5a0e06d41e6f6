"""Our caches for users of transformers: ``model.generate(past_key_values=make_cache(model))``.

::

    cache = make_cache(model, kv_dtype="int8")
    model.generate(**inputs, past_key_values=cache)

The model needs no change: its own attention reads what the cache gives it. K and V may be quantised
from the first token on, and a layer with a window can be cut back by ``rollback`` tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvcellar.backends.torch import TorchContiguousCache
from kvcellar.errors import ConfigError
from kvcellar.kv_dtype import FLOAT_KV_DTYPES
from kvcellar.spec import params_from_config
from kvcellar.types import make_config

__all__ = ["make_cache"]


def make_cache(
    model: Any,
    max_kv_size: int | None = None,
    *,
    kv_dtype: str | None = None,
    rollback: int = 64,
) -> Cache:
    """A cache of ours for ``model.generate(past_key_values=...)``, for one sequence.

    Args:
        model: of transformers.
        max_kv_size: the most tokens; None: as many as the model was made for. A full cache raises,
            it does not forget.
        kv_dtype: how K and V are stored; None: as the model computes them.
        rollback: by how many tokens the layers with a window can be cut back.

    Raises:
        ModelError: of an architecture that is not supported.
        ConfigError: a ``kv_dtype`` that asks for changes in the attention.
    """
    text = model.config.get_text_config()
    computed = str(model.dtype).removeprefix("torch.")
    config = make_config(
        params_from_config(text.to_dict()),
        max_kv_size or int(text.max_position_embeddings),
        kv_dtype or (computed if computed in FLOAT_KV_DTYPES else "float32"),
        window_slack=rollback,
    )
    if config.kv.k.is_rotated or config.kv.exact_first or config.kv.exact_last:
        raise ConfigError(
            f"kv_dtype {kv_dtype!r} has options that the model's own attention does not know; "
            f"leave out :rot, :first and :last here"
        )
    shared = TorchContiguousCache(config)
    return Cache(layers=[CellLayer(shared, layer) for layer in range(shared.n_layers)])


class CellLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's view of a cache that all layers share: transformers' protocol."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, shared: TorchContiguousCache, layer: int) -> None:
        """Of ``layer``."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._shared = shared
        self._layer = layer
        self._window = shared.groups[shared.group_of(layer)].window
        self.is_sliding = self._window is not None
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: pools are made where the first K comes."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store ``[1, n_kv_heads, T, dim]``; return what the T queries read together."""
        with torch.no_grad():
            return self._shared.update_run(self._layer, key_states, value_states)

    def get_seq_length(self) -> int:
        """Tokens that this layer has been given."""
        return self._shared.length_in(self._layer)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(cells that the next ``update`` returns, position of the first of them)."""
        length = self.get_seq_length()
        first = 0 if self._window is None else max(0, length - self._window + 1)
        return length + query_length - first, first

    def get_max_length(self) -> int:
        """The most tokens."""
        return self._shared.capacity

    def reset(self) -> None:
        """Forget all tokens, in all layers."""
        self._shared.clear()

    def crop(self, tokens_to_remove: int) -> None:
        """Cut back by ``-tokens_to_remove`` tokens, in all layers; called for each.

        Raises:
            RewindError: a window has let go of what it would need; nothing was changed.
        """
        if tokens_to_remove > 0:
            raise ConfigError(
                f"crop takes what to remove as a negative number, got {tokens_to_remove}"
            )
        if not self._layer:
            self._shared.rewind(max(0, self._shared.length + tokens_to_remove))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Refused: beams are several sequences.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "this cache holds one sequence and beams are several; generate with num_beams=1, or "
            "fork sequences with kvcellar's own engine"
        )
