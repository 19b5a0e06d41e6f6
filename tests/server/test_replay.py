"""A recorded session of an agent, sent as text alone, is served from the cache."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.server.live import load_demo, serving


@pytest.fixture(scope="module")
def session():
    path = Path(__file__).parents[2] / "benchmarks" / "replay.py"
    spec = importlib.util.spec_from_file_location("kvcellar_replay", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.slow
def test_a_session_that_comes_as_text_is_computed_once(session, tmp_path):
    with serving(tmp_path, load=load_demo(16384)) as live:
        live.post("/v1/completions", {"prompt": [9], "max_tokens": 1})  # the model is there
        host = live.host()
        n_shared = session.shared_tokens(host.tokenizer)
        reuse = session.replay(
            lambda body: live.post("/v1/chat/completions", body), n_shared=n_shared
        )
        assert reuse.ideal > 10_000
        assert reuse.share >= 0.95, reuse
        computed = live.engine().computed_tokens
        assert computed <= reuse.prompt - 0.95 * reuse.ideal + live.engine().sampled_tokens
