"""Ways to multiply few rows: which is the quickest for a shape is measured once and kept.

It is measured while a model is prepared, where all kernels are compiled, and never later: a layer
that has multiplied so many rows goes on as it did. Numbers of 32 bits are multiplied in one way
alone, since in float32 an answer must not depend on how many rows run beside each other.
"""

from __future__ import annotations

import hashlib
import logging
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import triton
from torch import Tensor, nn

from kvcellar.models.known import keep, read_kept

log = logging.getLogger("kvcellar.torch")

Product = Callable[["Way"], Tensor]
"""A product with all that is done before and behind it, in some way."""

Timer = Callable[[Callable[[], object]], float]
"""Returns the time of a call, in ms."""

PROGRAMS, TILES, TORCH = "programs", "tiles", "torch"

FILE = "kvcellar-products.json"
"""File of the choices, in the folder in which Triton keeps what it has compiled."""

SOURCES = ("between.py", "linears.py", "multiply.py", "products.py", "ways.py")
"""Files that say what is measured: with others of these it is measured anew."""

COLD_BYTES = 256 << 20
"""Bytes that are written before each call, so that no weights are in a card's cache."""

AHEAD_CYCLES = 20_000_000
"""Cycles for which a card waits, so that all calls have been launched before the first one runs."""

WARM, ROUNDS = 3, 15
"""Calls before those that are measured, and these."""

APART = 2.0**-5
"""Largest part of the largest result by which ways may differ: a rounding is 2 ** -9 of it."""


class Way(NamedTuple):
    """Way to multiply few rows by a matrix.

    Attributes:
        by: ``PROGRAMS`` that have all inputs, norms, gates and rotations in them; or with launches
            of their own for those, ``TILES`` with inputs split into parts, or ``TORCH``.
        outputs: how often the outputs of a program are doubled; negative: halved.
        inputs: the same of the inputs that it reads at once.
    """

    by: str = PROGRAMS
    outputs: int = 0
    inputs: int = 0

    @property
    def name(self) -> str:
        """Name of the way in files and logs."""
        sizes = f" {2.0**self.outputs:g} x {2.0**self.inputs:g}"
        return self.by + (sizes if self.by == PROGRAMS else "")


PLAIN = Way()

SIZES = (Way(outputs=-1), Way(outputs=1), Way(inputs=1), Way(outputs=-1, inputs=1))
"""Programs of other sizes, each of which is compiled by itself: they are tried for a row alone."""


class Meter(Protocol):
    """Protocol of what knows, or finds out, the quickest way of a product."""

    def best(self, asked: str, ways: Sequence[Way], product: Product) -> Way:
        """Return one of some ways, the first of which is what is done where nothing is known."""
        ...


class Ways(nn.Module):
    """Ways of one layer's products of few rows; a module, so that a network's can be found.

    What was once chosen stays: without a meter it is what is done where nothing is known.
    """

    def __init__(self) -> None:
        """Have chosen nothing yet."""
        super().__init__()
        self.chosen: dict[str, Way] = {}
        self.meter: Meter | None = None

    def of(self, asked: str, ways: Sequence[Way], product: Product) -> Way:
        """Return the way of a product; see :class:`Meter`."""
        found = self.chosen.get(asked)
        if found is None:
            found = ways[0]
            if self.meter is not None and len(ways) > 1:
                found = self.meter.best(asked, ways, product)
            self.chosen[asked] = found
        return found


class KeptMeter:
    """A meter that reads what was measured before, and keeps what it measures, in a file."""

    def __init__(self, path: Path, card: str, made_with: str, timer: Timer) -> None:
        """Read what is kept; a file that is damaged, or not of this kind, counts as none.

        Args:
            path: of the file.
            card: name of the card.
            made_with: versions of all that has a part in a time; of others nothing is taken.
            timer: measures a call.
        """
        self._path, self._card, self._made_with, self._timer = path, card, made_with, timer
        self._names = self._read()
        self._unknown: set[str] = set()
        self._is_new = False

    def best(self, asked: str, ways: Sequence[Way], product: Product) -> Way:
        """Return the quickest of some ways, those that fail left out; see :class:`Meter`."""
        known = {way.name: way for way in ways}
        name = self._names.get(asked)
        if isinstance(name, str) and name in known:
            return known[name]
        if asked in self._unknown or _is_capturing():
            return ways[0]
        times = self._times(asked, ways, product)
        if not times:
            self._unknown.add(asked)  # of the next layer it would be the same
            return ways[0]
        found = min(times, key=lambda way: times[way])
        log.info("%s: %s", asked, ", ".join(f"{w.name} {ms:.4f} ms" for w, ms in times.items()))
        self._names[asked], self._is_new = found.name, True
        return found

    def save(self) -> None:
        """Write the file, if anything is new; where that cannot be it is measured again."""
        if self._is_new:
            all_cards = _kept(self._path)
            all_cards[self._card] = {"made_with": self._made_with, "ways": self._names}
            keep(self._path, all_cards)

    def _read(self) -> dict[str, str]:
        own = _kept(self._path).get(self._card)
        if not isinstance(own, dict) or own.get("made_with") != self._made_with:
            return {}
        ways = own.get("ways")
        return dict(ways) if isinstance(ways, dict) else {}

    def _times(self, asked: str, ways: Sequence[Way], product: Product) -> dict[Way, float]:
        """Return the times of the ways whose results are those of the first one."""
        times: dict[Way, float] = {}
        wanted: Tensor | None = None
        for way in ways:
            try:
                found = product(way)
                if wanted is None:
                    wanted = found.clone()
                elif not _is_near(found, wanted):
                    log.warning("%s by %s is left out: the result is another", asked, way.name)
                    continue
                times[way] = self._timer(partial(product, way))
            except Exception as error:
                log.warning("%s by %s is left out: %s", asked, way.name, error)
        return times


@contextmanager
def choosing(network: nn.Module) -> Iterator[None]:
    """Measure the products of few rows that a network meets in a block, and keep what was found.

    Nothing is measured on a device without a timer.
    """
    layers = [module for module in network.modules() if isinstance(module, Ways)]
    device = next((one.device for one in network.parameters()), torch.device("cpu"))
    timer = timer_of(device) if layers else None
    if timer is None:
        yield
        return
    folder = Path(triton.knobs.cache.dir)
    meter = KeptMeter(folder / FILE, _card_of(device), _made_with(), timer)
    for layer in layers:
        layer.meter = meter
    try:
        yield
    finally:
        for layer in layers:
            layer.meter = None
        meter.save()


def chosen_of(network: nn.Module) -> dict[str, str]:
    """Return the name of the way of each product of few rows that a network has met."""
    layers = [module for module in network.modules() if isinstance(module, Ways)]
    return {asked: way.name for layer in layers for asked, way in sorted(layer.chosen.items())}


def timer_of(device: torch.device) -> Timer | None:
    """Return what measures calls on a device; None: there is nothing for it."""
    return CardTimer(device) if device.type == "cuda" else None


class CardTimer:
    """Times of calls on a CUDA or ROCm card, by its own clock."""

    def __init__(self, device: torch.device) -> None:
        """Take the device."""
        self._device = device

    def __call__(self, call: Callable[[], object]) -> float:
        """Return the median of some calls in ms; each finds no weights in the card's cache."""
        with torch.cuda.device(self._device):
            for _ in range(WARM):
                call()
            cold = torch.empty(COLD_BYTES, dtype=torch.uint8, device=self._device)
            begins, ends = (
                [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS)] for _ in range(2)
            )
            torch.cuda._sleep(AHEAD_CYCLES)
            for begin, end in zip(begins, ends, strict=True):
                cold.zero_()
                begin.record()
                call()
                end.record()
            torch.cuda.current_stream().synchronize()
        times = zip(begins, ends, strict=True)
        return float(statistics.median(begin.elapsed_time(end) for begin, end in times))


def _is_capturing() -> bool:
    """Return true while work is recorded, of which nothing can be timed."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _card_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _made_with() -> str:
    """Return the versions that a choice is of, and a digest of our own sources."""
    here, digest = Path(__file__).parent, hashlib.sha256()
    for name in SOURCES:
        digest.update((here / name).read_bytes())
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    return f"{versions}, CUDA {torch.version.cuda}, kernels {digest.hexdigest()[:16]}"


def _kept(path: Path) -> dict[str, Any]:
    """Return what a file has of each card."""
    with suppress(OSError, ValueError, RecursionError):
        found = read_kept(path)
        return found if isinstance(found, dict) else {}
    return {}


def _is_near(found: Tensor, wanted: Tensor) -> bool:
    """Return true if results are one another's but for roundings."""
    apart = APART * float(wanted.abs().max())
    return torch.allclose(found.float(), wanted.float(), rtol=0, atol=apart, equal_nan=True)
