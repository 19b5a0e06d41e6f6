"""A card, models on it, and sequences and requests that its benchmark steps.

Each part of ``gpu.py`` asks a question of its own and stands for itself: none needs what another
one has found.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import torch
from random_models import LLAMA_1B, random_llama
from serving import KVCELLAR, RequestFailedError

import kvcellar as kv
from kvcellar.engine import (
    Engine,
    EngineConfig,
    FinishEvent,
    GeneratedToken,
    Request,
    SamplingParams,
)
from kvcellar.engine.picture_rows import PictureRows
from kvcellar.models import LoadedModel, load_model
from kvcellar.models.kept_logits import RowSampling, SamplingRunner
from kvcellar.models.sizes.snapshots import slots_bytes

ROOT = Path(__file__).resolve().parent.parent

TINY = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 262,
}  # fmt: skip

TINY_LENGTHS = {
    128: 3, 160: 4, 200: 3, 300: 4, 500: 6, 2048: 10, 4000: 18, 4096: 12, 5000: 12,
    8192: 14, 16_384: 16, 32_768: 18,
}  # fmt: skip
"""Numbers of tokens -> how many there are in their place where nothing is measured.

As on a card a prompt is longer than a step of the engine, or shorter: there it has 8 tokens.
"""

Found = dict[str, Any]


@dataclass
class Bench:
    """A card, models on it, and how long things are.

    Attributes:
        device: as torch names it.
        is_dry: nothing is measured; it is tried whether all parts run.
        folder: of models, which are made once.
        ends_s: when all has to be done, by ``time.monotonic``.
    """

    device: str
    is_dry: bool
    folder: Path
    ends_s: float
    dtype: str = "bfloat16"
    _peer: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.rounds = 1 if self.is_dry else 7
        self.branches = 2 if self.is_dry else 8
        self.vocab = 512 if self.is_dry else 128_256

    def n(self, n_tokens: int) -> int:
        """Return a number of tokens, or the small one in its place."""
        return TINY_LENGTHS[n_tokens] if self.is_dry else n_tokens

    @property
    def step(self) -> int:
        """Tokens of a step of the engine: what its default is."""
        return EngineConfig().max_num_batched_tokens

    @property
    def chunk(self) -> int:
        """Tokens of a forward of a prompt that no engine runs."""
        return self.n(2048)

    # Models ------------------------------------------------------------------------------------

    @functools.cached_property
    def path(self) -> Path:
        """Folder of a Llama of 1B shape, made when it is first wanted."""
        shape = TINY if self.is_dry else LLAMA_1B
        return self.made("llama", lambda folder: random_llama(shape, folder, self.device))

    def made(self, name: str, write: Callable[[Path], object]) -> Path:
        """Return the folder of a model, which is written where it is not there whole."""
        folder = self.folder / name
        if not (folder / "whole").exists():
            folder.mkdir(parents=True, exist_ok=True)
            write(folder)
            (folder / "whole").touch()
        return folder

    @functools.cached_property
    def model(self) -> Any:
        """Llama of 1B shape."""
        return self.load_prepared(self.path)

    def load(self, path: Path, **settings: Any) -> Any:
        """Load a model on the card, in bfloat16 where nothing else is said."""
        given = {"device": self.device, "dtype": self.dtype, "is_unchecked": True} | settings
        return load_model(str(path), backend="torch", **given)

    def load_prepared(self, path: Path, **settings: Any) -> Any:
        """Load a model, and have its steps without an engine go the ways that one would choose."""
        model = self.load(path, **settings)
        if not self.is_dry:
            with self.engine(model, 64, n_sequences=4, most_tokens=4):
                pass
        return model

    @property
    def peer(self) -> Any:
        """Network of the Llama's weights, as transformers runs it."""
        if self._peer is None:
            self._peer = self.by_transformers(self.path)
        return self._peer

    def by_transformers(self, path: Path) -> Any:
        """Return the network of a checkpoint, as transformers runs it."""
        from transformers import AutoModelForCausalLM

        made = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, self.dtype))
        return made.to(self.device).eval()

    def read_by(self, network: Any, cache: Any, length: int, chunk: int) -> None:
        """Have transformers read a prompt in chunks."""
        for start in range(0, length, chunk):
            ids = self.ids(min(chunk, length - start))
            network(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def ids(self, n: int) -> torch.Tensor:
        """Return a prompt ``[1, n]`` on the device."""
        return torch.full((1, n), 7, device=self.device)

    # Sessions ----------------------------------------------------------------------------------

    def config(
        self, capacity: int, kv_dtype: str | None = None, model: Any = None
    ) -> kv.CacheConfig:
        """Return the config of a cache of so many cells."""
        of = self.model if model is None else model
        return kv.make_config(of.params, capacity, kv_dtype=kv_dtype or of.kv_dtype)

    def bound(self, model: LoadedModel, session: Any) -> SamplingRunner:
        """Return a runner that samples on the card, as a card's does."""
        runner = model.bind(session)
        assert isinstance(runner, SamplingRunner), "on a GPU logits stay there"
        return runner

    @contextmanager
    def engine(
        self,
        model: Any,
        capacity: int,
        n_sequences: int,
        most_tokens: int | None = None,
        rows: PictureRows | None = None,
    ) -> Iterator[Engine]:
        """Open an engine, which is prepared as ``kvcellar serve`` does it.

        Args:
            model: that it runs.
            capacity: of its cache.
            n_sequences: that run at a time.
            most_tokens: of a step; None: as many as are the default.
            rows: of pictures, for a model that reads them.
        """
        config = EngineConfig(most_tokens or self.step, n_sequences)
        with kv.make_seq_session("torch", self.config(capacity, model=model)) as session:
            runner = self.bound(model, session)
            made = Engine(runner, session.cache, config=config, rows=rows)
            made.prepare(lambda part, what: None)
            yield made

    def least_bytes(self, model: Any, length: int) -> int:
        """Return the bytes that a step of one token behind so many must read: weights, KV, states.

        Of an embedding that no head shares a row is read alone.
        """
        config = self.config(length, model=model)
        rows = sum(
            group.cell_bytes(config.kv) * min(length, group.window or length)
            for group in model.params.groups
        )
        network = model.network
        words, head = network.get_input_embeddings(), network.get_output_embeddings()
        is_shared = bool(network.config.tie_word_embeddings) or words is head
        own = getattr(words, "weight", None)
        unread = 0 if is_shared or own is None else own.nbytes
        return int(model.size_bytes) - unread + rows + slots_bytes(model.params, 1)

    # Times -------------------------------------------------------------------------------------

    @functools.cached_property
    def bandwidth(self) -> float:
        """Bytes per second of a copy, reads and writes counted."""
        n_bytes = 1 << (16 if self.is_dry else 30)
        source = torch.empty(n_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * n_bytes / (self.timed(lambda: target.copy_(source)) * 1e-3)

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.get_device_module(self.device).synchronize()

    def timed(self, call: Callable[[], object], rounds: int | None = None) -> float:
        """Return the median time of a call in ms, with the device's work done."""
        found = []
        n = rounds or self.rounds
        n_warm = 1 if self.is_dry else 2
        for i in range(n + n_warm):
            self.synchronize()
            start = time.perf_counter()
            call()
            self.synchronize()
            if i >= n_warm:
                found.append(time.perf_counter() - start)
        return statistics.median(found) * 1e3


def products_of(model: Any) -> dict[str, str]:
    """Return how products of few rows of a model on a card are computed: their ways, by shape."""
    from kvcellar.backends.torch.gpu.weights.ways import chosen_of  # it imports Triton

    return chosen_of(model.network)


class Sequences:
    """Sequences in one session, and forwards over them."""

    def __init__(self, bench: Bench, session: Any, model: Any = None) -> None:
        """Bind a model to a session; None: the Llama."""
        self.runner = bench.bound(bench.model if model is None else model, session)
        self.cache = session.cache
        self._chunk = bench.chunk

    def step(self, seq_ids: Sequence[int]) -> None:
        """Run one forward; each id is a token of its sequence; sample behind each one's last."""
        stretches = [(seq_id, len([*same])) for seq_id, same in groupby(seq_ids)]
        positions = self.cache.begin_step(stretches)
        ends = [end - 1 for end in accumulate(n for _, n in stretches)]
        kept, _ = self.runner.forward_kept([7] * len(seq_ids), positions, ends)
        kept.sample([RowSampling(row) for row in range(len(ends))])

    def fill(self, seq: int, length: int) -> None:
        """Prefill a sequence in chunks up to a length."""
        there = self.cache.seq_len(seq) if self.cache.has_seq(seq) else 0
        for start in range(there, length, self._chunk):
            self.step([seq] * min(self._chunk, length - start))

    @property
    def n_graphs(self) -> int:
        """Graphs that were recorded and are kept; 0 where a step could not be recorded."""
        return n_graphs_of(self.runner)


def n_graphs_of(runner: Any) -> int:
    """Return how many steps a runner has as graphs; 0 where one could not be recorded."""
    graphs = getattr(runner, "graphs", None)
    return 0 if graphs is None or graphs.is_off else graphs.n_graphs


# Requests ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answered:
    """Times of requests that ran together to their ends.

    Attributes:
        first_s: seconds until all had their first token.
        steps_s: seconds of each step behind it in which every one of them got a token.
        token_ids: of each, what was sampled.
    """

    first_s: float
    steps_s: list[float]
    token_ids: list[tuple[int, ...]]

    @property
    def step_ms(self) -> float:
        """Median of a step's time."""
        return statistics.median(self.steps_s) * 1e3


def answered(engine: Engine, prompts: Sequence[Sequence[int]], n_tokens: int) -> Answered:
    """Run a request of so many tokens behind each prompt; greedy.

    Raises:
        RequestFailedError: one has ended with an error, or with fewer tokens.
    """
    params = SamplingParams(max_tokens=n_tokens, ignore_eos=True)
    began = time.perf_counter()
    ids = [engine.submit(Request(prompt, params)) for prompt in prompts]
    first_s, begun, steps_s = None, set[int](), list[float]()
    ends: dict[int, tuple[int, ...]] = {}
    while len(ends) < len(ids):
        start = time.perf_counter()
        events = engine.step()
        end = time.perf_counter()
        told = {event.request_id for event in events if isinstance(event, GeneratedToken)}
        if first_s is not None and len(told) == len(prompts):
            steps_s.append(end - start)
        begun |= told
        if first_s is None and len(begun) == len(prompts):
            first_s = end - began
        for event in events:
            if isinstance(event, FinishEvent):
                _check(event, n_tokens)
                ends[event.request_id] = event.token_ids
        if engine.is_idle and len(ends) < len(ids):
            raise RequestFailedError(f"{len(ids) - len(ends)} of {len(ids)} requests never ended")
    assert first_s is not None, "each had a token"
    return Answered(first_s, steps_s, [ends[request_id] for request_id in ids])


def _check(event: FinishEvent, n_tokens: int) -> None:
    """Refuse the end of a request that was not to be.

    Raises:
        RequestFailedError: it ended with an error, or with fewer tokens.
    """
    if event.error is not None:
        said = f"{type(event.error).__name__}: {event.error}"
        raise RequestFailedError(f"a request ended with {said}") from event.error
    if event.reason != "length" or len(event.token_ids) != n_tokens:
        raise RequestFailedError(
            f"{n_tokens} tokens were asked for, and {len(event.token_ids)} came, which ended with "
            f"{event.reason!r}"
        )


def prompt_of(length: int, seed: int, vocab: int) -> list[int]:
    """Return a prompt that shares nothing with those of other seeds."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab - 10, (length,), generator=generator).tolist()


# Where there is no card --------------------------------------------------------------------------


def stand_in() -> None:
    """Let a CPU be a card for this process, which has not imported Triton yet."""
    import pytest

    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(ROOT))
    from tests import card

    card.stand_in(pytest.MonkeyPatch())
    card.with_short_steps()


def command_of(*, is_dry: bool) -> tuple[str, ...]:
    """Return what runs kvcellar: as users do, or where a CPU stands in for the card."""
    return (sys.executable, "-W", "ignore", "-m", "tests.card") if is_dry else KVCELLAR
