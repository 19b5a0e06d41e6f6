"""Parts of ``gpu.py`` that ask whether a card computes what transformers does, and NumPy.

How far logits are from transformers' own, with chunks, forks, trees, windows, sinks and states;
whether tokens are the same while pictures are encoded beside them; and the tests that run on a card
with all their tensors there.
"""

from __future__ import annotations

import io
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu import PARTS
from gpu_bench import ROOT, Bench, Found, answered, n_graphs_of, prompt_of
from numpy.typing import NDArray
from PIL import Image
from random_models import random_vision

import kvcellar as kv
from kvcellar.backends.torch.learn.shrink.checkpoints import write_tiny
from kvcellar.engine import Engine, FinishEvent, GeneratedToken, Request, SamplingParams
from kvcellar.engine.picture_rows import PictureRows
from kvcellar.models import LoadedModel, load_model
from kvcellar.pictures.picture import Picture
from kvcellar.pictures.tokens import placeholders

Logits = NDArray[np.float32]

TESTS = (
    "tests/backends/gpu/test_products.py",
    "tests/backends/gpu/test_between.py",
    "tests/engine/test_kept_logits.py",
    "tests/backends/gpu/test_on_card.py",
)

FAMILIES = {
    "llama": "seq",
    "gemma2": "seq",  # windows and caps
    "gpt_oss": "seq",  # sinks and windows, and experts that amplify rounding
    "lfm2": "seq",  # states
    "qwen3": "tree",
}
PROMPT = 40
TREE = (-1, 0, 0, 1)
"""Parents of guesses: two behind the first, and one behind the second."""


N_PICTURES = 4


class Eager:
    """A family's own network of transformers, without caches: what logits should be."""

    def __init__(self, folder: Path, device: str, dtype: torch.dtype) -> None:
        """Read its weights."""
        from transformers import AutoModelForCausalLM

        made = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=dtype
        )
        self._network, self._device = made.to(device).eval(), device

    def logits(self, tokens: Sequence[int]) -> Logits:
        """Return ``[len(tokens), vocab_size]``."""
        with torch.inference_mode():
            ids = torch.tensor([list(tokens)], device=self._device)
            found: Logits = self._network(ids, use_cache=False).logits[0].float().cpu().numpy()
        return found


class Played:
    """A session on a card whose logits are held against a network's."""

    def __init__(self, eager: Eager, runner: Any, cache: Any) -> None:
        """Begin without tokens."""
        self._eager, self._runner, self._cache = eager, runner, cache
        self.texts: dict[int, list[int]] = {}
        self.apart = 0.0

    def bring(self, tokens: Sequence[int], seq: int = 0) -> None:
        """Bring tokens of a sequence in one forward, and compare the logits of all of them."""
        positions = self._cache.begin_step([(seq, len(tokens))])
        found = self._runner.forward(list(tokens), positions, range(len(tokens)))
        text = self.texts.setdefault(seq, [])
        text += tokens
        self._compare(found, self._eager.logits(text)[-len(tokens) :])

    def fork(self, seq: int) -> None:
        """Begin a sequence with the tokens of the first."""
        self._cache.seq_cp(0, seq)
        self.texts[seq] = list(self.texts[0])

    def guess(self, tokens: Sequence[int]) -> None:
        """Verify a tree of guesses behind the first sequence, and take it back."""
        self._cache.propose(list(TREE), 0)
        positions = self._cache.begin_step([(0, len(tokens))])
        found = self._runner.forward(list(tokens), positions, range(len(tokens)))
        paths = []
        for parent, token in zip(TREE, tokens, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else ()), token])
        wanted = [self._eager.logits([*self.texts[0], *path])[-1] for path in paths]
        self._compare(found, np.stack(wanted))
        self._cache.commit([], 0)

    def _compare(self, found: Logits, wanted: Logits) -> None:
        self.apart = max(self.apart, float(np.abs(found - wanted).max()))


def agreement(bench: Bench) -> Found:
    """Measure how far logits are from transformers', with chunks, forks, windows, sinks, trees."""
    found: Found = {}
    for family, kind in FAMILIES.items():
        if bench.is_dry and kind != "tree":
            continue
        distance, n_graphs = _apart(family, kind, bench.device)
        found[f"float32_apart_{family}"] = float(f"{distance:.2g}")
        found[f"graphs_of_{family}"] = n_graphs
    n = 16 if bench.is_dry else 512
    ratio = _rounding(bench.path, bench.model, bench.device, n)
    return found | {"bfloat16_error_over_transformers": round(ratio, 3)}


def pictures(bench: Bench) -> Found:
    """Decode a text while pictures of others are encoded: the same tokens, and how much slower."""
    model = bench.load(bench.made("vision", lambda to: _vision(to, bench)), dtype="float32")
    reader, n_tokens = model.pictures, bench.n(300)
    if reader is None:
        raise RuntimeError(f"the model reads no pictures: {model.no_pictures}")
    seen = [_picture(seed, 56 if bench.is_dry else 980) for seed in range(N_PICTURES)]
    by_name = {one.name: one for one in seen}
    rows = PictureRows(lambda name: reader.encode(by_name[name]))
    prompts = [prompt_of(bench.n(300), 0, 4000)]
    for picture in seen:
        look = reader.look(picture)
        there = placeholders(reader.token_id, picture.name, look.n_rows, look.grid)
        prompts.append([5, *there.tolist(), 6])
    capacity = sum(len(one) + n_tokens + 1 for one in prompts)
    reader.load()
    with bench.engine(model, capacity, len(prompts), rows=rows) as made:
        said, alone, beside = _said_beside(made, prompts, n_tokens)
    rows.close()
    again = PictureRows(lambda name: reader.encode(by_name[name]))
    with bench.engine(model, capacity, len(prompts), rows=again) as made:
        wanted = [answered(made, [one], n_tokens).token_ids[0] for one in prompts]
    again.close()
    return {
        "pictures_are_equal": said == wanted,
        "encoding_picture_ms": round(again.counts.encoding_s / N_PICTURES * 1e3, 1),
        "beside_encoding_over_alone": round(beside / alone, 2),
    }


def _said_beside(
    engine: Engine, prompts: Sequence[Sequence[int]], n_tokens: int
) -> tuple[list[tuple[int, ...]], float, float]:
    """Run the first prompt to half of its answer, then the others too, whose pictures are new.

    Returns:
        Tokens of each; the median seconds of a step before, and of one while pictures are encoded.
    """
    params = SamplingParams(max_tokens=n_tokens, ignore_eos=True)
    ids = [engine.submit(Request(prompts[0], params))]
    alone, beside, ends = list[float](), list[float](), dict[int, FinishEvent]()
    n_said = 0
    while not engine.is_idle:
        if len(ids) == 1 and n_said >= n_tokens // 2:
            ids += [engine.submit(Request(one, params)) for one in prompts[1:]]
        counts, began = engine.stats(), time.perf_counter()
        events = engine.step()
        took_s = time.perf_counter() - began
        told = [one for one in events if isinstance(one, GeneratedToken)]
        n_said += sum(one.request_id == ids[0] for one in told)
        if ids[0] not in ends and len(ids) == 1 and n_said > 1:
            alone.append(took_s)
        elif ids[0] not in ends and len(ids) > 1 and counts.encoded_pictures < N_PICTURES:
            beside.append(took_s)
        ends |= {one.request_id: one for one in events if isinstance(one, FinishEvent)}
    for end in ends.values():
        if end.error is not None:
            raise end.error
    return [ends[one].token_ids for one in ids], statistics.median(alone), statistics.median(beside)


def _vision(to: Path, bench: Bench) -> None:
    """Save a model that reads pictures, of a 3B model's tower, or a tiny one."""
    n, depth = (256, 2) if bench.is_dry else (1280, 32)
    text = {
        "hidden_size": n, "intermediate_size": 3 * n, "num_hidden_layers": depth // 2,
        "num_attention_heads": n // 64, "num_key_value_heads": 2, "vocab_size": 8448,
    }  # fmt: skip
    tower = {
        "depth": depth, "hidden_size": n, "intermediate_size": 3 * n, "num_heads": n // 64,
        "out_hidden_size": n, "fullatt_block_indexes": [depth - 1],
    }  # fmt: skip
    random_vision(to, text, tower)


def _picture(seed: int, side: int) -> Picture:
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return Picture.read(file.getvalue())


def checks(bench: Bench) -> Found:
    """Run the conformance suite, and tests of products and sampling, with tensors on the card."""
    tests = ("tests/backends/gpu/test_plans.py",) if bench.is_dry else TESTS
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "TRITON_INTERPRET": str(int(bench.is_dry))}
    left = max(5.0, min(PARTS["checks"], bench.ends_s - time.monotonic()) - 10.0)
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=left
        )
        text, is_whole = done.stdout + done.stderr, True
    except subprocess.TimeoutExpired as error:
        text, is_whole = (error.stdout or b"").decode(errors="replace"), False
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error)", text)}
    dots = text.count(".") if not is_whole else counts.get("passed", 0)
    failed = counts.get("failed", 0) + counts.get("error", 0)
    if failed or not is_whole or not dots:
        print(text[-3000:].strip())
    return {
        "tests_passed": dots,
        "tests_failed": failed + len(re.findall(r"^[.]*F", text, re.M)) * (not is_whole),
        "tests_are_whole": is_whole,
        "is_correct": is_whole and not failed and dots > 0,
    }


def _apart(family: str, kind: str, device: str) -> tuple[float, int]:
    """Return how far a tiny model's float32 logits are from transformers', and its graphs."""
    make = kv.make_tree_session if kind == "tree" else kv.make_seq_session
    with tempfile.TemporaryDirectory() as name:
        folder = write_tiny(family, Path(name))
        model = load_model(
            str(folder), backend="torch", device=device, dtype="float32", weights="none"
        )
        eager = Eager(folder, device, torch.float32)
        with make("torch", kv.make_config(model.params, 4 * PROMPT)) as session:
            runner: Any = model.bind(session)
            played = Played(eager, runner, session.cache)
            _play(played, has_tree=kind == "tree")
            return played.apart, n_graphs_of(runner)


def _play(played: Played, *, has_tree: bool) -> None:
    """Bring a prompt in parts, decode, fork, decode both, and guess."""
    tokens = [3 + 7 * i % 200 for i in range(PROMPT)]
    third = PROMPT // 3
    for start in range(0, PROMPT, third):
        played.bring(tokens[start : start + third])
    for token in (5, 6, 7):
        played.bring([token])
    played.fork(1)
    for seq in (0, 1, 0, 1):
        played.bring([9 + seq], seq)
    if has_tree:
        for first in (20, 30):
            played.guess([first, first + 1, first + 2, first + 3])


def _rounding(folder: Path, model: LoadedModel, device: str, n: int) -> float:
    """Return the error of bfloat16 logits against float32, ours over transformers' own."""
    tokens = [3 + 11 * i % 250 for i in range(n)]
    exact = Eager(folder, device, torch.float32).logits(tokens)
    theirs = Eager(folder, device, torch.bfloat16).logits(tokens)
    with kv.make_seq_session("torch", kv.make_config(model.params, n + 64)) as session:
        runner, half = model.bind(session), n // 2
        parts = [tokens[:half], tokens[half:]]
        ours = np.concatenate(
            [
                runner.forward(part, session.cache.begin_step([(0, len(part))]), range(len(part)))
                for part in parts
            ]
        )
    base = max(float(np.linalg.norm(theirs - exact)), 1e-9)
    return float(np.linalg.norm(ours - exact)) / base
