"""A model that reads pictures, without a tensor: a picture is the text that its name spells.

What the vision part makes of a picture are tokens that follow from its name, in place of the
placeholders' embeddings. So the oracle is a history in which they stand, and a row of another
picture, or one at another place, changes every later token.
"""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from PIL import Image

from kvcellar.agents import ModelHost, check_template
from kvcellar.cache_config import make_config
from kvcellar.engine import Engine, EngineConfig, EngineService
from kvcellar.engine.picture_rows import PictureRows
from kvcellar.hosting.pictures import HostLooks
from kvcellar.models.seeing import EncodedPicture, Look, SeenPicture
from kvcellar.pictures.picture import Picture
from kvcellar.pictures.shelf import PictureShelf
from kvcellar.pictures.tokens import ids_of, pictures_in
from kvcellar.store import ModelKey, RowLayout
from tests.agents.fakes import BLOCK_TOKENS, LETTERS, Eager, RowCells
from tests.engine.fakes import FULL_PARAMS, ByteTokenizer, HashRunner, PagedCells

PAD = 260
VOCAB = 261
WRITTEN = "<picture>"


def picture_file(seed: int = 0, width: int = 32, height: int = 24, form: str = "PNG") -> bytes:
    """The file of a picture of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


def rows_of(name: str, n: int) -> list[int]:
    """What the model reads for a picture: tokens."""
    return np.random.default_rng(int(name, 16)).integers(0, 256, n).tolist()


def as_read(tokens: Any) -> list[int]:
    """A history with the tokens that the model reads in place of its pictures."""
    array = np.asarray(tokens)
    found = ids_of(array).copy()
    for placed in pictures_in(array):
        found[placed.places] = rows_of(placed.name, len(placed.places))
    return found.tolist()


class FakeReader:
    """A :class:`kvcellar.models.seeing.PictureReader`: a token for 8 by 8 pixels."""

    written, in_text, token_id, size_bytes = WRITTEN, WRITTEN, PAD, 0

    def __init__(self, *, is_whole: bool = False) -> None:
        self.is_whole = is_whole
        self.looked: list[str] = []
        self.encoded: list[str] = []
        self.may_encode = threading.Event()
        self.may_encode.set()
        self.error: Exception | None = None
        self.n_loads = 0

    def look(self, picture: Picture) -> Look:
        self.looked.append(picture.name)
        height, width = picture.height // 8, picture.width // 8
        n = height * width
        return Look(f"[{'<pad>' * n}]", n, (height, width))

    def load(self) -> None:
        self.n_loads += 1

    def encode(self, picture: Picture) -> EncodedPicture:
        assert self.may_encode.wait(60)
        if self.error is not None:
            raise self.error
        self.encoded.append(picture.name)
        rows = np.array(rows_of(picture.name, self._n(picture)))
        return EncodedPicture(rows, (), rows.nbytes)

    @staticmethod
    def _n(picture: Picture) -> int:
        return (picture.height // 8) * (picture.width // 8)


class SeeingRunner(HashRunner):
    """Reads the rows of pictures in place of their placeholders."""

    is_whole = False
    _seen: Sequence[tuple[Sequence[SeenPicture], int]] = ()

    @contextmanager
    def seeing(self, stretches: Sequence[tuple[Sequence[SeenPicture], int]]) -> Iterator[None]:
        self._seen = stretches
        try:
            yield
        finally:
            self._seen = ()

    def forward(self, token_ids: Any, positions: Any, rows: Any = None) -> np.ndarray:
        ids, at = np.array(token_ids), np.asarray(positions)
        start, n_placed = 0, 0
        for pictures, n in self._seen:
            own = at[start : start + n]
            for placed, encoded in pictures:
                here = np.isin(own, placed.places)
                if not here.any():
                    continue
                assert encoded is not None, "its tokens are computed"
                assert not self.is_whole or here.sum() == len(placed.places), "half of a picture"
                rank = np.searchsorted(placed.places, own[here])
                assert (ids[start : start + n][here] == PAD).all()
                ids[start : start + n][here] = encoded.rows[rank]
                n_placed += int(here.sum())
            start += n
        assert n_placed == np.count_nonzero(np.asarray(token_ids) == PAD), "all are placed"
        return super().forward(ids.tolist(), positions, rows)


class PictureTokenizer(ByteTokenizer):
    """Bytes, and a token for a row of a picture."""

    vocab_size = VOCAB

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        for part in re.split("(<pad>)", text):
            ids += [PAD] if part == "<pad>" else super().encode(part)
        return ids

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        said = [{**m, "content": _text(m["content"])} for m in conversation]
        return super().apply_chat_template(
            said, add_generation_prompt=add_generation_prompt, tokenize=tokenize
        )

    def _specials(self) -> dict[str, int]:
        return {**super()._specials(), "<pad>": PAD}


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(WRITTEN if part["type"] == "image" else part["text"] for part in content)


def make_seeing_host(
    name: str = "hash",
    *,
    is_whole: bool = False,
    capacity: int = 4096,
    params: Any = FULL_PARAMS,
    config: EngineConfig | None = None,
    drafter: Any = None,
    kind: str = "cells",
) -> ModelHost:
    """A host of the model, whose reader is ``host.looks.reader``."""
    make_cache = RowCells if kind == "cells" else PagedCells
    cache = make_cache(make_config(params, capacity, min_chunk=16, n_slots=64))
    tokenizer = PictureTokenizer()
    runner = SeeingRunner(cache, VOCAB)
    runner.bias, runner.is_whole = dict(LETTERS), is_whole
    looks = HostLooks(FakeReader(is_whole=is_whole), PictureShelf())
    engine = Engine(
        runner,
        cache,
        tokenizer,
        eos_token_ids=[ByteTokenizer.END],
        config=config or EngineConfig(max_num_batched_tokens=64),
        rows=PictureRows(looks.encode),
        drafter=drafter,
    )
    layout = RowLayout.from_config(cache.config, BLOCK_TOKENS)
    return ModelHost(
        name=name,
        engine=engine,
        service=EngineService(engine),
        tokenizer=tokenizer,
        key=ModelKey(f"weights of {name}", layout),
        eos_token_ids=frozenset([ByteTokenizer.END]),
        costs=Eager(),
        template=check_template(tokenizer),
        shelf=looks.shelf,
        looks=looks,
    )
