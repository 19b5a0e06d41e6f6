"""Check on a Mac what can be checked nowhere else: our caches on Metal. One command, one verdict.

    python tools/check_metal.py            # on Apple silicon
    python tools/check_metal.py --cpu      # the same checks without a GPU: tries the script out

What each check is for is in docs/metal.md. Exit status: 0 all passed, 1 something failed, 2 there
is no Metal here and nothing was checked.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

import kvcellar as kv
from kvcellar.budget import MemoryBudget
from kvcellar.engine import SamplingParams, generate, last
from kvcellar.models import load_model

ROOT = Path(__file__).resolve().parent.parent
HEADS, KV_HEADS, DIM = 8, 2, 64
TOLERANCES = {"float32": 2e-5, "float16": 8e-3, "bfloat16": 6e-2}

Check = Callable[[argparse.Namespace], str]
CHECKS: dict[str, Check] = {}


class CheckError(Exception):
    """A check that did not hold; the message has the figures."""


def check(function: Check) -> Check:
    """Add a check; its name is the function's, its purpose the docstring."""
    CHECKS[function.__name__] = function
    return function


def params(n_layers: int = 1, window: int | None = None) -> kv.ModelCacheParams:
    """Return a made-up model's facts."""
    group = kv.LayerGroup(tuple(range(n_layers)), KV_HEADS, DIM, DIM, window)
    return kv.ModelCacheParams(n_layers, KV_HEADS, DIM, groups=(group,))


def dense(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Compute causal attention of the last tokens in float64: ``[heads, n, dim]``."""
    k, v = (np.repeat(x.astype(np.float64), HEADS // KV_HEADS, axis=0) for x in (k, v))
    logits = np.einsum("hnd,hld->hnl", q.astype(np.float64), k) * DIM**-0.5
    n, length = logits.shape[1:]
    hidden = np.arange(length)[None, :] > np.arange(length - n, length)[:, None]
    weights = np.exp(np.where(hidden, -np.inf, logits))
    return np.einsum("hnl,hld->hnd", weights / weights.sum(-1, keepdims=True), v)


class Compared:
    """A cache and NumPy side by side: random tokens to both, the largest error of each forward."""

    def __init__(self, cache: Any, name: str) -> None:
        self.cache, self.dtype = cache, getattr(mx, name)
        self.rng = np.random.default_rng(0)
        self.histories: dict[int, list[np.ndarray]] = {}

    def forward(self, *batch: tuple[int, int]) -> float:
        """Run a forward of ``(seq_id, n_tok)`` stretches."""
        ids = [seq for seq, n in batch for _ in range(n)]
        at = self.cache.begin_step(batch)
        shapes = [(n, len(ids), DIM) for n in (HEADS, KV_HEADS, KV_HEADS)]
        args = [mx.array(self.rng.standard_normal(s))[None].astype(self.dtype) for s in shapes]
        got = self.cache.update_and_attend(*args, at, 0, DIM**-0.5, mx.float32)
        q, k, v = (np.array(x.astype(mx.float32))[0] for x in args)
        first, most = 0, 0.0
        for seq, n in batch:
            part = slice(first, first + n)
            self.histories.setdefault(seq, []).append(np.stack([k[:, part], v[:, part]]))
            want = dense(q[:, part], *np.concatenate(self.histories[seq], axis=2))
            most = max(most, float(np.abs(np.array(got)[0, :, part] - want).max()))
            first += n
        return most

    def fork(self, seq: int, branch: int) -> None:
        """Let ``branch`` start with what ``seq`` holds."""
        self.cache.seq_cp(seq, branch)
        self.histories[branch] = list(self.histories[seq])


@check
def attention_equals_numpy(options: argparse.Namespace) -> str:
    """Compare prefill, decode and forks in every float type, and packed int8, with NumPy."""
    worst = []
    for name, stored in [*((n, n) for n in TOLERANCES), ("float32", "int8")]:
        with kv.make_seq_session("mlx", kv.make_config(params(), 4096, stored)) as session:
            both = Compared(session.cache, name)
            errors = [both.forward(b) for b in ((0, 300), (0, 1))]
            errors.append(both.forward((1, 40), (0, 1)))
            for branch in (2, 3):
                both.fork(0, branch)
            for _ in range(3):
                errors += [both.forward((2, 1), (0, 1), (3, 1), (1, 1)), both.forward((3, 20))]
        limit = TOLERANCES[name] if stored == name else 6e-2  # NumPy does not quantise
        worst.append(f"{stored} {max(errors):.1e}")
        if not max(errors) <= limit:
            raise CheckError(f"{stored}: off by {max(errors):.2e}, {limit:g} is rounding")
    return "largest errors: " + ", ".join(worst)


@check
def a_token_does_not_copy_its_pool(options: argparse.Namespace) -> str:
    """See that a write takes over the pool's bytes; the peak would show a copy."""
    n = 1 << 14 if options.quick else 1 << 18
    with kv.make_seq_session("mlx", kv.make_config(params(), n, "float16", n)) as session:
        cache = session.cache

        def step(n_tok: int) -> None:
            at = cache.begin_step([(0, n_tok)])
            q = mx.ones((1, HEADS, n_tok, DIM), dtype=mx.float16)
            k = mx.ones((1, KV_HEADS, n_tok, DIM), dtype=mx.float16)
            cache.settle(cache.update_and_attend(q, k, k, at, 0, 1.0, mx.float16))

        step(8)
        step(1)
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        for _ in range(5):
            step(1)
        grown, pool = mx.get_peak_memory() - held, cache.usage().size_bytes // 2
    if grown > pool / 10:
        raise CheckError(f"a token took {grown:,} bytes beside a pool of {pool:,}: it was copied")
    return f"{max(0, grown):,} bytes beside pools of {pool:,} each"


@check
def prefill_holds_no_matrix_of_logits(options: argparse.Namespace) -> str:
    """See that the fused kernel serves prefill: queries times history is never held."""
    if options.cpu:
        return "skipped: there is no fused kernel on a CPU"
    n, length = 512, 1 << 15
    with kv.make_seq_session("mlx", kv.make_config(params(), length, "float16", length)) as session:
        cache = session.cache
        k = mx.ones((1, KV_HEADS, length - n, DIM), dtype=mx.float16)
        cache.begin_step([(0, length - n)])
        cache.update_and_fetch(0, None, k, k)
        cache.settle()
        q = mx.ones((1, HEADS, n, DIM), dtype=mx.float16)
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        at = cache.begin_step([(0, n)])
        out = cache.update_and_attend(q, k[:, :, :n], k[:, :, :n], at, 0, 1.0, mx.float16)
        cache.settle(out)
        grown, logits = mx.get_peak_memory() - held, HEADS * n * length * 2
    if grown > logits / 2:
        raise CheckError(f"{grown:,} bytes for a prefill whose logits would be {logits:,}")
    return f"{grown:,} bytes; the logits would be {logits:,}"


@check
def threads_take_turns(options: argparse.Namespace) -> str:
    """See that nothing stays lazy between forwards: another thread can run the next one."""
    model = load_model("demo", backend="mlx")
    found: list[Any] = []
    with kv.make_seq_session("mlx", kv.make_config(model.params, 256)) as session:
        cache, runner = session.cache, model.bind(session)

        def forward() -> None:
            try:
                found.append(runner.forward([7, 8], cache.begin_step([(0, 2)])).argmax())
            except Exception as error:
                found.append(error)

        for _ in range(3):
            thread = threading.Thread(target=forward)
            thread.start()
            thread.join()
        forward()
    wrong = [one for one in found if isinstance(one, Exception)]
    if wrong:
        raise CheckError(f"a forward in another thread: {wrong[0]}")
    return "4 forwards in 4 threads"


@check
def half_precision_says_nearly_the_same(options: argparse.Namespace) -> str:
    """Compare the bundled model in float16 and bfloat16 with float32: logits and text."""
    texts, logits = {}, {}
    for dtype in ("float32", "float16", "bfloat16"):
        model = load_model("demo", backend="mlx", dtype=dtype)
        prompt = model.tokenizer("import os\nimport sys\n\n\ndef main(")["input_ids"]
        with kv.make_seq_session("mlx", kv.make_config(model.params, 512, dtype)) as session:
            runner, cache = model.bind(session), session.cache
            logits[dtype] = runner.forward(prompt, cache.begin_step([(0, len(prompt))]))[0]
            events = generate(
                runner, cache, model.tokenizer, prompt, SamplingParams(max_tokens=16), seq_id=1
            )
            texts[dtype] = last(events).token_ids
    spread = logits["float32"].std()
    said = []
    for dtype, most in (("float16", 0.02), ("bfloat16", 0.15)):
        off = float(np.sqrt(((logits[dtype] - logits["float32"]) ** 2).mean()) / spread)
        same = sum(a == b for a, b in zip(texts[dtype], texts["float32"], strict=False))
        said.append(f"{dtype} {off:.4f} of the spread, {same} of {len(texts['float32'])} tokens")
        if off > most:
            raise CheckError(
                f"{dtype}: logits are off by {off:.3f} of their spread, {most} is rounding"
            )
    return "; ".join(said)


@check
def rows_come_back_bit_for_bit(options: argparse.Namespace) -> str:
    """See that what leaves the cache comes back as the same bytes, in every type."""
    types = ("float32", "float16", "bfloat16", "int8", "int4")
    for stored in types:
        with kv.make_seq_session("mlx", kv.make_config(params(2), 128, stored)) as session:
            cache = session.cache
            cache.begin_step([(0, 50)])
            for layer in range(2):
                k = mx.random.normal((1, KV_HEADS, 50, DIM))
                cache.update_and_fetch(layer, None, k, k)
            cache.settle()
            before = cache.read_rows([np.arange(50)])
            cache.write_rows([np.arange(60, 110)], before)
            after = cache.read_rows([np.arange(60, 110)])
        for a, b in zip(before[0], after[0], strict=True):
            if any(x.tobytes() != y.tobytes() for x, y in zip(a, b, strict=True)):
                raise CheckError(f"{stored}: other bytes came back")
    return ", ".join(types)


@check
def the_wired_limit_is_left_alone(options: argparse.Namespace) -> str:
    """See that a budget sets MLX's memory limit and leaves to the system what is wired."""
    if options.cpu:
        return "skipped: only Metal wires memory"
    before = mx.set_wired_limit(0)
    model = load_model("demo", backend="mlx")
    budget = MemoryBudget(4_000_000_000)
    with kv.make_seq_session("mlx", kv.make_config(model.params, 64, budget=budget)) as session:
        runner = model.bind(session)
        runner.forward([7], session.cache.begin_step([(0, 1)]))
    wired, limit = mx.set_wired_limit(before), mx.set_memory_limit(4_000_000_000)
    if wired != 0 or limit != 4_000_000_000:
        raise CheckError(f"the wired limit became {wired:,}, the memory limit {limit:,}")
    return f"wired limit untouched, memory limit {limit:,}"


@check
def as_fast_as_mlx_lm(options: argparse.Namespace) -> str:
    """Time one stream, within 3% of mlx-lm's, and a ragged batch, twice as fast in less memory."""
    command = [sys.executable, str(ROOT / "benchmarks" / "mlx.py"), "--json"]
    command += ["--quick"] if options.quick else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CheckError(done.stderr.strip().splitlines()[-1])
    found = json.loads(done.stdout.splitlines()[-1])
    goals = (
        ("single_stream_ratio_to_mlx_lm", 0.97, 1),
        ("ragged_batch_speedup", 2.0, 1),
        ("ragged_batch_memory_ratio", 0.7, -1),
    )
    missed = [f"{k} {found[k]} (goal {goal})" for k, goal, up in goals if up * found[k] < up * goal]
    if missed and not options.cpu:
        raise CheckError("; ".join(missed))
    return ", ".join(f"{key} {found[key]}" for key, _, _ in goals)


@check
def the_tests_pass(options: argparse.Namespace) -> str:
    """Run the conformance suite and all other tests of MLX on this device."""
    if options.quick:
        return "skipped: --quick"
    command = [sys.executable, "-m", "pytest", "-q", "-k", "mlx or Mlx", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    summary = (done.stdout.strip().splitlines() or ["nothing"])[-1]
    if done.returncode:
        raise CheckError(summary)
    return summary


def main() -> int:
    """Run the checks; print a line for each and the verdict."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="run them on the CPU")
    parser.add_argument("--quick", action="store_true", help="leave the long ones out, or short")
    parser.add_argument("--only", metavar="NAME", action="append", choices=list(CHECKS))
    options = parser.parse_args()
    if options.cpu:
        mx.set_default_device(mx.cpu)
    elif not mx.metal.is_available():
        print("there is no Metal here, so nothing was checked; --cpu tries the script out")
        return 2
    versions = {name: importlib.metadata.version(name) for name in ("mlx", "mlx-lm", "numpy")}
    where = "cpu" if options.cpu else mx.device_info().get("device_name", "gpu")
    print(f"{where}, {platform.platform()}, kvcellar {kv.__version__}, {versions}")
    failed = []
    for name in options.only or CHECKS:
        try:
            said, word = CHECKS[name](options), "ok  "
        except Exception as error:
            said, word = f"{type(error).__name__}: {error}", "FAIL"
            failed.append(name)
        print(f"{word}  {name.replace('_', ' ')}: {said}", flush=True)
    if failed:
        print(f"verdict: {len(failed)} failed; please report the lines above")
    else:
        print("verdict: everything that was checked holds")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
