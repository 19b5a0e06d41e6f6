"""Steps that are run before the first request, where a runner compiles or records what it meets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvcellar.cache import SeqCache, StateCache
from kvcellar.engine.kv.restore import ApartCache
from kvcellar.errors import CacheFullError
from kvcellar.models.kept_logits import CompilingRunner, FirstStep, RowSampling
from kvcellar.sampler_settings import SamplerSettings

Report = Callable[[float, str], None]


def run_first_steps(
    runner: CompilingRunner, cache: SeqCache, most_tokens: int, most_rows: int, report: Report
) -> None:
    """Run the steps whose kernels and graphs an engine is going to need; the cache is empty again.

    Args:
        runner: of the session of ``cache``, which nobody has used yet.
        cache: for many sequences.
        most_tokens: of one forward.
        most_rows: sequences that run at a time.
        report: called before each step with how much is done, 0 to 1, and what comes now.
    """
    steps = runner.first_steps(most_tokens, most_rows)
    with runner.choosing():
        for i, step in enumerate(steps):
            report(i / len(steps), f"preparing {_said(step)}")
            try:
                _run(runner, cache, step)
                if not i:
                    _move_rows(cache)
            except CacheFullError:  # a cache without room for it never meets it
                cache.cancel_step()
            finally:
                cache.clear()


def _move_rows(cache: SeqCache) -> None:
    """Copy the rows and states of the first sequence to main memory and back."""
    if not isinstance(cache, ApartCache) or not cache.rows_are_apart:
        return
    tables = cache.seq_table(0)
    groups = range(len(cache.config.params.groups))
    cells = [tables[group][tables[group] >= 0] for group in groups]
    cache.write_rows(cells, cache.read_rows(cells))
    if cache.config.params.state is not None and isinstance(cache, StateCache):
        slots = tables[-1][tables[-1] >= 0]
        cache.write_states(slots, cache.read_states(slots))


def _said(step: FirstStep) -> str:
    if step.n_sequences:
        return f"steps of {step.n_sequences} sequences"
    return f"prompts of {step.n_tokens} tokens"


def _run(runner: CompilingRunner, cache: SeqCache, step: FirstStep) -> None:
    """Run a prompt, and then tokens of as many sequences behind it."""
    _forward(runner, cache, [(0, step.n_tokens)], step.has_logits)
    for seq_id in range(1, step.n_sequences):
        cache.seq_cp(0, seq_id)
    for _ in range(step.n_times if step.n_sequences else 0):
        _forward(runner, cache, [(seq_id, 1) for seq_id in range(step.n_sequences)], True)


def _forward(
    runner: CompilingRunner,
    cache: SeqCache,
    stretches: Sequence[tuple[int, int]],
    has_logits: bool,
) -> None:
    """Run tokens of sequences, of one or one of each, and sample from the last row of each."""
    positions = cache.begin_step(stretches)
    n = len(stretches) if has_logits else 0
    rows = range(len(positions) - n, len(positions))
    logits, _ = runner.forward_kept([0] * len(positions), positions, rows)
    for asked in _settings(n):
        logits.sample(asked)
    cache.end_step()


def _settings(n_rows: int) -> Iterator[list[RowSampling]]:
    """Yield settings of sampling for so many rows, of each kind that the device has a way for."""
    drawn = SamplerSettings(temperature=1.0)
    kinds = (
        (drawn, None),
        (drawn, 0.5),
        (SamplerSettings(temperature=1.0, top_k=40), 0.5),
        (SamplerSettings(temperature=1.0, top_k=40, top_p=0.9, min_p=0.05), 0.5),
    )
    for settings, draw in kinds if n_rows else ():
        yield [RowSampling(row, settings, draw) for row in range(n_rows)]
