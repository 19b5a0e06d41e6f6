"""kv_cache.* metadata: what is written is read, what is not understood is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.errors import ConfigError, MetadataError
from kvcellar.metadata import read_kv_cache_metadata, write_kv_cache_metadata
from kvcellar.types import LayerGroup, ModelCacheParams

GROUPS = (
    LayerGroup((0, 2), 2, 8, 16, window=None, softcap=30.0),
    LayerGroup((1, 3), 4, 8, 8, window=512),
)


def written(groups=GROUPS):
    return write_kv_cache_metadata({}, n_layers=4, groups=groups)


@st.composite
def params(draw):
    """Any model: each layer in one of up to three groups."""
    n_layers = draw(st.integers(1, 6))
    dim = st.integers(1, 300)
    if draw(st.booleans()):
        return ModelCacheParams(n_layers, draw(dim), draw(dim), draw(st.integers(0, 300)))
    of = [draw(st.integers(0, 2)) for _ in range(n_layers)]
    groups = tuple(
        LayerGroup(
            tuple(layer for layer in range(n_layers) if of[layer] == index),
            1 if is_latent else draw(dim),
            draw(dim),
            draw(dim),
            None if has_chunk else draw(st.none() | st.integers(1, 5000)),
            draw(st.none() | st.floats(0.5, 100)),
            draw(st.integers(1, 5000)) if has_chunk else None,
            is_latent,
        )
        for index in sorted(set(of))
        for has_chunk in (draw(st.booleans()),)
        for is_latent in (draw(st.booleans()),)
    )
    layer = st.integers(0, n_layers - 1)
    shared = tuple((n_layers + i, draw(layer)) for i in range(draw(st.integers(0, 2))))
    return ModelCacheParams(n_layers + len(shared), groups=groups, shared=shared)


@given(params())
def test_what_is_written_is_read(want):
    metadata = write_kv_cache_metadata(
        {}, n_layers=want.n_layers, groups=want.groups, shared=want.shared
    )
    assert read_kv_cache_metadata(metadata) == want
    for key, value in metadata.items():
        assert key.startswith("kv_cache.")
        assert type(value) in (int, float) or all(type(item) is int for item in value)


def test_a_plain_model_has_four_facts_and_other_keys_stay():
    metadata = {"get_vocab_size": 1000}
    out = write_kv_cache_metadata(metadata, n_layers=4, n_kv_heads=2, head_dim=8)
    assert out is metadata
    assert metadata == {
        "get_vocab_size": 1000,
        "kv_cache.schema_version": 1,
        "kv_cache.n_layers": 4,
        "kv_cache.n_kv_heads": 2,
        "kv_cache.head_dim": 8,
    }
    assert read_kv_cache_metadata(metadata) == ModelCacheParams(4, 2, 8)


def test_writing_again_leaves_nothing_of_the_model_before():
    metadata = written()
    write_kv_cache_metadata(metadata, n_layers=4, n_kv_heads=2, head_dim=8)
    assert read_kv_cache_metadata(metadata) == ModelCacheParams(4, 2, 8)
    assert len(metadata) == 4


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("head_dim", "8", "head_dim is '8', not a whole number"),
        ("v_head_dim", [8], r"v_head_dim is \[8\], not a whole number"),
        ("n_kv_heads", 0, "a model needs n_kv_heads >= 1, got 0"),
    ],
)
def test_an_impossible_fact_of_a_plain_model_is_named(key, value, message):
    metadata = write_kv_cache_metadata({}, n_layers=4, n_kv_heads=2, head_dim=8, v_head_dim=4)
    with pytest.raises(MetadataError, match=message):
        read_kv_cache_metadata(metadata | {f"kv_cache.{key}": value})


def test_what_a_runtime_gives_back_for_an_int_is_read():
    metadata = {
        key: np.array(value) if isinstance(value, list) else np.asarray(value)[()]
        for key, value in written().items()
    }
    assert read_kv_cache_metadata(metadata).groups == GROUPS


def test_facts_that_contradict_each_other_are_not_written():
    metadata = written()
    before = dict(metadata)
    with pytest.raises(ConfigError, match="each of the 3 layers once"):
        write_kv_cache_metadata(metadata, n_layers=3, groups=GROUPS)
    with pytest.raises(ConfigError, match="n_kv_heads >= 1, got 0"):
        write_kv_cache_metadata(metadata, n_layers=4, n_kv_heads=0, head_dim=8, groups=GROUPS)
    assert metadata == before


def test_a_program_without_metadata_says_how_to_export_it():
    with pytest.raises(MetadataError, match="carries no cache metadata; export it with write_kv_"):
        read_kv_cache_metadata({"get_vocab_size": 1000})


@pytest.mark.parametrize("version", [0, 2, "1", 1.5])
def test_an_unknown_schema_version_is_refused_by_name(version):
    metadata = written() | {"kv_cache.schema_version": version}
    with pytest.raises(MetadataError) as info:
        read_kv_cache_metadata(metadata)
    assert str(info.value) == (
        f"kv_cache.schema_version is {version!r} and this reader knows 1; use the kvcellar that "
        f"wrote it, or export again"
    )


@pytest.mark.parametrize(
    "key", [key for key in written() if "softcap" not in key and "version" not in key]
)
def test_a_missing_fact_is_named(key):
    metadata = written()
    del metadata[key]
    if key == "kv_cache.layer_groups":  # all that says that there are groups
        key = "kv_cache.n_kv_heads"
    with pytest.raises(MetadataError) as info:
        read_kv_cache_metadata(metadata)
    assert str(info.value) == f"{key} is missing from schema version 1; export again"


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("n_layers", 2.5, "n_layers is 2.5, not a whole number; export again"),
        ("n_layers", None, "n_layers is None, not a whole number"),
        ("n_layers", 0, "metadata cannot be right: a model has at least one layer"),
        ("n_layers", (1 << 31) - 1, "n_layers of a model must be at most 65536"),
        ("n_layers", 5, r"cannot be right: layer groups must name each of the 5 layers once"),
        ("layer_groups", 3, "layer_groups is 3, not a list of whole numbers"),
        ("layer_groups", [0, 1, 0, 2], r"each of the 4 layers once, got \[0, 1, 2\]"),
        ("group_windows", [0, 1.5], r"group_windows is \[0, 1.5\], not a list of whole numbers"),
        ("group_windows", [0, -4], "got window=-4"),
        ("group_chunks", [0, 8], "a window or a chunk, got window=512 and chunk=8"),
        ("group_is_latent", [1], "group_is_latent has 1 entries for 2 layer groups"),
        ("layer_sources", [0, 1, 2], "layer_sources has 3 entries for 4 layers"),
        ("layer_sources", [0, 1, 2, 9], "layer 3 cannot share the rows of layer 9"),
        ("group_head_dims", [8], "group_head_dims has 1 entries for 2 layer groups"),
        ("group_softcap.0", "x", "group_softcap.0 is 'x', not a number; export again"),
        ("group_softcap.0", -1.0, "softcap is above 0"),
    ],
)
def test_an_impossible_fact_is_named(key, value, message):
    with pytest.raises(MetadataError, match=message):
        read_kv_cache_metadata(written() | {f"kv_cache.{key}": value})


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 40)
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.just(1 << 62),
    lambda one: st.lists(one, max_size=5),
    max_leaves=6,
)


@given(
    st.dictionaries(st.sampled_from([*written(), "kv_cache.what", "get_vocab_size"]), ANYTHING),
    st.sets(st.sampled_from([*written()]), max_size=2),
    st.booleans(),
)
def test_whatever_a_program_says_of_its_cache_is_read_or_refused(changes, missing, is_plain):
    """Facts are of somebody else's file: no other error, and no work as large as they say."""
    whole = write_kv_cache_metadata({}, n_layers=4, n_kv_heads=2, head_dim=8)
    whole = (whole if is_plain else written()) | changes
    told = {key: value for key, value in whole.items() if key not in missing}
    try:
        found = read_kv_cache_metadata(told)
    except MetadataError as error:
        assert str(error)
    else:
        assert (
            read_kv_cache_metadata(
                write_kv_cache_metadata(
                    {}, n_layers=found.n_layers, groups=found.groups, shared=found.shared
                )
            )
            == found
        )
