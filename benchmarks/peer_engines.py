"""The engines that ``peers.py`` compares, behind one face; each with one model and its cache.

Each runs in a process of its own: their thread pools would take the cores from each other, and an
engine that crashes leaves the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import logging
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

import kvcellar as kv
from kvcellar.backends.torch.cache import memory
from kvcellar.engine.loop.branches import bytes_per_cell
from kvcellar.kernel import levels
from kvcellar.models import load_model

CAPACITY = 8192 + 1024
MOST_PER_STEP = 512


class Engine(Protocol):
    """One model and its cache. Sequences are 0, 1, ...; their lengths are what was filled."""

    weight_bytes: int
    """Read in a step of one token."""

    def fill(self, lengths: Sequence[int]) -> None:
        """Hold sequences of these lengths whose K and V nobody computed, and no others."""

    def prefill(self, tokens: Sequence[int]) -> Any:
        """Go from nothing to these tokens in sequence 0, and return the last one's logits."""

    def decode(self, n: int) -> None:
        """Decode a token for each of the first n sequences, to its logits, and go back again."""

    def branches(self, n: int, suffix: Sequence[int]) -> None:
        """Fork sequence 0 to 1, ..., n, which each read a suffix, to the first token's logits."""

    def decode_branches(self, n: int) -> None:
        """Decode a token for each of the branches, and go back again."""

    def kv_bytes(self) -> int:
        """Return the bytes of the cells that hold something."""

    def save(self) -> None:
        """Copy sequence 0's K and V to memory of their own."""

    def restore(self) -> None:
        """Go from nothing to what was saved in sequence 0, ready for a token."""


class Ours:
    """A model of kvcellar on a cache of many sequences."""

    def __init__(self, folder: Path, backend: str, weights: str, embedding: int) -> None:
        """Open a session of its own; K and V in bfloat16."""
        model = load_model(folder, backend=backend, weights=weights)
        self.weight_bytes = model.touch_weights()
        if backend == "executorch":
            self.weight_bytes -= embedding  # in 8 bits, and a row of it is read
        self._stack = contextlib.ExitStack()
        self._saved: Any = None
        config = kv.make_config(model.params, CAPACITY, "bfloat16")
        session = self._stack.enter_context(kv.make_seq_session(model.backend, config))
        self.cache: Any = session.cache
        self.runner: Any = model.bind(session)

    def _clear(self) -> None:
        for seq_id in self.cache.seq_ids():
            self.cache.seq_rm(seq_id)

    def _rows(self, n: int) -> list[Any]:
        group = self.cache.config.params.groups[0]
        shape = (len(group.layers), group.n_kv_heads, n, group.head_dim)
        bits = torch.randn(shape).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return [((bits,), (bits,))]

    def fill(self, lengths: Sequence[int]) -> None:
        """See :class:`Engine`."""
        self._clear()
        for seq_id, n in enumerate(lengths):
            tables = self.cache.seq_claim(seq_id, [np.zeros(n, np.int64)])
            self.cache.write_rows(tables, self._rows(n))

    def _forward(self, seq_ids: Sequence[int], tokens: Sequence[int], rows: Sequence[int]) -> Any:
        return self.runner.forward(
            tokens,
            self.cache.begin_step([(one, len([*same])) for one, same in groupby(seq_ids)]),
            rows=rows,
        )

    def prefill(self, tokens: Sequence[int]) -> Any:
        """See :class:`Engine`."""
        self._clear()
        for first in range(0, len(tokens), MOST_PER_STEP):
            part = tokens[first : first + MOST_PER_STEP]
            logits = self._forward([0] * len(part), part, [len(part) - 1])
        return logits[0]

    def decode(self, n: int) -> None:
        """See :class:`Engine`."""
        self._decode(range(n))

    def _decode(self, seq_ids: Sequence[int]) -> None:
        self._forward(seq_ids, [5] * len(seq_ids), range(len(seq_ids)))
        for seq_id in seq_ids:
            self.cache.seq_rm(seq_id, self.cache.seq_len(seq_id) - 1)

    def branches(self, n: int, suffix: Sequence[int]) -> None:
        """See :class:`Engine`."""
        seq_ids = range(1, n + 1)
        for seq_id in seq_ids:
            if self.cache.has_seq(seq_id):
                self.cache.seq_rm(seq_id)
            self.cache.seq_cp(0, seq_id)
        flat = [seq_id for seq_id in seq_ids for _ in suffix]
        last = [len(suffix) * (i + 1) - 1 for i in range(n)]
        self._forward(flat, [*suffix] * n, last)

    def decode_branches(self, n: int) -> None:
        """See :class:`Engine`."""
        self._decode(range(1, n + 1))

    def kv_bytes(self) -> int:
        """See :class:`Engine`."""
        return self.cache.usage().groups[0].live * bytes_per_cell(self.cache.config)

    def save(self) -> None:
        """See :class:`Engine`."""
        self._saved = self.cache.read_rows(self.cache.seq_table(0))

    def restore(self) -> None:
        """See :class:`Engine`."""
        self._clear()
        n = self._saved[0][0][0].shape[2]
        self.cache.write_rows(self.cache.seq_claim(0, [np.zeros(n, np.int64)]), self._saved)


class Transformers:
    """transformers' own model and cache; several sequences are a batch of equal lengths."""

    def __init__(self, folder: Path, is_static: bool) -> None:
        """Load the model in bfloat16, with SDPA."""
        import transformers

        self._is_static = is_static
        transformers.utils.logging.disable_progress_bar()
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        self.weight_bytes = sum(parameter.nbytes for parameter in self._model.parameters())
        self._cache: Any = None
        self._saved: Any = None
        self._length = 0

    def _empty(self, room: int) -> Any:
        import transformers

        if self._is_static:
            return transformers.StaticCache(self._model.config, max_cache_len=room)
        return transformers.DynamicCache(config=self._model.config)

    def fill(self, lengths: Sequence[int]) -> None:
        """See :class:`Engine`."""
        config = self._model.config
        self._length = n = lengths[0]
        self._cache = self._empty(n + 64)
        shape = (len(lengths), config.num_key_value_heads, n, config.head_dim)
        for layer in range(config.num_hidden_layers):
            self._cache.update(*(torch.randn(shape).bfloat16() for _ in "kv"), layer)

    def _forward(self, cache: Any, tokens: torch.Tensor, first: int) -> Any:
        at = torch.arange(first, first + tokens.shape[1])[None].expand(tokens.shape)
        with torch.inference_mode():
            return self._model(
                input_ids=tokens,
                position_ids=at,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits

    def prefill(self, tokens: Sequence[int]) -> Any:
        """See :class:`Engine`."""
        self._cache, self._length = self._empty(len(tokens) + 64), len(tokens)
        return self._forward(self._cache, torch.tensor([list(tokens)]), 0)[0, -1].float().numpy()

    def decode(self, n: int) -> None:
        """See :class:`Engine`."""
        self._forward(self._cache, torch.full((n, 1), 5), self._length)
        self._back(1)

    def _back(self, n: int) -> None:
        if self._is_static:
            for layer in self._cache.layers:
                layer.cumulative_length.sub_(n)
        else:
            self._cache.crop(-n)

    def branches(self, n: int, suffix: Sequence[int]) -> None:
        """See :class:`Engine`."""
        if self._length and self._cache.layers[0].keys.shape[0] == 1:
            self._cache.batch_repeat_interleave(n)
        self._forward(self._cache, torch.tensor([list(suffix)] * n), self._length)
        self._back(len(suffix))

    def decode_branches(self, n: int) -> None:
        """See :class:`Engine`."""
        self.decode(n)

    def kv_bytes(self) -> int:
        """See :class:`Engine`."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self._cache.layers)

    def save(self) -> None:
        """See :class:`Engine`."""
        self._saved = [(layer.keys.clone(), layer.values.clone()) for layer in self._cache.layers]

    def restore(self) -> None:
        """See :class:`Engine`."""
        self._cache, self._length = self._empty(0), self._saved[0][0].shape[2]
        for i, (k, v) in enumerate(self._saved):
            self._cache.update(k, v, i)


class LlamaCpp:
    """llama.cpp through its C interface, with one unified cache in float16."""

    def __init__(self, path: Path, row_numbers: int, is_repacked: bool, has_flash: bool) -> None:
        """Open a GGUF file.

        Args:
            path: the file.
            row_numbers: numbers of a token's K and V in all layers.
            is_repacked: let it bring weights into the order of the machine's best kernels.
            has_flash: with its flash attention, which is what it chooses by itself.
        """
        import llama_cpp as api

        self._api, self.weight_bytes = api, path.stat().st_size
        self._saved: Any = None
        self._quiet = api.llama_log_callback(lambda *_: None)
        api.llama_log_set(self._quiet, ctypes.c_void_p(0))
        options = api.llama_model_default_params()
        options.use_extra_bufts = is_repacked
        self._model = api.llama_model_load_from_file(str(path).encode(), options)
        context = api.llama_context_default_params()
        context.n_ctx, context.n_seq_max, context.kv_unified = CAPACITY, 8, True
        context.n_batch, context.n_ubatch = 2048, 512
        context.flash_attn_type, context.swa_full = int(has_flash), False  # as its server has it
        context.n_threads = context.n_threads_batch = torch.get_num_threads()
        self._context = api.llama_init_from_model(self._model, context)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context for {path}")
        self._memory = api.llama_get_memory(self._context)
        self._n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._cell_bytes = 2 * row_numbers
        self._batch = api.llama_batch_init(2048, 0, 1)
        self._lengths: dict[int, int] = {}
        self._n_own = 0  # cells that branches have beside sequence 0's

    def _forward(self, seq_ids: Sequence[int], tokens: Sequence[int], rows: Sequence[int]) -> Any:
        batch, wanted = self._batch, set(rows)
        batch.n_tokens = len(tokens)
        for i, (seq_id, token) in enumerate(zip(seq_ids, tokens, strict=True)):
            at = self._lengths.get(seq_id, 0)
            batch.token[i], batch.pos[i], batch.logits[i] = token, at, i in wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq_id
            self._lengths[seq_id] = at + 1
        if found := self._api.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode says {found}")
        return [self._api.llama_get_logits_ith(self._context, row) for row in rows]

    def _remove(self, seq_id: int, p0: int) -> None:
        self._api.llama_memory_seq_rm(self._memory, seq_id, p0, -1)
        self._lengths[seq_id] = p0

    def fill(self, lengths: Sequence[int]) -> None:
        """Compute a few tokens, and copy them as a state, shifted, and so double them."""
        self._api.llama_memory_clear(self._memory, True)
        self._lengths.clear()
        spare = 7
        for seq_id, n in enumerate(lengths):
            have = min(128, n)
            self._forward([seq_id] * have, [(i * 7) % 1000 for i in range(have)], [have - 1])
            while have < n:
                state, more = self._state(seq_id), min(have, n - have)
                self._api.llama_state_seq_set_data(self._context, state, len(state), spare)
                self._api.llama_memory_seq_rm(self._memory, spare, more, -1)
                self._api.llama_memory_seq_add(self._memory, spare, 0, -1, have)
                self._api.llama_memory_seq_cp(self._memory, spare, seq_id, -1, -1)
                self._api.llama_memory_seq_rm(self._memory, spare, -1, -1)
                have += more
            self._lengths[seq_id] = n
            self._forward([seq_id], [5], [0])  # the shift is done with the next step
            self._remove(seq_id, n)

    def _state(self, seq_id: int) -> Any:
        size = self._api.llama_state_seq_get_size(self._context, seq_id)
        state = (ctypes.c_uint8 * size)()
        self._api.llama_state_seq_get_data(self._context, state, size, seq_id)
        return state

    def prefill(self, tokens: Sequence[int]) -> Any:
        """See :class:`Engine`."""
        self._api.llama_memory_clear(self._memory, True)
        self._lengths.clear()
        for first in range(0, len(tokens), 2048):
            part = tokens[first : first + 2048]
            (logits,) = self._forward([0] * len(part), part, [len(part) - 1])
        return np.ctypeslib.as_array(logits, (self._n_vocab,)).copy()

    def best_after(self, token: int) -> int:
        """Return the best token that follows one more of sequence 0."""
        (logits,) = self._forward([0], [token], [0])
        return int(np.ctypeslib.as_array(logits, (self._n_vocab,)).argmax())

    def built_for(self) -> str:
        """Return the instructions that llama.cpp was built for, as it says them."""
        said = self._api.llama_print_system_info().decode()
        return str(said.strip(" |").replace(" = 1", "").replace(" |", ""))

    def decode(self, n: int) -> None:
        """See :class:`Engine`."""
        self._decode(range(n))

    def _decode(self, seq_ids: Sequence[int]) -> None:
        self._forward(seq_ids, [5] * len(seq_ids), range(len(seq_ids)))
        for seq_id in seq_ids:
            self._remove(seq_id, self._lengths[seq_id] - 1)

    def branches(self, n: int, suffix: Sequence[int]) -> None:
        """See :class:`Engine`."""
        seq_ids = range(1, n + 1)
        for seq_id in seq_ids:
            self._api.llama_memory_seq_rm(self._memory, seq_id, -1, -1)
            self._api.llama_memory_seq_cp(self._memory, 0, seq_id, -1, -1)
            self._lengths[seq_id] = self._lengths[0]
        flat = [seq_id for seq_id in seq_ids for _ in suffix]
        last = [len(suffix) * (i + 1) - 1 for i in range(n)]
        self._forward(flat, [*suffix] * n, last)
        self._n_own = n * len(suffix)

    def decode_branches(self, n: int) -> None:
        """See :class:`Engine`."""
        self._decode(range(1, n + 1))

    def kv_bytes(self) -> int:
        """See :class:`Engine`."""
        return (self._lengths[0] + self._n_own) * self._cell_bytes

    def save(self) -> None:
        """See :class:`Engine`."""
        self._saved = self._lengths[0], self._state(0)

    def restore(self) -> None:
        """See :class:`Engine`."""
        self._api.llama_memory_clear(self._memory, True)
        n, state = self._saved
        self._api.llama_state_seq_set_data(self._context, state, len(state), 0)
        self._lengths = {0: n}


class Stream:
    """No engine: a loop that reads memory, for what the machine gives at that moment."""

    weight_bytes = 256 << 20

    def __init__(self) -> None:
        """Take memory that no core's own cache holds, in large pages, as weights are."""
        shape = (self.weight_bytes,)
        self._memory = memory.empty(shape, torch.uint8, torch.device("cpu")).fill_(1)

    def decode(self, n: int) -> None:
        """Read it all."""
        levels.stream_read(self._memory.data_ptr(), self.weight_bytes)


class Remote:
    """An engine in a process of its own; calls take their time there."""

    def __init__(self, name: str, make: Callable[..., Any], *arguments: Any) -> None:
        """Start it.

        Raises:
            RuntimeError: it cannot be made, or ends by itself at its first tokens.
        """
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()
        self.weight_bytes: int
        self.weight_bytes, self.made_s = self._answer()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method, and return what it returns."""
        return self._ask(method, arguments)[0]

    def time(self, method: str, *arguments: Any) -> float:
        """Return the seconds that a method takes."""
        return self._ask(method, arguments)[1]

    def _ask(self, method: str, arguments: tuple[Any, ...]) -> tuple[Any, float]:
        self._pipe.send((method, arguments))
        return self._answer()

    def _answer(self) -> tuple[Any, float]:
        try:
            found: tuple[Any, float] | str = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"{self.name}: its process has ended") from None
        if isinstance(found, str):
            raise RuntimeError(f"{self.name}: {found}")
        return found

    def close(self) -> None:
        """End its process."""
        self._pipe.close()
        self._process.join()


def _serve(pipe: Any, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Run in an engine's process: calls in, results and seconds out, until nobody asks any more."""
    logging.disable(logging.WARNING)  # of packages that look for what is not here
    here = Path(__file__).parent  # where "executorch" is a benchmark
    sys.path[:] = [path for path in sys.path if Path(path) != here]
    try:
        started = time.perf_counter()
        engine = make(*arguments)
        pipe.send((engine.weight_bytes, time.perf_counter() - started))
        with contextlib.suppress(EOFError):
            while True:
                method, given = pipe.recv()
                started = time.perf_counter()
                found = getattr(engine, method)(*given)
                pipe.send((found, time.perf_counter() - started))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


def left_out() -> dict[str, str]:
    """Return what is not compared here, and why."""
    found = {}
    for package, name, what in (
        ("llama-cpp-python", "llama.cpp", "pip install llama-cpp-python"),
        ("gguf", "llama.cpp", "pip install gguf, which writes its files"),
        ("executorch", "ours, executorch", "pip install 'kvcellar[executorch]'"),
    ):
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found.setdefault(name, f"not installed; {what}")
    if sys.platform != "darwin":
        found["mlx-lm"] = "it is made for Macs; benchmarks/mlx.py compares it on MLX's CPU device"
    return found
