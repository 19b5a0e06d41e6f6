"""Rules of families where a config leaves something out: as its class of transformers has it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from kvcellar.models.plans.families import FAMILIES
from kvcellar.models.plans.rules import _OF_NO_MATTER, _READ, plan_by_rules

OF_LATENTS = {"deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu", "minicpm3"}
REFUSED = {(kind, name) for kind in OF_LATENTS for name in ("q_lora_rank", "v_head_dim")}
"""What has other matrices then: the file's shapes contradict the plan, which is an error."""

ELSEWHERE = {
    ("olmo_hybrid", "rope_parameters"),
    *((kind, "moe_intermediate_size") for kind in ("qwen2_moe", "qwen3_moe", "qwen3_next")),
}
"""What every published config says."""

WITHOUT_PLAN = {
    "deepseek_v2",
    "dots1",
    "glm4_moe",
    "granitemoehybrid",
    "lfm2",
    "lfm2_moe",
}
"""Whose class's own values are no model that rules plan."""


def filled(kind: str, raw: dict[str, Any]) -> dict[str, Any]:
    """Return a config as its class of transformers fills it in, of the fields that rules know."""
    family = FAMILIES[kind]
    known = {*_READ, *_OF_NO_MATTER, *family.reads, *family.spares, *family.needs}
    said = CONFIG_MAPPING[kind].from_dict(dict(raw)).to_dict()
    written = json.loads(json.dumps(said, default=str))
    written = {name: value for name, value in written.items() if name in known}
    return {"tie_word_embeddings": False, **written, "architectures": [family.network]}


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind in CONFIG_MAPPING])
def test_what_a_config_leaves_out_is_planned_as_its_class_has_it(kind):
    whole = filled(kind, {})
    if kind not in WITHOUT_PLAN:
        assert plan_by_rules(whole) is not None
    for name in whole:
        raw = {key: value for key, value in whole.items() if key != name}
        found = plan_by_rules(raw)
        if found is not None and (kind, name) not in REFUSED | ELSEWHERE:
            assert found == plan_by_rules(filled(kind, raw)), name
