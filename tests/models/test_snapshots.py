"""Slots for the states of recurrent layers: how many, of how many bytes, and what is refused."""

import pytest
from typer.testing import CliRunner

from kvcellar.cli import app
from kvcellar.errors import ConfigError
from kvcellar.kv_dtype import parse_kv_dtype
from kvcellar.models.options import LoadOptions
from kvcellar.models.sizes.snapshots import (
    LEAST,
    MOST,
    RUNNING,
    slots_bytes,
    slots_for,
    what_resumes,
)
from kvcellar.states import StateGroup
from kvcellar.types import ModelCacheParams

KV = parse_kv_dtype("float32")


def model(numbers: int) -> ModelCacheParams:
    """Two layers of attention, and one of states with so many numbers."""
    return ModelCacheParams(2, 2, 64, state=StateGroup(((("recurrent", (numbers,)),),)))


def test_snapshots_get_the_bytes_that_were_asked_for_beside_what_answers_live_on():
    params = model(1000)
    assert slots_for(params, 512, KV, 40_000, n_running=1) == 2 + 10
    assert slots_for(params, 512, KV, 43_999, n_running=3) == 6 + 10
    assert slots_for(params, 512, KV, 4_000, n_running=64) == 2 * RUNNING + 1
    assert slots_bytes(params, 12) == 12 * 4_000


def test_snapshots_take_a_quarter_of_the_memory_for_the_cache_where_nothing_is_said():
    params, capacity = model(250_000), 1 << 17
    rows = capacity * 2 * 2 * 2 * 64 * 4
    n_snapshots = slots_for(params, capacity, KV, None, n_running=1) - 2
    assert n_snapshots * 1_000_000 == pytest.approx((rows + n_snapshots * 1_000_000) / 4, rel=0.02)
    assert slots_for(model(4_000_000_000), 512, KV, None, n_running=1) == 2 + LEAST
    assert slots_for(model(1), capacity, KV, None, n_running=1) == 2 + MOST


def test_a_model_without_recurrent_layers_needs_no_slots():
    params = ModelCacheParams(2, 2, 64)
    assert slots_for(params, 512, KV, 1, n_running=64) == 2
    assert slots_bytes(params, 2) == 0


def test_bytes_that_hold_no_snapshot_are_refused_with_those_of_one():
    with pytest.raises(ConfigError, match=r"3.00 KB, and one of this model takes 4.00 KB: its 1"):
        slots_for(model(1000), 512, KV, 3_000, n_running=1)
    for asked in (0, -1, 2.5, "1GB"):
        with pytest.raises(ConfigError, match="snapshot"):
            LoadOptions(snapshot_bytes=asked)


@pytest.mark.parametrize(
    ("said", "why"), [("0", "from its beginning, turn after turn"), ("many", "is not a size")]
)
def test_an_option_that_is_no_size_is_refused(said, why):
    result = CliRunner().invoke(app, ["generate", "demo", "-p", "Hi", "--snapshots", said])
    shown = " ".join(result.output.split())
    assert result.exit_code != 0
    assert "--snapshots: " in shown
    assert why in shown


def test_the_cache_of_a_model_is_made_with_as_many():
    options = LoadOptions(snapshot_bytes=40_000)
    assert options.config_for(model(1000), 512, n_running=2).n_slots == 4 + 10


def test_it_is_said_from_where_conversations_go_on():
    options = LoadOptions(snapshot_bytes=40_000)
    config = options.config_for(model(1000), 512, n_running=64)
    assert what_resumes(config, 64) == (
        "recurrent layers (1): a conversation goes on from the nearest snapshot of their states; "
        "10 of 4.00 KB fit, 40.00 KB in all (--snapshots)"
    )
    config = options.config_for(ModelCacheParams(2, 2, 64), 512)
    assert what_resumes(config, 64) == ""
