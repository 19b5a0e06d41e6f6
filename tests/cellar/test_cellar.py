"""Three lines of Python: a cellar, its agents, and what they say."""

from __future__ import annotations

import asyncio
import logging
import pydoc
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import kvcellar as kv
from kvcellar.agents import AgentInfo, leasing
from kvcellar.cellar import Cellar, Sampling
from kvcellar.cellar.answers import params_of
from kvcellar.cellar.settings import CellarSettings
from kvcellar.engine import SamplingParams
from kvcellar.errors import (
    AgentError,
    ConfigError,
    EngineClosedError,
    ModelError,
    PromptError,
    UnknownAgentError,
)
from kvcellar.hosting.loader import Hosting
from kvcellar.models import LoadOptions
from kvcellar.models.files.hub import DEMO_FOLDER
from tests.agents.fakes import eager as eager
from tests.cellar import program
from tests.models.adapters import write_adapter

pytestmark = pytest.mark.kernel
GREEDY: Sampling = {"temperature": 0.0, "max_tokens": 6}


@pytest.fixture(scope="module")
def cellar(tmp_path_factory):
    with kv.open("demo", store=tmp_path_factory.mktemp("store"), capacity=4096) as opened:
        yield opened


def names(cellar: Cellar) -> set[str]:
    return {agent.name for agent in cellar.agents()}


def test_an_agent_that_another_process_is_using_goes_on_as_a_branch_of_it(cellar, monkeypatch):
    monkeypatch.setattr(leasing, "PATIENCE_S", 0.0)
    agent = cellar.agent("shared")
    agent.say("import os", **GREEDY)
    manager = cellar._behind.manager
    lease = manager.store.leases.take(manager.directory.agent("shared").name)
    answer = agent.say("import sys", **GREEDY)
    manager.store.leases.release(lease)
    assert answer.agent == agent.name == "shared.2"
    assert answer.usage.notes[0].endswith("so the answer is in its branch shared.2")
    with agent.stream("import re", **GREEDY) as stream:
        assert "".join(stream) == stream.answer.text
    assert agent.name == "shared.2" and len(agent.messages) == 6
    assert len(cellar.agent("shared").messages) == 2


# What an agent says -------------------------------------------------------------------------------


def test_a_stream_says_what_say_says_and_both_join_the_history(cellar):
    said = cellar.agent("said").say("def add(a, b):", **GREEDY)
    streamed = cellar.agent("streamed")
    with streamed.stream("def add(a, b):", **GREEDY) as stream:
        text = "".join(stream)
    assert said.text and text == said.text == str(said) == stream.answer.text
    assert stream.answer.token_ids == said.token_ids and said.finish_reason == "length"
    assert [m["role"] for m in streamed.messages] == ["user", "assistant"]
    assert streamed.messages[-1]["content"] == text


def test_a_turn_reuses_all_of_the_history(cellar):
    agent = cellar.agent(system="You write Python.")
    first = agent.say("import os", **GREEDY)
    second = agent.say("import sys", **GREEDY)
    n_before = first.usage.prompt_tokens + len(first.token_ids)
    assert second.usage.cached_tokens >= n_before - 1
    assert agent.why().miss is None and "nothing was lost" in str(agent.why())
    assert agent.system == "You write Python."


def test_text_that_is_held_back_for_a_stop_that_never_came_is_streamed_too(cellar):
    whole = cellar.agent().say("import", temperature=0, max_tokens=12)
    stop = whole.text[-1] + "that never comes"
    with cellar.agent().stream("import", temperature=0, max_tokens=12, stop=stop) as stream:
        assert "".join(stream) == whole.text == stream.answer.text


def test_a_setting_that_there_is_not_is_refused_by_name(cellar):
    agent = cellar.agent()
    with pytest.raises(TypeError, match="temprature is no setting of an answer; there are: temp"):
        agent.say("hi", temprature=1)
    with pytest.raises(ConfigError, match="top_p"):
        agent.say("hi", top_p=3)
    assert not agent.messages


def test_settings_are_those_of_the_engine_and_of_loading():
    assert Sampling.__annotations__.keys() == set(SamplingParams.__dataclass_fields__) - {
        "guide",
        "unset",
    }
    of_loading = set(LoadOptions.__dataclass_fields__) - {"model", "memory_bytes"}
    assert CellarSettings.__annotations__.keys() == of_loading | {
        "store",
        "shared",
        "memory",
        "progress",
    }
    assert params_of({"temperature": 0.2}).temperature == 0.2
    assert "temperature" not in params_of({"temperature": 0.2}).unset
    assert "top_p" in params_of({"temperature": 0.2}).unset


# Answers that are left ----------------------------------------------------------------------------


def test_an_answer_that_is_left_in_its_middle_does_not_block_the_agent(cellar):
    agent = cellar.agent()
    stream = agent.stream("def f(", temperature=0, max_tokens=2000, ignore_eos=True)
    first = next(stream)
    again = agent.say("def g(", **GREEDY)  # the stream is still held, and ended by this
    assert again.text
    assert agent.messages[1]["content"].startswith(first)
    assert [m["role"] for m in agent.messages] == ["user", "assistant"] * 2


def test_the_end_of_an_answer_that_has_not_ended_is_refused(cellar):
    with cellar.agent().stream("x", **GREEDY) as stream, pytest.raises(AgentError, match="ended"):
        _ = stream.answer


def test_an_agent_that_streams_in_another_thread_is_waited_for(cellar):
    agent = cellar.agent()
    begun, said = threading.Event(), []

    def talk():
        for piece in agent.stream("import", temperature=0, max_tokens=12, ignore_eos=True):
            said.append(piece)
            begun.set()

    thread = threading.Thread(target=talk)
    thread.start()
    assert begun.wait(180)
    agent.say("import", **GREEDY)
    thread.join()
    assert len(agent.messages) == 4 and agent.messages[1]["content"] == "".join(said)


def test_ctrl_c_ends_an_answer_and_keeps_what_was_said(cellar, monkeypatch):
    agent = cellar.agent()
    waited = []

    class Interrupted:
        def __init__(self, future):
            self.future = future

        def result(self):
            while agent.info().state != "generating":  # asked from beside
                time.sleep(0.005)
            time.sleep(0.2)
            waited.append(self.future)
            raise KeyboardInterrupt

        def cancel(self):
            return self.future.cancel()

    real = asyncio.run_coroutine_threadsafe

    def once(call, loop):
        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", real)
        return Interrupted(real(call, loop))

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", once)
    with pytest.raises(KeyboardInterrupt):
        agent.say("def f(", temperature=0, max_tokens=3000, ignore_eos=True)
    assert waited and agent.say("def g(", **GREEDY).text
    assert [m["role"] for m in agent.messages] == ["user", "assistant"] * 2


def test_a_cellar_stays_open_for_as_long_as_one_of_its_agents_is_held(tmp_path):
    agent = kv.open("demo", store=tmp_path, capacity=512).agent("held")
    stream = agent.stream("import", **GREEDY)
    del agent
    assert "".join(stream)


def test_whoever_is_answered_when_a_cellar_closes_hears_of_it_and_streams_are_ended(tmp_path):
    long: Sampling = {"temperature": 0, "max_tokens": 3000, "ignore_eos": True}
    told = []

    def talk():
        try:
            beside.say("def f(", **long)
        except EngineClosedError as error:
            told.append(error)

    opened = kv.open("demo", store=tmp_path, capacity=8192)
    stream = opened.agent("streams").stream("import", **long)
    first = next(stream)
    beside = opened.agent("beside")
    thread = threading.Thread(target=talk, daemon=True)
    thread.start()
    while beside.info().state != "generating":
        time.sleep(0.01)
    opened.close()
    stream.close()
    thread.join(180)
    assert told and not thread.is_alive()
    with pytest.raises(ConfigError, match="closed"):
        next(stream)
    with kv.open("demo", store=tmp_path, capacity=512) as again:
        assert again.agent("streams").messages[1]["content"].startswith(first)


def test_who_stops_waiting_for_a_cellar_that_opens_leaves_nothing_open(tmp_path, monkeypatch):
    loading, go_on = threading.Event(), threading.Event()
    real = Hosting.open

    def slow(self, name, report):
        loading.set()
        assert go_on.wait(180)
        return real(self, name, report)

    monkeypatch.setattr(Hosting, "open", slow)
    real_submit = asyncio.run_coroutine_threadsafe

    class Interrupted:
        def __init__(self, future):
            self.cancel = future.cancel

        def result(self):
            assert loading.wait(180)
            raise KeyboardInterrupt

    def once(call, loop):
        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", real_submit)
        return Interrupted(real_submit(call, loop))

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", once)
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        kv.open("demo", store=tmp_path, capacity=512)
    go_on.set()
    no_thread_is_left(before)


def no_thread_is_left(before):
    """Wait until the threads that opening has begun are over.

    Pools of workers wait for garbage to be collected, and the renderer of templates stays.
    """

    def left() -> list[str]:
        names = [thread.name for thread in set(threading.enumerate()) - before]
        return [name for name in names if "work" not in name and "render" not in name]

    deadline = time.monotonic() + 180
    while left() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left()


def test_what_is_no_text_is_refused_before_it_is_in_a_history(cellar):
    agent = cellar.agent()
    with pytest.raises(PromptError, match=r"has to be a str, or messages, got b'x'"):
        agent.say(b"x", **GREEDY)
    assert not agent.messages and agent.say("x", **GREEDY).text


# Forks --------------------------------------------------------------------------------------------


def test_branches_answer_alike_from_seed_and_number_and_one_is_kept(cellar):
    trunk = cellar.agent("trunk")
    trunk.say("import os", **GREEDY)
    bystander = trunk.fork("bystander")
    branches = trunk.branch(3)
    answers = branches.say("import sys", max_tokens=8, temperature=1.0, seed=5)
    alone = trunk.fork().say("import sys", max_tokens=8, temperature=1.0, seed=6, logprobs=0)
    assert answers[1].text == alone.text
    assert all(answer.mean_logprob < 0 for answer in answers)
    assert all(answer.usage.cached_tokens > 0 for answer in answers)
    others = {one.name for one in branches} - {branches[1].name}
    kept = branches.keep(1)
    assert list(branches) == [kept] and not others & names(cellar)
    assert bystander.name in names(cellar), "a fork that is no branch of these stays"
    assert {one.name for one in kept.undo()} == others


def test_no_branches_are_refused(cellar):
    with pytest.raises(ConfigError, match="n=0"):
        cellar.agent().branch(0)


def test_an_agent_goes_back_and_what_was_dropped_comes_back(cellar):
    agent = cellar.agent()
    for text in ("import os", "import sys"):
        agent.say(text, **GREEDY)
    before = list(agent.messages)
    assert agent.rename("Verses, all of them").title == "Verses, all of them"
    info = agent.rewind(-1)
    assert isinstance(info, AgentInfo) and agent.messages == tuple(before[:2])
    agent.undo()
    assert list(agent.messages) == before
    assert agent.rewind(0).n_turns == 0
    agent.delete(forever=True)
    with pytest.raises(UnknownAgentError):
        agent.say("x", **GREEDY)


def test_an_agent_is_paused_resumed_exported_and_imported(cellar, tmp_path):
    agent = cellar.agent()
    agent.say("import os\n" * 20, **GREEDY)
    assert agent.pause().state == "paused"
    assert agent.resume() > 0
    assert agent.export(tmp_path / "a.kv") == (tmp_path / "a.kv").stat().st_size
    assert cellar.import_agent(tmp_path / "a.kv", "imported").messages == agent.messages


def test_an_agent_that_is_there_is_gone_on_with_and_not_given_another_system_message(cellar):
    agent = cellar.agent("kept", system="One.")
    agent.say("import os", **GREEDY)
    assert cellar.agent("kept").messages == agent.messages
    assert cellar.agent("kept", system="One.").name == "kept"
    with pytest.raises(AgentError, match="'kept' is there already, with another system message"):
        cellar.agent("kept", system="Two.")


def test_threads_that_ask_for_one_name_at_once_get_one_agent(cellar):
    def talk(number: int) -> str:
        return cellar.agent("together", system="One.").say(f"x{number}", **GREEDY).text

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(talk, range(6)))
    assert len(cellar.agent("together").messages) == 13


# Completions --------------------------------------------------------------------------------------


def test_completions_come_in_order_and_leave_no_agent(cellar):
    before = names(cellar)
    prompts = [f"def f{n}(" for n in range(5)]
    found = cellar.complete(prompts, **GREEDY)
    assert [one.text for one in found] == [cellar.complete(p, **GREEDY).text for p in prompts]
    chat = [{"role": "user", "content": "import os"}]
    (answered,) = cellar.complete([chat], **GREEDY)
    assert answered.text == cellar.agent(None).say("import os", **GREEDY).text
    assert answered.agent is None
    assert len(names(cellar) - before) == 1


# The cellar ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("eager")
def test_agents_are_there_again_when_a_cellar_is_opened_again(tmp_path):
    with kv.open(store=tmp_path, memory="3GB", kv_dtype="int8") as first:
        said = first.agent("poet").say("import os\n" * 60, **GREEDY)
    assert "not open" in repr(first)
    with pytest.raises(ConfigError, match="closed"):
        first.agent("poet")
    first.close()
    with kv.open(store=tmp_path, kv_dtype="int8") as second:
        poet = second.agent("poet")
        assert poet.messages[-1]["content"] == said.text
        assert poet.say("import sys", **GREEDY).usage.cached_tokens > 0


def test_what_cannot_be_opened_leaves_nothing_open(tmp_path):
    before = set(threading.enumerate())
    with pytest.raises(ModelError, match="nowhere"):
        kv.open(tmp_path / "nowhere", store=tmp_path / "store")
    with pytest.raises(TypeError, match="kvdtype is no setting of a cellar; there are: store"):
        kv.open(kvdtype="int8")
    with pytest.raises(ConfigError, match="kv_dtype"):
        kv.open(kv_dtype="int3", store=tmp_path / "store")
    with pytest.raises(ConfigError, match=r"a memory budget of 1.00 MB does not hold the model"):
        kv.open(memory=1_000_000, store=tmp_path / "store")
    no_thread_is_left(before)
    with kv.open(store=tmp_path / "store") as opened:
        assert opened.context > 0


def test_what_fails_in_the_loop_s_thread_is_raised_to_the_caller_and_the_next_call_works(cellar):
    async def fails():
        asyncio.get_running_loop().call_soon(int, "no number")  # nobody waits for it
        raise ZeroDivisionError("of the caller")

    asyncio_log = logging.getLogger("asyncio")
    asyncio_log.disabled = True
    try:
        with pytest.raises(ZeroDivisionError, match="of the caller"):
            cellar._loop.run(fails())
        assert cellar.agent().say("import", **GREEDY).text
    finally:
        asyncio_log.disabled = False


def test_progress_is_told_to_whoever_asks(tmp_path):
    told = []
    with kv.open(store=tmp_path, progress=lambda part, what: told.append(part)):
        assert told == sorted(told) and told


def test_the_twin_for_asyncio_does_the_same(tmp_path, cellar):
    async def talk():
        async with kv.open_async(store=tmp_path) as opened:
            one, two = await asyncio.gather(opened.agent("one"), opened.agent("two"))
            said = await asyncio.gather(one.say("import os", **GREEDY), two.say("x", **GREEDY))
            async with one.stream("import", temperature=0, max_tokens=500) as stream:
                async for _ in stream:
                    break
            return said[0].text, len(one.messages), len(await opened.agents())

    text, n_messages, n_agents = asyncio.run(talk())
    assert text == cellar.agent().say("import os", **GREEDY).text
    assert (n_messages, n_agents) == (4, 2)


def test_a_cellar_that_is_not_open_says_so():
    with pytest.raises(ConfigError, match="async with"):
        _ = kv.open_async("demo").manager


def test_a_notebook_shows_text_of_strangers_as_text(cellar):
    agent = cellar.agent("shown", system="<script>alert(1)</script>")
    agent.say("<img src=x onerror=alert(1)>", **GREEDY)
    shown = agent._repr_html_() + cellar._repr_html_()
    tags = set(re.findall(r"<(\w+)", shown))
    assert tags == {"div", "b", "table", "tr", "th", "td", "span"}
    assert "&lt;script&gt;" in shown and "kept for reuse" in shown


def test_the_users_program_runs(tmp_path):
    out = program.main(tmp_path)
    assert len(out) == 9 and all(out)
    assert out[1] == out[2]


def test_help_fits_a_screen():
    said = pydoc.plain(pydoc.render_doc(kv))
    own = said[: said.index("PACKAGE CONTENTS")] + said[said.index("FUNCTIONS") :]
    assert len(own.splitlines()) <= 48
    assert max(map(len, own.splitlines())) <= 108


def test_a_cellar_with_an_adapter_answers_with_it(cellar, tmp_path):
    adapters = {name: write_adapter(tmp_path / name, DEMO_FOLDER) for name in ("tone", "other")}
    with pytest.raises(ConfigError, match="one adapter, and tone, other were given"):
        kv.open("demo", store=tmp_path / "store", adapters=adapters)
    prompt = "def add(a, b):"
    one = {"tone": adapters["tone"]}
    with kv.open("demo", store=tmp_path / "store", capacity=512, adapters=one) as adapted:
        found = adapted.complete(prompt, **GREEDY)
        assert found.token_ids != cellar.complete(prompt, **GREEDY).token_ids
        assert adapted.complete(prompt, **GREEDY).usage.cached_tokens > 0
        agent = adapted.agent("poet")
        agent.say(prompt, **GREEDY)
        assert agent.say("More.", **GREEDY).usage.cached_tokens > 0
        assert adapted.model == "demo+tone" and "demo+tone" in repr(agent)
