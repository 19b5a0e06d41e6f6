"""The native part, built on first use against the ExecuTorch that is installed.

Headers and libraries of ExecuTorch differ from version to version, so each has a build of its own,
named by the version and by what was compiled. A wheel may bring builds beside this file.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kvcellar.errors import BackendError
from kvcellar.home import default_home
from kvcellar.installed import pip_command

SOURCES = Path(__file__).parent / "native"
STEP_CALL = Path(__file__).parents[2] / "kernel" / "native" / "attend" / "step_call.h"
PREBUILT = Path(__file__).parent / "prebuilt"

COMPILERS = ("c++", "g++", "clang++")
"""Tried in this order where the environment names none in ``CXX``."""

FLAGS = (
    "-std=c++17",
    "-O2",
    "-shared",
    "-fPIC",
    "-DC10_USING_CUSTOM_GENERATED_MACROS",
    "-DET_EVENT_TRACER_ENABLED",
    "-DET_USE_THREADPOOL",
)

TIMEOUT_S = 600


def executorch_version() -> str:
    """Return the version of ExecuTorch that is installed, such as ``1.5.1``.

    Raises:
        BackendError: none is.
    """
    try:
        return importlib.metadata.version("executorch").split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        raise BackendError(
            "backend 'executorch' needs the package 'executorch'; install it with: "
            f"{pip_command('executorch')}"
        ) from None


def native_library() -> Path:
    """Find the native part for the ExecuTorch that is installed; build it if there is none yet.

    Raises:
        BackendError: it is not there and cannot be built: no compiler, or the build failed.
    """
    name = build_name()
    for folder in (PREBUILT, build_folder()):
        if (folder / name).is_file():
            return folder / name
    return build(build_folder())


def library_folder() -> Path:
    """Return the folder of the libraries of the ExecuTorch that is installed.

    Raises:
        BackendError: it is not installed.
    """
    executorch_version()
    spec = importlib.util.find_spec("executorch")
    assert spec is not None and spec.submodule_search_locations, "its metadata is there"
    return Path(next(iter(spec.submodule_search_locations))) / "lib"


def build_folder() -> Path:
    """Return the folder in which builds of this machine's user are kept."""
    return default_home() / "executorch" / "native"


def build_name() -> str:
    """Name the file of a build by the version of ExecuTorch, the platform and the sources."""
    digest = hashlib.blake2b(digest_size=6)
    for path in [*sorted(SOURCES.iterdir()), STEP_CALL]:
        digest.update(path.read_bytes())
    digest.update(" ".join(FLAGS).encode())
    where = f"{sys.platform}-{platform.machine()}".lower()
    return f"kvcellar-executorch-{executorch_version()}-{where}-{digest.hexdigest()}.so"


def build(folder: Path) -> Path:
    """Compile the native part into ``folder``; return the file. Whole or not there at all.

    Several processes may build at a time: each writes a file of its own, and the last one stays.

    Raises:
        BackendError: no compiler, headers that are not there, or the compiler's own errors.
    """
    target = folder / build_name()
    include, compiler = _headers(), _compiler()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix="building-", dir=folder))
    except OSError as error:
        raise BackendError(
            f"kvcellar's native part for ExecuTorch is kept in {folder}, which cannot be written "
            f"({error}); set KVCELLAR_HOME to a folder that can"
        ) from error
    try:
        _compile([*compiler, *_arguments(include, staged / target.name, folder)])
        (staged / target.name).replace(target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendError(
            f"kvcellar's native part for ExecuTorch could not be built with "
            f"{shlex.join(compiler)}: {error}; see that it works, or name another in CXX"
        ) from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return target


def _headers() -> Path:
    """Return the folder of the headers of the ExecuTorch that is installed.

    Raises:
        BackendError: it brings none.
    """
    root = library_folder().parent
    include = root / "include"
    if not (include / "executorch" / "extension" / "module" / "module.h").is_file():
        raise BackendError(
            f"ExecuTorch {executorch_version()} in {root} brings no headers of its runtime, so "
            f"kvcellar's native part cannot be built for it; install the published wheel: "
            f"{pip_command('executorch')}"
        )
    return include


def _arguments(include: Path, to: Path, folder: Path) -> list[str]:
    """Return the compiler's arguments for a build that is used from ``folder``."""
    lib = library_folder()
    return [
        *FLAGS,
        f'-DKVC_EXECUTORCH_VERSION="{executorch_version()}"',
        "-isystem",
        str(include),
        "-isystem",
        str(include / "executorch/runtime/core/portable_type/c10"),
        *sorted(str(path) for path in SOURCES.glob("*.cpp")),
        "-o",
        str(to),
        f"-L{lib}",
        "-lexecutorch",
        "-lexecutorch_threadpool",
        f"-Wl,-rpath,{_rpath(folder, lib)}",
    ]


def _compile(command: list[str]) -> None:
    """Run the compiler.

    Raises:
        BackendError: it found an error.
        OSError, TimeoutExpired: it could not be run, or took too long.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()]
        raise BackendError(
            f"kvcellar's native part did not compile against ExecuTorch {executorch_version()}: "
            f"{(lines or [done.stderr.strip()])[0]}; kvcellar is made for {_supported()}: "
            f"{pip_command('executorch')}"
        )


def _rpath(folder: Path, lib: Path) -> str:
    """Return where a build in ``folder`` looks for ExecuTorch; in a wheel: beside its package."""
    if folder != PREBUILT:
        return str(lib)
    origin = "@loader_path" if sys.platform == "darwin" else "$ORIGIN"
    return f"{origin}/../../../../executorch/lib"


def _compiler() -> list[str]:
    """Return the command of a C++ compiler: CXX, or one of the usual names.

    Raises:
        BackendError: there is none.
    """
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [[name] for name in COMPILERS]:
        if shutil.which(command[0]):
            return command
    missing = named[0] if named else ", ".join(COMPILERS)
    raise BackendError(
        f"kvcellar's native part for ExecuTorch {executorch_version()} is built on first use and "
        f"there is no C++ compiler here (looked for {missing}); install one (Debian, Ubuntu: apt "
        f"install g++; macOS: xcode-select --install), or name yours in CXX"
    )


def _supported() -> str:
    """Return the version of ExecuTorch that kvcellar is made for."""
    wanted = importlib.metadata.requires("kvcellar") or []
    found = (line.split(";")[0] for line in wanted if line.startswith("executorch"))
    return next((line.strip().replace("==", " ") for line in found), "another version")
