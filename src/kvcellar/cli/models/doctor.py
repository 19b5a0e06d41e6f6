"""``kvcellar doctor``: what this installation can do on this machine, and what would help."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvcellar.budget import format_size, machine_bytes
from kvcellar.cli.common.commands import add_command
from kvcellar.cli.common.exits import ExitCode
from kvcellar.cli.common.terminal import write
from kvcellar.cli.store.store import HOME_STORE, AsJson, StorePlace
from kvcellar.errors import ConfigError, KVCellarError, StoreError
from kvcellar.home import default_config, default_home, default_models
from kvcellar.installed import pip_command
from kvcellar.models.backend_choice import choose_backend
from kvcellar.models.files.packaged import PACKAGED
from kvcellar.models.options import LoadOptions
from kvcellar.version import __version__

if TYPE_CHECKING:
    from kvcellar.store import Store

GOOD, MORE, LESS, BROKEN = "ok", "more", "less", "broken"
"""A finding that is well, one of what could be had besides and nobody has to have, one with which
something is slower or does not work, and one that must be mended."""

_ROOM_BYTES = 1 << 30
"""Free bytes of a disk below which it is said."""

_ASK_TORCH = """
import torch
for i in range(torch.cuda.device_count()):
    print(f"cuda:{i} ({torch.cuda.get_device_name(i)})")
for i in range(torch.xpu.device_count()):
    print(f"xpu:{i} ({torch.xpu.get_device_name(i)})")
if torch.backends.mps.is_available():
    print("mps")
"""

_TORCH_S = 120.0
"""Seconds that torch may take to say it; a cold disk takes some."""

_NEEDS = {
    "models": ("tokenizers", "jinja2", "safetensors", "gguf"),
    "server": ("fastapi", "uvicorn", "pydantic", "prometheus_client", "llguidance"),
    "torch": ("torch", "transformers"),
    "mlx": ("mlx", "mlx_lm"),
    "executorch": ("executorch", "torchao"),
    "tp": ("accelerate",),
    "shared": ("obstore", "valkey"),
    "ray": ("ray",),
}
"""Modules that each part of an installation needs, by the name that doctor gives it."""

_ADDS = {
    "torch": "models without a plan, GPUs, adapters, EAGLE-3 heads, checks (--backend torch)",
    "mlx": "models of mlx-lm, on Apple silicon (--backend mlx)",
    "executorch": "models exported once, for any cache (--backend executorch)",
    "tp": "one model on several cards or processes (--tp)",
    "shared": "a place that several machines share (--shared)",
    "ray": "several replicas of the server at one address (kvcellar deploy)",
}
"""Features that an extra adds, by the extra's name; the parts of the base are not among them."""

_SHARED_S = 5.0


@dataclass(frozen=True, slots=True)
class Finding:
    """Finding about one thing.

    Attributes:
        name: of the thing.
        state: ``ok``, ``more``, ``less`` or ``broken``.
        said: what is so.
        helps: what would help; empty where nothing has to.
    """

    name: str
    state: str
    said: str
    helps: str = ""


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(
        app,
        "doctor",
        doctor_command,
        "kvcellar doctor",
        "kvcellar doctor --json | jq '.[] | select(.state != \"ok\")'",
    )


def doctor_command(store: StorePlace = HOME_STORE, as_json: AsJson = False) -> None:
    """Say what this installation can do on this machine, and what would help.

    Each line begins with ok, more (what could be added; nothing lacks it), less (something is
    slower, or does not work) or broken. The exit code is 1 where something is broken.
    """
    found = list(findings(store))
    if as_json:
        write(json.dumps([asdict(one) for one in found]) + "\n")
    else:
        width = max(len(one.name) for one in found)
        for one in found:
            write(f"{one.state:<7}{one.name:<{width}}  {one.said}\n")
            if one.helps:
                write(f"{'':<{7 + width}}  {one.helps}\n")
    if any(one.state == BROKEN for one in found):
        raise typer.Exit(ExitCode.FOUND)


def findings(store: StorePlace = HOME_STORE) -> Iterator[Finding]:
    """Yield what is found, one thing after the other."""
    version = f"{__version__}, Python {platform.python_version()} on {platform.platform()}"
    yield Finding("kvcellar", GOOD, version)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("machine", GOOD, f"{cores} cores, {format_size(machine_bytes())} of memory")
    yield _kernel()
    for name, modules in _NEEDS.items():
        yield _packages(name, modules)
    if importlib.util.find_spec("torch") is not None:
        yield _devices()
    yield _home()
    yield _store(store.path)
    if store.shared is not None:
        yield _shared(store.shared)
    yield _model()
    yield _config()


def _kernel() -> Finding:
    """Find out whether the CPU kernel is there, and which instructions it uses."""
    try:
        from kvcellar.kernel import levels
    except KVCellarError as error:
        return Finding("CPU kernel", BROKEN, str(error))
    if not levels.is_available():
        return Finding("CPU kernel", LESS, levels.why_not())
    names = ", ".join(one.name for one in levels.levels())
    return Finding("CPU kernel", GOOD, f"{levels.level().name} (of {names})")


def _packages(name: str, modules: tuple[str, ...]) -> Finding:
    """Find out whether the packages are there that something needs."""
    versions = {one: _version(one) for one in modules}
    missing = [one for one, version in versions.items() if version is None]
    if missing:
        if name in _ADDS:
            return Finding(name, MORE, f"would add {_ADDS[name]}", pip_command(name))
        return Finding(name, LESS, f"not installed: {', '.join(missing)}", pip_command())
    return Finding(name, GOOD, ", ".join(f"{one} {version}" for one, version in versions.items()))


def _version(module: str) -> str | None:
    """Return the version of an installed module; None also of a folder that is called like one."""
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return metadata.version(module.replace("_", "-"))
    except metadata.PackageNotFoundError:
        return None


def _devices() -> Finding:
    """Find out where torch can compute besides the CPU.

    In a process of its own: a driver that does not fit ends it without a word.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH],
            capture_output=True,
            text=True,
            timeout=_TORCH_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", "") or error).strip().splitlines()
        helps = "pip install --force-reinstall torch, of the build for this machine's driver"
        return Finding("devices", BROKEN, f"torch cannot be used: {said[-1]}", helps)
    named = done.stdout.split("\n")[:-1]
    return Finding("devices", GOOD, ", ".join(["cpu", *named]))


def _home() -> Finding:
    """Find out whether there is a folder to write to, with room."""
    home = default_home()
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        free = shutil.disk_usage(home).free
    except OSError as error:
        helps = "set KVCELLAR_HOME to a folder that can be written to"
        return Finding("folder", BROKEN, f"{home}: {error.strerror}", helps)
    if not os.access(home, os.W_OK):
        helps = "set KVCELLAR_HOME to a folder that can be written to"
        return Finding("folder", BROKEN, f"{home} cannot be written to", helps)
    said = f"{home}, {format_size(free)} free"
    if free < _ROOM_BYTES:
        helps = "free some, or set KVCELLAR_HOME to another disk; `kvcellar store gc` frees KV"
        return Finding("folder", LESS, said, helps)
    return Finding("folder", GOOD, said)


def _shared(url: str) -> Finding:
    """Write to the place that is to be shared, as every machine does, and read it again."""
    from kvcellar.store.shared.opening import open_place
    from kvcellar.store.shared.places import ForeignError, PlaceError

    key = f"doctor/{uuid.uuid4().hex}"
    try:
        place = open_place(url, timeout_s=_SHARED_S)
        place.write(key, b"doctor")
        is_there = place.read(key, 99) == b"doctor" and not place.create(key, b"", _SHARED_S)
        place.drop([key])
    except (ConfigError, ForeignError, PlaceError) as error:
        helps = "everything works without it; see docs/shared-tier.md for addresses and credentials"
        return Finding("shared place", BROKEN, str(error), helps)
    if not is_there:
        helps = "it cannot be shared: two machines would write over each other"
        return Finding("shared place", BROKEN, f"{place.title} makes one name twice", helps)
    return Finding("shared place", GOOD, f"{place.title} can be read and written")


def _store(path: Path) -> Finding:
    """Open the store, as every command does, and count what is in it."""
    from kvcellar.store import Store

    if not path.exists():
        return Finding("store", GOOD, f"{path} is made with the first agent")
    try:
        with Store(path) as store:
            return _stored(store)
    except StoreError as error:
        return Finding("store", BROKEN, str(error), "`kvcellar store verify` looks at every file")


def _stored(store: Store) -> Finding:
    """Say what an open store has."""
    cold = store.stats().cold
    said = f"{store.path}, {cold.n_blocks} blocks, {format_size(cold.size_bytes)}"
    events = store.take_events()
    if events:
        what = "; ".join(f"{event.subject}: {event.detail}" for event in events)
        return Finding("store", LESS, f"{said}; {what}", "`kvcellar store verify` says more")
    return Finding("store", GOOD, said)


def _model() -> Finding:
    """Find out whether the small real model is here, and which backend runs it."""
    model = PACKAGED["smollm2"]
    if model.file.is_file():
        try:
            choice = choose_backend(LoadOptions("smollm2"))
        except KVCellarError as error:
            return Finding("smollm2", LESS, f"{model.file}: {error}")
        return Finding("smollm2", GOOD, f"{model.file}; {choice.backend} runs it: {choice.why}")
    said = f"a small real model, fetched when it is first asked for, to {default_models()}"
    return Finding("smollm2", MORE, said, "kvcellar models pull smollm2 (93 MB)")


def _config() -> Finding:
    """Say which config file there is; that it can be read is known, or no command would run."""
    file = default_config()
    return Finding("config", GOOD, str(file) if file.is_file() else f"none; it would be {file}")
