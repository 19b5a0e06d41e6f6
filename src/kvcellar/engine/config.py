"""Policy of an engine, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcellar.checks import flag, number, text, whole
from kvcellar.engine.schedule.policy import Policy, make_policy
from kvcellar.errors import ConfigError
from kvcellar.prefix import PrefixIndex, make_index
from kvcellar.sight import FULL, Sight

HASHED_BLOCK = 16
"""Tokens per block of a hashed index over token cells, where nothing else is asked for."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Policy of an engine.

    Attributes:
        max_num_batched_tokens: tokens in one forward.
        max_num_seqs: sequences in one forward. Those that await a picture run beside them.
        policy: ``mixed`` or ``prefill-first``.
        max_prefill_beside: of ``mixed``: tokens of prompts in a step that has decodes too, so that
            running answers go on evenly; None: what the step holds.
        delay_factor: of ``prefill-first``: how long new prompts gather before they are let in.
        index: ``radix``, ``hashed`` or ``naive``.
        block_size: tokens that the index stores and matches together; None: as many as the cache
            takes and frees together, and 16 for ``hashed`` over token cells.
        max_drafted: guesses of a drafter per sequence and step, at most; in a cache with trees
            several may be for one token.
        verify_all_drafts: verify every guess; otherwise as many as save time.
    """

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    policy: str = "mixed"
    max_prefill_beside: int | None = None
    delay_factor: float = 0.0
    index: str = "radix"
    block_size: int | None = None
    max_drafted: int = 16
    verify_all_drafts: bool = False

    def __post_init__(self) -> None:
        for name in (
            "max_num_batched_tokens",
            "max_num_seqs",
            "max_prefill_beside",
            "block_size",
        ):
            value = getattr(self, name)
            if value is not None or name in ("max_num_batched_tokens", "max_num_seqs"):
                whole(value, name, least=1)
        whole(self.max_drafted, "max_drafted", least=1)
        number(self.delay_factor, "delay_factor")
        text(self.policy, "policy")
        text(self.index, "index")
        flag(self.verify_all_drafts, "verify_all_drafts")
        if self.index == "naive" and self.block_size is not None:
            raise ConfigError(
                f"a naive index finds nothing, so it has no blocks, got block_size "
                f"{self.block_size}; leave block_size out, or choose radix or hashed"
            )
        self.make_policy()
        self.make_index((FULL,), self.block_size or 1)

    def make_policy(self) -> Policy:
        """Create the policy.

        Raises:
            ConfigError: it is unknown, or has no delay.
        """
        return make_policy(self.policy, self.delay_factor, self.max_prefill_beside)

    def make_index(self, sights: Sequence[Sight], cache_block: int) -> PrefixIndex:
        """Create the index over a cache whose blocks have so many cells.

        Raises:
            ConfigError: it is unknown, or its blocks are not made of whole blocks of the cache.
        """
        is_hashed_cells = self.index == "hashed" and cache_block == 1
        block_size = self.block_size or (HASHED_BLOCK if is_hashed_cells else cache_block)
        if block_size % cache_block:
            raise ConfigError(
                f"block_size {block_size} cannot be used over blocks of {cache_block} cells, which "
                f"are shared and freed whole; choose a multiple, or None"
            )
        return make_index(self.index, sights, block_size)
