"""A tiny random model half of whose layers are recurrent, behind a template that drops thoughts."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from kvcellar.agents import open_host
from kvcellar.backends.torch.learn.shrink.checkpoints import make_tokenizer, write_tiny

TEMPLATE = """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- set said = m.content %}
{%- if m.role == 'assistant' %}
{%- set said = said.split('</think>')[-1].lstrip('\n') if loop.index0 < ns.last else said %}
{%- endif %}
{{- '<|' + m.role + '|>' + said + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|><think>\n' }}{%- endif %}"""
"""A template like Qwen3.5's: an answer opens with ``<think>``, and old ones lose their thoughts."""

OPENING = len("<think>\n") + 1
"""Tokens with which an answer opens: one per byte, and one for its role."""


@cache
def letters() -> dict[str, float]:
    """A bias by which every answer is text, which comes back in the tokens it was said in."""
    return dict.fromkeys(map(str, make_tokenizer().encode("abcdefghij")), 100.0)


def write_hybrid(folder: Path) -> Path:
    """Write the checkpoint; return its folder."""
    path = write_tiny("qwen3_next", folder)
    config = json.loads((path / "config.json").read_text())
    config["max_position_embeddings"] = 2048
    (path / "config.json").write_text(json.dumps(config))
    return path


def load_hybrid(**more: Any) -> Callable[[str, Any], Any]:
    """Return what loads it for a server."""
    more.setdefault("chat_template", TEMPLATE)
    return lambda path, progress: open_host(path, progress=progress, **more)
