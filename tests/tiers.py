"""Tiers: parts that nothing else is built on, each with its sources and the tests that it needs.

The rest imports a tier by its entrances alone, and no tier imports another, so a change inside one
needs its own tests alone; a change of anything else needs all. A test has its tier as a mark
(``pytest -m mlx``), and ``pytest --changed REV`` runs what the changes since a revision need.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Tier:
    """Files of a tier.

    Attributes:
        sources: paths below the repository, of files and folders.
        tests: paths of tests that belong to it, and of what these import.
        word: a word by which parameters, classes and files anywhere name it; None for none.
        entrances: those of its sources that others load: a change of them needs all tests.
    """

    sources: tuple[str, ...]
    tests: tuple[str, ...] = ()
    word: str | None = None
    entrances: tuple[str, ...] = ()


TIERS = {
    "mlx": Tier(
        ("src/kvcellar/backends/mlx", "src/kvcellar/integrations/mlx_lm.py"),
        ("tests/models/mlx_families.py", "tests/models/mlx_hybrids.py"),
        word="mlx",
    ),
    "executorch": Tier(
        ("src/kvcellar/backends/executorch",), ("tests/backends/executorch",), word="executorch"
    ),
    "gpu": Tier(
        ("src/kvcellar/backends/torch/gpu", "tests/card.py"),
        ("tests/backends/gpu",),
        entrances=tuple(
            f"src/kvcellar/backends/torch/gpu/{name}.py"
            for name in (
                *("__init__", "choice", "compiled"),
                *("sampler/__init__", "sampler/logits", "sampler/settings"),
                *("transfer/__init__", "transfer/pinned"),
            )
        ),
    ),
    "deploy": Tier(
        ("src/kvcellar/deploy", "src/kvcellar/cli/serve/deploy.py"),
        ("tests/deploy", "tests/cli/test_deploy.py"),
    ),
    "shared": Tier(
        ("src/kvcellar/store/shared",), ("tests/store/shared", "tests/agents/test_machines.py")
    ),
    "browser": Tier(
        ("src/kvcellar/server/viewer",),
        ("tests/server/test_viewer.py", "tests/server/test_page.py"),
    ),
    "docs": Tier(
        ("docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "mkdocs.yml", "tools"),
        (
            *("tests/tools", "tests/snippets.py", "tests/additions.py", "tests/test_additions.py"),
            *("tests/test_docs.py", "tests/test_docs_backends.py", "tests/test_snippets.py"),
            *("tests/test_site.py", "tests/test_site_in_a_browser.py"),
            *("tests/test_life_of_a_request.py", "tests/test_public_names.py"),
            *("tests/server/test_fields.py", "tests/server/test_http_reference.py"),
        ),
    ),
}


def tiers_of_test(nodeid: str) -> list[str]:
    """Return the tiers that a test belongs to, by the id that pytest gives it."""
    words, path = nodeid.lower(), nodeid.partition("::")[0]
    return [
        name
        for name, tier in TIERS.items()
        if (tier.word and tier.word in words) or lies_in(path, tier.tests)
    ]


def tier_of_file(path: str) -> str | None:
    """Return the tier that a file belongs to, None for the core.

    Args:
        path: of the file, below the repository.
    """
    for name, tier in TIERS.items():
        by_word = tier.word and path.startswith("tests/") and tier.word in path
        if by_word or lies_in(path, (*tier.sources, *tier.tests)):
            return None if path in tier.entrances else name
    return None


def lies_in(path: str, folders: Iterable[str]) -> bool:
    """Return true if a file is one of some paths, or lies in one."""
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def changed_files(base: str) -> list[str]:
    """Return the files that differ from a revision, with those that git does not know yet.

    Raises:
        subprocess.CalledProcessError: git does not know the revision.
    """
    commands = (
        ("git", "diff", "--name-only", "--no-renames", base, "--"),
        ("git", "ls-files", "--others", "--exclude-standard"),
    )
    found: set[str] = set()
    for command in commands:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        found.update(done.stdout.splitlines())
    return sorted(found)


def needed(files: Iterable[str]) -> set[str] | None:
    """Return the tiers whose tests a change of some files needs; None for all tests."""
    tiers = {tier_of_file(path) for path in files}
    return None if None in tiers else {tier for tier in tiers if tier is not None}
