"""A card, a model on it, and sequences that its benchmark steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from random_models import LLAMA_1B, random_llama

import kvcellar as kv
from kvcellar.backends.torch.gpu import choice
from kvcellar.models import LoadedModel, load_model
from kvcellar.models.kept_logits import RowSampling, SamplingRunner

TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 262,
}  # fmt: skip

Found = dict[str, Any]


@dataclass
class Bench:
    """A card, a model on it, and how long things are.

    Attributes:
        device: as torch names it.
        is_dry: nothing is measured; it is tried whether all parts run.
        folder: the model's.
        ends_s: when no further part begins.
        found: the results.
    """

    device: str
    is_dry: bool
    folder: Path
    ends_s: float
    found: Found = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rounds = 1 if self.is_dry else 7
        self.lengths = (8, 20) if self.is_dry else (128, 2048, 8192, 32_768)
        self.chunk = 12 if self.is_dry else 2048
        self.batch_length = 8 if self.is_dry else 4096
        self.trunk = 20 if self.is_dry else 16_384
        self.peer_length = 20 if self.is_dry else 8192
        self.branches = 3 if self.is_dry else 8
        self.vocab = 512 if self.is_dry else 128_256
        dtype = "float32" if self.is_dry else "bfloat16"
        random_llama(
            TINY if self.is_dry else LLAMA_1B, self.folder, "cpu" if self.is_dry else self.device
        )
        self.weights = "none" if self.is_dry else None  # a CPU's kernel is no card's
        self.model = self.load(self.device, dtype)
        self._peer: Any = None

    def load(self, device: str, dtype: str) -> LoadedModel:
        """Load the model on a device."""
        return load_model(str(self.folder), device=device, dtype=dtype, weights=self.weights)

    @property
    def peer(self) -> Any:
        """Network of the same weights, as transformers runs it."""
        if self._peer is None:
            from transformers import AutoModelForCausalLM

            dtype = self.model.network.dtype
            made = AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype)
            self._peer = made.to(self.device).eval()
        return self._peer

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

    def config(self, capacity: int, kv_dtype: str | None = None) -> kv.CacheConfig:
        """Return the config of a cache of so many cells."""
        return kv.make_config(self.model.params, capacity, kv_dtype=kv_dtype or self.model.kv_dtype)

    def bound(self, model: LoadedModel, session: Any) -> SamplingRunner:
        """Return a runner that samples and has graphs, as a card's has."""
        runner = model.bind(session)
        stand_in(model, runner)
        assert isinstance(runner, SamplingRunner), "on a GPU logits stay there"
        return runner

    def ids(self, n: int) -> torch.Tensor:
        """Return a prompt ``[1, n]`` on the device."""
        return torch.full((1, n), 7, device=self.device)


def stand_in(model: LoadedModel, runner: Any) -> None:
    """Give a runner on a CPU graphs of a device that records calls; a card's has its own."""
    if choice.ON_CPU:
        from kvcellar.backends.torch.gpu.graphs import StepGraphs
        from tests.backends.gpu.fake_device import FakeDevice

        runner.graphs = StepGraphs(model.network, FakeDevice())


class Sequences:
    """Sequences in one session, and forwards over them."""

    def __init__(self, bench: Bench, session: Any) -> None:
        """Bind the model to a session."""
        self.runner, self.cache = bench.bound(bench.model, session), session.cache
        self._chunk = bench.chunk

    def step(self, seq_ids: Sequence[int]) -> None:
        """Run one forward; each id is a token of its sequence; sample behind each one's last."""
        positions = self.cache.begin_step(list(seq_ids))
        ends = [i for i, s in enumerate(seq_ids) if i + 1 == len(seq_ids) or seq_ids[i + 1] != s]
        kept, _ = self.runner.forward_kept([7] * len(seq_ids), positions, ends)
        kept.sample([RowSampling(row) for row in range(len(ends))])

    def fill(self, seq: int, length: int) -> None:
        """Prefill a sequence in chunks up to a length."""
        there = self.cache.seq_len(seq) if self.cache.has_seq(seq) else 0
        for start in range(there, length, self._chunk):
            self.step([seq] * min(self._chunk, length - start))

    @property
    def n_graphs(self) -> int:
        """Graphs that were recorded and are kept."""
        graphs = getattr(self.runner, "graphs", None)
        return 0 if graphs is None else graphs.n_graphs
