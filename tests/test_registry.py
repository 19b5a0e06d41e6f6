"""Caches by key, builders by backend and kind, sessions, and the cache that is active."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvcellar import registry
from kvcellar.bookkeeping import OneSequence, Sequences, TreeSequences
from kvcellar.cache_config import make_config
from kvcellar.errors import BackendError, ConfigError, SessionClosedError, UnknownCacheError
from kvcellar.registry import (
    Backend,
    CacheRegistry,
    CacheSession,
    active_cache,
    backend_names,
    freeze_prefix,
    make_decode_session,
    make_seq_session,
    make_tree_session,
    make_unique_key,
    register_backend,
    use_cache,
)
from kvcellar.states import StateGroup, StateShape
from kvcellar.types import ModelCacheParams

CONFIG = make_config(ModelCacheParams(1, 1, 1), 8)


def make_cache():
    return Sequences(CONFIG)


@pytest.fixture
def fake_backend(monkeypatch):
    """A backend 'fake' that builds bookkeeping without bytes; 'odd' builds a cache of no face."""
    monkeypatch.setattr(registry, "_registered", {})
    caches = {
        "contiguous": OneSequence,
        "seq": Sequences,
        "tree": TreeSequences,
    }
    register_backend("fake", Backend(caches))
    register_backend("odd", Backend({"seq": OneSequence}))


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Install a package that brings a backend, as pip would: a module and its metadata."""

    def install(name: str, source: str, brings: str | None = None) -> None:
        (tmp_path / f"{name}_package.py").write_text(source)
        info = tmp_path / f"{name}_package-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}-package\nVersion: 1.0\n"
        )
        point = f"[kvcellar.backends]\n{brings or name} = {name}_package:BACKEND\n"
        (info / "entry_points.txt").write_text(point)
        monkeypatch.syspath_prepend(str(tmp_path))

    return install


# Caches by key ------------------------------------------------------------------------------------


def test_a_cache_is_found_under_its_key_until_it_is_erased():
    caches, cache = CacheRegistry(), make_cache()
    caches.install("a", cache)
    assert caches.get("a") is cache
    assert caches.keys() == ["a"]
    caches.erase("a")
    assert caches.keys() == []


def test_an_unknown_key_says_which_there_are():
    caches = CacheRegistry()
    with pytest.raises(UnknownCacheError, match="under 'x'; installed are: none; a session inst"):
        caches.get("x")
    caches.install("a", make_cache())
    caches.install("b", make_cache())
    with pytest.raises(UnknownCacheError, match="installed are: a, b;"):
        caches.get("x")


def test_erasing_an_unknown_key_is_no_error():
    CacheRegistry().erase("x")


def test_who_looked_a_cache_up_keeps_it_when_the_entry_is_erased_in_mid_use():
    caches = CacheRegistry()
    caches.install("a", make_cache())
    cache = caches.get("a")
    cache.begin_step([(0, 2)])
    caches.erase("a")
    cache.steps.plan(0, 2, None)
    cache.steps.wrote(0)
    assert cache.seq_len(0) == 2


@pytest.mark.slow
def test_a_cache_that_nobody_holds_any_more_is_freed():
    caches, cache = CacheRegistry(), make_cache()
    caches.install("a", cache)
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is not None
    caches.erase("a")
    gc.collect()
    assert gone() is None


def test_an_entry_of_another_cache_is_refused_and_kept():
    caches, first, second = CacheRegistry(), make_cache(), make_cache()
    caches.install("a", first)
    with pytest.raises(ConfigError, match="has the cache_key 'a'; end it first, or leave"):
        caches.install("a", second)
    assert caches.get("a") is first
    caches.install("a", first)


def in_threads(n, work):
    """Run ``work(i)`` in n threads that start together; raise what any of them raised."""
    errors, start = [], threading.Barrier(n)

    def body(i):
        try:
            start.wait()
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_threads_install_get_and_erase_side_by_side():
    caches = CacheRegistry()

    def work(i):
        for n in range(200):
            key, cache = f"{i}-{n}", make_cache()
            caches.install(key, cache)
            assert caches.get(key) is cache
            caches.keys()
            caches.erase(key)

    in_threads(8, work)
    assert caches.keys() == []


def test_keys_are_unique_across_threads():
    keys = []
    in_threads(8, lambda i: keys.extend([make_unique_key() for _ in range(500)]))
    assert len(set(keys)) == 4000
    assert all(key.startswith("cache-") for key in keys)


# Sessions -----------------------------------------------------------------------------------------


def test_a_session_installs_its_cache_for_as_long_as_its_with_lasts():
    cache = make_cache()
    session = CacheSession(cache, backend="fake")
    assert session.cache_key not in CacheRegistry.instance().keys()  # noqa: SIM118
    with session as entered:
        assert entered is session and session.cache is cache
        assert CacheRegistry.instance().get(session.cache_key) is cache
    assert session.cache_key not in CacheRegistry.instance().keys()  # noqa: SIM118


def test_a_session_is_erased_when_its_block_raises():
    session = CacheSession(make_cache(), backend="fake")
    with pytest.raises(RuntimeError, match="boom"), session:
        raise RuntimeError("boom")
    with pytest.raises(UnknownCacheError):
        CacheRegistry.instance().get(session.cache_key)
    with pytest.raises(SessionClosedError):
        _ = session.cache


def test_a_session_used_outside_of_its_with_says_what_to_do():
    session = CacheSession(make_cache(), backend="fake", cache_key="mine")
    for _ in range(2):
        with pytest.raises(SessionClosedError) as info:
            _ = session.cache
        assert str(info.value) == (
            "session mine is not open; use its cache inside 'with session: ...', and make a new "
            "session once it has ended"
        )
        with session:
            pass


def test_a_session_whose_entry_was_erased_in_mid_use_goes_on():
    with CacheSession(make_cache(), backend="fake") as session:
        CacheRegistry.instance().erase(session.cache_key)
        assert session.cache.begin_step([(0, 1)]) == [0]


def test_a_with_inside_of_a_with_does_not_end_the_session():
    with CacheSession(make_cache(), backend="fake") as session:
        with session:
            pass
        assert CacheRegistry.instance().get(session.cache_key) is session.cache
    assert session.cache_key not in CacheRegistry.instance().keys()  # noqa: SIM118


def test_a_session_cannot_take_the_key_of_another():
    with CacheSession(make_cache(), backend="fake", cache_key="mine") as first:
        second = CacheSession(make_cache(), backend="fake", cache_key="mine")
        with pytest.raises(ConfigError, match="another session has the cache_key 'mine'"), second:
            raise AssertionError("not entered")
        assert CacheRegistry.instance().get("mine") is first.cache
        with pytest.raises(SessionClosedError):
            _ = second.cache
    with second:
        assert CacheRegistry.instance().get("mine") is second.cache


def test_sessions_get_keys_of_their_own():
    sessions = [CacheSession(make_cache(), backend="fake") for _ in range(3)]
    assert len({session.cache_key for session in sessions}) == 3


def test_which_cache_it_is_is_said_by_the_factory(fake_backend):
    for make, kind in (
        (make_decode_session, OneSequence),
        (make_seq_session, Sequences),
        (make_tree_session, TreeSequences),
    ):
        with make("fake", CONFIG) as session:
            assert type(session.cache) is kind
            assert session.cache.config is CONFIG
            assert session.backend == "fake"


def test_a_cache_that_lacks_the_verbs_of_its_face_is_refused_where_it_is_made(fake_backend):
    with pytest.raises(UnknownCacheError, match="built OneSequence for 'seq', which lac"):
        make_seq_session("odd", CONFIG)


# Backends -----------------------------------------------------------------------------------------


def test_an_unknown_backend_says_which_there_are():
    with pytest.raises(BackendError, match=r"'tensorflow' is unknown; there are: .*reference"):
        make_seq_session("tensorflow", CONFIG)


def test_a_kind_that_a_backend_does_not_build_says_which_it_does(fake_backend):
    with pytest.raises(UnknownCacheError, match="'odd' builds no 'tree' cache; it builds: seq"):
        make_tree_session("odd", CONFIG)


def test_the_last_backend_of_a_name_counts(fake_backend):
    register_backend("odd", Backend({"seq": TreeSequences}))
    with make_seq_session("odd", CONFIG) as session:
        assert type(session.cache) is TreeSequences


@pytest.mark.parametrize("backend", [None, {"seq": TreeSequences}, "torch"])
def test_what_is_no_backend_is_not_registered(fake_backend, backend):
    with pytest.raises(BackendError, match="'wrong' must be a Backend, or a function that makes"):
        register_backend("wrong", backend)
    assert "wrong" not in backend_names()


@pytest.mark.parametrize("caches", [None, {"seq": 3}, {3: TreeSequences}])
def test_a_backend_without_builders_is_refused(caches):
    with pytest.raises(BackendError, match="caches must be functions by kind of cache"):
        Backend(caches)


def test_a_backend_may_be_made_when_it_is_asked_for(fake_backend):
    made = []

    def make():
        made.append(True)
        return Backend({"seq": Sequences})

    register_backend("late", make)
    assert "late" in backend_names() and not made
    with make_seq_session("late", CONFIG) as session:
        assert type(session.cache) is Sequences and made


def test_our_own_backends_are_the_packages_of_their_room():
    assert {"reference", "torch", "mlx", "executorch"} <= set(backend_names())
    assert "host_rows" not in backend_names()


def test_an_installed_package_brings_a_backend(installed):
    source = """
from kvcellar.bookkeeping import Sequences
from kvcellar.registry import Backend
BACKEND = Backend({"seq": Sequences})
"""
    installed("brought", source)
    assert "brought" in backend_names()
    with make_seq_session("brought", CONFIG) as session:
        assert type(session.cache) is Sequences
    with pytest.raises(BackendError, match="'x' is unknown; there are: brought, executorch"):
        make_seq_session("x", CONFIG)


def test_an_installed_backend_whose_package_is_missing_says_which(installed):
    installed("lacking", "import no_such_runtime")
    with pytest.raises(BackendError, match="'lacking' needs the package 'no_such_runtime'"):
        make_seq_session("lacking", CONFIG)


def test_what_is_no_backend_is_refused(installed):
    installed("wrong", "BACKEND = 3")
    with pytest.raises(BackendError, match="'wrong' must be a Backend, got 3"):
        make_seq_session("wrong", CONFIG)


@pytest.mark.parametrize(
    "source, says",
    [
        ("raise RuntimeError('boom')", "RuntimeError: boom"),
        ("backend = 3", "AttributeError: .* no attribute 'BACKEND'"),
        (None, "ModuleNotFoundError: No module named 'kvcellar_lost_package'"),
    ],
)
def test_an_installed_backend_that_cannot_be_imported_says_from_where(installed, source, says):
    name = "kvcellar_lost" if source is None else "failing"
    installed(name, source or "")
    if source is None:
        (Path(sys.path[0]) / f"{name}_package.py").unlink()
    sys.modules.pop(f"{name}_package", None)
    with pytest.raises(BackendError, match=f"'{name}' cannot be imported from {name}_.*: {says};"):
        registry.load_backend(name)


def test_two_installed_packages_that_bring_one_name_are_refused(installed):
    installed("left", "BACKEND = 3", "twin")
    installed("right", "BACKEND = 3", "twin")
    with pytest.raises(BackendError, match=r"several packages: left_.*, right_.*; uninstall all"):
        registry.load_backend("twin")


def test_a_model_with_states_is_refused_where_a_cache_keeps_none(fake_backend):
    state = StateGroup(((StateShape("recurrent", (2,)),),))
    config = make_config(replace(CONFIG.params, state=state), 8)
    with pytest.raises(ConfigError, match=r"'fake' built .*, which keeps no states, and .* 8 byt"):
        make_seq_session("fake", config)
    with (
        make_seq_session("reference", config) as session,
        pytest.raises(ConfigError, match="recurrent layers cannot be frozen"),
    ):
        freeze_prefix(session.cache)


def test_a_frozen_prefix_is_refused_where_a_cache_cannot_read_it(fake_backend):
    with make_seq_session("reference", CONFIG) as session:
        cache = session.cache
        cache.begin_step([(0, 2)])
        x = np.ones((1, 1, 2, 1), np.float32)
        cache.update_and_attend(x, x, x, np.arange(2), 0, 1.0, "float32")
        frozen = freeze_prefix(cache)
    config = make_config(CONFIG.params, 8, prefix=frozen)
    for make in (make_decode_session, make_seq_session, make_tree_session):
        with pytest.raises(ConfigError, match=r"'fake' built .*, which reads no frozen prefix"):
            make("fake", config)


def test_a_bug_inside_of_a_backend_is_not_taken_for_a_missing_package(fake_backend):
    def broken():
        import kvcellar.backends.no_such_module  # noqa: F401

    register_backend("broken", broken)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        registry.load_backend("broken")


# The active cache ---------------------------------------------------------------------------------


def test_the_active_cache_nests_and_comes_back():
    outer, inner = make_cache(), make_cache()
    assert active_cache() is None
    with use_cache(outer):
        assert active_cache() is outer
        with use_cache(inner):
            assert active_cache() is inner
        assert active_cache() is outer
    assert active_cache() is None


def test_the_active_cache_comes_back_when_a_block_raises():
    outer = make_cache()
    with use_cache(outer):
        with pytest.raises(RuntimeError), use_cache(make_cache()):
            raise RuntimeError
        assert active_cache() is outer
    assert active_cache() is None


def test_every_thread_has_an_active_cache_of_its_own():
    both_inside = threading.Barrier(4)

    def work(i):
        assert active_cache() is None
        cache = make_cache()
        with use_cache(cache):
            both_inside.wait()
            assert active_cache() is cache
            both_inside.wait()
        assert active_cache() is None

    with use_cache(make_cache()):
        in_threads(4, work)
