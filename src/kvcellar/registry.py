"""Backends by name, caches by key, and the cache that a model's op meets in this thread.

A session installs its cache in the registry under a unique ``cache_key`` for as long as its
``with`` lasts. Whoever looked the cache up holds it too, so erasing an entry in mid-use is safe.
"""

from __future__ import annotations

import importlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path
from pkgutil import iter_modules
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from kvcellar.budget import format_size
from kvcellar.cache import Cache, DecodeCache, SeqCache, StateCache, TreeSeqCache
from kvcellar.cache_config import CacheConfig, SharedPrefix
from kvcellar.checks import seen, text
from kvcellar.errors import (
    BackendError,
    CacheFullError,
    ConfigError,
    SessionClosedError,
    UnknownCacheError,
)
from kvcellar.installed import pip_command
from kvcellar.types import IntArray

Face = TypeVar("Face", bound=Cache)
CacheBuilder = Callable[[CacheConfig], Cache]


@dataclass(frozen=True, slots=True)
class Backend:
    """Backend: the builders of its caches, and the loader of its models.

    Attributes:
        caches: kind of cache (``contiguous``, ``seq``, ``paged`` or ``tree``) -> how it is built.
        loader: imports and returns what loads models, a :class:`kvcellar.models.ModelLoader`; None:
            it has caches alone.
        has_adapters: its models can have adapters loaded beside them.
        has_ranks: several processes can compute one of its models together.
    """

    caches: Mapping[str, CacheBuilder]
    loader: Callable[[], Any] | None = None
    has_adapters: bool = False
    has_ranks: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.caches, Mapping) or not all(
            isinstance(kind, str) and callable(build) for kind, build in self.caches.items()
        ):
            raise BackendError(
                f"caches must be functions by kind of cache, got {seen(self.caches)}"
            )


ENTRY_POINTS = "kvcellar.backends"
"""Group of packaging entry points whose names are backends and whose objects are ``Backend``."""

_OWN = "kvcellar.backends"
"""The package whose packages are backends, each with its ``BACKEND``."""


class CacheRegistry:
    """Caches by key, for this process. Safe to call from any thread."""

    _global: CacheRegistry

    def __init__(self) -> None:
        """Create an empty registry."""
        self._lock = threading.Lock()
        self._caches: dict[str, Cache] = {}

    @classmethod
    def instance(cls) -> CacheRegistry:
        """Return the registry of this process."""
        return cls._global

    def install(self, cache_key: str, cache: Cache) -> None:
        """Make ``cache`` known under a key.

        Raises:
            ConfigError: another cache has that key; nothing was changed.
        """
        text(cache_key, "cache_key")
        with self._lock:
            if self._caches.get(cache_key, cache) is not cache:
                raise ConfigError(
                    f"another session has the cache_key {cache_key!r}; end it first, or leave "
                    f"cache_key out and get one that no other session has"
                )
            self._caches[cache_key] = cache

    def get(self, cache_key: str) -> Cache:
        """Return the cache of a key.

        Raises:
            UnknownCacheError: nothing is installed under it.
        """
        text(cache_key, "cache_key", UnknownCacheError)
        with self._lock:
            cache = self._caches.get(cache_key)
            there = list(self._caches)
        if cache is None:
            raise UnknownCacheError(
                f"no cache is installed under {cache_key!r}; installed are: "
                f"{', '.join(there) or 'none'}; a session installs its cache while its with lasts"
            )
        return cache

    def erase(self, cache_key: str) -> None:
        """Forget the key. Who holds the cache keeps it; an unknown key is no error."""
        with self._lock:
            self._caches.pop(cache_key, None)

    def keys(self) -> list[str]:
        """Return the keys that are installed."""
        with self._lock:
            return list(self._caches)


CacheRegistry._global = CacheRegistry()


_registered: dict[str, Callable[[], Backend]] = {}


def register_backend(name: str, backend: Backend | Callable[[], Backend]) -> None:
    """Make a backend known under a name, in this process; the last one of a name counts.

    A package that is installed says the same with an entry point of the group
    ``kvcellar.backends``.

    Args:
        name: what callers ask for.
        backend: the backend, or what makes it, called whenever it is asked for.

    Raises:
        BackendError: the name is no text, or ``backend`` is neither; nothing was registered.
    """
    text(name, "backend", BackendError)
    if not isinstance(backend, Backend) and not callable(backend):
        raise BackendError(
            f"backend {name!r} must be a Backend, or a function that makes one, got {seen(backend)}"
        )
    _registered[name] = (lambda: backend) if isinstance(backend, Backend) else backend


def backend_names() -> list[str]:
    """Return the names of all backends, sorted: our own, installed ones, and registered ones.

    A name says nothing of whether the packages that its backend needs are installed.
    """
    installed = (point.name for point in entry_points(group=ENTRY_POINTS))
    return sorted({*_own_names(), *installed, *_registered})


def load_backend(name: str) -> Backend:
    """Return a backend by its name; its runtime is imported.

    Raises:
        BackendError: it is unknown or cannot be imported, or a package that it needs is not
            installed.
    """
    text(name, "backend", BackendError)
    with needed_packages(name, f"backend {name!r}"):
        if name in _registered:
            found = _registered[name]()
        elif name in _own_names():
            found = importlib.import_module(f"{_OWN}.{name}").BACKEND
        elif points := entry_points(group=ENTRY_POINTS, name=name):
            found = _load_installed(name, points)
        else:
            raise BackendError(
                f"backend {name!r} is unknown; there are: {', '.join(backend_names())}"
            )
    if not isinstance(found, Backend):
        raise BackendError(f"backend {name!r} must be a Backend, got {seen(found)}")
    return found


def _load_installed(name: str, points: EntryPoints) -> Any:
    """Return what the entry point of a name stands for.

    Raises:
        BackendError: several packages bring that name, or the import fails.
    """
    values = sorted({point.value for point in points})
    if len(values) > 1:
        raise BackendError(
            f"backend {name!r} is brought by several packages: {', '.join(values)}; uninstall all "
            f"but one"
        )
    try:
        return next(iter(points)).load()
    except ModuleNotFoundError as error:
        module = values[0].partition(":")[0]
        if error.name and not f"{module}.".startswith(f"{error.name}."):
            raise  # of a package that it needs
        reason: Exception = error
    except Exception as error:
        reason = error
    raise BackendError(
        f"backend {name!r} cannot be imported from {values[0]}: {type(reason).__name__}: {reason}; "
        f"update or uninstall the package that brings it"
    ) from reason


_EXTRAS = ("executorch", "mlx", "torch")
"""Backends that need an extra of this package, of their name."""


@contextmanager
def needed_packages(backend: str, who: str) -> Iterator[None]:
    """Say what to install where an import inside of the block finds no package.

    Raises:
        BackendError: a package that is none of ours is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if not error.name or error.name.partition(".")[0] == "kvcellar":
            raise
        way = error.name
        if backend in _own_names():
            way = pip_command(backend if backend in _EXTRAS else "")
        raise BackendError(
            f"{who} needs the package {error.name!r}; install it with: {way}"
        ) from error


@cache
def _own_names() -> frozenset[str]:
    folder = Path(__file__).parent / "backends"
    return frozenset(found.name for found in iter_modules([str(folder)]) if found.ispkg)


_counter = itertools.count()


def make_unique_key() -> str:
    """Return a key that no other session of this process has: ``cache-N``."""
    return f"cache-{next(_counter)}"


class CacheSession(Generic[Face]):
    """A cache, installed under ``cache_key`` for as long as a ``with`` lasts.

    ::

        with make_seq_session("torch", config) as session:
            session.cache.begin_step([(0, 3)])
    """

    def __init__(self, cache: Face, *, backend: str, cache_key: str | None = None) -> None:
        """Not installed yet; ``with`` does it."""
        self.cache_key = cache_key or make_unique_key()
        self.backend = backend
        self._cache = cache
        self._n_open = 0

    @property
    def cache(self) -> Face:
        """The cache, while the session is open.

        Raises:
            SessionClosedError: outside of the ``with``.
        """
        if not self._n_open:
            raise SessionClosedError(
                f"session {self.cache_key} is not open; use its cache inside "
                f"'with session: ...', and make a new session once it has ended"
            )
        return self._cache

    def __enter__(self) -> CacheSession[Face]:
        """Install the cache. Nests: the outermost ``with`` counts.

        Raises:
            ConfigError: another session has the ``cache_key``.
        """
        CacheRegistry.instance().install(self.cache_key, self._cache)
        self._n_open += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Erase the entry, however the block ended."""
        self._n_open -= 1
        if not self._n_open:
            CacheRegistry.instance().erase(self.cache_key)


def make_decode_session(backend: str, config: CacheConfig) -> CacheSession[DecodeCache]:
    """Make a session for one sequence in a contiguous cache.

    Raises:
        BackendError: the backend is unknown or not installed.
        UnknownCacheError: it has no contiguous cache.
    """
    return _make_session(backend, "contiguous", config, DecodeCache)  # type: ignore[type-abstract]


def make_seq_session(backend: str, config: CacheConfig) -> CacheSession[SeqCache]:
    """Make a session for many sequences over shared cells; errors as in ``make_decode_session``."""
    return _make_session(backend, "seq", config, SeqCache)  # type: ignore[type-abstract]


def make_paged_session(backend: str, config: CacheConfig) -> CacheSession[TreeSeqCache]:
    """Make a session for many sequences over shared blocks, each with or without a draft tree.

    Errors as in ``make_decode_session``.

    Raises:
        ConfigError: the capacity holds no block of ``config.block_size`` cells.
    """
    return _make_session(backend, "paged", config, TreeSeqCache)  # type: ignore[type-abstract]


def make_tree_session(backend: str, config: CacheConfig) -> CacheSession[TreeSeqCache]:
    """Make a session for sequences with draft trees; errors as in ``make_decode_session``."""
    return _make_session(backend, "tree", config, TreeSeqCache)  # type: ignore[type-abstract]


def _make_session(
    backend: str, kind: str, config: CacheConfig, face: type[Face]
) -> CacheSession[Face]:
    if not isinstance(config, CacheConfig):
        raise ConfigError(f"config must be what make_config gives, got {seen(config)}")
    caches = load_backend(backend).caches
    if kind not in caches:
        raise UnknownCacheError(
            f"backend {backend!r} builds no {kind!r} cache; it builds: {', '.join(caches)}"
        )
    made = caches[kind](config)
    if not isinstance(made, face):
        raise UnknownCacheError(
            f"backend {backend!r} built {type(made).__name__} for {kind!r}, which lacks verbs of "
            f"{face.__name__}"
        )
    if config.prefix is not None and not isinstance(made, FreezableCache):
        raise ConfigError(
            f"backend {backend!r} built {type(made).__name__}, which reads no frozen prefix, and "
            f"config.prefix has {config.prefix.length} tokens; leave prefix out, or use one of the "
            f"backends reference, torch or mlx"
        )
    if config.params.state is not None and not isinstance(made, StateCache):
        raise ConfigError(
            f"backend {backend!r} built {type(made).__name__}, which keeps no states, and the "
            f"model has recurrent layers ({config.params.state}); use one of the backends "
            f"native, reference, torch or mlx"
        )
    return CacheSession(made, backend=backend)


@runtime_checkable
class FreezableCache(Cache, Protocol):
    """A cache whose rows can be frozen for others, and that reads what was frozen."""

    def rows_to_freeze(self, seq_id: int, length: int | None) -> tuple[int, list[IntArray]]:
        """Return how many first tokens of a sequence to freeze, and their cells by layer group."""
        ...

    def freeze_rows(self, cells: Sequence[IntArray]) -> Sequence[Any]:
        """Copy the rows of some cells, given per layer group; return one copy per layer."""
        ...


def freeze_prefix(cache: Cache, length: int | None = None, seq_id: int = 0) -> SharedPrefix:
    """Freeze the first tokens of a sequence, for caches that all begin with them.

    Their K and V are copied once. ``make_config(..., prefix=...)`` makes caches whose sequences
    begin with them; the copy is freed with the last of these caches. With a memory budget it is
    counted in the budget of the cache that it was frozen in.

    Args:
        cache: where the tokens were computed; it goes on as before.
        length: how many; None: all of the sequence.
        seq_id: whose.

    Raises:
        UnknownCacheError: caches of this backend cannot be frozen.
        UnknownSequenceError: no such sequence.
        RewindError: nothing can go on from there: a window has moved on, or tokens are not in the
            cache's own cells.
        CacheFullError: the memory budget has no room for the copy.
        ConfigError: the storage type cannot be shared, or the model has recurrent layers.
    """
    if cache.config.params.state is not None:
        raise ConfigError(
            f"a prefix of a model with recurrent layers cannot be frozen: its caches would start "
            f"from states that are no rows ({cache.config.params.state}); fork a sequence that "
            f"holds the prefix, in one cache (seq_cp), or restore it from a store"
        )
    if not isinstance(cache, FreezableCache):
        raise UnknownCacheError(
            f"a {type(cache).__name__} cannot be frozen; freeze a prefix in a cache of the "
            f"backends reference, torch or mlx"
        )
    n, cells = cache.rows_to_freeze(seq_id, length)
    layers = tuple(cache.freeze_rows(cells))
    config = cache.config
    stored = [layers[layer] for group in config.params.groups for layer in group.layers]
    size_bytes = sum(layer.size_bytes for layer in stored)
    firsts = tuple(n - len(rows) for rows in cells)
    frozen = SharedPrefix(config.params, config.kv_dtype, n, firsts, layers, size_bytes)
    if config.budget is not None:
        if not config.budget.ask(size_bytes):
            raise CacheFullError(
                f"a frozen prefix of {n} tokens takes {format_size(size_bytes)}; {config.more_room}"
            )
        weakref.finalize(frozen, config.budget.give_back, size_bytes)
    return frozen


# The active cache: which one the op meets in this thread ------------------------------------------

_active = threading.local()


def active_cache() -> Cache | None:
    """Return the cache that the op uses in this thread; None outside of ``use_cache``."""
    return getattr(_active, "cache", None)


@contextmanager
def use_cache(cache: Cache) -> Iterator[None]:
    """Let the op use ``cache`` in this thread for as long as the block lasts. Nests."""
    before = active_cache()
    _active.cache = cache
    try:
        yield
    finally:
        _active.cache = before
