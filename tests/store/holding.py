"""A process that takes leases of histories, says so, and waits to be killed.

python -m tests.store.holding STORE NAME...
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvcellar.store.disk.folder import Folder
from kvcellar.store.disk.leases import LocalLeases

if __name__ == "__main__":
    leases = LocalLeases(Folder(Path(sys.argv[1])))
    for name in sys.argv[2:]:
        leases.take(name)
    print("held", flush=True)
    sys.stdin.read()
