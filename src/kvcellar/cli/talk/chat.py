"""``kvcellar chat``: talk with a model, turn by turn."""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcellar.cli.common import options
from kvcellar.cli.common.commands import add_command
from kvcellar.cli.common.groups import AnyCacheOptions, ChatSampling, SamplingOptions
from kvcellar.cli.common.images import eyes_of, shelved
from kvcellar.cli.common.terminal import is_interactive, print_note
from kvcellar.cli.store.attached import RunningServer, running_server
from kvcellar.cli.store.store import StorePlace
from kvcellar.cli.talk.generate import followed, show_end, told_prefill
from kvcellar.cli.talk.session import Bound, bound_model
from kvcellar.cli.talk.talking import ChosenImages, Command, Talk, talk
from kvcellar.errors import ModelError, PictureError
from kvcellar.models.files.places import full_path
from kvcellar.models.options import DEMO
from kvcellar.models.sizes.snapshots import what_resumes

if TYPE_CHECKING:
    from kvcellar.engine import SamplingParams
    from kvcellar.pictures.picture import Picture
    from kvcellar.server.commands.verbs import Tell


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(
        app,
        "chat",
        chat_command,
        "kvcellar chat",
        "kvcellar chat ~/models/Qwen3-0.6B --system 'Answer in one sentence.'",
        "printf 'Hello!\\nThanks!\\n' | kvcellar chat --seed 1",
    )


def chat_command(
    model: options.ServersModel = None,
    *,
    system: options.System = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per answer, each on a line.")
    ] = False,
    alone: options.Alone = False,
    store: options.ServersStore = None,
    sampling: ChatSampling,
    loading: AnyCacheOptions,
) -> None:
    """Talk with a model; only what is new is computed in each turn.

    The model reads what its template makes of all that was said. Commands: /image FILE, /undo,
    /reset, /help, /quit. In a pipe every line is one message. Lines between two lines of \"\"\" are
    one message, as are those that end with a backslash and the next, and at a terminal what is
    pasted.

    What a model thinks is dim at a terminal, `reasoning` with --json, and not in a pipe.
    """
    params = sampling.params()
    server = running_server(
        StorePlace(store=store), is_alone=alone, model=model and full_path(model), loading=loading
    )
    if server is not None:
        chat = _ServersChat(*server, system, sampling)
        if is_interactive():
            chat.greet(params)
        talk(chat.talk(model or chat.model_name), as_json=as_json)
        return
    model = model or DEMO
    with bound_model(loading.options_for(model), memory=loading.memory) as bound:
        _check_chats(bound.model.name, bool(bound.model.tokenizer.chat_template))
        own = _OwnChat(bound, system, params.for_model(bound.model.sampling))
        if is_interactive():
            own.greet(loading.cache)
        talk(own.talk(model), as_json=as_json)


def _check_chats(name: str, has_template: bool) -> None:
    """Refuse a model that was not made for conversations, before anything is typed.

    Raises:
        ModelError: it has no chat template.
    """
    if not has_template:
        raise ModelError(
            f"{name} has no chat template, so it is a base model and no chat model; have it go on "
            f"with a text by 'kvcellar generate {name} -p TEXT', or give a template with "
            f"--chat-template"
        )


class _Chat(ABC):
    """A conversation that is kept for as long as the command runs."""

    def __init__(self) -> None:
        """With no picture chosen."""
        self._chosen = ChosenImages()

    @abstractmethod
    def say(self, text: str, tell: Tell) -> dict[str, Any]:
        """Say something; tell the answer, and return what ``--json`` prints of it."""

    @abstractmethod
    def undo(self) -> str:
        """Take back the last turn; say what came of it."""

    @abstractmethod
    def reset(self) -> str:
        """Start again; say so."""

    def talk(self, model: str) -> Talk:
        """Return the conversation as one talks with it."""
        commands = {
            "/undo": Command("take back the last turn", self.undo),
            "/reset": Command("start again", self.reset),
        }
        way_back = (
            f"this chat is not kept; `kvcellar agents chat NAME --model {model}` has one that is"
        )
        return Talk(self.say, show_end, self._chosen, commands, way_back)


class _OwnChat(_Chat):
    """A conversation with a model of this process."""

    def __init__(self, bound: Bound, system: str | None, params: SamplingParams) -> None:
        from kvcellar.engine import Conversation
        from kvcellar.server.commands.thoughts import reading_for

        super().__init__()
        self._bound = bound
        self._eyes = eyes_of(bound.model)
        self._held: list[list[Picture]] = []
        """Pictures of each turn, which are at hand for as long as they are held."""
        self._reading = reading_for(bound.model.tokenizer)
        self._params = params
        self._conversation = Conversation(
            bound.runner,
            bound.cache,
            bound.model.tokenizer,
            system=system,
            eos_token_ids=bound.model.eos_token_ids,
            marks=None if self._reading is None else self._reading.marks,
            eyes=self._eyes,
        )

    def greet(self, kind: str) -> None:
        """Say with what and how one talks."""
        bound = self._bound
        print_note(
            f"{bound.model.name}, {bound.model.held_as} on {bound.model.backend}; {kind} "
            f"cache of {bound.cache.capacity} tokens ({bound.capacity.why}) in "
            f"{bound.cache.config.kv_dtype}; {_sampled(self._params)}; /help"
        )
        _note_model(bound.model.name, what_resumes(bound.cache.config, 1))

    def say(self, text: str, tell: Tell) -> dict[str, Any]:
        """Say something; see the class above."""
        from kvcellar.server.commands.thoughts import ReadAnswer, stops_for

        reading, sent = self._reading, self._chosen.listed()
        pictures = shelved(self._bound.model, self._eyes, sent)
        events = self._conversation.say(
            text,
            replace(self._params, stop=stops_for(reading, self._params.stop)),
            on_prefill=told_prefill(tell, "reading {} of {} new tokens"),
            message_of=None if reading is None else reading.kept,
            pictures=[one.name for one in pictures],
        )
        self._held.append(pictures)
        self._chosen.clear()
        if reading is not None:
            reading.begin(self._bound.model.tokenizer, self._conversation.tokens)
        try:
            return followed(events, ReadAnswer(reading), self._params, tell)
        except PictureError:  # the model cannot read it, so no turn could go on behind it
            self.undo()
            raise

    def undo(self) -> str:
        """Take back the last turn; see the class above."""
        said = self._conversation.undo()
        if said is None:
            return "there is no turn to take back"
        pictures = [base64.b64encode(one.data).decode() for one in self._held.pop()]
        return (
            f"took back: {said} ({self._conversation.cached_tokens} of "
            f"{len(self._conversation.tokens)} tokens are still cached)"
            f"{self._chosen.give_back(pictures)}"
        )

    def reset(self) -> str:
        """Start again; see the class above."""
        self._conversation.reset()
        self._held.clear()
        return "a new conversation"


class _ServersChat(_Chat):
    """A conversation with a model of a running server, which remembers nothing of it but K and V.

    Always: ``_messages`` are what was said, with whatever came of an answer that was cut.
    """

    def __init__(
        self,
        server: RunningServer,
        model: str | None,
        system: str | None,
        sampling: SamplingOptions,
    ) -> None:
        super().__init__()
        self._server = server
        self._model = model
        self._sampling = sampling.as_json()
        self._opening: list[dict[str, Any]] = (
            [] if system is None else [{"role": "system", "content": system}]
        )
        self._messages: list[dict[str, Any]] = list(self._opening)
        self._facts = server.ask("model", model=model)
        _check_chats(self._facts["name"], self._facts["has_template"])

    @property
    def model_name(self) -> str:
        """Name of the model at the server."""
        return str(self._facts["name"])

    def greet(self, params: SamplingParams) -> None:
        """Say with what and how one talks."""
        sampled = _sampled(params.for_model(self._facts["sampling"]))
        print_note(
            f"{self._facts['name']}, {self._facts['weights']}, of the server at "
            f"{self._server.url}; {sampled}; /help"
        )
        _note_model(self._facts["name"], self._facts["resumes"])

    def say(self, text: str, tell: Tell) -> dict[str, Any]:
        """Say something; see the class above."""
        said = {"role": "user", "content": text, **self._chosen.fields()}
        heard = {"text": "", "thought": ""}

        def take(event: dict[str, Any]) -> None:
            for kind in heard.keys() & event.keys():
                heard[kind] += event[kind]
            tell(event)

        try:
            value: dict[str, Any] = self._server.ask(
                "complete",
                take,
                model=self._model,
                messages=[*self._messages, said],
                sampling=self._sampling,
            )
        except KeyboardInterrupt:
            self._keep(said, heard["text"], heard["thought"])
            raise
        self._keep(said, value["text"], value["reasoning"])
        return value

    def _keep(self, said: dict[str, Any], text: str, thought: str) -> None:
        self._chosen.clear()
        answer = {"role": "assistant", "content": text}
        if thought:
            answer["reasoning_content"] = thought
        self._messages += [said, answer]

    def undo(self) -> str:
        """Take back the last turn; see the class above."""
        if len(self._messages) == len(self._opening):
            return "there is no turn to take back"
        said = self._messages[-2]
        del self._messages[-2:]
        return f"took back: {said['content']}{self._chosen.give_back(said.get('images', ()))}"

    def reset(self) -> str:
        """Start again; see the class above."""
        self._messages = list(self._opening)
        return "a new conversation"


def _sampled(params: SamplingParams) -> str:
    return f"temperature {params.temperature:g}, top_p {params.top_p:g}"


def _note_model(name: str, resumes: str) -> None:
    """Say what one should know of a model before one talks with it."""
    if name == DEMO:
        print_note(options.DEMO_NOTE)
    if resumes:
        print_note(resumes)
