"""A change runs the tests of its tier alone where nothing else can be touched by it, else all."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import ROOT, TIERS, needed, tier_of_file, tiers_of_test

RUN_ON_A_CPU = """
import sys
import kvcellar as kv
with kv.open("demo", store=None, backend="torch") as cellar:
    cellar.agent("a").say("def f(", max_tokens=4)
print(*(name for name in sys.modules if name.startswith("kvcellar.")))
"""


@pytest.mark.parametrize("name", TIERS)
def test_every_path_of_a_tier_exists_and_it_has_tests(name: str):
    tier = TIERS[name]
    for path in (*tier.sources, *tier.tests, *tier.entrances):
        assert (ROOT / path).exists(), path
    assert tier.tests


@pytest.mark.parametrize(
    ("files", "tiers"),
    [
        ([], set()),
        (["src/kvcellar/backends/mlx/cache/pools.py"], {"mlx"}),
        (["tests/models/test_mlx_families.py"], {"mlx"}),
        (["src/kvcellar/backends/torch/gpu/attend/launch.py", "docs/tour.md"], {"gpu", "docs"}),
        (["src/kvcellar/backends/torch/gpu/choice.py"], None),
        (["src/kvcellar/store/shared/tier.py"], {"shared"}),
        (["src/kvcellar/store/store.py", "docs/tour.md"], None),
        (["src/kvcellar/server/viewer/main.js"], {"browser"}),
        (["tests/conftest.py"], None),
        (["pyproject.toml"], None),
        (["src/kvcellar/backends/mlx_like.py"], None),
    ],
)
def test_a_change_needs_the_tests_of_its_tiers_and_anything_else_all(files, tiers):
    assert needed(files) == tiers


def test_tests_have_their_tiers_as_marks():
    assert tiers_of_test("tests/backends/test_pool.py::TestMlxPaged::test_a") == ["mlx"]
    assert tiers_of_test("tests/backends/gpu/test_plans.py::test_a") == ["gpu"]
    assert tiers_of_test("tests/engine/test_engine.py::test_a[executorch-mlx]") == [
        "mlx",
        "executorch",
    ]
    assert tiers_of_test("tests/engine/test_engine.py::test_a") == []


def test_what_a_model_on_a_cpu_loads_of_a_tier_is_its_entrances():
    done = subprocess.run(
        [sys.executable, "-c", RUN_ON_A_CPU],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    source = ROOT / "src"
    loaded = []
    for name in done.stdout.splitlines()[-1].split():
        path = source / name.replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        loaded.append(file.relative_to(ROOT).as_posix())
    assert "src/kvcellar/backends/torch/loading.py" in loaded
    shared = "src/kvcellar/store/shared/"  # the store has its types
    inside = [file for file in loaded if tier_of_file(file) and not file.startswith(shared)]
    assert inside == []


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with our settings and two files of tests: one, of a tier, has changed."""
    for name in (
        *(".gitignore", "pyproject.toml"),
        *(f"tests/{n}.py" for n in ("__init__", "conftest", "proved", "tiers")),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("test_mlx_pools", "test_other"):
        (tmp_path / "tests" / f"{name}.py").write_text("def test_it(): ...\n")
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "All"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True, timeout=60)
    (tmp_path / "tests" / "test_mlx_pools.py").write_text("def test_changed(): ...\n")
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        (None, ["tests/test_mlx_pools.py::test_changed"]),
        (
            "tests/proved.py",
            ["tests/test_mlx_pools.py::test_changed", "tests/test_other.py::test_it"],
        ),
    ],
)
def test_pytest_takes_the_tests_of_changed_tiers_alone_and_all_where_more_has_changed(
    repository: Path, changed: str | None, found: list[str]
):
    if changed:
        with (repository / changed).open("a") as file:
            file.write("# more\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "--changed", "HEAD"],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert [line for line in done.stdout.splitlines() if "::" in line] == found, done.stderr
