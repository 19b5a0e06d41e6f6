"""A chat template that never ends: its model loads, its chats are refused, nobody else waits."""

from __future__ import annotations

import threading

import pytest

from kvcellar.agents import open_host
from kvcellar.models.text import rendering
from tests.server.live import serving

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


@pytest.mark.slow
def test_a_template_that_never_ends_refuses_its_chats_and_the_rest_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(rendering, "CPU_S", 1.0)

    def load(path, progress):
        return open_host(path, capacity=512, chat_template=ENDLESS, progress=progress)

    with serving(tmp_path, load=load) as live:
        live.post("/v1/completions", {"prompt": "import", "max_tokens": 2})
        host = live.host()
        assert "was stopped" in host.template.findings[0]
        answers = []

        def ask():
            answers.append(live.http.post("/v1/chat/completions", json=CHAT))

        n_meanwhile = 0
        for _ in range(5):  # while a template computes for a second a busy machine may do little
            asking = threading.Thread(target=ask)
            asking.start()
            while asking.is_alive():
                assert live.http.get("/health").status_code == 200
                n_meanwhile += asking.is_alive()
                asking.join(0.05)
            if n_meanwhile > 3:
                break
        assert n_meanwhile > 3
        for answer in answers:
            assert answer.status_code == 400
            assert "took more than 1 s" in answer.json()["error"]["message"]
            assert "models" not in answer.json()["error"]["message"]  # no path of ours
        live.post("/v1/completions", {"prompt": "import", "max_tokens": 2})
