"""The smoke test does what the page says, and has no compiler at hand."""

from __future__ import annotations

import shutil
import subprocess
import sys

from tests.tools.scripts import load_script

smoke = load_script("smoke")


def test_each_block_of_the_page_is_run_in_its_order():
    page = smoke.PAGE.read_text()
    done = smoke.script_of(page)
    fences = [line for line in page.splitlines() if line in ("```sh", "```python")]
    assert len(fences) > 5
    lines = iter(page.splitlines())
    told = []
    for line in lines:
        if line in ("```sh", "```python"):
            told += iter(lines.__next__, "```")
    run = iter(done.splitlines())
    assert all(line in run for line in told), "in this order"


def test_a_block_that_fails_ends_it_and_what_it_started(tmp_path):
    page = (
        "```sh\nsleep 600 &\n```\n\n```python\nimport sys; sys.exit(3)\n```\n\n"
        "```sh\necho more\n```\n"
    )
    done = subprocess.run(
        ["bash", "-c", smoke.script_of(page).replace("python -", "python3 -")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 3 and "more" not in done.stdout


def test_there_are_programs_but_no_compiler(tmp_path):
    path = smoke.environment(tmp_path)["PATH"]
    assert all(shutil.which(name, path=path) for name in ("bash", "ls", "python3"))
    for name in (
        "cc",
        "c++",
        "gcc",
        "g++",
        "x86_64-linux-gnu-g++",
        "g++-12",
        "cmake",
        "ninja",
        "ld",
    ):
        assert shutil.which(name, path=path) is None


def test_families_are_checked_by_a_script_that_needs_the_package_alone():
    lines = smoke.FAMILIES.read_text().splitlines()
    brought = [line.split()[1] for line in lines if line.startswith(("import ", "from "))]
    others = {one.split(".")[0] for one in brought} - sys.stdlib_module_names
    assert others == {"numpy", "safetensors", "tokenizers"}, "packages that kvcellar brings"
