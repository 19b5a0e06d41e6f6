"""Proof that a model divided among ranks is the model, found once and kept.

A plan of transformers says what each rank computes, and nothing says that it is right for all that
a config asks for: a layer that looks at all of its activations sees a part of them on a rank. So a
small twin of the model is run whole, and by two ranks of a process that is started for it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from kvcellar.backends.torch.adapters.updates import NO_ADAPTERS
from kvcellar.backends.torch.learn.probe import learn_facts
from kvcellar.backends.torch.learn.shrink.checkpoints import random_network, twin_raw
from kvcellar.backends.torch.ranks.commands import Load
from kvcellar.backends.torch.ranks.leading import Leader, read_together
from kvcellar.backends.torch.ranks.parts import read_part
from kvcellar.backends.torch.ranks.processes import ranks_of
from kvcellar.backends.torch.run.runner import TorchRunner
from kvcellar.cache_config import make_config
from kvcellar.errors import KVCellarError, ModelError
from kvcellar.models.check import InexactModelWarning, gap_of, torch_versions, unit_of
from kvcellar.models.known import keep, known_path, read_kept
from kvcellar.models.runner import FloatArray
from kvcellar.models.text.tokenizer import quiet
from kvcellar.registry import make_seq_session

ALLOWED = 1e-3
"""Most that a logit may differ, as ``gap_of`` counts it: ranks add up in another order."""

_TEXT, _ENDS = 40, (17, 39, 40)
"""Tokens that a twin is given, and where the pieces end in which they come."""


def prove_division(raw: Mapping[str, Any], name: str, *, is_unchecked: bool) -> None:
    """Make sure that ranks compute what one process does; that is found out once, and kept.

    Args:
        raw: the model's ``config.json``.
        name: as a person knows it.
        is_unchecked: a person goes on whatever is found.

    Raises:
        ModelError: they do not, or a twin could not be compared.

    Warns:
        InexactModelWarning: the same, where a person goes on.
    """
    path = known_path(raw, f"transformers {transformers.__version__}").with_suffix(".ranks.json")
    found: dict[str, Any] = {}
    with suppress(OSError, ValueError, RecursionError):
        found = read_kept(path)
    if found.get("versions") != torch_versions():
        found = {"versions": torch_versions(), **_ask(raw)}
        if "gap" in found:
            keep(path, found)
    gap = found.get("gap")
    if gap is not None and gap <= ALLOWED:
        return
    said = f"two ranks could not be compared with one: {found.get('reason')}"
    if gap is not None:
        said = (
            f"logits of a twin that two ranks compute differ by {gap:.1e} from those of one, and "
            f"at most {ALLOWED:.0e} is allowed"
        )
    if not is_unchecked:
        raise ModelError(
            f"{name} cannot be divided among ranks as transformers plans it: {said}. Leave --tp "
            f"out, or go on at your own risk with --unchecked"
        )
    warnings.warn(f"{name} is divided among ranks: {said}", InexactModelWarning, stacklevel=3)


def _ask(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the gap that a process of its own finds, or the reason why there is none."""
    source = str(Path(__file__).parents[4])
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-m", "kvcellar.backends.torch.ranks.checking"],
        input=json.dumps(raw, default=str),
        capture_output=True,
        text=True,
        env=os.environ | own,
    )
    with suppress(ValueError, IndexError):
        said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return said
    return {"reason": f"the process ended with exit code {done.returncode}"}


def division_gap(raw: Mapping[str, Any]) -> float:
    """Return the most that a logit of a model's twin differs where two ranks compute it.

    Raises:
        KVCellarError: it has no twin, or it cannot be divided.
    """
    with tempfile.TemporaryDirectory(prefix="kvcellar-twin-") as folder, quiet(lambda part: None):
        try:
            small = twin_raw(raw)
            facts = learn_facts(small)
        except ModelError:  # some sizes belong to heads, and are nowhere in the config
            small = twin_raw(raw, keeps_dims=True)
            facts = learn_facts(small)
        network = random_network(small)
        getattr(network, "whole", network).save_pretrained(folder)
        cpu, ranks = torch.device("cpu"), ranks_of(2, "cpu")
        whole = Load(0, Path(folder), small, "float32", facts, 1)
        part = Load(ranks.new_number(), Path(folder), small, "float32", facts, 2)
        want = _logits(whole, read_part(whole, cpu)[0], None)
        network, leader = read_together(ranks, part, cpu)
        return gap_of(_logits(part, network, leader), want, unit_of(want))


def _logits(what: Load, network: Any, leader: Leader | None) -> FloatArray:
    """Return logits ``[_TEXT, vocab_size]`` of a text that comes in pieces."""
    facts, found = what.facts, []
    of_model = network, None, facts.params, facts.vocab_size
    length = facts.rope.length_for(_TEXT)
    tokens = np.random.default_rng(1).integers(0, min(facts.vocab_size, 250), _TEXT)
    with make_seq_session("torch", make_config(facts.params, _TEXT, "float32")) as session:
        given: tuple[Any, ...] = (*of_model, session, (), length, NO_ADAPTERS, leader)
        runner = TorchRunner(*given, has_graphs=False)
        for start, stop in zip((0, *_ENDS), _ENDS, strict=False):
            at = session.cache.begin_step([(0, stop - start)])
            found.append(runner.forward(tokens[start:stop], at, range(stop - start)))
    return np.concatenate(found)


def main() -> None:
    """Read a ``config.json`` from standard input; write the gap, or why there is none."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        said: dict[str, Any] = {"gap": division_gap(json.load(sys.stdin))}
    except Exception as error:  # whatever transformers' own code does not like
        words = " ".join(str(error).split())[:400]
        is_ours = isinstance(error, KVCellarError)
        said = {"reason": words if is_ours else f"{type(error).__name__}: {words}"}
    print(json.dumps(said), file=answers, flush=True)


if __name__ == "__main__":
    main()
