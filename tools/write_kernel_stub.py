"""Write src/kvcellar/kernel/_native.pyi, or check that it is what the kernel says of itself.

python tools/write_kernel_stub.py [--check]
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvcellar.kernel import levels

STUB = Path(levels.__file__).parent / "_native.pyi"


def generate() -> str:
    """Return the stub of the extension that is built, formatted.

    Raises:
        SystemExit: nanobind's stub generator fails, or there is no extension.
    """
    if not levels.is_available():
        raise SystemExit(f"no stub without the extension: {levels.why_not()}")
    from nanobind.stubgen import StubGen

    from kvcellar.kernel import _native

    made = StubGen(_native, quiet=True)
    made.put(_native)
    return format_stub(made.get())


def format_stub(source: str) -> str:
    """Return the source as ruff formats it, its imports sorted."""
    ruff = [sys.executable, "-m", "ruff"]
    for command in (
        [*ruff, "check", "--quiet", "--select", "I,F401,UP", "--fix"],
        [*ruff, "format", "--quiet"],
    ):
        done = subprocess.run(
            [*command, "--stdin-filename", str(STUB), "-"],
            input=source,
            capture_output=True,
            text=True,
            check=True,
        )
        source = done.stdout
    return source


def main() -> int:
    """Write the stub, or with ``--check`` say whether it is stale."""
    is_check = "--check" in sys.argv[1:]
    if is_check and not levels.is_available():
        print(f"the stub is not checked: {levels.why_not()}")
        return 0
    made = generate()
    if not is_check:
        STUB.write_text(made, encoding="utf-8")
        return 0
    if STUB.read_text(encoding="utf-8") == made:
        return 0
    print(f"{STUB.name} is stale; run: python {sys.argv[0]}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
