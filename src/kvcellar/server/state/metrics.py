"""Metrics for Prometheus, in a registry of each server's own."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcellar.engine import EngineStats

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)

_COUNTERS = {
    "requests": "Requests that came to the engine.",
    "prompt_tokens": "Tokens of all prompts.",
    "reused_tokens": "Prompt tokens that were in the cache.",
    "computed_tokens": "Tokens that went through the model.",
    "sampled_tokens": "Tokens that were sampled.",
    "drafted_tokens": "Guesses that were verified.",
    "accepted_tokens": "Guesses that were right.",
    "drafter_failures": "Times that who guesses failed; requests went on without guesses.",
    "evicted_tokens": "Tokens whose cells were taken back.",
    "taken_snapshots": "Slots of recurrent layers' states that were kept to go on from.",
    "evicted_snapshots": "Slots of recurrent layers' states that were taken back.",
    "gathered_cells": "Cells that were copied into longer runs while nobody asked.",
    "encoded_pictures": "Pictures that the model's vision part has read.",
    "reused_pictures": "Times that what the vision part made of a picture was there already.",
    "failed_pictures": "Pictures that could not be read.",
    "encoding_s": "Seconds in which the vision part read pictures.",
    "preemptions": "Times that a running sequence gave way.",
    "n_steps": "Steps that ran a batch.",
    "steps_s": "Seconds in all steps.",
}
_TITLES = {
    "n_steps": "steps",
    "steps_s": "steps_seconds",
    "encoding_s": "encoding_seconds",
}
_GAUGES = {
    "waiting": "Requests in the engine's queue.",
    "running": "Requests that run.",
    "live_cells": "Cells that sequences stand on.",
    "evictable_cells": "Cells that only the prefix index holds.",
    "free_cells": "Cells that nobody holds.",
    "snapshots": "Slots of recurrent layers' states that only the prefix index holds.",
    "picture_bytes": "Bytes of what the vision part made of pictures, kept for the next time.",
    "live_slots": "Slots of recurrent layers' states that sequences stand on.",
    "free_slots": "Slots of recurrent layers' states that nobody holds.",
}


class Metrics:
    """All counts of one server."""

    def __init__(self) -> None:
        """Create counters that are all 0."""
        self.registry = CollectorRegistry()
        own = self.registry
        self.requests = Counter(
            "kvcellar_http_requests",
            "Requests by route and status.",
            ["method", "route", "status"],
            registry=own,
        )
        self.seconds = Histogram(
            "kvcellar_http_request_seconds",
            "Seconds from the first byte of a request to the last of its answer.",
            ["route"],
            buckets=_SECONDS,
            registry=own,
        )
        self.gone = Counter(
            "kvcellar_clients_gone",
            "Clients that left before their answer's end.",
            registry=own,
        )
        self.refused = Counter(
            "kvcellar_refused",
            "Generations that were refused for want of room.",
            ["why"],
            registry=own,
        )
        self.active = Gauge("kvcellar_active", "Generations that wait or run.", registry=own)
        self.first_token = Histogram(
            "kvcellar_first_token_seconds",
            "Seconds to the first token.",
            ["model"],
            buckets=_SECONDS,
            registry=own,
        )
        self.between_tokens = Histogram(
            "kvcellar_between_tokens_seconds",
            "Seconds between two tokens of one answer.",
            ["model"],
            buckets=_SECONDS,
            registry=own,
        )
        self._between: dict[str, Histogram] = {}
        self.streams = Gauge(
            "kvcellar_viewer_streams", "Pages that look at the cache.", registry=own
        )

    def token(self, model: str, started_s: float, last_s: float | None, now_s: float) -> None:
        """Count one more token of an answer."""
        if last_s is None:
            self.first_token.labels(model).observe(now_s - started_s)
            return
        between = self._between.get(model)
        if between is None:
            between = self._between[model] = self.between_tokens.labels(model)
        between.observe(now_s - last_s)

    def render(
        self,
        engines: Iterable[tuple[str, EngineStats]],
        gauges: Iterable[tuple[str, str, float]],
    ) -> bytes:
        """Write what Prometheus reads.

        Args:
            engines: models and their engines' counts.
            gauges: name, help and value of what is true now.
        """
        once = CollectorRegistry()
        once.register(_Now(list(engines), list(gauges)))
        return generate_latest(self.registry) + generate_latest(once)


class _Now(Collector):
    """Metrics that are read from the engines when they are asked for."""

    def __init__(
        self, engines: list[tuple[str, EngineStats]], gauges: list[tuple[str, str, float]]
    ) -> None:
        self._engines = engines
        self._gauges = gauges

    def collect(self) -> Iterable[Metric]:
        """Return all families."""
        for name, help_text in _COUNTERS.items():
            title = _TITLES.get(name, name)
            counter = CounterMetricFamily(f"kvcellar_engine_{title}", help_text, labels=["model"])
            for model, stats in self._engines:
                counter.add_metric([model], getattr(stats, name))
            yield counter
        for name, help_text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"kvcellar_engine_{name}", help_text, labels=["model"])
            for model, stats in self._engines:
                gauge.add_metric([model], getattr(stats, name))
            yield gauge
        size = GaugeMetricFamily(
            "kvcellar_engine_pool_bytes", "Bytes of the pools of K and V.", labels=["model"]
        )
        for model, stats in self._engines:
            size.add_metric([model], stats.cache.size_bytes)
        yield size
        for name, help_text, value in self._gauges:
            yield GaugeMetricFamily(f"kvcellar_{name}", help_text, value)
