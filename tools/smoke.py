"""Do what docs/first-ten-minutes.md says, word for word, with the wheel in dist/.

In an empty folder that is also the home, with a PATH that has no compiler, so that the wheel stands
for the checkout's folder: all blocks of commands run in one shell, a command that fails ends it,
and the seconds stand before each.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "first-ten-minutes.md"

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
    """Run the page; end with the exit code of the command that failed."""
    wheels = [*(ROOT / "dist").glob("kvcellar-*.whl")]
    if not wheels:
        sys.exit("there is no wheel in dist/; make one: python tools/build_wheels.py --here")
    with tempfile.TemporaryDirectory(prefix="kvcellar-smoke-") as name:
        folder = Path(name)
        script = folder / "page.sh"
        script.write_text(script_of(PAGE.read_text()).replace(CHECKOUT, str(wheels[0])))
        env = environment(folder)
        sys.exit(subprocess.call(["bash", script], cwd=folder, env=env, stdin=subprocess.DEVNULL))


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
