"""ExecuTorch's own tests of the op and its caches, beside ours, in one process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
THEIRS = "executorch.extension.llm.cache"


def test_executorchs_own_tests_of_the_op_pass_beside_ours():
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *("-o", "filterwarnings=", "-p", f"{THEIRS}.update_and_attend"),
        *("--pyargs", f"{THEIRS}.test_update_and_attend"),
        *(str(ROOT / "tests" / "test_op.py"), "-k", "not either_import_order"),
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= 38 + 8, done.stdout[-500:]
