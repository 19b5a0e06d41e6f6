"""Ask how fast other engines run the same random weights on the same prompts on this CPU.

A Llama of 1B shape, in three sizes of weights: 16 bits (ours and transformers in bfloat16,
llama.cpp in float16), 8 and 4 bits (ours packed by the native backend or exported for ExecuTorch,
llama.cpp in Q8_0 and Q4_0). Within a size all engines are in memory and take turns: decoding at
128, 2,048 and 8,192 tokens; prompts of 512 and 2,048; four sequences of 1,024; four branches of one
trunk of 4,096; K and V saved and restored against computed again. K and V are in 16 bits
everywhere. What fills a history is random rows or copies, since only its length matters. Decoding
is also compared with what the memory gives: a loop that reads as many bytes, timed in the same
rounds. With --quick the model is a small one, whose ratios say little, in 16 bits unless told
otherwise and without a static cache.

With --gguf FILE the same file is loaded in our engine and in llama.cpp: seconds to load, prompts of
512 and 2,048, and a token at 128, at 2,048 and at 8,192.

llama.cpp is llama-cpp-python as it is installed. Built for the machine it knows all of its
instructions: CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary llama-cpp-python llama-cpp-python
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf_peers import RANDOM_1B, measure_file
from harness import median_ms, run
from peer_engines import LlamaCpp, Ours, Remote, Stream, Transformers, left_out
from random_models import LLAMA_1B, quantise_gguf, random_llama, write_blocks, write_gguf

from kvcellar.home import default_home

SMALL = LLAMA_1B | {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
}
BITS = {"16": (None, "bf16", None), "8": ("Q8_0", "int8", "8da8w"), "4": ("Q4_0", "int4", "8da4w")}
"""Bits of the weights -> llama.cpp's name for it, the native backend's, ExecuTorch's."""

PARTS = ("decode", "prefill", "four", "trunk", "restore")
SUFFIX = 16
ALIKE = 0.05
"""Bound on the difference of 16-bit engines' logits, as a share of the largest one."""


class Models:
    """Weights in every engine's own files, made when they are first wanted and kept."""

    def __init__(self, shape: Mapping[str, int], folder: Path) -> None:
        """Keep the files in a folder."""
        self.shape, self.folder = dict(shape), folder
        folder.mkdir(parents=True, exist_ok=True)
        self.checkpoint = folder / "checkpoint"
        if not (self.checkpoint / "tokenizer.json").exists():
            random_llama(self.shape, self.checkpoint)

    def gguf(self, scheme: str | None) -> Path:
        """Return a GGUF file, in float16 or quantised."""
        path = self.folder / f"{scheme or 'F16'}.gguf"
        if not path.exists():
            half = path.with_suffix(".half")
            if scheme is None:
                write_gguf(self.checkpoint, half)
            else:
                quantise_gguf(self.gguf(None), half, scheme)
            half.rename(path)
        return path

    def engines(
        self, bits: str, missing: Mapping[str, str], wanted: tuple[str, ...], quick: bool
    ) -> list[Remote]:
        """Start the engines of one size of weights whose names begin as wanted, ours first."""
        scheme, weights, exported = BITS[bits]
        embedding = self.shape["vocab_size"] * self.shape["hidden_size"]
        given: dict[str, tuple[Any, ...]] = {
            f"ours {weights}": (Ours, self.checkpoint, "native", weights, embedding)
        }
        if exported and "ours, executorch" not in missing and not (quick and bits == "8"):
            given[f"ours {exported}"] = Ours, self.checkpoint, "executorch", exported, embedding
        if bits == "16":
            for name in ("dynamic",) if quick else ("dynamic", "static"):
                given[f"transformers {name}"] = Transformers, self.checkpoint, name == "static"
        found = [Remote(name, *how) for name, how in given.items() if name.startswith(wanted)]
        if "llama.cpp" not in missing and "llama.cpp".startswith(wanted):
            found += [self.llama_cpp(scheme, has_flash) for has_flash in (True, False)]
        return found

    def llama_cpp(self, scheme: str | None, has_flash: bool) -> Remote:
        """Start llama.cpp; without its repacked weights where these crash it on this machine.

        With its flash attention, or not: on some processors a decode step takes 2.5 times as long
        with it. It is compared by the better one.
        """
        shape = self.shape
        row = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
        name = f"llama.cpp {scheme or 'F16'}" + ("" if has_flash else ", no flash")
        for is_repacked in (True, False):
            engine = Remote(name, LlamaCpp, self.gguf(scheme), row, is_repacked, has_flash)
            try:
                engine.call("prefill", list(range(64)))
                engine.call("decode", 1)
            except RuntimeError as error:
                if not is_repacked:
                    raise
                print(f"  {error} at its first tokens; again without its repacked weights")
                name += ", plain"
            else:
                return engine
        raise AssertionError


def turns(
    engines: Sequence[Remote], method: str, *arguments: Any, rounds: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Time a method in each engine, as ``harness.alternate`` takes turns."""
    times: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for i in range(warmup + rounds):
        for engine in engines if i % 2 == 0 else list(reversed(engines)):
            seconds = engine.time(method, *arguments)
            if i >= warmup:
                times[engine.name].append(seconds)
    return times


class Table:
    """Measurements, as lines to print and keys of the JSON object."""

    def __init__(self, bits: str, results: dict[str, Any]) -> None:
        """Create the table of one size of weights."""
        self.bits, self.results = bits, results

    def show(
        self, what: str, times: Mapping[str, list[float]], note: Mapping[str, str] | None = None
    ) -> None:
        """Print an engine a line: milliseconds, and how many times our first engine's."""
        print(f"  {what}")
        names = [name for name in times if name != "stream"]
        for name in names:
            ratios = [a / b for a, b in zip(times[name], times[names[0]], strict=True)]
            ratio, ms = statistics.median(ratios), median_ms(times[name])
            print(f"    {name:22s} {ms:10.2f} ms  {ratio:6.2f}  {(note or {}).get(name, '')}")
            key = f"{name} {what}".replace(" ", "_").replace(".", "").replace(",", "")
            self.results[f"{key}_ms"] = round(ms, 3)
        theirs = [name for name in names if name.startswith("llama")]
        ours = [name for name in names if name.startswith("ours")]
        if theirs and ours:
            them, best = (min(some, key=lambda n: median_ms(times[n])) for some in (theirs, ours))
            pairs = zip(times[them], times[best], strict=True)
            key = f"{what.replace(' ', '_').replace(',', '')}_speedup_over_llamacpp_{self.bits}"
            self.results[key] = round(statistics.median(a / b for a, b in pairs), 3)


def decode(engines: Sequence[Remote], table: Table, quick: bool) -> None:
    """Measure one token at three lengths, with the share of what the memory gives."""
    stream = Remote("stream", Stream)
    for n in (128, 2048, 8192):
        for engine in engines:
            engine.call("fill", [n])
        times = turns([*engines, stream], "decode", 1, rounds=5 if quick else 9, warmup=2)
        gb_per_s = stream.weight_bytes / median_ms(times["stream"]) / 1e6
        note = {}
        for engine in engines:
            n_bytes = engine.weight_bytes + engine.call("kv_bytes")
            shares = [
                (n_bytes / seconds) / (stream.weight_bytes / reading)
                for seconds, reading in zip(times[engine.name], times["stream"], strict=True)
            ]
            share = statistics.median(shares)
            note[engine.name] = f"{n_bytes / 1e9:.2f} GB, {share:.0%} of {gb_per_s:.0f} GB/s"
            key = f"{engine.name} decode at {n} share of bandwidth".replace(" ", "_")
            table.results[key.replace(".", "")] = round(share, 3)
        table.show(f"decode at {n}", times, note)
    stream.close()


def prefill(engines: Sequence[Remote], table: Table, quick: bool) -> None:
    """Measure two prompts; in 16 bits all engines have to say the same."""
    vocabulary = table.results["vocab_size"]
    words = [(i * 7919) % vocabulary for i in range(24)]
    said = {engine.name: engine.call("prefill", words) for engine in engines}
    first = next(iter(said.values()))
    for name, logits in said.items():
        apart = float(np.abs(logits - first).max() / np.abs(first).max())
        table.results[f"{name} logits apart".replace(" ", "_").replace(".", "")] = round(apart, 4)
        if table.bits == "16" and apart > ALIKE:
            raise SystemExit(f"{name} computes something else: logits are {apart:.1%} apart")
    for n in (512, 2048):
        prompt = [(i * 7919) % vocabulary for i in range(n)]
        rounds = 3 if n == 512 else 2
        times = turns(engines, "prefill", prompt, rounds=rounds, warmup=int(n == 512))
        table.show(f"prefill {n}", times)
        exported = f"ours {BITS[table.bits][2]}"
        if exported in times:
            pairs = zip(times[exported], times[engines[0].name], strict=True)
            ratio = statistics.median(theirs / own for theirs, own in pairs)
            table.results[f"prefill_{n}_over_executorch_{table.bits}"] = round(ratio, 3)


def four(engines: Sequence[Remote], table: Table, quick: bool) -> None:
    """Measure a token for each of four sequences of 1,024."""
    for engine in engines:
        engine.call("fill", [1024] * 4)
    table.show("four at 1024", turns(engines, "decode", 4, rounds=5 if quick else 9))


def trunk(engines: Sequence[Remote], table: Table, quick: bool) -> None:
    """Measure four branches of a trunk of 4,096: their first tokens, a step of all, bytes."""
    suffix = [(i * 31) % 1000 for i in range(SUFFIX)]
    engines = [engine for engine in engines if "static" not in engine.name]
    note, trunk_bytes = {}, {}
    for engine in engines:
        engine.call("fill", [4096])
        trunk_bytes[engine.name] = engine.call("kv_bytes")
    first = turns(engines, "branches", 4, suffix, rounds=3)
    for engine in engines:
        share = engine.call("kv_bytes") / trunk_bytes[engine.name]
        note[engine.name] = f"{share:.3f} times the trunk's KV bytes"
        key = f"{engine.name} trunk4 kv bytes over trunk".replace(" ", "_").replace(".", "")
        table.results[key] = round(share, 4)
    table.show(f"first tokens of 4 branches of {SUFFIX} each", first, note)
    times = turns(engines, "decode_branches", 4, rounds=5 if quick else 9)
    table.show("step of 4 branches", times)


def restore(engines: Sequence[Remote], table: Table, quick: bool) -> None:
    """Measure K and V out to other memory and in again, against computing them."""
    vocabulary = table.results["vocab_size"]
    engines = [engine for engine in engines if "static" not in engine.name]
    for n in (2048,) if quick else (2048, 8192):
        prompt = [(i * 7919) % vocabulary for i in range(n)]
        again = turns(engines, "prefill", prompt, rounds=1, warmup=0)
        saves = turns(engines, "save", rounds=3)
        back = turns(engines, "restore", rounds=3)
        note = {
            e.name: f"{median_ms(again[e.name]) / median_ms(back[e.name]):.0f} times as fast as "
            f"computing in {median_ms(again[e.name]):.0f} ms"
            for e in engines
        }
        table.show(f"recompute {n}", again)
        table.show(f"save {n}", saves)
        table.show(f"restore {n}", back, note)


def measure(
    quick: bool,
    bits: list[str],
    part: list[str],
    engine: list[str],
    models: Path,
    gguf: str | None,
) -> Mapping[str, Any]:
    """Measure size by size, part by part; or a file."""
    if gguf is not None:
        return measure_file(_file(gguf, models), quick)
    missing = left_out()
    for name, why in missing.items():
        print(f"  left out: {name} ({why})")
    shape = SMALL if quick else LLAMA_1B
    files = Models(shape, models / ("small" if quick else "1B"))
    results: dict[str, Any] = {
        "shape": "small" if quick else "1B",
        "vocab_size": shape["vocab_size"],
        "left_out": sorted(missing),
    }
    every = {"decode": decode, "prefill": prefill, "four": four, "trunk": trunk, "restore": restore}
    for size in bits or (["16"] if quick else BITS):
        engines = files.engines(size, missing, tuple(engine or [""]), quick)
        print(f" {size}-bit weights; ms, and times our first engine's")
        for name in part or PARTS:
            every[name](engines, Table(size, results), quick)
        for one in engines:
            one.close()
    return results


def _file(name: str, models: Path) -> Path:
    """Return a GGUF file, which is made where it is the random one."""
    if name != RANDOM_1B:
        return Path(name).expanduser()
    path = models / f"{RANDOM_1B}.Q4_K_M.gguf"
    if not path.exists():
        models.mkdir(parents=True, exist_ok=True)
        write_blocks(LLAMA_1B, path.with_suffix(".half")).rename(path)
    return path


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose parts of a long benchmark."""
    parser.add_argument(
        "--bits", action="append", choices=BITS, help="sizes of weights; by default all"
    )
    parser.add_argument("--part", action="append", choices=PARTS, help="what to measure; all")
    parser.add_argument(
        "--engine", action="append", metavar="NAME", help="engines whose names begin so; all"
    )
    parser.add_argument(
        "--models",
        type=Path,
        default=default_home() / "peers",
        help="where the models are kept, up to 6 GB of them",
    )
    parser.add_argument(
        "--gguf",
        metavar="FILE",
        help=f"compare on this GGUF file alone; {RANDOM_1B}: random blocks of Llama 3.2 1B's shape",
    )


if __name__ == "__main__":
    run(__doc__ or "", measure, add_options)
