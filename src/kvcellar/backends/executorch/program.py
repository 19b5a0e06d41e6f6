"""Programs: a .pte file, opened once, whose methods run on the cache that is bound to them.

A loaded method holds weights and no session: bound to several caches it is in memory once, and runs
one forward at a time. Open the file twice where two threads should run at the same time.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvcellar.backends.executorch import native
from kvcellar.backends.executorch.archive import check_file
from kvcellar.backends.executorch.forward import Forwards
from kvcellar.backends.executorch.values import put_value, take_value
from kvcellar.errors import BackendError, ConfigError, MetadataError, ModelError, StepError
from kvcellar.metadata import PREFIX, read_kv_cache_metadata
from kvcellar.op import OpCache
from kvcellar.registry import CacheRegistry, use_cache
from kvcellar.types import ModelCacheParams

OWN_PREFIX = "kvcellar."
"""Beginning of the names of kvcellar's own constants, beside those of the cache."""

_LISTS = (
    "layer_groups", "layer_sources", "group_windows", "group_chunks", "group_is_latent",
    "group_n_kv_heads", "group_head_dims", "group_v_head_dims",
)  # fmt: skip
LIST_KEYS = {
    *(PREFIX + name for name in _LISTS),
    OWN_PREFIX + "eos_token_ids",
    OWN_PREFIX + "feature_layers",
}
"""Constants that are lists also where they have one entry."""

MAX_OUTPUTS = 512


class Program:
    """An exported program. Safe to use from several threads; runs one forward at a time.

    Attributes:
        path: its file, which is never written to.
        is_sealed: whether every byte was compared with what was exported.
        method_names: what it can run, without constants.
        metadata: its constants by name: cache facts and what else its exporter wrote.
    """

    def __init__(self, path: str | Path) -> None:
        """Open a file and read its constants. The weights are read when a method is loaded.

        Raises:
            ModelError: it is no program, truncated or damaged, or of another ExecuTorch.
            BackendError: the native part is missing; see ``native.library``.
        """
        self.path = Path(path)
        self.is_sealed = check_file(self.path)
        self._lib = native.library()
        self._lock = threading.Lock()
        handle = self._lib.kvc_open(str(self.path).encode())
        if not handle:
            raise native.fail(self._lib, f"{self.path} cannot be used")
        self._handle = handle
        self._close = weakref.finalize(self, self._lib.kvc_close, handle)
        names = [
            self._lib.kvc_method_name(handle, i).decode()
            for i in range(self._lib.kvc_n_methods(handle))
        ]
        constants = [name for name in names if "." in name]
        self.method_names = tuple(sorted(name for name in names if "." not in name))
        self.metadata: Mapping[str, Any] = {name: self._constant(name) for name in constants}

    def close(self) -> None:
        """Let go of the weights. Whoever runs it later gets an error; may be called twice."""
        with self._lock:
            self._close()

    @property
    def params(self) -> ModelCacheParams:
        """The cache facts of the model inside.

        Raises:
            MetadataError: it has none, or of a schema that is not known here.
        """
        try:
            return read_kv_cache_metadata(self.metadata)
        except MetadataError as error:
            raise MetadataError(f"{self.path}: {error}") from error

    def load_method(
        self, name: str = "forward", *, cache_key: str | None = None, cache: Any = None
    ) -> Method:
        """Load a method and bind it to a cache, which it keeps alive.

        Args:
            name: one of ``method_names``.
            cache_key: of an open session, as the load option of that name.
            cache: the cache itself, in place of its key. Neither: the one that is active in the
                thread that runs it.

        Raises:
            UnknownCacheError: no session is open under the key.
            BackendError: the session's cache has no ``update_and_attend`` for tensors.
            ConfigError: its cache was made for another model than the program's constants describe.
            ModelError: there is no such method, or it cannot be loaded.
        """
        if cache_key is not None:
            cache = CacheRegistry.instance().get(cache_key)
        if cache is not None:
            self._check_cache(cache, cache_key)
        if name not in self.method_names:
            raise ModelError(
                f"{self.path} has no method {name!r}; it has: {', '.join(self.method_names)}"
            )
        with self._lock:
            self._check_open()
            if self._lib.kvc_load(self._handle, name.encode()):
                raise native.fail(self._lib, f"{self.path} cannot be used")
        return Method(self, name, cache)

    def run(
        self, name: str, inputs: Sequence[Any], forward: int | None = None
    ) -> tuple[list[Any], native.Times]:
        """Run a loaded method; outputs are copies. ``forward``: what was planned, an address.

        Raises:
            ModelError: the program is closed.
            StepError: the runtime refused, for example an input of another type or size.
            Whatever a cache in Python raised.
        """
        values = (native.Value * max(1, len(inputs)))()
        kept = [put_value(value, given) for value, given in zip(values, inputs, strict=False)]
        outputs = (native.Value * MAX_OUTPUTS)()
        times = native.Times()
        with self._lock:
            self._check_open()
            n = self._lib.kvc_run(
                self._handle,
                name.encode(),
                values,
                len(inputs),
                forward,
                outputs,
                MAX_OUTPUTS,
                ctypes.byref(times),
            )
            del kept
            if n >= 0:
                return [take_value(value) for value in outputs[:n]], times
        raise native.run_error(self._lib, f"{self.path.name} did not run")

    def _constant(self, name: str) -> Any:
        if self._lib.kvc_load(self._handle, name.encode()):
            raise native.fail(self._lib, f"{self.path} cannot be used")
        try:
            found, _ = self.run(name, ())
        except StepError as error:
            raise ModelError(f"{self.path} is damaged: constant {name}: {error}") from error
        return found if name in LIST_KEYS or len(found) != 1 else found[0]

    def _check_open(self) -> None:
        """Refuse a program that was closed."""
        if not self._close.alive:
            raise ModelError(f"{self.path} was closed; open it again")

    def _check_cache(self, cache: Any, cache_key: str | None) -> None:
        """Refuse a cache that cannot attend tensors, or was made for another model."""
        what = f"the cache of session {cache_key}" if cache_key else type(cache).__name__
        if not isinstance(cache, OpCache):
            raise BackendError(
                f"{what} is a {type(cache).__name__}, which cannot attend the tensors of a "
                f"program; make the session with backend 'executorch' or 'torch'"
            )
        if PREFIX + "schema_version" in self.metadata and cache.config.params != self.params:
            raise ConfigError(
                f"{what} was made for {cache.config.params}; {self.path.name} has {self.params}; "
                f"make the session with the program's params"
            )


class Method:
    """A loaded method and the cache that its op meets."""

    def __init__(self, program: Program, name: str, cache: Any) -> None:
        """Bind; use :meth:`Program.load_method`."""
        self.program = program
        self.name = name
        self.cache = cache
        self.times = native.Times()
        """Times of the last run."""
        self._forwards = Forwards(cache) if Forwards.can_run(cache) else None

    def __call__(self, *inputs: Any, n_tokens: int = 0, positions: Any = None) -> list[Any]:
        """Run a forward: all of its layers store K and V in the cache, or none counts.

        Args:
            inputs: tensors on the CPU, or numbers, as the method takes them.
            n_tokens: tokens of the flat batch, where the caller knows; the step is then planned
                before the run, else when the first layer asks.
            positions: of these tokens.

        Returns:
            The outputs; tensors are copies.

        Raises:
            StepError, PositionError, CacheFullError, ShapeError: the forward does not fit the cache
                or the program; no cell stays claimed for it.
            ModelError: the program was closed.
        """
        cache, forwards = self.cache, self._forwards
        if cache is None:
            with native.planning(None):
                outputs, self.times = self.program.run(self.name, inputs)
            return outputs
        if not cache.is_step_open:
            cache.end_step()  # from here on cancel_step can only mean this forward's step
        try:
            with ExitStack() as stack:
                stack.enter_context(use_cache(cache))
                planned = None
                if forwards is None:
                    stack.enter_context(native.planning(None))
                else:
                    stack.enter_context(native.planning(forwards.plan_for))
                    if n_tokens:
                        planned = forwards.plan(n_tokens, positions)
                outputs, self.times = self.program.run(self.name, inputs, planned)
                if forwards is not None:
                    forwards.finish()
            if cache.is_step_open:
                raise StepError(
                    f"{self.program.path.name} has run and not all of the cache's "
                    f"{cache.steps.n_layers} layers have written; the cache is for another model"
                )
        except BaseException:
            if forwards is not None:
                forwards.forget()
            cache.cancel_step()
            raise
        return outputs
