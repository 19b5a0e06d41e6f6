"""Ask how much faster tokens come when some are guessed and verified several at once.

Guesses of what followed before (n-grams), in the engine, against the same engine without. The
answer to "repeat this file with one change" is forced upon the model (its own text means little):
every forward runs in full, and the token of the changed file is made the likeliest. And where every
guess is wrong: what it costs to have a drafter, once it is known to be of no use. Where there is a
head for the bundled model, its trees against its own chains and against no guesses, on text that
neither was trained on. Greedy outputs have to be the same.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from harness import run
from restore import make_model

import kvcellar as kv
from kvcellar.backends.torch.eagle3.head import Eagle3Head
from kvcellar.backends.torch.eagle3.loading import load_eagle3
from kvcellar.engine import Engine, EngineConfig, FinishEvent, Request, SamplingParams
from kvcellar.engine.speculate import Eagle3Drafter, NgramDrafter
from kvcellar.models import LoadedModel, load_model

TREE_NODES = 32
"""Guesses of a tree that is verified whole; published systems take 24 to 60."""


class Forced:
    """A runner whose likeliest next token is that of a script, for one sequence."""

    def __init__(self, runner: Any, n_prompt: int, script: list[int]) -> None:
        self._runner, self._n_prompt, self._script = runner, n_prompt, script
        self.params, self.vocab_size = runner.params, runner.vocab_size
        self.max_tokens_per_step = runner.max_tokens_per_step

    def forward(self, token_ids: Any, positions: Any, rows: Any = None) -> Any:
        """Run the runner's forward, and then say the script's word."""
        logits = self._runner.forward(token_ids, positions, rows)
        wanted = [len(token_ids) - 1] if rows is None else rows
        for i, row in enumerate(np.asarray(wanted)):
            at = int(positions[row]) + 1 - self._n_prompt
            if 0 <= at < len(self._script):
                logits[i, self._script[at]] += 1e4
        return logits


@contextmanager
def forced(
    model: LoadedModel, prompt: list[int], script: list[int], has_drafts: bool
) -> Iterator[Engine]:
    """Make an engine that says the script behind the prompt, with n-grams or without."""
    make = kv.make_tree_session if has_drafts else kv.make_seq_session
    with make("torch", kv.make_config(model.params, 4096)) as session:
        runner: Any = Forced(model.bind(session), len(prompt), script)
        yield Engine(runner, session.cache, drafter=NgramDrafter() if has_drafts else None)


def edits(model: LoadedModel, file: list[int], edited: list[int], rounds: int) -> Any:
    """Return (median ratio of tokens/s with guesses to without, mismatches, the last end)."""
    ratios, mismatches, end = [], 0, None
    request = Request(tuple(file), SamplingParams(max_tokens=len(edited), ignore_eos=True))
    for _ in range(rounds):
        ends = []
        for has_drafts in (False, True):
            with forced(model, file, edited, has_drafts) as engine:
                ends.append(engine.generate(request))
        plain, end = ends
        mismatches += plain.token_ids != end.token_ids
        ratios.append(end.usage.tokens_per_second / plain.usage.tokens_per_second)
    return statistics.median(ratios), mismatches, end


def misled(model: LoadedModel, prompt: list[int], script: list[int], n_first: int) -> Any:
    """Return (time per token with a drafter to that without, mismatches, the end with one).

    Two engines take turns, step by step, so that whatever else the machine does hits them alike;
    the first ``n_first`` tokens, in which the drafter is found out, do not count, nor does a tenth
    of the pairs of steps at either end.
    """
    request = Request(tuple(prompt), SamplingParams(max_tokens=len(script), ignore_eos=True))
    took: dict[bool, list[float]] = {False: [], True: []}
    ends: dict[bool, Any] = {}
    with forced(model, prompt, script, False) as a, forced(model, prompt, script, True) as b:
        engines = {False: a, True: b}
        for engine in engines.values():
            engine.submit(request)
        for i in itertools.count():
            if len(ends) == len(engines):
                break
            for has_drafts in (False, True) if i % 2 else (True, False):
                started = time.perf_counter()
                events = engines[has_drafts].step()
                took[has_drafts].append(time.perf_counter() - started)
                for event in events:
                    if isinstance(event, FinishEvent):
                        ends[has_drafts] = event
    pairs = list(zip(took[False], took[True], strict=True))[n_first:]
    ratios = sorted(b / a for a, b in pairs)
    n_out = len(ratios) // 10
    ratio = statistics.mean(ratios[n_out : len(ratios) - n_out])
    return ratio, ends[False].token_ids != ends[True].token_ids, ends[True]


def held_out(model: LoadedModel, n_prompts: int, n_tokens: int) -> list[tuple[int, ...]]:
    """Return pieces of standard-library files that neither the bundled model nor its head saw."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
    from train_demo_model import is_heldout, library_files

    found: list[tuple[int, ...]] = []
    for path, text in library_files():
        if is_heldout(path):
            tokens = model.tokenizer(text, verbose=False)["input_ids"]
            places = range(0, len(tokens) - n_tokens, 4 * n_tokens)
            found += [tuple(tokens[place : place + n_tokens]) for place in places]
    return found[:: max(1, len(found) // n_prompts)][:n_prompts]


def with_head(
    model: LoadedModel, head: Eagle3Head, stack: ExitStack, config: EngineConfig, **shape: Any
) -> Engine:
    """Make an engine for which the head guesses, in trees of a shape."""
    ours = stack.enter_context(kv.make_tree_session("torch", kv.make_config(model.params, 2048)))
    own = stack.enter_context(kv.make_tree_session("torch", kv.make_config(head.params, 2048)))
    drafter = Eagle3Drafter(head.bind(own), own.cache, **shape)
    runner = model.bind(ours, feature_layers=head.feature_layers)
    return Engine(runner, ours.cache, config=config, drafter=drafter)


def eagle3(quick: bool) -> dict[str, Any]:
    """Measure the bundled model's head: tokens per forward of its trees and chains, and speed.

    Tree and chain go equally deep and are verified whole, whatever that takes: the chain is the
    likeliest token after another. What pays on this machine is the adaptive engine's to find out;
    the speed is its.
    """
    model = load_model("demo", backend="torch")
    head = load_eagle3(None, model)
    prompts = held_out(model, 12 if quick else 24, 128)
    params = SamplingParams(max_tokens=50 if quick else 200, ignore_eos=True)
    whole = EngineConfig(verify_all_drafts=True, max_drafted=TREE_NODES)
    deep = {"min_reach": 0.0, "max_depth": 8}
    with ExitStack() as stack:
        session = kv.make_seq_session("torch", kv.make_config(model.params, 2048))
        plain = stack.enter_context(session)
        engines = {
            "plain": Engine(model.bind(plain), plain.cache),
            "adaptive": with_head(model, head, stack, EngineConfig()),
            "tree": with_head(model, head, stack, whole, width=8, **deep),
            "chain": with_head(model, head, stack, whole, width=1, **deep),
        }
        speeds: dict[str, list[float]] = {name: [] for name in engines}
        said: dict[str, list[Any]] = {name: [] for name in engines}
        for prompt in (prompts[0], *prompts):  # the first one once more, to warm up
            for name, engine in engines.items():
                end = engine.generate(Request(prompt, params))
                speeds[name].append(end.usage.tokens_per_second)
                said[name].append(end)
    accepted = {}
    for name in ("adaptive", "tree", "chain"):
        usages = [end.usage for end in said[name][1:]]
        right = sum(usage.accepted_tokens for usage in usages)
        n_forwards = sum(usage.completion_tokens for usage in usages) - right
        accepted[name] = right / n_forwards
    ratios = [a / b for a, b in zip(speeds["adaptive"], speeds["plain"], strict=True)][1:]
    more = accepted["tree"] - accepted["chain"]
    speedup = statistics.median(ratios)
    print(
        f"Eagle3 on {len(prompts)} pieces of text held out: {accepted['tree']:.2f} guesses right "
        f"per forward as a tree of {TREE_NODES}, {accepted['chain']:.2f} as a chain; "
        f"{accepted['adaptive']:.2f} of those that are believed to pay, and {speedup:.2f} times as "
        f"fast as without"
    )
    wrong = sum(
        a.token_ids != b.token_ids
        for name in ("adaptive", "tree", "chain")
        for a, b in zip(said["plain"], said[name], strict=True)
    )
    return {
        "tree_nodes": TREE_NODES,
        "tree_accepted": round(accepted["tree"], 2),
        "chain_accepted": round(accepted["chain"], 2),
        "tree_minus_chain_accepted": round(more, 2),
        "eagle3_speedup": round(speedup, 2),
        "greedy_mismatches": wrong,
    }


def measure(quick: bool) -> Mapping[str, Any]:
    """Measure editing, and text that repeats nothing; on a model of some 100M parameters."""
    n_file, rounds = (120, 2) if quick else (900, 5)
    with tempfile.TemporaryDirectory(prefix="kvcellar-speculation-") as name:
        os.environ["KVCELLAR_HOME"] = name
        make_model(Path(name) / "model")
        model = load_model(str(Path(name) / "model"), backend="torch")
        text = Path(textwrap.__file__).read_text()
        file = model.tokenizer(text)["input_ids"][:n_file]
        half = n_file // 2
        edited = [*file[:half], *model.tokenizer("one_change = 42\n")["input_ids"], *file[half:]]
        speedup, wrong_a, end = edits(model, file, edited, rounds)
        print(
            f"repeat a file of {n_file} tokens with one change: {speedup:.2f} times as fast, "
            f"{end.usage.accepted_tokens} of {end.usage.drafted_tokens} guesses right"
        )
        rng = np.random.default_rng(0)
        chance = rng.integers(6, 8000, n_file).tolist()
        words = rng.permutation(np.arange(100, 8000))[: (n_file + 60) // 3]
        script = [token for word in words.tolist() for token in (7, 8, word)]
        ratio, wrong_b, end = misled(model, chance, script, n_first=60)
        print(
            f"text that misleads: {ratio:.3f} of the time without a drafter, "
            f"{end.usage.accepted_tokens} of {end.usage.drafted_tokens} guesses right"
        )
    head = eagle3(quick)
    return {
        **head,
        "ngram_speedup": round(speedup, 2),
        "off_overhead": round(ratio - 1, 4),
        "greedy_mismatches": wrong_a + int(wrong_b) + head["greedy_mismatches"],
    }


if __name__ == "__main__":
    run(__doc__ or "", measure)
