"""Fixtures of tests of agents."""

from tests.agents.fakes import eager as eager
