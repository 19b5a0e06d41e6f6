"""The conformance suite for backends, to be run by pytest, with the extra ``testing``.

Imports the faces of caches; no backend comes in.

::

    from kvcellar.testing import ConformanceSuite, NumpyAdapter

    class TestMyBackend(ConformanceSuite):
        adapter = NumpyAdapter("mine")
"""

import pytest

pytest.register_assert_rewrite(
    "kvcellar.testing.driver", "kvcellar.testing.walks", "kvcellar.testing.suite"
)

from kvcellar.testing.adapter import BackendAdapter, NumpyAdapter  # noqa: E402
from kvcellar.testing.cases import CASES, STATE_CASES, Case, cases_named  # noqa: E402
from kvcellar.testing.conformance import ConformanceSuite  # noqa: E402

__all__ = [
    "CASES",
    "STATE_CASES",
    "BackendAdapter",
    "Case",
    "ConformanceSuite",
    "NumpyAdapter",
    "cases_named",
]
