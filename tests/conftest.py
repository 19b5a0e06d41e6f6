"""Settings that every test folder shares."""

import atexit
import contextlib
import gc
import os
import shutil
import tempfile
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported: GPUs are not tested

import pytest
from hypothesis import HealthCheck, Phase, settings

from kvcellar.home import default_home
from tests.proved import proving
from tests.tiers import changed_files, needed, tiers_of_test

settings.register_profile(
    "local",
    deadline=None,
    max_examples=40,
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("quick", settings.get_profile("local"), max_examples=15)
settings.register_profile(
    "ci",  # the same examples for the same tree, so that many of them would be found but once
    settings.get_profile("local"),
    derandomize=True,
    print_blob=True,
    max_examples=20,
)
settings.register_profile(
    "mutants",  # that something fails is all that is asked, and not what the smallest case of it is
    settings.get_profile("ci"),
    max_examples=5,
    stateful_step_count=30,
    phases=[Phase.explicit, Phase.generate],
    report_multiple_bugs=False,
)
settings.register_profile("night", settings.get_profile("local"), max_examples=200)
settings.register_profile("thorough", settings.get_profile("local"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if "CI" in os.environ else "local"))

MEMORY = Path("/dev/shm")
"""A folder in memory, on Linux: stores synchronise every write, which takes long on a disk."""

ROOM_BYTES = 4 << 30
"""What it must have left to be used."""

OF_TORCH = ("backends", "engine", "integrations", "models", "store")
"""Folders of tests that mean torch, the oracle of others, where they load a model and name none."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let all models be on a card (``tests/card.py``), and a change choose its tests."""
    parser.addoption("--card", action="store_true", help="run models on a card, or a stand-in")
    parser.addoption(
        "--changed",
        metavar="REV",
        help="run what the changes since a revision need (tests/tiers.py)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Keep temporary files in memory where there is room for them, and libraries can be loaded.

    What kvcellar keeps for its user is kept apart, but for what takes long to build.
    """
    if "KVCELLAR_HOME" not in os.environ:
        real, home = default_home(), Path(tempfile.mkdtemp(prefix="kvcellar-home-"))
        atexit.register(shutil.rmtree, home, ignore_errors=True)
        with contextlib.suppress(OSError):
            (real / "executorch").mkdir(mode=0o700, parents=True, exist_ok=True)
            (home / "executorch").symlink_to(real / "executorch")
        os.environ["KVCELLAR_HOME"] = str(home)
    if MEMORY.is_dir() and hasattr(os, "ST_NOEXEC"):
        state = os.statvfs(MEMORY)
        if state.f_bavail * state.f_frsize > ROOM_BYTES and not state.f_flag & os.ST_NOEXEC:
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
    if "KVCELLAR_PROVE" in os.environ and "KVCELLAR_ALL_CASES" not in os.environ:
        config.pluginmanager.register(proving(config))
    if config.getoption("card"):
        from tests.card import use_card

        use_card()


def pytest_collection_finish() -> None:
    """Keep the collector from what was imported and collected: a walk over it takes a second."""
    gc.collect()
    gc.freeze()


def pytest_xdist_auto_num_workers() -> int:
    """Return one worker more than processors: a third of the time tests wait for something."""
    return (os.cpu_count() or 1) + 1


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark a test with the tiers that it belongs to, and with ``kernel`` where it names that."""
    for tier in tiers_of_test(item.nodeid):
        item.add_marker(tier)
    if "kernel" in item.nodeid.lower():
        item.add_marker("kernel")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out, with ``--changed``, the tests that no change needs."""
    base = config.getoption("changed")
    tiers = needed(changed_files(base)) if base else None
    if tiers is None:
        return
    left_out = [item for item in items if not any(map(item.get_closest_marker, tiers))]
    items[:] = [item for item in items if item not in set(left_out)]
    config.hook.pytest_deselected(items=left_out)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say, with ``--changed``, whose tests are run."""
    base = config.getoption("changed")
    if not base:
        return None
    tiers = needed(changed_files(base))
    whose = "all" if tiers is None else ", ".join(sorted(tiers)) or "none: nothing has changed"
    return f"tests that the changes since {base} need: {whose}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Choose, before fixtures load one, who runs a model that both torch and native could."""
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    os.environ["KVCELLAR_PREFERS"] = "torch" if folder in OF_TORCH else "native"
