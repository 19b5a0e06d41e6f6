"""Models that read pictures, the wrappers that they are held to, and sessions fed with them."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvcellar.models.seeing import SeenPicture, seeing
from kvcellar.pictures.tokens import ids_of, pictures_in, placeholders
from tests.vision_checkpoints import make_picture

ONE = [make_picture(32, 24, seed=1)]
TWO = [make_picture(24, 40, seed=2), make_picture(33, 20, seed=3)]
"""Two that are read together, as far as a family gives them as many rows each."""


@dataclass
class Own:
    """A checkpoint, loaded by us and by transformers."""

    model: Any
    wrapper: Any
    processor: Any

    @property
    def reader(self):
        return self.model.pictures

    def inputs(self, text, pictures, **options):
        """What the processor makes of a text and pictures."""
        given = {"text": [text.replace("IMG", self.reader.written)]}
        if pictures:
            given["images"] = [one.pixels() for one in pictures]
        return self.processor(**given, add_special_tokens=False, **options)

    def logits(self, text, pictures):
        """What the wrapper says of a text and pictures."""
        inputs = self.inputs(text, pictures, return_tensors="pt")
        with torch.inference_mode():
            return self.wrapper(**inputs, use_cache=False).logits[0].numpy()

    @functools.cached_property
    def tolerance(self):
        """What is promised: 2e-4, and more only where float32 itself rounds so much away."""
        if self.model.params.state is None:
            return 2e-4
        said = INTERLEAVED, TWO
        rounded = self.logits(*said)
        inputs = self.inputs(*said, return_tensors="pt")
        exact = copy.deepcopy(self.wrapper).double()
        with torch.inference_mode():
            found = exact(**inputs, use_cache=False).logits[0].numpy()
        return max(2e-4, min(4 * float(np.abs(rounded - found).max()), 1e-3))

    def history(self, text, pictures):
        """The tokens of a text and pictures, as a history has them."""
        looks = [self.reader.look(one) for one in pictures]
        parts = text.split("IMG")
        written = parts[0] + "".join(
            look.text + part for look, part in zip(looks, parts[1:], strict=True)
        )
        ids = np.array(self.model.tokenizer(written, add_special_tokens=False)["input_ids"])
        at = np.flatnonzero(ids == self.reader.token_id)
        for picture, look in zip(pictures, looks, strict=True):
            mine, at = at[: look.n_rows], at[look.n_rows :]
            ids[mine] = placeholders(self.reader.token_id, picture.name, look.n_rows, look.grid)
        assert not len(at)
        return ids


class Player:
    """A session of many sequences, fed with histories."""

    def __init__(self, own, session):
        self.own, self.cache = own, session.cache
        self.runner = own.model.bind(session)
        self.at: dict[int, int] = {}
        self.encoded: dict[str, Any] = {}

    def feed(self, *stretches):
        """Run sequences ``(seq, tokens, stop, pictures)`` up to a position each."""
        counts = {seq: stop - self.at.get(seq, 0) for seq, _, stop, _ in stretches}
        seen = []
        for seq, tokens, stop, pictures in stretches:
            by_name = {one.name: one for one in pictures}
            placed = [one for one in pictures_in(tokens) if one.start < stop]
            for one in placed:
                if one.name not in self.encoded:
                    self.encoded[one.name] = self.own.reader.encode(by_name[one.name])
            seen.append(([SeenPicture(one, self.encoded[one.name]) for one in placed], counts[seq]))
        ids = np.concatenate([tokens[self.at.get(seq, 0) : s] for seq, tokens, s, _ in stretches])
        positions = self.cache.begin_step(list(counts.items()))
        with seeing(self.runner, seen):
            logits = self.runner.forward(ids_of(ids), positions, rows=range(len(ids)))
        self.at |= {seq: stop for seq, _, stop, _ in stretches}
        return np.split(logits, np.cumsum(list(counts.values()))[:-1])

    def cut(self, seq, tokens, length):
        at = self.cache.seq_rm(seq, length)
        while self.own.reader.is_whole:
            within = [one for one in pictures_in(tokens) if one.start < at < one.stop]
            if not within:
                break
            at = self.cache.seq_rm(seq, within[0].start)
        self.at[seq] = at


def assert_close(play, got, want):
    unit = max(1.0, float(np.abs(want).max()) / 10)
    assert float(np.abs(got - want).max()) / unit < play.own.tolerance


INTERLEAVED = "Before IMG, between IMG and behind it."
