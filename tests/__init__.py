"""Tests, and programs that they start: ``python -m tests....``.

Such a program has torch run what both torch and native could, as ``conftest.py`` has it for tests
of which torch is the oracle.
"""

import os

os.environ["KVCELLAR_PREFERS"] = "torch"
