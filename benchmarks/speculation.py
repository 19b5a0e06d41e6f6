"""Ask how much faster tokens come when some are guessed and verified several at once.

Guesses of what followed before (n-grams), in the engine, against the same engine without. The
answer to "repeat this file with one change" is forced upon the model (its own text means little):
every forward runs in full, and the token of the changed file is made the likeliest. And where no
guess is ever right: what it costs to have asked. Greedy outputs have to be the same.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from harness import run
from restore import make_model

import kvcellar as kv
from kvcellar.engine import Engine, Request, SamplingParams
from kvcellar.engine.speculate import NgramDrafter
from kvcellar.models import LoadedModel, load_model


class Forced:
    """A runner whose likeliest next token is that of a script, for one sequence."""

    def __init__(self, runner: Any, n_prompt: int, script: list[int]) -> None:
        self._runner, self._n_prompt, self._script = runner, n_prompt, script
        self.params, self.vocab_size = runner.params, runner.vocab_size

    def forward(self, token_ids: Any, positions: Any, rows: Any = None) -> Any:
        """As the runner's, and then the script's word."""
        logits = self._runner.forward(token_ids, positions, rows)
        wanted = [len(token_ids) - 1] if rows is None else rows
        for i, row in enumerate(np.asarray(wanted)):
            at = int(positions[row]) + 1 - self._n_prompt
            if 0 <= at < len(self._script):
                logits[i, self._script[at]] += 1e4
        return logits


def one_run(
    model: LoadedModel, prompt: list[int], script: list[int] | None, n: int, has_drafts: bool
) -> Any:
    """How one request ended."""
    with kv.make_seq_session("torch", kv.make_config(model.params, 4096)) as session:
        runner: Any = model.bind(session)
        if script is not None:
            runner = Forced(runner, len(prompt), script)
        drafter = NgramDrafter() if has_drafts else None
        engine = Engine(runner, session.cache, drafter=drafter)
        params = SamplingParams(max_tokens=n, ignore_eos=True)
        return engine.generate(Request(tuple(prompt), params))


def compare(model: LoadedModel, prompt: list[int], script: list[int], n: int, rounds: int) -> Any:
    """(median ratio of tokens per second with guesses to without, mismatches, the last end)."""
    ratios, mismatches, end = [], 0, None
    for _ in range(rounds):
        plain = one_run(model, prompt, script, n, False)
        end = one_run(model, prompt, script, n, True)
        mismatches += plain.token_ids != end.token_ids
        ratios.append(end.usage.tokens_per_second / plain.usage.tokens_per_second)
    return statistics.median(ratios), mismatches, end


def measure(quick: bool) -> Mapping[str, Any]:
    """Editing, and text that nothing repeats in; on a model of about 100 million parameters."""
    n_file, rounds = (300, 3) if quick else (900, 5)
    with tempfile.TemporaryDirectory(prefix="kvcellar-speculation-") as name:
        os.environ["KVCELLAR_HOME"] = name
        make_model(Path(name) / "model")
        model = load_model(str(Path(name) / "model"))
        text = Path(textwrap.__file__).read_text()
        file = model.tokenizer(text)["input_ids"][:n_file]
        half = n_file // 2
        edited = [*file[:half], *model.tokenizer("one_change = 42\n")["input_ids"], *file[half:]]
        speedup, wrong_a, end = compare(model, file, edited, len(edited), rounds)
        print(
            f"repeat a file of {n_file} tokens with one change: {speedup:.2f} times as fast, "
            f"{end.usage.accepted_tokens} of {end.usage.drafted_tokens} guesses right"
        )
        rng = np.random.default_rng(0)
        chance = rng.integers(6, 8000, n_file // 2).tolist()
        pairs = rng.permutation(np.repeat(np.arange(6, 8000), 2))[: n_file // 2].tolist()
        ratio, wrong_b, end = compare(model, chance, pairs, n_file // 2, 3 * rounds)
        print(
            f"text that repeats nothing: {1 / ratio:.3f} of the time without a drafter, "
            f"{end.usage.drafted_tokens} guesses verified"
        )
    return {
        "ngram_speedup": round(speedup, 2),
        "off_overhead": round(1 / ratio - 1, 4),
        "greedy_mismatches": wrong_a + wrong_b,
    }


if __name__ == "__main__":
    run(__doc__ or "", measure)
