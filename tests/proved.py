"""Long tests that need not run again: what decides their outcome is as it was when they passed.

A test says with ``@pytest.mark.decided_by(PATHS..., packages=(...))`` which files of the repository
and which versions of packages decide it, beside its own file: no other code, and no machine. Their
digest is noted in ``proved.json`` when it has passed in ``make test`` (``KVCELLAR_PROVE``), to be
committed with the change; and the test is skipped while the digest is that one.
``make night`` and ``KVCELLAR_ALL_CASES`` run it in any case.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[1]
PROVED = ROOT / "tests" / "proved.json"
LOCK = Path(tempfile.gettempdir()) / "kvcellar-proved.lock"
BUILT = (".pyc", ".so", ".o")


def files_of(paths: tuple[str, ...]) -> Iterator[Path]:
    """Yield the files of these paths below the repository, folders with all that is in them."""
    for name in paths:
        path = ROOT / name
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (file for file in found if file.is_file() and file.suffix not in BUILT)


def version_of(package: str) -> str | None:
    """Return the version of a package that is installed; None where it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def digest_of(item: pytest.Item) -> str | None:
    """Return the digest of all that decides a test; None where it does not say what that is.

    Raises:
        FileNotFoundError: it names a path that is not there.
    """
    mark = item.get_closest_marker("decided_by")
    if mark is None:
        return None
    own = item.path.resolve().relative_to(ROOT).as_posix()
    return digest_of_files((*mark.args, own), mark.kwargs.get("packages", ()))


@functools.cache
def digest_of_files(paths: tuple[str, ...], packages: tuple[str, ...]) -> str:
    """Return the digest of all files of these paths, and of these packages' versions."""
    digest = hashlib.sha256()
    for package in packages:
        digest.update(f"{package} {version_of(package)}\n".encode())
    for path in paths:
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"a test is decided by {path}, which is not there")
    for file in files_of(paths):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(ROOT).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def known() -> dict[str, str]:
    """Return the digests that are noted, by test."""
    found: dict[str, str] = json.loads(PROVED.read_text()) if PROVED.exists() else {}
    return found


def skip_if_proved(item: pytest.Item) -> None:
    """Skip a test that has passed with what decides it as it is."""
    digest = digest_of(item)
    if digest is None or "KVCELLAR_ALL_CASES" in os.environ:
        return
    if known().get(item.nodeid) == digest:
        pytest.skip("passed with these sources (tests/proved.json); make night runs it anew")


def note_passed(item: pytest.Item) -> None:
    """Note the digest of a test that has passed, where ``KVCELLAR_PROVE`` is set."""
    digest = digest_of(item)
    if digest is None or "KVCELLAR_PROVE" not in os.environ:
        return
    with FileLock(LOCK):
        noted = {**known(), item.nodeid: digest}
        staged = PROVED.with_suffix(".staged")
        staged.write_text(json.dumps(noted, indent=2, sort_keys=True) + "\n")
        staged.replace(PROVED)
