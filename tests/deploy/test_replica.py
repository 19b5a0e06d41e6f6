"""What a replica says of itself."""

from __future__ import annotations

import pytest

from kvcellar.deploy.routing import Report
from kvcellar.errors import EngineFailedError


def test_a_report_is_the_same_until_somebody_asks(loop, local, replicas):
    for replica in replicas:
        first, again = loop.run(replica.report()), loop.run(replica.report())
        assert first == again
    asked = replicas[0]
    before = Report.from_stats(loop.run(asked.report())).digest.revision
    assert loop.run(local.ask("GET", "/health", headers={"x-replica": asked.name})).status == 200
    assert Report.from_stats(loop.run(asked.report())).digest.revision > before


def test_a_report_has_a_hash_for_so_many_tokens_and_no_token(loop, local, replicas):
    def reported():
        stats = [loop.run(replica.report()) for replica in replicas]
        assert all(set(one) == {"digest", "agents"} for one in stats)
        digests = [Report.from_stats(one).digest for one in stats]
        for one, digest in zip(stats, digests, strict=True):
            assert len(one["digest"]) <= 24 + 8 * digest.hashes.size and digest.chunk == 32
        return {int(one) for digest in digests for one in digest.hashes}

    before = reported()
    said = loop.run(local.chat("The cellar is cold in winter, and nobody goes there. " * 12))
    assert 0 < len(reported() - before) <= said.json["usage"]["total_tokens"] // 32


def test_a_replica_whose_engine_has_stopped_is_not_healthy(loop, replicas, monkeypatch):
    replica = replicas[0]
    replica.check_health()
    (host,) = replica.service.models.hosts()
    monkeypatch.setattr(host.service, "_failure", EngineFailedError("it has stopped"))
    with pytest.raises(EngineFailedError, match="demo"):
        replica.check_health()
