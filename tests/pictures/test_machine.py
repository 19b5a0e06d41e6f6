"""Agents with pictures under any order of their verbs, beside a model of what each has said.

What an agent reads is what was said to it, pictures at their places; an answer is what the oracle
says behind it, whatever was cached, restored, forked, dropped or lost before.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvcellar.agents import AgentManager
from kvcellar.engine import EngineConfig
from kvcellar.pictures.picture import Picture
from kvcellar.pictures.tokens import pictures_in, placeholders
from tests.agents.fakes import manager, tokens_of, turn
from tests.pictures.fakes import PAD, FakeReader, make_seeing_host, picture_file
from tests.pictures.test_agents import answer_to

T = TypeVar("T")

PICTURES = [Picture.read(picture_file(i, *size)) for i, size in enumerate([(16, 16), (48, 40)] * 2)]
BY_NAME = {picture.name: picture for picture in PICTURES}
TEXTS = st.text("ab <>", max_size=12)
ROLES = {"system": 257, "user": 258, "assistant": 259}


def tokens_said(messages: Any) -> list[int]:
    """What a conversation has to be read as that awaits an answer; written without the product."""
    reader, tokens = FakeReader(), []
    for message in messages:
        tokens.append(ROLES[message["role"]])
        parts: list[int | str] = []
        at, content = 0, message["content"]
        for i, picture in enumerate(message.get("pictures", ())):
            parts += [content[at : picture["at"]], i]
            at = picture["at"]
        parts.append(content[at:])
        said: list[int] = []
        for part in parts:
            if isinstance(part, str):
                said += part.encode()
            else:
                look = reader.look(BY_NAME[message["pictures"][part]["name"]])
                name = message["pictures"][part]["name"]
                said += [91, *placeholders(PAD, name, look.n_rows, look.grid).tolist(), 93]
        spaces = b" \n".__contains__
        while said and said[0] < 256 and spaces(said[0]):
            said.pop(0)
        while said and said[-1] < 256 and spaces(said[-1]):
            said.pop()
        tokens += [*said, 256, 10]
    return [*tokens, ROLES["assistant"]]


class Eyes(RuleBasedStateMachine):
    """Some agents in one store, which one process after the other has open."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").exists() else None))
        self.stack = ExitStack()
        self.is_whole = False
        self.names: list[str] = []
        self.n_made = 0
        self.loop = asyncio.new_event_loop()
        self._open()

    def _open(self) -> None:
        self.agents: AgentManager = self.stack.enter_context(
            manager(
                self.folder,
                lambda name: make_seeing_host(
                    name,
                    is_whole=self.is_whole,
                    capacity=600,
                    config=EngineConfig(max_num_batched_tokens=24),
                ),
            )
        )

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(coroutine)

    def teardown(self) -> None:
        self.stack.close()
        self.loop.close()
        shutil.rmtree(self.folder)

    def some(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(self.names), "agent")

    @initialize()
    def begin(self) -> None:
        self.create()
        self.agents.models.shelf.add(PICTURES[1])
        shown = [{"name": PICTURES[1].name, "at": 1}]
        said = {"role": "user", "content": "xy", "pictures": shown}
        self.run(turn(self.agents, self.names[0], behind=[said]))

    @rule()
    @precondition(lambda self: len(self.names) < 4)
    def create(self) -> None:
        self.n_made += 1
        self.names.append(f"eye{self.n_made}")
        self.run(self.agents.lifecycle.create(self.names[-1]))

    @rule(data=st.data(), text=TEXTS, which=st.lists(st.sampled_from(PICTURES), max_size=2))
    @precondition(lambda self: self.names)
    def say(self, data: st.DataObject, text: str, which: list[Picture]) -> None:
        name = self.some(data)
        places = sorted(data.draw(st.integers(0, len(text))) for _ in which)
        pictures = [{"name": p.name, "at": at} for p, at in zip(which, places, strict=True)]
        for picture in which:
            self.agents.models.shelf.add(picture)
        if len(tokens_of(self.agents, name)) > 330:
            self.run(self.agents.lifecycle.rewind(name, turn=0))
        before = [dict(m) for m in self.agents.directory.conversation(name)]
        message = {"role": "user", "content": f"x{text}", "pictures": pictures}
        for picture in pictures:
            picture["at"] += 1
        end = self.run(turn(self.agents, name, behind=[message]))
        assert end.finish.error is None, end.finish.error
        tokens, n = tokens_of(self.agents, name), len(end.finish.token_ids)
        assert list(end.finish.token_ids) == answer_to(tokens[:-n], n)
        if all(m["content"] is not None for m in before):
            assert list(tokens[:-n]) == tokens_said([*before, message])

    @rule(data=st.data())
    @precondition(lambda self: self.names and len(self.names) < 4)
    def fork(self, data: st.DataObject) -> None:
        parent = self.some(data)
        n = len(tokens_of(self.agents, parent))
        self.n_made += 1
        child = f"eye{self.n_made}"
        at = data.draw(st.one_of(st.none(), st.integers(0, n)))
        self.run(self.agents.lifecycle.fork(parent, child, position=at))
        self.names.append(child)

    @rule(data=st.data())
    @precondition(lambda self: self.names)
    def rewind(self, data: st.DataObject) -> None:
        name = self.some(data)
        before = tokens_of(self.agents, name)
        within = [
            at for one in pictures_in(np.array(before, np.int64)) for at in one.places.tolist()
        ]
        anywhere = st.integers(0, len(before))
        at = data.draw(st.one_of(anywhere, st.sampled_from(within)) if within else anywhere)
        info = self.run(self.agents.lifecycle.rewind(name, position=at))
        assert before[: info.n_tokens] == tokens_of(self.agents, name)
        inside = [
            one for one in pictures_in(np.array(before, np.int64)) if one.start < at < one.stop
        ]
        assert info.n_tokens == (inside[0].start if inside else at)
        if data.draw(st.booleans()) and info.n_tokens < len(before):
            self.run(self.agents.dropped.undo(name))
            assert tokens_of(self.agents, name) == before

    @rule(is_whole=st.booleans())
    def restart(self, is_whole: bool) -> None:
        self.stack.close()
        self.is_whole = is_whole
        self._open()

    @rule()
    def lose_kv(self) -> None:
        """Blocks of the store are gone, and so is the process that had them in memory."""
        self.stack.close()
        for block in (self.folder / "blocks").iterdir():
            block.unlink()
        self._open()

    @rule(data=st.data())
    @precondition(lambda self: self.names)
    def delete(self, data: st.DataObject) -> None:
        name = self.some(data)
        self.names.remove(name)
        self.run(self.agents.lifecycle.delete(name, is_final=data.draw(st.booleans())))

    @rule()
    def tidy_up(self) -> None:
        self.agents.store.flush()
        if (self.folder / "pictures").exists():
            for file in (self.folder / "pictures").iterdir():
                os.utime(file, (1, 1))
        self.agents.store.gc()

    @invariant()
    def pictures_of_all_are_there(self) -> None:
        for name in self.names:
            for one in pictures_in(np.array(tokens_of(self.agents, name), np.int64)):
                assert self.agents.store.picture(one.name) == BY_NAME[one.name].data


TestEyes = Eyes.TestCase
TestEyes.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
