"""How many replicas are asked for, as people write it."""

from __future__ import annotations

import pytest

from kvcellar.cli.serve.deploy import ScaleOptions
from kvcellar.errors import ConfigError


@pytest.mark.parametrize(("said", "meant"), [("2", (2, 2)), ("1-8", (1, 8)), ("3-3", (3, 3))])
def test_a_number_or_the_least_and_the_most(said, meant):
    assert ScaleOptions(replicas=said).counts() == meant


@pytest.mark.parametrize("said", ["", "0", "8-2", "two", "2-", "-2", "1.5"])
def test_what_is_no_number_of_replicas_is_refused(said):
    with pytest.raises(ConfigError, match="such as 2-8"):
        ScaleOptions(replicas=said).counts()
