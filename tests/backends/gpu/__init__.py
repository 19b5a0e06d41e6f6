"""Tests of what runs on a card, interpreted on the CPU."""
