"""The kernel's README says what was measured."""

from __future__ import annotations

import json

from tests.tools.scripts import load_script

measure_kernel = load_script("measure_kernel")


def test_the_table_in_the_readme_is_that_of_what_was_measured():
    measured = json.loads(measure_kernel.MEASURED.read_text(encoding="utf-8"))
    assert measure_kernel.README.read_text(encoding="utf-8") == measure_kernel.readme_with(measured)


def test_a_level_that_was_not_measured_says_so():
    found = {"machine": "a machine", "ms": {"product": 0.5}, "scalar_ms": {"product": 2.0}}
    plain = {"machine": "a machine", "ms": {"product": 2.0}, "scalar_ms": {"product": 2.0}}
    missing = {"machine": None, "ms": {}, "scalar_ms": {}}
    lines = measure_kernel.table({"scalar": plain, "fast": found, "rare": missing}).splitlines()
    assert lines[2] == "| product | 4.0 (0.50 ms) | - |"
    assert lines[4:] == ["- `fast`: a machine", "- `rare`: not measured"]
