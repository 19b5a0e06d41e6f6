"""Compare tiny models of many families, without torch, with what transformers says of them.

``tests/models/families.json`` has the config of each, the names and sizes of its tensors, whose
numbers are drawn here, and some of the logits that transformers computed elsewhere;
``tests/models/family_logits.py`` writes it. Each model is written as a checkpoint, loaded as
``kvcellar`` loads any, and run through its cache: a prompt in several chunks, single tokens, a fork
beside its trunk, and what was dropped, once more. A family without logits is one that needs torch:
it has to be refused, and the sentence that refuses it is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

Floats = NDArray[np.float32]

FILE = Path(__file__).parents[1] / "tests" / "models" / "families.json"

TEXT = tuple(b"def first(items):\n    return items[0] or fail")
"""Ids of a text."""

SHARED = 34
"""Tokens of it that a fork shares."""

FORK = (*TEXT[:SHARED], *b" and others")
"""Ids of what the fork reads."""

CHUNKS = (0, 9, 24, SHARED)
"""Where chunks of the prompt begin and end; what follows comes token by token."""

NEAR = 2e-4
"""By how much a logit may be another number."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Check all families of the file; end with 1 where one is not what it should be."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--file", type=Path, default=FILE, help="what transformers said")
    families = json.loads(parser.parse_args(arguments).file.read_text())
    equal: set[str] = set()
    refused: dict[str, list[str]] = {}
    wrong: dict[str, str] = {}
    for name, family in families.items():
        with tempfile.TemporaryDirectory(prefix="kvcellar-families-") as folder:
            os.environ["KVCELLAR_HOME"] = folder
            write(family, Path(folder))
            try:
                said = check(family, Path(folder))
            except Exception as error:
                said, wrong[name] = "", f"{type(error).__name__}: {error}"
        if said:
            refused.setdefault(said.replace(folder, "MODEL"), []).append(name)
        elif name not in wrong:
            equal.add(family["config"]["model_type"])
    for sentence, names in refused.items():
        print(f"refused: {', '.join(names)}: {sentence}")
    for name, sentence in wrong.items():
        print(f"WRONG: {name}: {sentence}")
    n_refused = sum(map(len, refused.values()))
    n_equal = len(families) - n_refused - len(wrong)
    print(
        f"equal to transformers without torch: {len(equal)} families ({n_equal} models); "
        f"refused: {n_refused}; wrong: {len(wrong)}"
    )
    sys.exit(bool(wrong))


def check(family: Mapping[str, Any], folder: Path) -> str:
    """Hold the model in a folder to what is known of it.

    Returns:
        The sentence that refuses it; empty: it says what transformers says.

    Raises:
        ValueError: it does not, or is not refused as it has to be, or torch was imported.
    """
    from kvcellar.errors import BackendError
    from kvcellar.models import load_model

    try:
        model = load_model(folder, dtype="float32")
    except BackendError as error:
        if family["logits"] is None:
            return str(error)
        raise
    if family["logits"] is None:
        raise ValueError("it runs without torch, and is said to need it; write the file again")
    if "torch" in sys.modules and sys.modules["torch"] is not None:
        raise ValueError("it was run with torch")
    of_text, of_fork = (np.array(one, np.float32) for one in family["logits"])
    for found, want in zip(run(model), (of_text, of_fork, of_text), strict=True):
        got = told(found)
        if got.shape != want.shape or not np.isfinite(got).all():
            raise ValueError(f"logits {list(got.shape)} where there are {list(want.shape)}")
        off = float(np.abs(got - want).max())
        if off > NEAR:
            raise ValueError(f"logits are off by {off:.2g}, more than {NEAR:g}")
    return ""


def told(logits: Floats) -> Floats:
    """Return what is kept of logits ``[T, vocab]``: a few numbers of a few rows, evenly spread."""
    every = logits.shape[-1] // 6
    return logits[[3, 13, 20, 33, 34, -4, -1], every // 2 :: every]


def write(family: Mapping[str, Any], folder: Path) -> None:
    """Write a checkpoint of a family, with a tokenizer of one token per byte."""
    (folder / "config.json").write_text(json.dumps(family["config"]))
    save_file(dict(drawn(family["tensors"])), folder / "model.safetensors", {"format": "pt"})
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(letters)}
    Tokenizer(models.BPE(vocab=vocab, merges=[])).save(str(folder / "tokenizer.json"))


def drawn(tensors: Mapping[str, Any]) -> Iterator[tuple[str, Floats]]:
    """Yield tensors by their names, the same whatever the machine and the version of NumPy.

    Args:
        tensors: name -> shape, mean and deviation of its numbers; ``layers.0,2.`` in a name stands
            for several layers.
    """
    for pattern, (shape, mean, deviation) in tensors.items():
        before, layers, behind = re.fullmatch(r"(.*?layers\.|)([\d,]*)(.*)", pattern).groups()
        for name in (f"{before}{layer}{behind}" for layer in layers.split(",")):
            bits = np.random.PCG64(zlib.crc32(name.encode())).random_raw(int(np.prod(shape)))
            even = (bits >> np.uint64(11)) * 2.0**-53 - 0.5
            numbers = mean + deviation * 12**0.5 * even
            yield name, numbers.astype(np.float32).reshape(shape)


def run(model: Any) -> tuple[Floats, Floats, Floats]:
    """Return logits ``[T, vocab]`` of the text, of the fork, and of the text after another try."""
    import kvcellar as kv

    config = kv.make_config(model.params, 256, "float32")
    with kv.make_seq_session(model.backend, config) as session:
        runner, cache = model.bind(session), session.cache

        def feed(*new: tuple[int, Sequence[int]]) -> Floats:
            """Run tokens of sequences, one sequence behind the other; return the logits of all."""
            at = cache.begin_step([(seq, len(tokens)) for seq, tokens in new])
            ids = [token for _, tokens in new for token in tokens]
            found: Floats = runner.forward(ids, at, range(len(ids)))
            return found

        trunk = np.concatenate([feed((0, TEXT[a:b])) for a, b in pairwise(CHUNKS)])
        cache.seq_cp(0, 1)
        cache.seq_cp(0, 2)
        ends = zip(TEXT[SHARED:], FORK[SHARED:], strict=True)
        both = np.array([feed((0, (one,)), (1, (other,))) for one, other in ends])
        cache.keep_point(2, SHARED)
        feed((2, FORK[SHARED:]))
        cache.seq_rm(2, SHARED)
        again = feed((2, TEXT[SHARED:]))
    return tuple(np.concatenate((trunk, end)) for end in (both[:, 0], both[:, 1], again))


if __name__ == "__main__":
    main()
