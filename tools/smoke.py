"""Do what docs/first-ten-minutes.md says, word for word, with the wheel in dist/.

In an empty folder that is also the home, with a PATH that has no compiler, so that the wheel stands
for the checkout's folder: all blocks of commands run in one shell, a command that fails ends it,
and the seconds stand before each. Then tiny models of many families are held to what transformers
says of them. At the end it is said what the installation takes on disk, and torch must not be in
it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "first-ten-minutes.md"
FAMILIES = ROOT / "tools" / "check_families.py"

CHECKOUT = "path/to/kvcellar"
"""What the page calls the folder that a reader has."""

COMPILERS = re.compile(
    r"(.*-)?(c\+\+|g\+\+|gcc|cc|cpp|c[89]9|clang.*|cmake|ninja|make|ld|as)(-[\d.]+)?"
)
"""Names of programs that are left out."""

HEAD = """set -euo pipefail
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
PS4='+ ${SECONDS}s '
set -x
"""


def main() -> None:
    """Run the page, and models of many families; end with the exit code of what failed."""
    wheels = [*(ROOT / "dist").glob("kvcellar-*.whl")]
    if not wheels:
        sys.exit("there is no wheel in dist/; make one: python tools/build_wheels.py --here")
    with tempfile.TemporaryDirectory(prefix="kvcellar-smoke-") as name:
        folder = Path(name)
        script = folder / "page.sh"
        script.write_text(script_of(PAGE.read_text()).replace(CHECKOUT, str(wheels[0])))
        env = environment(folder)
        failed = subprocess.call(["bash", script], cwd=folder, env=env, stdin=subprocess.DEVNULL)
        if failed:
            sys.exit(failed)
        (python,) = folder.glob("*/bin/python")
        failed = subprocess.call([python, "-P", FAMILIES], cwd=folder, env=env)
        if failed:
            sys.exit(failed)
        (packages,) = folder.glob("*/lib/python*/site-packages")
        sizes = sizes_of(packages)
        print(said_of(sizes))
        if "torch" in sizes or "transformers" in sizes:
            sys.exit("the base has torch or transformers, and is to run without them")


def sizes_of(packages: Path) -> dict[str, int]:
    """Return the bytes of each package on disk, by its folder or file; pip's own are left out."""
    found: dict[str, int] = {}
    for file in packages.rglob("*"):
        top = file.relative_to(packages).parts[0]
        name = re.sub(r"(-[\d.]+.*)?\.(dist-info|libs|data)$", "", top).lower().replace("-", "_")
        if file.is_file() and name not in ("pip", "setuptools"):
            found[name] = found.get(name, 0) + file.stat().st_size
    return found


def said_of(sizes: Mapping[str, int]) -> str:
    """Say what an installation takes, and the largest packages of it."""
    largest = sorted(sizes.items(), key=lambda one: -one[1])[:8]
    named = ", ".join(f"{name} {size / 1e6:.1f}" for name, size in largest)
    return f"installed without extras: {sum(sizes.values()) / 1e6:.1f} MB ({named})"


def script_of(page: str) -> str:
    """Return the commands of a page as one script of bash, in which Python is a command, too."""
    parts = [HEAD]
    fences = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    for language, code in fences.findall(page):
        parts.append(code if language == "sh" else f"python - <<'THE_END'\n{code}THE_END\n")
    return "\n".join(parts)


def environment(folder: Path) -> dict[str, str]:
    """Return an environment with an empty home and the programs of this one but its compilers."""
    programs = folder / "bin"
    programs.mkdir()
    python = programs / "python3"  # no link: what is found beside a link is not beside the program
    python.write_text(f'#!/bin/sh\nexec {sys.base_prefix}/bin/python3 "$@"\n')
    python.chmod(0o755)
    for program in (*Path("/usr/bin").iterdir(), *Path("/bin").iterdir()):
        link = programs / program.name
        if not COMPILERS.fullmatch(program.name) and not link.exists():
            link.symlink_to(program)
    kept = {key: value for key, value in os.environ.items() if key.startswith(("PIP_", "SSL_"))}
    return kept | {"HOME": str(folder), "PATH": str(programs)}


if __name__ == "__main__":
    main()
