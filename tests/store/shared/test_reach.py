"""A place that fails is left alone, longer each time, and an answer in time ends that."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvcellar.store.shared import guarded_calls
from kvcellar.store.shared.guarded_calls import AwayError, Reach
from kvcellar.store.shared.places import PlaceError
from kvcellar.store.values.reports import EventKind, EventLog

FIRST_S, LONGEST_S = 600.0, 60_000.0
"""Pauses that no slow machine outlasts."""


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_calls, "FIRST_PAUSE_S", FIRST_S)
    monkeypatch.setattr(guarded_calls, "LONGEST_PAUSE_S", LONGEST_S)


class Place:
    """Answers five, or fails."""

    title = "file:///share"
    error: Exception | None = None

    def answer(self) -> int:
        if self.error is not None:
            raise self.error
        return 5


@pytest.fixture
def events() -> EventLog:
    return EventLog()


@pytest.fixture
def place() -> Any:
    return Place()


@pytest.fixture
def reach(place: Any, events: EventLog) -> Iterator[Reach]:
    opened = Reach(place, "reading", events)
    yield opened
    opened.close()


def test_pauses_double_up_to_the_longest_and_begin_anew_with_an_answer(
    reach: Reach, place: Any, events: EventLog
) -> None:
    place.error = PlaceError("no answer")
    for _ in range(2):
        for n in range(9):
            began = time.monotonic()
            with pytest.raises(AwayError, match="no answer"):
                reach.ask(lambda place: place.answer(), 60)
            want = min(LONGEST_S, FIRST_S * 2**n)
            assert began + want <= reach._away_until <= time.monotonic() + want
            assert reach.is_away and reach.trouble == "no answer"
            with pytest.raises(AwayError, match="no answer"):
                reach.begin(lambda place: 1 / 0).result(60)  # nobody is asked
            reach._away_until = 0.0
        (event,) = events.take()
        assert (event.kind, event.subject) == (EventKind.SHARED_AWAY, place.title)
        assert "reading does not work: no answer; everything goes on" in event.detail
        place.error = None
        assert not reach.is_away and reach.ask(lambda place: place.answer(), 60) == 5
        assert reach.trouble == ""
        (event,) = events.take()
        assert (event.kind, event.detail) == (EventKind.SHARED_BACK, "reading works again")
        assert reach.ask(lambda place: place.answer(), 60) == 5 and not events.take()
        place.error = PlaceError("no answer")


def test_who_answers_late_is_as_good_as_away(reach: Reach, events: EventLog) -> None:
    go = threading.Event()
    with pytest.raises(AwayError, match=r"no answer within 0.02 s"):
        reach.ask(lambda place: go.wait(60), 0.02)
    assert reach.is_away and reach.trouble == "no answer within 0.02 s"
    go.set()


def test_what_a_stranger_wrote_is_told_to_who_asked_and_leaves_the_place_alone(
    reach: Reach, place: Any, events: EventLog
) -> None:
    place.error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        reach.ask(lambda place: place.answer(), 60)
    assert not reach.is_away and not events.take()


def test_a_reach_that_is_closed_asks_nobody(reach: Reach) -> None:
    reach.close()
    with pytest.raises(AwayError, match="the store is closed"):
        reach.begin(lambda place: 5)
