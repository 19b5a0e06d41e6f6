"""Takes what is said to an agent, and what its answer has to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from kvcellar.agents import ModelHost
from kvcellar.agents.text.reading import Reading, reading_of
from kvcellar.cellar.answers import Asking, params_of
from kvcellar.dialects.messages import read_arguments
from kvcellar.engine import Guide, SamplingParams
from kvcellar.errors import ConfigError, PromptError
from kvcellar.grammar.beginning import begin_guide
from kvcellar.grammar.form import ResponseFormat
from kvcellar.grammar.grammars import MOST_CALLS, Constraint, Grammars
from kvcellar.history import History
from kvcellar.hosting.given_pictures import read_pictures, with_pictures
from kvcellar.models.text.prompts import begun_of
from kvcellar.pictures.given import Given, list_of
from kvcellar.pictures.picture import Picture

T = TypeVar("T")

Said = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""A text, a message, or several messages: what is said next, behind the history."""

_FREE = ("auto", "none")


@dataclass(slots=True, eq=False)
class Wishes:
    """Wishes for one answer, as they were given. For one answer.

    Attributes:
        role: who says a text.
        params: how it is sampled.
        tools: definitions of what may be called; None: as before.
        choice: ``auto``, ``none``, ``required``, or the name of the tool to call.
        form: what the answer has to be; None: anything.
        images: pictures that go with what is said.
        reading: how the answer is read, once its conversation is known.
    """

    role: str
    params: SamplingParams
    tools: list[dict[str, Any]] | None
    choice: str
    form: ResponseFormat | None
    images: list[Given] = field(default_factory=list)
    reading: Reading | None = None
    _pictures: list[Picture] = field(default_factory=list)
    _host: ModelHost | None = None
    _held: Constraint | None = None
    _troubles: Sequence[str] = field(default=())

    @classmethod
    def of(cls, how: Asking) -> Wishes:
        """Take the wishes of whoever asks.

        Raises:
            TypeError: there is no setting of a name that was given.
            ConfigError: a value that cannot work; the message names it.
        """
        given: dict[str, Any] = dict(how)
        role, choice = given.pop("role", "user"), given.pop("tool_choice", "auto")
        images = list_of(given.pop("images", None))
        tools, form = (
            _tools_of(given.pop("tools", None)),
            _form_of(given.pop("response_format", None)),
        )
        return cls(role, params_of(given), tools, choice, form, images)

    def read(
        self,
        host: ModelHost,
        known: Sequence[Mapping[str, Any]],
        known_tools: Sequence[Mapping[str, Any]] | None,
        new: Sequence[Mapping[str, Any]],
    ) -> Reading | None:
        """Find out how the answer is read; None: of a model without text it is not.

        Args:
            host: the model.
            known: messages of the history.
            known_tools: definitions of tools that it has.
            new: messages that are said next.

        Raises:
            ConfigError: it cannot be what is wished for.
        """
        self._host = host
        if host.tokenizer is None:
            if self.tools or self.form is not None:
                raise ConfigError(
                    f"model {host.name!r} has no tokenizer, so no text of it can be held to a form"
                )
            return None
        begun = new[-1] if new and begun_of(new) is not None else None
        if self.form is not None and begun is not None:
            raise ConfigError(
                "response_format holds an answer from its beginning, and this one has begun: the "
                "last message is the assistant's; leave one of them out"
            )
        tools = known_tools if self.tools is None else self.tools
        messages = known if self.tools is None else ()
        reading = reading_of(host, messages, tools, begun=begun)
        reads_calls = bool(reading.tools) and self.choice != "none"
        self.reading = replace(
            reading,
            reads_calls=reads_calls,
            is_forced=reads_calls and self.choice not in _FREE,
            reads_thoughts=self.form is None or reads_calls,
        )
        self._check_choice(self.reading.tools)
        return self.reading

    def show(self, host: ModelHost, said: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return what is said with the pictures that go with it. They are read: for threads.

        Raises:
            PictureError: one cannot be read, or the model reads text alone.
        """
        if not self.images:
            return said
        self._pictures = read_pictures(host, self.images)  # at hand for as long as this is
        return [*said[:-1], with_pictures(said[-1], self._pictures)]

    def read_text(self, host: ModelHost) -> None:
        """Take note that a text is gone on with, in which nobody calls a tool.

        Raises:
            ConfigError: tools or pictures were given.
        """
        if self.images:
            raise ConfigError("a text that is gone on with has no pictures; give messages")
        if self.tools or self.choice not in _FREE:
            raise ConfigError("a text that is gone on with has no tools; give messages")
        self._host = host

    def _check_choice(self, tools: Sequence[Mapping[str, Any]]) -> None:
        if self.choice in _FREE:
            return
        names = [str(tool["function"]["name"]) for tool in tools]
        if not names or self.choice not in ("required", *names):
            raise ConfigError(
                f"tool_choice is {self.choice!r:.80}, and there are the tools "
                f"{', '.join(names) or 'none'}; choose auto, none, required or one of their names"
            )

    async def hold(self, grammars: Grammars) -> SamplingParams:
        """Return how the answer is sampled, held to what it has to be.

        Raises:
            GrammarError: no grammar can be made of that.
        """
        host, form, params = self._host, self.form, self.params
        assert host is not None, "it was read before"
        called = self._callable()
        if called:
            self._held = await grammars.of_calls(
                host,
                called,
                is_forced=self.choice not in _FREE,
                most=MOST_CALLS if self.choice in ("auto", "required") else 1,
                schema=None if form is None else form.value,
                is_strict=form is None or form.is_strict,
            )
        elif form is not None:
            self._held = await grammars.of_form(host, form)
        if self._held is not None and self._held.begin is not None:
            params = replace(params, guide=self._guide)
        return params

    def _callable(self) -> list[Mapping[str, Any]]:
        if self.reading is None or not self.reading.reads_calls:
            return []
        is_any = self.choice in ("auto", "required")
        return [t for t in self.reading.tools if is_any or t["function"]["name"] == self.choice]

    def _guide(self) -> Guide:
        """Begin to hold the answer, once its prompt is known."""
        assert self._host is not None
        reading = self.reading
        guide, self._troubles = begin_guide(
            self._host,
            self._held,
            None if reading is None else reading.dialect.thought,
            is_in_thought=reading is not None and reading.is_in_reasoning,
            has_form=self.form is not None,
        )
        return guide

    def begin(self, prompt: History) -> None:
        """Stand behind the prompt of a request that is nobody's turn."""
        if self.reading is not None and self._host is not None and self._host.tokenizer is not None:
            self.reading.begin(self._host.tokenizer, prompt)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what the answer was not held to, once it has ended."""
        return (*(self._held.notes if self._held is not None else ()), *self._troubles)


def messages_of(said: Said, role: str) -> list[dict[str, Any]]:
    """Return what is said as messages, with arguments of calls as templates take them.

    Raises:
        PromptError: it is no text and no message, or there is none.
    """
    if isinstance(said, str):
        return [{"role": role, "content": said}]
    listed = [said] if isinstance(said, Mapping) else said
    if not isinstance(listed, Sequence) or not all(isinstance(one, Mapping) for one in listed):
        raise PromptError(f"what is said has to be a str, or messages, got {said!r:.80}")
    if not listed:
        raise PromptError("there is no message to answer; give a text, or a message at least")
    return [_with_objects(one) for one in listed]


def each_of(said: Said | Sequence[Said], n: int) -> list[Said]:
    """Return what is said to each of ``n`` branches: to each its own, or to all the same.

    Raises:
        ConfigError: there are more or fewer texts than branches.
    """
    is_same = isinstance(said, str | Mapping) or not isinstance(said, Sequence)
    if is_same or all(isinstance(one, Mapping) for one in said):
        return [said] * n  # type: ignore[list-item]  # of messages, which all of them get
    if len(said) != n:
        raise ConfigError(
            f"{len(said)} texts were given for {n} branches; give one for each, or one for all"
        )
    return list(said)


def _with_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have their arguments as objects, where a text said them."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    found = []
    for call in calls:
        function = dict(call.get("function") or {})
        if isinstance(function.get("arguments"), str):
            function["arguments"] = read_arguments(function["arguments"])
        found.append({**call, "function": function})
    return {**message, "tool_calls": found}


def _tools_of(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return definitions of tools as OpenAI has them, of which the inside is enough.

    Raises:
        ConfigError: one is none.
    """
    if tools is None:
        return None
    found = []
    for tool in tools:
        inside = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(inside, Mapping) or not isinstance(inside.get("name"), str):
            raise ConfigError(
                f"a tool is a mapping with name, description and parameters (a JSON schema), got "
                f"{tool!r:.80}"
            )
        function = dict(inside)
        function.setdefault("parameters", {"type": "object", "properties": {}})
        found.append({"type": "function", "function": function})
    return found


def _form_of(wanted: Mapping[str, Any] | None) -> ResponseFormat | None:
    """Return what an answer has to be: JSON of a schema, given plainly or as OpenAI does.

    Raises:
        ConfigError: it is no schema.
    """
    field = "response_format"
    if wanted is None:
        return None
    if not isinstance(wanted, Mapping):
        raise ConfigError(f"{field} is a mapping, a JSON schema, got {wanted!r:.80}")
    kind = wanted.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return ResponseFormat("schema", wanted.get("schema") or {"type": "object"}, field)
    if kind != "json_schema":
        return ResponseFormat("schema", wanted, field)
    inside = wanted.get("json_schema")
    if not isinstance(inside, Mapping) or not isinstance(inside.get("schema"), Mapping):
        raise ConfigError(f"{field} json_schema comes without a schema")
    return ResponseFormat("schema", inside["schema"], field, inside.get("strict") is not False)
