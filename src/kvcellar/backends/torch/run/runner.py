"""A transformers model and a session: the runner of the torch backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from kvcellar.backends.torch.adapters.updates import NO_ADAPTERS, Adapters
from kvcellar.backends.torch.bind.inputs import inputs_of, modules_given
from kvcellar.backends.torch.bind.pictures import Pictures
from kvcellar.backends.torch.bind.positions import Positions, RopeLength
from kvcellar.backends.torch.cache.caches import TorchCache
from kvcellar.backends.torch.cache.shortage import within_memory
from kvcellar.backends.torch.cpu.decoder import KernelDecoder
from kvcellar.backends.torch.gpu import choice
from kvcellar.backends.torch.gpu.sampler.logits import DeviceLogits
from kvcellar.backends.torch.run.placing import Placing, place
from kvcellar.errors import StepError
from kvcellar.models.kept_logits import FirstStep
from kvcellar.models.picture_facts import WINDOWS, PictureFacts
from kvcellar.models.runner import BoundRunner, FloatArray, Turned
from kvcellar.models.seeing import Seen
from kvcellar.registry import CacheSession, use_cache
from kvcellar.types import IntArray, ModelCacheParams

if TYPE_CHECKING:
    from kvcellar.backends.torch.gpu.record.graphs import StepGraphs
    from kvcellar.backends.torch.ranks.leading import Leader


class Computed(NamedTuple):
    """Results of a forward, of which the first two are still on the device.

    Attributes:
        logits: ``[R, vocab_size]``.
        likeliest: each row's likeliest token and its logit, where a graph has found them.
        features: ``[T, n_features]``, or of no numbers.
    """

    logits: torch.Tensor
    likeliest: torch.Tensor | None
    features: FloatArray


class TorchRunner(BoundRunner):
    """One model bound to one session; a :class:`~kvcellar.models.runner.Runner`."""

    def __init__(
        self,
        model: Any,
        decoder: KernelDecoder | None,
        params: ModelCacheParams,
        vocab_size: int,
        session: CacheSession[Any],
        feature_layers: Sequence[int] = (),
        rope_length: RopeLength = 0,
        adapters: Adapters = NO_ADAPTERS,
        leader: Leader | None = None,
        *,
        rope_border: int = 0,
        has_graphs: bool = True,
        pictures: PictureFacts | None = None,
    ) -> None:
        """Bind a model, and what runs a few tokens of it at once where there is such a thing.

        Args:
            model: the network.
            decoder: of it, or None.
            params: of its cache.
            vocab_size: of the model.
            session: open.
            feature_layers: whose inputs are wanted.
            rope_length: the length of text whose RoPE factors turn positions of which nothing is
                said, and of long texts: that of the longest text that the session holds.
            adapters: that are loaded beside the network.
            leader: of the ranks that have the rest of the network; None: it is whole.
            rope_border: tokens of the longest text that RoPE was made for, whose factors are others
                than those of ``rope_length``; 0: none are.
            has_graphs: small forwards on a card may be played as graphs.
            pictures: how the network places them, where it was made to take them; None: it was not.
        """
        n_features = len(feature_layers) * int(model.config.hidden_size)
        super().__init__(session, params, vocab_size, n_features)
        self._network = model
        self._feature_layers = tuple(feature_layers)
        self._feature_modules = modules_given(model, feature_layers)
        self._decoder = decoder
        self.rope_length, self.rope_border = rope_length, rope_border
        self._device: torch.device = model.device
        self._adapters = adapters
        self._runs: Sequence[tuple[str, int]] = ()
        self._turned: Turned = True
        self._pictures = pictures
        self.is_whole = pictures is not None and pictures.is_whole
        self._seen: Seen = ()
        self.read_as: dict[int, bool] = {}
        """By sequence, true where what a plain loop has read of it is of a long text."""
        self.adapters, self.own_adapter = adapters.names, ""
        self._leader = leader
        if isinstance(session.cache, TorchCache):
            session.cache.pools.place(self._device)
            if leader is not None:
                leader.take(session.cache)
        self.graphs = _graphs_of(model, self._feature_modules) if has_graphs else None
        """Small forwards on a card as graphs; None: all are the modules' own."""

    def forward_hidden(
        self, token_ids: Sequence[int] | IntArray, positions: Sequence[int] | IntArray
    ) -> FloatArray:
        """See :meth:`kvcellar.models.runner.HiddenRunner.forward_hidden`."""
        return self._forward(self._hidden, token_ids, positions, None, has_features=False)[0]

    def _hidden(
        self, cache: Any, ids: IntArray, at: IntArray, rows: IntArray | None, *, has_features: bool
    ) -> tuple[FloatArray, FloatArray]:
        """Run the modules below the head; there are neither rows nor features."""
        places, numbers = self._tensor(at[None]), self._numbers(len(ids))
        active = nullcontext() if numbers is None else self._adapters.active(numbers, ids[:0])
        positions = Positions(places, self._rope_lengths(len(ids)))
        led = self._led(cache, ids, at, None, is_hidden=True)
        with led, use_cache(cache), torch.inference_mode(), positions, active:
            found = self._network.base_model(
                input_ids=self._tensor(ids[None]), position_ids=places, use_cache=False
            )
        states = found.last_hidden_state[0].float().cpu().numpy()
        return states, np.empty((len(ids), 0), np.float32)

    @property
    def lost(self) -> Exception | None:
        """See :attr:`kvcellar.models.runner.LosableRunner.lost`."""
        return None if self._leader is None else self._leader.ranks.lost

    @contextmanager
    def adapting(self, runs: Sequence[tuple[str, int]]) -> Iterator[None]:
        """Compute tokens with adapters; see :class:`kvcellar.models.runner.AdaptingRunner`."""
        before, self._runs = self._runs, runs
        try:
            yield
        finally:
            self._runs = before

    @contextmanager
    def turning(self, runs: Turned) -> Iterator[None]:
        """Turn positions by texts' lengths; see :class:`kvcellar.models.runner.TurningRunner`."""
        before, self._turned = self._turned, runs
        try:
            yield
        finally:
            self._turned = before

    @contextmanager
    def seeing(self, stretches: Seen) -> Iterator[None]:
        """Read pictures; see :class:`kvcellar.models.seeing.SeeingRunner`."""
        before, self._seen = self._seen, stretches
        try:
            yield
        finally:
            self._seen = before

    def _placing(self, at: IntArray) -> Placing | None:
        """Return the pictures of a forward; None where it is text that knows of none.

        Raises:
            StepError: as ``place``; or the model reads text alone.
        """
        if not self._seen:
            return None
        if self._pictures is None:
            raise StepError("a forward has pictures, and the model reads text alone")
        return place(self._seen, at, self._pictures, self._device)

    @contextmanager
    def _both_ways(self, cache: Any, placing: Placing | None) -> Iterator[None]:
        """Have tokens of whole pictures see each other in a block."""
        if placing is None or not placing.whole:
            yield
            return
        assert self._pictures is not None, "it has placed some"
        cache.both_ways_in_windows = self._pictures.both_ways == WINDOWS
        cache.both_ways = placing.whole
        try:
            yield
        finally:
            cache.both_ways = ()

    def _rope_lengths(self, n_tokens: int) -> RopeLength:
        """Return whose factors turn the tokens of a forward: of all, or of each where they differ.

        Raises:
            StepError: it was said of other tokens.
        """
        if not self.rope_border or self._turned is True:
            return self.rope_length
        if not self._turned:
            return self.rope_border
        n_said = sum(n for _, n in self._turned)
        if n_said != n_tokens:
            raise StepError(
                f"lengths of texts were said of {n_said} tokens, and the forward has {n_tokens}"
            )
        assert isinstance(self.rope_length, int), "the ranks that follow are told lengths"
        by_length = {True: self.rope_length, False: self.rope_border}
        runs = [(by_length[is_long], n) for is_long, n in self._turned if n]
        if len({length for length, _ in runs}) == 1:
            return runs[0][0]
        return tuple(length for length, n in runs for _ in range(n))

    def _numbers(self, n_tokens: int) -> IntArray | None:
        """Return the number of each token's adapter; None: none has one.

        Raises:
            StepError: it was said of other tokens.
        """
        runs = self._runs or [(self.own_adapter, n_tokens)]
        numbers = self._adapters.numbers_of(runs)
        if numbers is not None and len(numbers) != n_tokens:
            raise StepError(
                f"adapters were said of {len(numbers)} tokens, and the forward has {n_tokens}"
            )
        return numbers

    def _run(
        self, cache: Any, ids: IntArray, at: IntArray, rows: IntArray | None, *, has_features: bool
    ) -> tuple[FloatArray, FloatArray]:
        placing = self._placing(at)
        is_text = placing is None or not placing.rows
        if self._decoder is not None and is_text and self._numbers(len(ids)) is None:
            last = np.array([len(ids) - 1], np.int64) if rows is None else rows
            layers = self._feature_layers if has_features else ()
            turned = None if placing is None else placing.turned_alike
            whole = self._decoder.forward(
                cache, ids, at, last, layers, self._rope_lengths(len(ids)), turned
            )
            if whole is not None:
                return whole
        computed = self._by_modules(cache, ids, at, rows, has_features=has_features)
        return computed.logits.float().cpu().numpy(), computed.features

    def _by_modules(
        self, cache: Any, ids: IntArray, at: IntArray, rows: IntArray | None, *, has_features: bool
    ) -> Computed:
        """Run the tokens as transformers does, or by a graph; the logits stay on the device.

        Raises:
            DeviceMemoryError: it has no memory for them.
        """
        graphs = self.graphs
        with self._led(cache, ids, at, rows):
            return within_memory(
                lambda: self._tried(cache, ids, at, rows, has_features=has_features),
                self._device,
                lambda: None if graphs is None else graphs.clear(),
            )

    def _led(
        self,
        cache: Any,
        ids: IntArray,
        at: IntArray,
        rows: IntArray | None,
        *,
        is_hidden: bool = False,
    ) -> AbstractContextManager[None]:
        """Have other ranks run their part of the forward in a block, where there are others."""
        if self._leader is None:
            return nullcontext()
        length = self._rope_lengths(len(ids))
        return self._leader.forward(cache, ids, at, rows, length, is_hidden=is_hidden)

    def _tried(
        self, cache: Any, ids: IntArray, at: IntArray, rows: IntArray | None, *, has_features: bool
    ) -> Computed:
        modules = self._feature_modules if has_features else []
        placing = self._placing(at)
        with use_cache(cache), torch.inference_mode(), self._both_ways(cache, placing):
            length, wanted = self._rope_lengths(len(ids)), bool(modules)
            is_plain = placing is None or not (placing.rows or placing.turned is not None)
            is_alike = is_plain and self._numbers(len(ids)) is None
            if self.graphs is not None and is_alike and isinstance(length, int):
                played = self.graphs.run(cache, ids, at, rows, length, has_features=wanted)
                if played is not None:
                    features = played.features.cpu().numpy() if wanted else _none_of(ids)
                    return Computed(played.logits, played.likeliest, features)
            return self._by_network(ids, at, rows, modules, placing)

    def _by_network(
        self,
        ids: IntArray,
        positions: IntArray,
        rows: IntArray | None,
        modules: Sequence[Any],
        placing: Placing | None,
    ) -> Computed:
        """Run the tokens as transformers does; features are what these modules are given."""
        # By index: told how many, Gemma 4 leaves tokens out of the layers that share K and V.
        kept = np.array([len(ids) - 1], np.int64) if rows is None else rows
        numbers = self._numbers(len(ids))
        active = nullcontext() if numbers is None else self._adapters.active(numbers, kept)
        at = self._tensor(positions[None])
        length = self._rope_lengths(len(ids))
        placed, turned = Pictures(()), at
        if placing is not None:
            placed = Pictures(placing.rows)
            ids = self._without_placeholders(ids, placing)
            turned = at if placing.turned is None else self._tensor(placing.turned[:, None])
        with inputs_of(modules) as seen, Positions(at, length), placed, active:
            logits = self._network(
                input_ids=self._tensor(ids[None]),
                position_ids=turned,
                use_cache=False,
                logits_to_keep=self._tensor(kept),
            ).logits[0]
            features = [hidden[0].float().cpu() for hidden in seen]
        joined = torch.cat(features, dim=-1) if features else torch.empty(len(ids), 0)
        return Computed(logits, None, joined.numpy())

    def _without_placeholders(self, ids: IntArray, placing: Placing) -> IntArray:
        """Return ids with those of padding where rows stand.

        Some models have more of an id than its embedding, and wrappers take that of padding there.
        """
        padding = self._network.config.pad_token_id
        for one in placing.rows:
            ids[one.tokens.cpu().numpy()] = 0 if padding is None else padding
        return ids

    def _tensor(self, values: IntArray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


class SamplingTorchRunner(TorchRunner):
    """Runner on a GPU: a :class:`~kvcellar.models.kept_logits.SamplingRunner` too."""

    def forward_kept(
        self,
        token_ids: Sequence[int] | IntArray,
        positions: Sequence[int] | IntArray,
        rows: Sequence[int] | IntArray | None = None,
        *,
        has_features: bool = False,
    ) -> tuple[DeviceLogits, FloatArray]:
        """See :meth:`kvcellar.models.kept_logits.SamplingRunner.forward_kept`."""
        run, given = self._run_kept, (token_ids, positions, rows)
        return self._forward(run, *given, has_features=has_features)

    def prepare(
        self, positions: Sequence[int] | IntArray, rows: Sequence[int] | IntArray | None = None
    ) -> None:
        """See :meth:`kvcellar.models.kept_logits.PreparingRunner.prepare`."""
        if self.graphs is not None:
            at = np.array(positions, np.int64)
            wanted = None if rows is None else np.array(rows, np.int64)
            if isinstance(length := self._rope_lengths(len(at)), int):
                with suppress(torch.OutOfMemoryError):  # the forward itself will say it
                    self.graphs.prepare(self._session.cache, at, wanted, length)

    def first_steps(self, most_tokens: int, most_rows: int) -> Sequence[FirstStep]:
        """See :meth:`kvcellar.models.kept_logits.CompilingRunner.first_steps`."""
        if self.graphs is None:
            return ()
        from kvcellar.backends.torch.gpu.record.first import first_steps  # few runners have graphs

        return first_steps(most_tokens, most_rows)

    def choosing(self) -> AbstractContextManager[None]:
        """See :meth:`kvcellar.models.kept_logits.CompilingRunner.choosing`."""
        if self.graphs is None:
            return nullcontext()
        from kvcellar.backends.torch.gpu.weights.ways import choosing  # it imports Triton

        return choosing(self._network)

    def _run_kept(
        self, cache: Any, ids: IntArray, at: IntArray, rows: IntArray | None, *, has_features: bool
    ) -> tuple[DeviceLogits, FloatArray]:
        computed = self._by_modules(cache, ids, at, rows, has_features=has_features)
        return DeviceLogits(computed.logits, computed.likeliest), computed.features


def _none_of(ids: IntArray) -> FloatArray:
    """Return the features of tokens of which none are wanted."""
    return np.empty((len(ids), 0), np.float32)


def _graphs_of(model: Any, modules: Sequence[Any]) -> StepGraphs | None:
    if not choice.has_graphs(model.device):
        return None
    from kvcellar.backends.torch.gpu.record.graphs import graphs_for  # it imports Triton

    return graphs_for(model, modules)
