"""A model of transformers in memory, and how runners are made for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvcellar.backends.torch.adapters.updates import Adapters
from kvcellar.backends.torch.cpu.decoder import KernelDecoder
from kvcellar.backends.torch.gpu.sampler.logits import samples_on
from kvcellar.backends.torch.load.weights import own_tensors, touch_weights
from kvcellar.backends.torch.run.runner import SamplingTorchRunner, TorchRunner
from kvcellar.cache_config import CacheConfig
from kvcellar.models.facts import ModelFacts
from kvcellar.models.model import LoadedModel
from kvcellar.models.runner import Runner
from kvcellar.registry import CacheSession

if TYPE_CHECKING:
    from kvcellar.backends.torch.ranks.leading import Leader


@dataclass(frozen=True, slots=True, eq=False)
class TorchModel(LoadedModel):
    """A model of transformers in memory; attributes as in :class:`LoadedModel`.

    Attributes:
        network: the module of transformers, in evaluation mode, with its attention on the op.
        decoder: runs a few tokens of it as one call of the CPU kernel; None: not all of its parts
            are the kernel's.
        facts: what was learnt of it.
        beside: its adapters.
        leader: of the ranks that have the rest of it; None: this process has all of it.
    """

    network: Any = field(repr=False)
    decoder: KernelDecoder | None = field(repr=False)
    facts: ModelFacts = field(repr=False)
    beside: Adapters = field(repr=False)
    leader: Leader | None = field(default=None, repr=False, kw_only=True)

    def _make_runner(self, session: CacheSession[Any], feature_layers: Sequence[int]) -> Runner:
        """Make a runner of torch; session and model were found to fit."""
        is_kept = samples_on(self.network.device)
        length = self.rope_length_for(session.cache.config)
        return (SamplingTorchRunner if is_kept else TorchRunner)(
            self.network,
            self.decoder,
            self.params,
            self.vocab_size,
            session,
            feature_layers,
            length,
            self.beside,
            self.leader,
            rope_border=self.facts.rope.border_in(length),
            has_graphs=self.leader is None,
            pictures=getattr(self.pictures, "facts", None),
        )

    @property
    def n_layers(self) -> int:
        """Layers of the model, those without attention included."""
        return self.facts.n_layers

    @property
    def has_session_ropes(self) -> bool:
        """True if sessions of different capacity turn positions by different factors."""
        return not self.facts.rope.is_fixed

    def rope_length_for(self, config: CacheConfig) -> int:
        """Return the length of text whose RoPE factors a session has; see ``LoadedModel``."""
        longest = min(config.origin + config.capacity, self.max_positions)
        return self.facts.rope.length_for(longest)

    @property
    def size_bytes(self) -> int:
        """Bytes of the weights as they are held, those of what is not loaded left out.

        Of a model that is divided, on all ranks, each of which has about as many.
        """
        tensors = own_tensors(self.network)
        held = sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
        n_ranks = 1 if self.leader is None else self.leader.ranks.n_ranks
        return n_ranks * int(held) + self.beside.size_bytes

    def touch_weights(self) -> int:
        """Read a byte of every page of the weights; see :meth:`LoadedModel.touch_weights`."""
        return touch_weights(self.network)
