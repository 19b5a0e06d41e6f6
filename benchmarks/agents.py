"""Ask how much of what eight agents share the engine reuses, and what that is worth.

A trace of agents on the bundled model: one trunk of 2k tokens; eight agents fork off it at once;
each takes turns (its own output and a tool's result join its history), one in three goes back and
tries again, and at the end one agent reads what all the others wrote. The ideal is a reader of the
trace that computes every distinct prefix once. The same trace then runs without a prefix index.

Then it runs on a random model half of whose layers are recurrent, which goes on from snapshots of
their states alone: with slots for all, with few, and with so few that agents cannot all run beside
them. There the ideal knows the trace: it has a snapshot wherever a turn will go on, as far as the
slots hold them; in the last run it answers one agent after the other for that.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import run

import kvcellar as kv
from kvcellar.engine import Engine, EngineConfig, FinishEvent, Request, SamplingParams
from kvcellar.models import load_model

N_AGENTS = 8
TRUNK = 2048
CAPACITY = 24 * 1024

HYBRID = "qwen3_next"
"""The random model with recurrent layers: two of its four."""

N_FEW = N_AGENTS
"""Snapshots of the second run on it: as few as the ideal needs to lose nothing."""

MANY_SLOTS, FEW_SLOTS = 512, N_FEW + 2 * N_AGENTS
"""Slots of the two runs: two for each agent that runs, and the others are for snapshots."""

TIGHT_SLOTS = 12
"""Slots of the third: what a model with very large states has where nothing else is asked for."""


class Ideal:
    """Every prefix that was ever computed, as a trie of tokens."""

    def __init__(self) -> None:
        """Create a trie of which nothing is computed yet."""
        self._root: dict[int, Any] = {}
        self._n_turns = 0
        self._wanted: dict[int, int] = {}  # id of a node -> the turn that made or used it last
        self._stays: list[tuple[int, int, int]] = []

    def reusable(self, tokens: list[int]) -> int:
        """Return the length of the longest known prefix; the last token never counts."""
        node, n = self._root, 0
        for token in tokens[:-1]:
            if token not in node:
                break
            node, n = node[token], n + 1
        self._n_turns += 1
        self._stays.append((n, self._wanted.get(id(node), self._n_turns), self._n_turns))
        self._wanted[id(node)] = self._n_turns
        return n

    def computed(self, tokens: list[int]) -> None:
        """Remember that these tokens have their KV somewhere."""
        node = self._root
        for token in tokens:
            if token not in node:
                node[token] = {}
                self._wanted[id(node[token])] = self._n_turns
            node = node[token]

    def reusable_with(self, n_slots: int) -> int:
        """Return the tokens that are reused with so many snapshots by who knows the trace.

        A snapshot is kept from when its place was computed or used to its next use; those that
        save most are kept first.
        """
        taken = [0] * (self._n_turns + 1)
        total = 0
        for n, since, until in sorted(self._stays, reverse=True):
            if all(taken[turn] < n_slots for turn in range(since, until)):
                total += n
                for turn in range(since, until):
                    taken[turn] += 1
        return total


@dataclass
class Totals:
    """Counts and seconds of one run of the trace."""

    seconds: float = 0.0
    ideal: int = 0
    reused: int = 0
    turns: int = 0
    prompt_tokens: int = 0
    outputs: list[tuple[int, ...]] = field(default_factory=list)
    worst_extra: int = 0
    overhead_ms: float = 0.0
    claimed: int = 0
    """Tokens that were said to be reused and went through the model all the same."""
    ideal_with_few: int = 0
    """Tokens that the ideal reuses with few snapshots."""


class Replay:
    """The trace on one engine."""

    def __init__(
        self,
        model: Any,
        index: str,
        max_tokens: int,
        n_slots: int = MANY_SLOTS,
        n_ideal: int = N_FEW,
    ) -> None:
        """Create a fresh cache and engine, and an ideal with so many snapshots."""
        self._model = model
        self._index = index
        self._n_slots, self._n_ideal = n_slots, n_ideal
        self._params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.totals = Totals()
        self._ideal = Ideal()

    def run(self, n_rounds: int) -> Totals:
        """Run the whole trace."""
        config = kv.make_config(self._model.params, CAPACITY, n_slots=self._n_slots)
        with kv.make_seq_session("torch", config) as session:
            runner = TimedRunner(self._model.bind(session))
            engine = Engine(
                runner, session.cache, config=EngineConfig(index=self._index, max_num_seqs=16)
            )
            started = time.perf_counter()
            self._trace(engine, n_rounds)
            self.totals.seconds = time.perf_counter() - started
            stats = engine.stats()
            spent = stats.steps_s - runner.seconds
            totals = self.totals
            totals.overhead_ms = spent / stats.n_steps * 1e3
            # A token is computed, or it was reused; the last one of an answer is neither.
            n_sampled = sum(map(len, totals.outputs)) - totals.turns
            totals.claimed += runner.n_tokens - totals.prompt_tokens - n_sampled
            totals.ideal_with_few = self._ideal.reusable_with(self._n_ideal)
        return self.totals

    def _trace(self, engine: Engine, n_rounds: int) -> None:
        chance = random.Random(7)
        vocab = self._model.vocab_size

        def words(n: int) -> list[int]:
            return [chance.randrange(6, vocab) for _ in range(n)]

        trunk = words(TRUNK)
        kept = [trunk] * N_AGENTS
        histories = [trunk + words(24) for _ in range(N_AGENTS)]  # sub-agents, all at once
        for round_ in range(n_rounds):
            outputs = self._turn(engine, histories, [len(tokens) for tokens in kept])
            for i, output in enumerate(outputs):
                if round_ and (i + round_) % 3 == 0:  # backtrack: the answer is thrown away
                    kept[i] = histories[i][:-12]
                    histories[i] = kept[i] + words(16)
                else:  # a tool's result joins the history
                    kept[i] = histories[i] + list(output)
                    histories[i] = kept[i] + words(40)
        joined = histories[0] + [token for h in histories[1:] for token in h[-32:]]
        self._turn(engine, [joined], [len(histories[0])])

    def _turn(
        self, engine: Engine, prompts: list[list[int]], n_kept: list[int]
    ) -> list[tuple[int, ...]]:
        """Ask all prompts at once; the ideal computes a shared prefix of theirs once.

        Args:
            engine: who answers.
            prompts: of the agents.
            n_kept: tokens of each that were there before, behind which others may go on, too.
        """
        places = [
            tuple(sorted({min(n, len(p) - 1), len(p) - 1}))
            for p, n in zip(prompts, n_kept, strict=True)
        ]
        ids = [
            engine.submit(Request(tuple(p), self._params, snapshots_at=at))
            for p, at in zip(prompts, places, strict=True)
        ]
        ends = {e.request_id: e for e in engine.run() if isinstance(e, FinishEvent)}
        totals = self.totals
        for request_id, prompt in zip(ids, prompts, strict=True):
            end = ends[request_id]
            assert end.usage is not None, end.error
            ideal = self._ideal.reusable(prompt)
            self._ideal.computed(prompt)
            totals.ideal += ideal
            totals.reused += min(ideal, end.usage.cached_tokens)
            totals.claimed += end.usage.cached_tokens
            totals.worst_extra = max(totals.worst_extra, ideal - end.usage.cached_tokens)
            totals.prompt_tokens += len(prompt)
            totals.turns += 1
        for request_id, prompt in zip(ids, prompts, strict=True):
            self._ideal.computed(prompt + list(ends[request_id].token_ids[:-1]))
        outputs = [ends[request_id].token_ids for request_id in ids]
        totals.outputs.extend(outputs)
        return outputs


class TimedRunner:
    """A runner that knows how long its forwards took."""

    def __init__(self, runner: Any) -> None:
        """Wrap a runner."""
        self._runner = runner
        self.params = runner.params
        self.vocab_size = runner.vocab_size
        self.max_tokens_per_step = runner.max_tokens_per_step
        self.seconds = 0.0
        self.n_tokens = 0

    def forward(self, token_ids: Any, *args: Any) -> Any:
        """Run the runner's forward; note how long it took, and how many tokens it had."""
        started = time.perf_counter()
        self.n_tokens += len(token_ids)
        try:
            return self._runner.forward(token_ids, *args)
        finally:
            self.seconds += time.perf_counter() - started


def measure(quick: bool) -> Mapping[str, Any]:
    """Run the trace with the radix index and without any."""
    model = load_model("demo", backend="torch")
    rounds, max_tokens = (2, 12) if quick else (5, 32)
    radix = Replay(model, "radix", max_tokens).run(rounds)
    naive = Replay(model, "naive", max_tokens).run(rounds)
    same = sum(a == b for a, b in zip(radix.outputs, naive.outputs, strict=True))
    result = {
        "reuse_of_ideal": round(radix.reused / radix.ideal, 4),
        "extra_tokens_per_turn": round((radix.ideal - radix.reused) / radix.turns, 2),
        "worst_extra_tokens": radix.worst_extra,
        "claimed_and_computed_tokens": radix.claimed,
        "speedup_over_naive": round(naive.seconds / radix.seconds, 2),
        "same_outputs": f"{same}/{len(radix.outputs)}",
        "step_overhead_ms": round(radix.overhead_ms, 3),
        "radix_s": round(radix.seconds, 2),
        "naive_s": round(naive.seconds, 2),
    }
    print(f"{radix.turns} turns, {radix.prompt_tokens} prompt tokens, ideal reuse {radix.ideal}:")
    print(f"  reused of ideal      {result['reuse_of_ideal']} (goal 0.98)")
    print(f"  extra tokens a turn  {result['extra_tokens_per_turn']} (goal at most 64)")
    print(
        f"  radix {radix.seconds:.2f} s, naive {naive.seconds:.2f} s: "
        f"{result['speedup_over_naive']} times as fast, same outputs {result['same_outputs']}"
    )
    print(f"  engine around the forward: {result['step_overhead_ms']} ms a step")
    return result | measure_hybrid(3 if quick else rounds, max_tokens)


def measure_hybrid(rounds: int, max_tokens: int) -> dict[str, Any]:
    """Run the trace on a model half of whose layers are recurrent, with many slots and with few."""
    from kvcellar.backends.torch.learn.shrink.checkpoints import write_tiny

    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny(HYBRID, Path(folder) / "model", max_position_embeddings=4 * TRUNK)
        model = load_model(path, backend="torch")
    many = Replay(model, "radix", max_tokens).run(rounds)
    few = Replay(model, "radix", max_tokens, FEW_SLOTS).run(rounds)
    tight = Replay(model, "radix", max_tokens, TIGHT_SLOTS, TIGHT_SLOTS - 2).run(rounds)
    naive = Replay(model, "naive", max_tokens).run(rounds)
    outputs = zip(many.outputs, few.outputs, tight.outputs, naive.outputs, strict=True)
    same = sum(len(set(four)) == 1 for four in outputs)
    result = {
        "hybrid_reuse_of_ideal": round(many.reused / many.ideal, 4),
        "hybrid_few_reuse_of_ideal": round(few.reused / few.ideal_with_few, 4),
        "hybrid_tight_reuse_of_ideal": round(tight.reused / tight.ideal_with_few, 4),
        "hybrid_claimed_and_computed_tokens": many.claimed + few.claimed + tight.claimed,
        "hybrid_worst_extra_tokens": many.worst_extra,
        "hybrid_speedup_over_naive": round(naive.seconds / many.seconds, 2),
        "hybrid_same_outputs": f"{same}/{len(many.outputs)}",
    }
    print(f"{HYBRID}, {model.params}, snapshots of {model.params.state.slot_bytes} bytes:")
    print(f"  reused of ideal      {result['hybrid_reuse_of_ideal']} (goal 0.95)")
    print(
        f"  with {N_FEW} snapshots    {result['hybrid_few_reuse_of_ideal']} of "
        f"{few.ideal_with_few} (goal 0.95)"
    )
    print(
        f"  with {TIGHT_SLOTS} slots in all  {result['hybrid_tight_reuse_of_ideal']} of "
        f"{tight.ideal_with_few} (goal 0.95)"
    )
    print(f"  claimed, computed    {result['hybrid_claimed_and_computed_tokens']} (goal 0)")
    print(
        f"  {result['hybrid_speedup_over_naive']} times as fast as without an index, same outputs "
        f"{result['hybrid_same_outputs']}"
    )
    return result


if __name__ == "__main__":
    run(__doc__ or "", measure)
