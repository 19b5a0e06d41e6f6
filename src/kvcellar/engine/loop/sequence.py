"""One sequence of any cache, asked and changed with the same words."""

from __future__ import annotations

from kvcellar.cache import Cache, DecodeCache, SeqCache
from kvcellar.errors import UnknownCacheError


class SequenceView:
    """One sequence of a cache, which may be a contiguous, sequence or tree cache."""

    def __init__(self, cache: Cache, seq_id: int = 0) -> None:
        """View a sequence of a cache; nothing is claimed.

        Raises:
            UnknownCacheError: the cache has neither face, or a contiguous one is asked for another
                sequence than 0.
        """
        self.cache = cache
        self.seq_id = seq_id
        self._many = cache if isinstance(cache, SeqCache) else None
        self._single = cache if isinstance(cache, DecodeCache) else None
        if self._many is None and self._single is None:
            raise UnknownCacheError(
                f"{type(cache).__name__} is neither a DecodeCache nor a SeqCache"
            )
        if self._many is None and seq_id != 0:
            raise UnknownCacheError(
                f"a contiguous cache holds sequence 0 alone, asked for {seq_id}; use a seq cache"
            )

    @property
    def length(self) -> int:
        """Tokens held: the position that the next one gets."""
        if self._many is not None:
            has_own = self._many.has_seq(self.seq_id)
            return self._many.seq_len(self.seq_id) if has_own else self.cache.config.origin
        assert self._single is not None
        return self._single.length

    def can_extend(self, n: int = 1) -> bool:
        """Return true if ``n`` more tokens fit."""
        return self.cache.can_extend(n)

    def begin(self, n: int) -> list[int]:
        """Announce ``n`` more tokens; return their positions. The next forward brings them.

        Raises:
            CacheFullError: they do not fit; nothing was claimed.
        """
        if self._many is not None:
            return self._many.begin_step([(self.seq_id, n)])
        return list(range(self.length, self.length + n))

    def cut(self, new_length: int) -> int:
        """Cut the history back to at most ``new_length`` tokens, as far as all layers can go on.

        Returns:
            Its length now: what follows is to be computed.
        """
        length = self.length
        if new_length >= length:
            return length
        if self._many is not None:
            return self._many.seq_rm(self.seq_id, new_length)
        assert self._single is not None
        return self._single.rewind(new_length)

    def keep_point(self, length: int) -> None:
        """Keep what is needed to go on from ``length``, which is held, until it is cut below.

        Raises:
            RewindError: some layer cannot go on from there any more; nothing was changed.
        """
        if self._many is not None:
            self._many.keep_point(self.seq_id, length)
        else:
            assert self._single is not None
            self._single.keep_point(length)

    def drop_point(self, length: int) -> None:
        """Keep what is needed to go on from ``length`` no longer; a no-op where it is no point."""
        if length > self.length:
            return
        if self._many is not None:
            self._many.drop_point(self.seq_id, length)
        else:
            assert self._single is not None
            self._single.drop_point(length)
