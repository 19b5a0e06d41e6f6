"""Costs of a model in bytes: its K and V, its weights, and what a forward takes and gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from kvcellar.bookkeeping.cells.growth import STEP_TOKENS, grown_size
from kvcellar.bookkeeping.cells.pool import MAX_GAP, MIN_RUN
from kvcellar.budget import format_size
from kvcellar.cache_config import MIN_CHUNK, WINDOW_SLACK
from kvcellar.kv_dtype import KvDtype
from kvcellar.types import ModelCacheParams

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one number, by the names that configs and files use."""

PROCESS_BYTES = 600_000_000
"""Python, torch and transformers once a model is loaded, without its weights: measured on Linux
with torch and with MLX (530 to 590 MB), rounded up."""

NATIVE_PROCESS_BYTES = 150_000_000
"""Python and the CPU kernel once a model is loaded, without its weights: measured on Linux (130 to
140 MB), rounded up."""

ALLOCATOR_BYTES = 64_000_000
"""What threads, kernels' own buffers and the allocator take besides what is asked for."""

AGENT_SLOTS = 2
"""Slots of an agent whose states nobody shares: those it goes on from, and those it writes."""

PLAIN_LOGITS = 1 << 24
"""Attention logits that are held at a time where a kernel does not keep them to itself."""


_NO_TOWER = " alone (a vision tower is not loaded)"

MOST_PICTURE_BYTES = 256 << 20
"""Bytes that are kept of what a model makes of pictures, at most, and of their files."""


def picture_room(n_bytes: int) -> int:
    """Return the bytes that may be kept of what a model makes of pictures, and of their files each.

    Args:
        n_bytes: of the weights that read them.
    """
    return min(n_bytes // 4, MOST_PICTURE_BYTES)


@dataclass(frozen=True, slots=True)
class ModelCacheSpec:
    """Costs of a model's KV and weights in bytes.

    Attributes:
        name: what was asked for.
        family: ``model_type``.
        params: what a cache must know of it.
        max_positions: the longest sequence that it was made for.
        stored_bytes: weights as they are stored.
        weight_bytes: weights in memory, once loaded.
        dtype: their type in memory; of those in a file's blocks the one that is computed in.
        counted: what the weights are, and how they were counted.
        n_heads: query heads.
        hidden_size: numbers per token between layers.
        inner_size: numbers per token inside of a layer's MLP, all its active experts together.
        vocab_size: logits per token.
        quantisation: of a GGUF file, or of what else is held as it is stored, by the name that
            people know it by; empty: it is none.
        stored_types: bytes of such a file's tensors by their type.
        is_in_blocks: true if such a file's blocks are held as they are.
        n_parameters: numbers in the weights; 0 where nobody counted them.
        exact_to: tokens of the longest text whose logits are exact; None: those of any length are.
    """

    name: str
    family: str
    params: ModelCacheParams
    max_positions: int
    stored_bytes: int
    weight_bytes: int
    dtype: str
    counted: str
    n_heads: int
    hidden_size: int
    inner_size: int
    vocab_size: int
    quantisation: str = ""
    stored_types: Mapping[str, int] = field(default_factory=dict)
    is_in_blocks: bool = False
    n_parameters: int = 0
    exact_to: int | None = None

    def with_pictures(self, n_bytes: int) -> ModelCacheSpec:
        """Return the costs with those of reading pictures: weights, and room for what is made.

        Args:
            n_bytes: of the weights that read them, which are loaded with the first picture.
        """
        if not n_bytes:
            return self
        of_pictures = n_bytes + 2 * picture_room(n_bytes)
        return replace(
            self,
            weight_bytes=self.weight_bytes + of_pictures,
            counted=f"{self.counted.replace(_NO_TOWER, '')}; {format_size(of_pictures)} of it are "
            f"for pictures, and loaded with the first one",
        )

    @property
    def kv_dtype(self) -> str:
        """Storage type of K and V where nothing else is asked for."""
        return self.params.kv_dtype

    @property
    def held_in(self) -> str:
        """Name of how the weights are held, for people."""
        return self.quantisation if self.is_in_blocks else self.dtype

    def group_bytes(self, kv: KvDtype) -> tuple[int, ...]:
        """Return the bytes of one token in each layer group, scales included."""
        return tuple(group.cell_bytes(kv) for group in self.params.groups)

    def token_bytes(self, kv: KvDtype) -> int:
        """Return the bytes of one token in all layers."""
        return sum(self.group_bytes(kv))

    @property
    def slot_bytes(self) -> int:
        """Bytes of the states of all recurrent layers at one position; 0 where it has none."""
        return 0 if self.params.state is None else self.params.state.slot_bytes

    def agent_cells(self, context: int) -> tuple[int, ...]:
        """Return the tokens that a sequence of ``context`` holds in each group.

        A window lets go of what is behind it.
        """
        return tuple(
            context if group.is_full else min(context, group.sight.most_before + 1 + WINDOW_SLACK)
            for group in self.params.groups
        )

    def agent_bytes(self, context: int, kv: KvDtype) -> int:
        """Return the bytes of a sequence of ``context`` tokens, shared with nobody: with states."""
        cells = self.agent_cells(context)
        rows = sum(n * size for n, size in zip(cells, self.group_bytes(kv), strict=True))
        return rows + AGENT_SLOTS * self.slot_bytes

    def growth_bytes(self, context: int, kv: KvDtype) -> int:
        """Return the bytes that growing adds: one layer's old copy stands beside the new one."""
        cells = self.agent_cells(context)
        return max(
            n * size // len(group.layers)
            for n, size, group in zip(cells, self.group_bytes(kv), self.params.groups, strict=True)
        )

    def pool_cells(self, context: int, n_agents: int = 1) -> tuple[int, ...]:
        """Return the cells that pools allocate in each group where no budget is set: they double.

        Exact for one agent whose history came in steps of ``STEP_TOKENS``. Of several it is what
        they take at most: each has free cells behind its tail, so that it can grow in place.

        Args:
            context: tokens of each agent.
            n_agents: agents in one cache, sharing nothing.
        """
        cells = []
        for group in self.params.groups:
            one = context
            if not group.is_full:  # a step's tokens come before older ones go
                keep = group.sight.most_before + WINDOW_SLACK
                one = max(
                    min(keep, at) + min(STEP_TOKENS, context - at)
                    for at in range(0, context, STEP_TOKENS)
                )
            gap = max(MIN_RUN, min(one // 2, MAX_GAP))
            need = n_agents * one + (n_agents - 1) * gap
            cells.append(grown_size(need, 0, MIN_CHUNK, max(self.max_positions, need)))
        return tuple(cells)

    def pool_bytes(self, context: int, kv: KvDtype, n_agents: int = 1) -> int:
        """Return the bytes that pools allocate for agents where no budget is set: with states."""
        cells = self.pool_cells(context, n_agents)
        rows = sum(n * size for n, size in zip(cells, self.group_bytes(kv), strict=True))
        return rows + n_agents * AGENT_SLOTS * self.slot_bytes

    def n_agents(self, n_bytes: int, context: int, kv: KvDtype, *, has_budget: bool = True) -> int:
        """Return how many agents of ``context`` tokens, sharing nothing, fit in so many bytes.

        Args:
            n_bytes: for K and V.
            context: tokens of each.
            kv: how K and V are stored.
            has_budget: true if pools are granted what they need; else they double.
        """
        if has_budget:
            one = self.agent_bytes(context, kv) + self.growth_bytes(context, kv)
            return max(0, n_bytes) // one
        return most(
            max(0, n_bytes) // self.agent_bytes(context, kv),
            lambda n: self.peak_bytes(context, kv, n) <= n_bytes,
        )

    def peak_bytes(self, context: int, kv: KvDtype, n_agents: int = 1) -> int:
        """Return the bytes of pools without a budget, and of a layer's old copy as it doubles."""
        cells = self.pool_cells(context, n_agents)
        copies = [
            n // 2 * size // len(group.layers)
            for n, size, group in zip(cells, self.group_bytes(kv), self.params.groups, strict=True)
        ]
        return self.pool_bytes(context, kv, n_agents) + max(copies)

    def most_context(
        self, n_bytes: int, n_agents: int, kv: KvDtype, *, has_budget: bool = True
    ) -> int:
        """Return the longest context of the model's own at which so many agents fit."""
        return most(
            self.max_positions,
            lambda context: self.n_agents(n_bytes, context, kv, has_budget=has_budget) >= n_agents,
        )

    def scratch_bytes(self, context: int, n_tokens: int = 512, n_rows: int = 64) -> int:
        """Estimate from above what a forward takes besides weights and KV, and gives back: bytes.

        Args:
            context: tokens that its longest sequence has.
            n_tokens: tokens that go through the model.
            n_rows: of these, tokens whose logits are wanted.
        """
        n_heads, groups = self.n_heads, self.params.groups
        dim = max(max(group.q_dim, group.v_head_dim) for group in groups)
        inside = 8 * self.hidden_size + 4 * n_heads * dim + 4 * self.inner_size
        logits = min(PLAIN_LOGITS, n_tokens * n_heads * context)
        row = max(group.n_kv_heads * (group.head_dim + group.v_head_dim) for group in groups)
        gathered = 2 * 4 * context * row
        return (
            ALLOCATOR_BYTES
            + 4 * n_tokens * inside
            + 12 * n_rows * self.vocab_size
            + 10 * logits
            + gathered
        )


def most(limit: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to a limit that fits; 0 where none does.

    Where a number fits, all smaller ones have to fit too.
    """
    low, high = 0, max(0, limit)
    while low < high:
        n = (low + high + 1) // 2
        if fits(n):
            low = n
        else:
            high = n - 1
    return low
