"""Simulated agents, each with a model of what it must see."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from tests.soak.oracle import Message, Oracle, digest
from tests.soak.served import GUESTS, BrokenError, Served, until

LONGEST = 320
"""Tokens after which a conversation is begun anew: several fit into the cache, all do not."""

TEXTS = (
    "Hello.",
    "And then?",
    "Write a function that adds two numbers.",
    "  two  spaces \n",
    "é🙂漢",
    "What is a cellar, and who goes there in winter? " * 3,
    "def fibonacci(n):\n    ",
)


NOT_KEPT = "is not on disk and is lost if the process ends"
"""What is said with a turn that the disk did not take."""

HARMED = {500, 503, 507}
"""With which a request may fail that a fault met."""


class FailedError(Exception):
    """A request that a fault has ended, where there are faults."""


def has_token(event: dict[str, Any]) -> bool:
    """Return true if an event of a turn brings a token; held-back text comes without one."""
    return event.get("token_id") is not None


@dataclass(frozen=True)
class State:
    """A history after a turn.

    Attributes:
        messages: the conversation.
        tokens: of it, as they were told.
        later: the prompt of a turn behind it, whose template or tokenizer wrote it otherwise; from
            then on its tokens are the beginning of that. None: there was none.
        is_kept: if it must be there after a kill: its end was told, and not that it is not on disk.
    """

    messages: list[Message]
    tokens: list[int]
    later: list[int] | None = None
    is_kept: bool = True

    def read_in(self, prompt: list[int]) -> State:
        """Return the state as a later turn's prompt has it."""
        is_same = prompt[: len(self.tokens)] == self.tokens
        return replace(self, later=None if is_same else prompt)

    def wanted(self, n_tokens: int) -> list[int]:
        """Return the tokens that a server must have, which says that it has so many."""
        return self.tokens if self.later is None else self.later[:n_tokens]


@dataclass
class Known:
    """A named agent of a model: its history after each of its turns, the first one empty."""

    name: str
    model: str
    states: list[State]

    def read(self, prompt: list[int]) -> None:
        """Take note of a turn's prompt, in which its earlier turns are read anew."""
        self.states = [one.read_in(prompt) for one in self.states]

    @property
    def messages(self) -> list[Message]:
        """The conversation as it is."""
        return self.states[-1].messages

    @property
    def tokens(self) -> list[int]:
        """The history as it is."""
        return self.states[-1].tokens


@dataclass
class Report:
    """Counts of what all workers did together, and their last operations."""

    requests: int = 0
    turns: int = 0
    refused: int = 0
    failed: int = 0
    wrong_tokens: int = 0
    bytes_lost: int = 0
    operations: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    last: deque[str] = field(default_factory=lambda: deque(maxlen=60))


class Worker:
    """One client with some agents and conversations of its own; one operation after another.

    Args:
        name: begins the names of its agents.
        served: the server.
        oracles: the models that it offers, each with what says what follows a prompt.
        is_exact: if the server must answer as the oracle; else only what it tells is compared with
            what it keeps.
        report: where it counts.
        may_fail: if there are faults of which requests may end; it takes turns and reads then.
    """

    def __init__(
        self,
        name: str,
        served: Served,
        oracles: Mapping[str, Oracle],
        is_exact: bool,
        report: Report,
        *,
        may_fail: bool = False,
    ) -> None:
        self.name = name
        self.served = served
        self.oracles = oracles
        self.is_exact = is_exact
        self.report = report
        self.may_fail = may_fail
        self.agents: dict[str, Known] = {}
        self.chats: list[tuple[str, list[Message]]] = []
        self.rng = random.Random(name)
        self._n = 0

    def broken(self, what: str) -> BrokenError:
        """Return the error of this worker."""
        return BrokenError(f"{self.name}: {what}")

    # requests

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        """Send a request until it is taken, and return its answer.

        Raises:
            BrokenError: it failed otherwise than by asking to come back.
            FailedError: a fault ended it, and it said so.
        """
        for _ in range(200):
            self.report.requests += 1
            answer = self.served.http.request(method, path, json=body, headers=headers)
            if answer.is_success:
                return answer.json()
            if self.may_fail and method == "GET" and answer.status_code in HARMED:
                self.report.failed += 1  # it is asked again when the disk is well
            elif answer.status_code in (429, 503) and "retry-after" in answer.headers:
                self.report.refused += 1
            else:
                break
            time.sleep(0.2)
        self.may_have_failed(method, answer.status_code, answer.text)
        raise self.broken(f"{method} {path} {body}: {answer.status_code} {answer.text}")

    def may_have_failed(self, method: str, status: int, text: str) -> None:
        """Take note of a request that a fault has ended.

        Raises:
            FailedError: it is one.
        """
        is_said = status in HARMED and bool(json.loads(text)["error"]["message"])
        if self.may_fail and is_said:
            self.report.failed += 1
            raise FailedError(text)

    @contextmanager
    def streamed(self, name: str, text: str, max_tokens: int) -> Iterator[Iterator[Any]]:
        """Say something to an agent; gives what its events carry."""
        body = {"text": text, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        self.report.requests += 1
        with self.served.http.stream("POST", f"/v1/agents/{name}/generate", json=body) as answer:
            if not answer.is_success:
                answer.read()
                self.may_have_failed("POST", answer.status_code, answer.text)
                raise self.broken(f"a turn of {name}: {answer.status_code} {answer.text}")
            yield (
                json.loads(line.removeprefix("data: "))
                for line in answer.iter_lines()
                if line.startswith("data: ")
            )

    # what must be

    def expected(self, model: str, prompt: list[int], most: int) -> tuple[list[int] | None, int]:
        """Return the tokens of the answer, where they are known, and how many to ask for.

        An answer is asked for as far as it is certain, and for one token at least.
        """
        if not self.is_exact:
            return None, most
        answer = self.oracles[model].answer(prompt, most)
        return (answer, len(answer)) if answer else (None, 1)

    def check_tokens(self, where: str, said: list[int], wanted: list[int] | None) -> None:
        """Compare an answer with the oracle's."""
        if wanted is not None and said != wanted:
            n_same = next(
                (i for i, (a, b) in enumerate(zip(said, wanted, strict=False)) if a != b),
                min(len(said), len(wanted)),
            )
            self.report.wrong_tokens += max(len(said), len(wanted)) - n_same
            raise self.broken(f"{where}: a wrong token: {said}, the oracle says {wanted}")

    def check(self, agent: Known) -> None:
        """Compare an agent with what the server has of it."""
        now = self.ask("GET", f"/v1/agents/{agent.name}")
        self.check_history(agent, now)
        if now["messages"] != agent.messages:
            raise self.broken(f"{agent.name}: {now['messages']} is not {agent.messages}")

    def check_history(self, agent: Known, now: dict[str, Any]) -> None:
        """Compare the tokens of an agent with those that the server says it has."""
        if now["history_digest"] != digest(agent.states[-1].wanted(now["n_tokens"])):
            self.report.bytes_lost += max(0, len(agent.tokens) - now["n_tokens"])
            raise self.broken(
                f"{agent.name} has {now['n_tokens']} tokens {now['history_digest']}, not the "
                f"{len(agent.tokens)} of which it was told; {now}"
            )

    def check_all(self) -> None:
        """Compare all agents of this worker."""
        for agent in self.agents.values():
            self.check(agent)

    # operations

    def operate(self) -> None:
        """Do one operation, drawn by chance."""
        kinds: list[tuple[int, Callable[[], None]]] = [
            (6, self.turn),
            (5, self.chat),
            (2, self.named_chat),
            (2, self.disconnect),
            (2, self.stop),
            (8, self.read),
        ]
        verbs: list[tuple[int, Callable[[], None]]] = [
            (2, self.fork),
            (2, self.rewind_and_undo),
            (1, self.keep),
            (2, self.pause),
            (1, self.delete),
            (1, self.salted),
        ]
        kinds += [] if self.may_fail else verbs
        (one,) = self.rng.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])
        self.report.last.append(f"{self.name} {one.__name__}")
        try:
            one()
        except FailedError as failed:
            self.report.last.append(f"{self.name} {one.__name__} failed: {failed}")
        self.report.operations[one.__name__] += 1

    def some(self) -> Known:
        """Return an agent that has room for a turn; it may be a new one."""
        fit = [one for one in self.agents.values() if len(one.tokens) < LONGEST]
        if not fit or (len(self.agents) < 5 and self.rng.random() < 0.3):
            return self.create()
        return self.rng.choice(fit)

    def create(self) -> Known:
        """Make an agent."""
        name, model = self.new_name(), self.rng.choice(list(self.oracles))
        system = self.rng.choice(("", "Be brief.", "You write Python."))
        more = {"system": system} if system else {}
        self.ask("POST", "/v1/agents", {"id": name, "model": model, **more})
        messages = [{"role": "system", "content": system}] if system else []
        made = self.agents[name] = Known(name, model, [State(messages, [])])
        return made

    def new_name(self) -> str:
        """Return a name that was never taken."""
        self._n += 1
        return f"{self.name}-{self._n}"

    def limit(self) -> int:
        """Return the length of an answer, at most."""
        return self.rng.randint(2, 9)

    def take_turn(self, agent: Known) -> None:
        """Say something to an agent and hear all of the answer."""
        text = self.rng.choice(TEXTS)
        asked = [*agent.messages, {"role": "user", "content": text}]
        prompt = self.oracles[agent.model].prompt(asked)
        wanted, limit = self.expected(agent.model, prompt, self.limit())
        said: list[int] = []
        try:
            with self.streamed(agent.name, text, limit) as events:
                for event in events:
                    if has_token(event):
                        said.append(event["token_id"])
            self.ended(event)
        except FailedError:
            self.settle(agent, text, wanted, len(said))
            raise
        if "finish_reason" not in event:
            raise self.broken(f"a turn of {agent.name} ended with {event}")
        self.check_tokens(agent.name, said, wanted)
        if event["usage"]["prompt_tokens"] != len(prompt):
            raise self.broken(f"{agent.name}: {event['usage']} for {len(prompt)} tokens of prompt")
        answer = {"role": "assistant", "content": event["text"]}
        agent.read(prompt)
        is_kept = NOT_KEPT not in str(event)
        agent.states.append(State([*asked, answer], prompt + said, is_kept=is_kept))
        if event["history_digest"] != digest(agent.tokens):
            raise self.broken(f"{agent.name}: another history than {agent.tokens} after {text!r}")
        self.report.turns += 1

    def ended(self, event: dict[str, Any]) -> None:
        """Look if a stream ended with a fault.

        Raises:
            FailedError: it did.
        """
        if "error" in event:
            self.may_have_failed("POST", 500, json.dumps(event))

    def turn(self) -> None:
        """Take a turn of some agent."""
        self.take_turn(self.some())

    def chat(self) -> None:
        """Go on with a conversation that has no name, by its messages."""
        if not self.chats or (len(self.chats) < 4 and self.rng.random() < 0.3):
            self.chats.append((self.rng.choice(list(self.oracles)), []))
        model, talk = chosen = self.rng.choice(self.chats)
        if talk and self.rng.random() < 0.2:  # the last answer is asked for again
            del talk[-2:]
        asked = [*talk, {"role": "user", "content": self.rng.choice(TEXTS)}]
        answer, _ = self.completed(model, asked, self.limit())
        talk[:] = [*asked, {"role": "assistant", "content": said_in(answer)}]
        if len(self.oracles[model].prompt(talk)) > LONGEST:
            self.chats.remove(chosen)

    def completed(
        self, model: str, talk: list[Message], most: int, **headers: str
    ) -> tuple[Any, list[int] | None]:
        """Have messages answered; the answer, and the tokens that it had to have."""
        oracle = self.oracles[model]
        prompt = oracle.prompt(talk)
        wanted, limit = self.expected(model, prompt, most)
        body = {"model": model, "messages": talk, "max_tokens": limit, "temperature": 0}
        answer = self.ask("POST", "/v1/chat/completions", body, **headers)
        said, usage = said_in(answer), answer["usage"]
        if wanted is not None and said != oracle.text(wanted):
            self.report.wrong_tokens += 1
            raise self.broken(f"{talk}: {said!r}, the oracle says {oracle.text(wanted)!r}")
        if usage["prompt_tokens"] != len(prompt):
            raise self.broken(f"{talk}: {usage} for {len(prompt)} tokens of prompt")
        self.report.turns += 1
        return answer, wanted

    def named_chat(self) -> None:
        """Take a turn of a named agent by the chat route, with all of its messages."""
        agent, text = self.some(), self.rng.choice(TEXTS)
        asked = [*agent.messages, {"role": "user", "content": text}]
        prompt, most = self.oracles[agent.model].prompt(asked), self.limit()
        try:
            answer, wanted = self.completed(agent.model, asked, most, **{"X-Agent-Id": agent.name})
        except FailedError:
            self.settle(agent, text, self.expected(agent.model, prompt, most)[0], 0)
            raise
        now = self.ask("GET", f"/v1/agents/{agent.name}")
        messages = [*asked, {"role": "assistant", "content": said_in(answer)}]
        if now["messages"] != messages:
            raise self.broken(f"{agent.name}: {now['messages']} is not {messages}")
        if wanted is None:  # nothing tells the tokens of such an answer
            self.forget(agent)
            return
        agent.read(prompt)
        is_kept = NOT_KEPT not in str(answer)
        agent.states.append(State(messages, prompt + wanted, is_kept=is_kept))
        self.check(agent)

    def forget(self, agent: Known) -> None:
        """Delete an agent for ever."""
        with suppress(FailedError):
            self.ask("DELETE", f"/v1/agents/{agent.name}?forever=true")
        del self.agents[agent.name]

    def salted(self) -> None:
        """Ask as a stranger what is in the cache already: nothing of it may be reused."""
        model = self.rng.choice(list(self.oracles))
        talk = [{"role": "user", "content": self.rng.choice(TEXTS)}]
        self.completed(model, talk, self.limit())
        stranger = {"X-Cache-Salt": self.new_name() + "-salt"}
        if self.rng.random() < 0.5:  # somebody else with a key
            stranger |= GUESTS
            for name in self.agents:
                self.report.requests += 1
                seen = self.served.http.get(f"/v1/agents/{name}", headers=GUESTS)
                if seen.status_code != 404:
                    raise self.broken(f"a guest sees {name}: {seen.status_code} {seen.text}")
        answer, _ = self.completed(model, talk, self.limit(), **stranger)
        if n_cached := answer["usage"]["prompt_tokens_details"]["cached_tokens"]:
            raise self.broken(f"a stranger reused {n_cached} tokens of {talk}")

    def read(self) -> None:
        """Look at what is told of everything, and compare it with what is known."""
        listed = {one["id"]: one for one in self.ask("GET", "/v1/agents")["data"]}
        for agent in self.agents.values():
            self.check_history(agent, listed.get(agent.name, {"n_tokens": 0, "history_digest": ""}))
        if not self.may_fail:
            mine = {name: one for name, one in listed.items() if name.startswith(f"{self.name}-")}
            if mine.keys() != self.agents.keys():
                raise self.broken(f"there is {mine}, not {sorted(self.agents)}")
        for agent in self.agents.values():
            self.check(agent)
            why = self.ask("GET", f"/v1/agents/{agent.name}/why")
            if why["miss"] != self.ask("GET", f"/v1/agents/{agent.name}")["miss"]:
                raise self.broken(f"{agent.name} says two things: {why}")
        health = self.ask("GET", "/health")
        offered = {one["id"] for one in self.ask("GET", "/v1/models")["data"]}
        if health["status"] != "ok" or offered != set(self.oracles):
            raise self.broken(f"{health} of {offered}")
        for model, talk in self.chats:
            asked = [*talk, {"role": "user", "content": self.rng.choice(TEXTS)}]
            body = {"model": model, "messages": asked}
            counted = self.ask("POST", "/v1/messages/count_tokens", body)
            if counted["input_tokens"] != len(self.oracles[model].prompt(asked)):
                raise self.broken(f"{asked}: {counted}")

    def disconnect(self) -> None:
        """Leave in the middle of an answer."""
        self.report.faults["disconnect"] += 1
        agent, text, wanted, heard = self.begin()
        self.settle(agent, text, wanted, heard)

    def begin(self) -> tuple[Known, str, list[int] | None, int]:
        """Say something, hear a few tokens and leave."""
        agent, text = self.some(), self.rng.choice(TEXTS)
        asked = [*agent.messages, {"role": "user", "content": text}]
        wanted, limit = self.expected(agent.model, self.oracles[agent.model].prompt(asked), 24)
        heard, n = 0, self.rng.randint(0, 3)
        with suppress(FailedError), self.streamed(agent.name, text, limit) as events:
            while heard < n and has_token(next(events, {})):
                heard += 1
        return agent, text, wanted, heard

    def stop(self) -> None:
        """Have a turn stopped by somebody else while it is heard."""
        self.report.faults["stop"] += 1
        agent, text = self.some(), self.rng.choice(TEXTS)
        asked = [*agent.messages, {"role": "user", "content": text}]
        wanted, limit = self.expected(agent.model, self.oracles[agent.model].prompt(asked), 24)
        heard = 0
        with suppress(FailedError), self.streamed(agent.name, text, limit) as events:
            for event in events:
                heard += has_token(event)
                if heard == 1 and has_token(event):
                    self.ask("POST", f"/v1/agents/{agent.name}/stop")
        self.settle(agent, text, wanted, heard)

    def settle(self, agent: Known, text: str, wanted: list[int] | None, heard: int) -> None:
        """Learn how much of a turn that did not end by itself is in the history.

        It is the history of before, or that with a beginning of the oracle's answer: of a turn that
        ``heard`` tokens were read of, at least as many.
        """
        until(
            lambda: self.ask("GET", f"/v1/agents/{agent.name}")["under_way"] is None,
            f"the end of a turn of {agent.name}",
        )
        now = self.ask("GET", f"/v1/agents/{agent.name}")
        asked = [*agent.messages, {"role": "user", "content": text}]
        oracle = self.oracles[agent.model]
        prompt = oracle.prompt(asked)
        if now["history_digest"] == digest(agent.states[-1].wanted(now["n_tokens"])):
            if heard:
                raise self.broken(f"{agent.name} has nothing of the {heard} tokens that it said")
            return
        agent.read(prompt)
        if wanted is None:
            self.forget(agent)
            return
        n_said = now["n_tokens"] - len(prompt)
        tokens = prompt + wanted[: max(0, n_said)]
        if n_said < heard or now["history_digest"] != digest(tokens):
            raise self.broken(
                f"{agent.name} has {n_said} tokens of an answer, {heard} were heard, the oracle "
                f"says {wanted} behind {len(prompt)}: {now['messages']}, {now['turns'][-1:]}"
            )
        agent.states.append(State(now["messages"], tokens, is_kept=not self.may_fail))
        if now["messages"][:-1] != asked or (
            not oracle.text(tokens[len(prompt) :]).startswith(now["messages"][-1]["content"])
        ):
            raise self.broken(f"{agent.name}: {now['messages']} is not {asked} and an answer")

    def fork(self) -> None:
        """Fork an agent at one of its turns, and go on with the fork."""
        agent = self.some()
        turn = self.rng.randint(0, len(agent.states) - 1)
        if turn == 0:
            return self.take_turn(agent)
        name = self.new_name()
        body = {"id": name, **({"turn": turn} if turn < len(agent.states) - 1 else {})}
        self.ask("POST", f"/v1/agents/{agent.name}/fork", body)
        made = self.agents[name] = Known(name, agent.model, agent.states[: turn + 1])
        self.check(made)
        self.take_turn(made)
        self.check(agent)

    def rewind_and_undo(self) -> None:
        """Go back before the last turn; half of the time, forth again."""
        agent = self.some()
        if len(agent.states) < 2:
            self.take_turn(agent)
        dropped = agent.states.pop()
        self.ask("POST", f"/v1/agents/{agent.name}/rewind")
        self.check(agent)
        if self.rng.random() < 0.5:
            self.ask("POST", f"/v1/agents/{agent.name}/undo")
            agent.states.append(dropped)
            self.check(agent)

    def keep(self) -> None:
        """Make a small family, keep one branch, bring the others back, and let them go."""
        trunk = self.create()
        self.take_turn(trunk)
        family = []
        for parent in (trunk, trunk, None):
            parent = parent or family[-1]
            made = Known(self.new_name(), parent.model, list(parent.states))
            self.ask("POST", f"/v1/agents/{parent.name}/fork", {"id": made.name})
            self.take_turn(made)
            family.append(made)
        kept, *others = family
        deleted = self.ask("POST", f"/v1/agents/{kept.name}/keep")["deleted"]
        more = set(deleted) - {one.name for one in others}  # chats that went on from the trunk
        if len(deleted) != len(others) + len(more) or not all(m.startswith("chat-") for m in more):
            raise self.broken(f"keep {kept.name} deleted {deleted}")
        self.ask("POST", f"/v1/agents/{kept.name}/undo")
        for one in (kept, *others):
            self.check(one)
        self.agents[kept.name] = kept
        for one in others:
            self.ask("DELETE", f"/v1/agents/{one.name}?forever=true")
        self.forget(trunk)

    def pause(self) -> None:
        """Have an agent on disk alone, and back."""
        agent = self.some()
        if self.ask("POST", f"/v1/agents/{agent.name}/pause")["state"] != "paused":
            raise self.broken(f"{agent.name} was not paused")
        if self.rng.random() < 0.5:
            self.ask("POST", f"/v1/agents/{agent.name}/resume")
        self.check(agent)

    def delete(self) -> None:
        """Delete an agent; half of the time bring it back, else for ever."""
        if not self.agents:
            return
        agent = self.rng.choice(list(self.agents.values()))
        if agent.messages and self.rng.random() < 0.5:  # of who said nothing nothing is kept
            self.ask("DELETE", f"/v1/agents/{agent.name}")
            self.ask("POST", f"/v1/agents/{agent.name}/undo")
            self.check(agent)
        else:
            self.forget(agent)
            if self.served.http.get(f"/v1/agents/{agent.name}").status_code != 404:
                raise self.broken(f"{agent.name} is there after it was deleted for ever")

    def prune(self) -> None:
        """Delete all but a few agents, so that what there is does not grow with time."""
        for agent in list(self.agents.values())[:-4]:
            self.forget(agent)

    def recover(self) -> None:
        """Go back, after a kill, to what is there: all that was told to be on disk, at least."""
        for agent in list(self.agents.values()):
            found = self.served.http.get(f"/v1/agents/{agent.name}")
            now = found.json() if found.is_success else {"n_tokens": 0, "history_digest": ""}
            n_there = next(
                (
                    n
                    for n in range(len(agent.states), 0, -1)
                    if digest(agent.states[n - 1].wanted(now["n_tokens"])) == now["history_digest"]
                ),
                0,
            )
            if any(state.is_kept for state in agent.states[n_there:]):
                self.check_history(agent, now)
                raise self.broken(f"{agent.name} has lost what was on disk: {now}")
            del agent.states[n_there:]
            if not n_there:
                del self.agents[agent.name]


def said_in(answer: Any) -> str:
    """Return the text of an answer of the chat route."""
    return answer["choices"][0]["message"]["content"] or ""


class Fleet:
    """Workers, each in a thread of its own."""

    def __init__(self, workers: list[Worker]) -> None:
        self.workers = workers

    def run(self, seed: str, until_s: float, meanwhile: Callable[[], None] | None = None) -> None:
        """Have all workers operate until a time; every one does at least one operation.

        Raises:
            BrokenError: what the first of them found.
        """
        found: list[BaseException] = []

        def work(worker: Worker) -> None:
            worker.rng = random.Random(f"{seed}/{worker.name}")
            try:
                while not found:
                    worker.operate()
                    worker.prune()
                    if time.monotonic() >= until_s:
                        return
            except (BrokenError, httpx.HTTPError, KeyError, ValueError) as error:
                found.append(error)

        threads = [threading.Thread(target=work, args=(one,)) for one in self.workers]
        for thread in threads:
            thread.start()
        try:
            if meanwhile is not None:
                meanwhile()
        finally:
            for thread in threads:
                thread.join()
        for error in found:
            if isinstance(error, BrokenError):
                raise error
            raise BrokenError(f"{type(error).__name__}: {error}") from error
