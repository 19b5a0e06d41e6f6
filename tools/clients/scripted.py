"""A server whose model says what it is told to say; all else is as ever.

Template, tokenizer, KV, cache, agents, store, parsers and writers are the real ones. A guide allows
one token at a time, each the next of the script, and what else constrains the answer has to allow
it too. Every prompt that reaches the engine is kept, as tokens, with what was reused of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from clients.session import ASIDE, Said
from kvcellar.agents import DEFAULT_RULES, ModelHost, open_host
from kvcellar.dialects import Dialect, dialect_for
from kvcellar.dialects.messages import write_calls
from kvcellar.engine import EngineService, EventStream, FinishEvent, Request
from kvcellar.engine.sampler.guide import Guide
from kvcellar.history import History
from kvcellar.server.config import ServerConfig
from kvcellar.server.run import Server, listen
from kvcellar.server.state.models import ServedModels
from kvcellar.server.state.service import Service
from kvcellar.store import Store, StoreConfig

CONTEXT = 131072
ASSISTANT = "<|assistant|>"
PATIENCE_S = 120.0

FOLDER = Path(__file__).parent
TEMPLATES = {True: "template.jinja", False: "plain.jinja"}
"""Templates that know tools, or do not. They write old thoughts where ``KEEPS`` is true."""

ScriptFn = Callable[[str], Said]
"""From a prompt's text to what is answered."""


@dataclass
class Says:
    """A guide to one sequence of tokens.

    Attributes:
        tokens: what is said, with its end.
        vocab_size: of the model.
        inner: what else constrains the answer.
        troubles: where to note a token that ``inner`` does not allow.
        at: how many were said.
    """

    tokens: list[int]
    vocab_size: int
    inner: Guide | None
    troubles: list[str]
    at: int = 0

    @property
    def is_complete(self) -> bool:
        """True where all is said."""
        return self.at >= len(self.tokens)

    @property
    def end_id(self) -> None:
        """None: nothing stands for what is not allowed."""

    def allowed(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return the one token that comes next."""
        allowed = np.zeros(self.vocab_size, dtype=np.bool_)
        allowed[self.tokens[self.at]] = True
        return allowed

    def accept(self, token_id: int) -> None:
        """Go on with a token."""
        if self.inner is not None:
            if not self.inner.is_complete and self.inner.allowed()[token_id]:
                self.inner.accept(token_id)
            elif token_id != self.tokens[-1]:
                self.troubles.append(f"the answer's grammar refuses its token {self.at}")
                self.inner = None
        self.at += 1

    def fork(self) -> Says:
        """Return a copy that goes on by itself."""
        return replace(self, inner=None if self.inner is None else self.inner.fork())


@dataclass
class Asked:
    """A prompt that reached the engine.

    Attributes:
        prompt: its tokens.
        text: of the prompt.
        said: what was to be answered.
        answer: tokens that were sampled.
        cached: tokens of the prompt that were not computed.
        could: tokens of the prompt that an earlier request had computed in the same places.
        went_on: tokens of the earlier request that it shares most with, answer included.
    """

    prompt: History
    text: str
    said: Said
    answer: tuple[int, ...] = ()
    cached: int = 0
    could: int = 0
    went_on: int = 0


class ScriptedService(EngineService):
    """An engine's thread that tells the engine what to sample."""

    def __init__(self, host: ModelHost, script: ScriptFn, dialect: str | None) -> None:
        """Take the place of a host's own."""
        super().__init__(host.engine)
        self._dialect = dialect_for(host.tokenizer, dialect)
        self.asked: list[Asked] = []
        self.troubles: list[str] = []
        self._script = script
        self._tokenizer: Any = host.tokenizer
        self._end_id = self._tokenizer.convert_tokens_to_ids("<|end|>")

    async def submit(
        self, request: Request, on_finish: Callable[[FinishEvent], None] | None = None
    ) -> EventStream:
        """Queue a request whose answer is the script's."""
        prompt = request.prompt_ids
        text = self._tokenizer.decode(prompt[:].tolist())
        said = self._script(text)
        if said.needs not in text:
            self.troubles.append(f"the prompt lacks {said.needs!r}")
        asked = Asked(prompt, text, said)
        self._compare(asked)
        self.asked.append(asked)
        tokens = [
            *self._tokenizer.encode(written(said, self._dialect), add_special_tokens=False),
            self._end_id,
        ]
        inner, size = request.params.guide, len(self._tokenizer)

        def guide() -> Guide:
            held = None if inner is None else inner()
            if said is ASIDE and held is not None and not held.allowed()[tokens[0]]:
                return held  # a schema of its own, such as a title's
            return Says(tokens, size, held, self.troubles)

        def finished(event: FinishEvent) -> None:
            asked.answer = event.token_ids
            if event.usage is not None:
                asked.cached = event.usage.cached_tokens
            if on_finish is not None:
                on_finish(event)

        params = replace(request.params, guide=guide)
        return await super().submit(replace(request, params=params), finished)

    def _compare(self, asked: Asked) -> None:
        """Find what of a prompt was computed before; the last token's logits are always wanted."""
        for other in self.asked:
            whole = [*other.prompt[:].tolist(), *other.answer[:-1]]
            common = asked.prompt.common_prefix(History(whole))
            if common > asked.could:
                asked.could, asked.went_on = common, len(whole)
        asked.could = min(asked.could, len(asked.prompt) - 1)


def written(said: Said, dialect: Dialect) -> str:
    """Write an answer as a model of a dialect does."""
    if said is ASIDE:
        return said.text
    parts = [said.text] if said.text else []
    if said.call is not None:
        parts.append(write_calls(dialect, [said.call]))
    text = "\n".join(parts)
    marks = dialect.reasoning
    assert marks is not None, "the template has marks of thoughts"
    return f"{marks.begin}\n{said.thought}\n{marks.end}\n\n{text}"


@dataclass
class Heard:
    """A request that came to the server, and how it was answered."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""
    status: int = 0
    answer: bytes = b""

    def line(self) -> str:
        """Write it as a line of JSON, to look at."""
        said = {"body": self.body.decode(), "answer": self.answer.decode()}
        whole = {"method": self.method, "path": self.path, "status": self.status}
        return json.dumps({**whole, "headers": self.headers, **said}, ensure_ascii=False) + "\n"


class Recorder:
    """An ASGI application around the server's that keeps what comes and goes."""

    def __init__(self, app: Any) -> None:
        """Keep nothing yet."""
        self._app = app
        self.heard: list[Heard] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass one request through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        one = Heard(scope["method"], scope["path"], headers)
        self.heard.append(one)

        async def hear() -> Any:
            message = await receive()
            one.body += message.get("body", b"")
            return message

        async def say(message: Any) -> None:
            one.status = message.get("status", one.status)
            one.answer += message.get("body", b"")
            await send(message)

        await self._app(scope, hear, say)


@dataclass
class Scripted:
    """A server that runs.

    Attributes:
        url: where.
        recorder: what came.
        services: of the models that were loaded.
    """

    url: str
    recorder: Recorder
    services: list[ScriptedService] = field(default_factory=list)

    @property
    def asked(self) -> list[Asked]:
        """Prompts, oldest first."""
        return [asked for service in self.services for asked in service.asked]

    @property
    def troubles(self) -> list[str]:
        """Return what went wrong in the engine."""
        return [trouble for service in self.services for trouble in service.troubles]


@contextmanager
def serving(
    model: Path,
    store: Path,
    script: ScriptFn,
    *,
    rules: tuple[str, ...] = DEFAULT_RULES,
    dialect: str | None = None,
) -> Iterator[Scripted]:
    """Serve a model that follows a script, for as long as the block lasts."""
    services: list[ScriptedService] = []

    def load(path: str, progress: Any) -> ModelHost:
        host = open_host(path, capacity=CONTEXT, dtype="float32", progress=progress)
        host.service.close()
        host.service = ScriptedService(host, script, dialect)
        services.append(host.service)
        return host

    config = ServerConfig(port=0, takes_any_model=True, rules=rules, dialect=dialect)
    listener = listen(config.host, 0)
    with contextlib.closing(listener), Store(store, StoreConfig(warm_bytes=1 << 28)) as opened:
        served = ServedModels({"local": str(model)}, load, takes_any=True)
        inside: list[Any] = []
        is_up = threading.Event()

        async def serve() -> None:
            server = Server(Service(config, opened, served))
            recorder = Recorder(server.config.app)
            server.config.app = recorder
            inside.extend((server, recorder, asyncio.get_running_loop()))
            is_up.set()
            await server.run_in_loop(listener)

        thread = threading.Thread(target=lambda: asyncio.run(serve()), name="server")
        thread.start()
        if not is_up.wait(PATIENCE_S):
            raise TimeoutError("the server did not start")
        server, recorder, loop = inside
        try:
            port = listener.getsockname()[1]
            yield Scripted(f"http://127.0.0.1:{port}", recorder, services)
        finally:
            loop.call_soon_threadsafe(server.stop)
            thread.join(PATIENCE_S)


# The model ----------------------------------------------------------------------------------------

WIDTH, LAYERS = 128, 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": LAYERS,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    "tie_word_embeddings": False,
    "dtype": "float32",
}


def make_model(folder: Path, *, keeps_thoughts: bool, knows_tools: bool = True) -> Path:
    """Make a small Llama with random weights and a long context, unless it is there.

    Args:
        folder: where to.
        keeps_thoughts: the template writes the thoughts of all turns, not only of the last.
        knows_tools: the template writes tools and calls; else the server does, in a dialect.
    """
    if (folder / "config.json").is_file():
        return folder
    import torch
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    from kvcellar.models.files.hub import DEMO_FOLDER

    vocab = len(AutoTokenizer.from_pretrained(DEMO_FOLDER))
    torch.manual_seed(1)
    shapes = {"model.embed_tokens": (vocab, WIDTH), "lm_head": (vocab, WIDTH)}
    for i in range(LAYERS):
        for name, rows, columns in (
            ("self_attn.q_proj", 128, WIDTH),
            ("self_attn.k_proj", 64, WIDTH),
            ("self_attn.v_proj", 64, WIDTH),
            ("self_attn.o_proj", WIDTH, 128),
            ("mlp.gate_proj", WIDTH, WIDTH),
            ("mlp.up_proj", WIDTH, WIDTH),
            ("mlp.down_proj", WIDTH, WIDTH),
        ):
            shapes[f"model.layers.{i}.{name}"] = rows, columns
    weights = {f"{name}.weight": 0.05 * torch.randn(*shape) for name, shape in shapes.items()}
    norms = ["model.norm"]
    for i in range(LAYERS):
        norms += [f"model.layers.{i}.{n}_layernorm" for n in ("input", "post_attention")]
    weights |= {f"{name}.weight": torch.ones(WIDTH) for name in norms}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.copy(DEMO_FOLDER / name, folder)
    template = (
        (FOLDER / TEMPLATES[knows_tools]).read_text().replace("KEEPS", str(keeps_thoughts).lower())
    )
    (folder / "chat_template.jinja").write_text(template)
    settings = json.loads((DEMO_FOLDER / "tokenizer_config.json").read_text())
    settings["model_max_length"] = CONTEXT
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ids = {"bos_token_id": 0, "eos_token_id": 5, "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **ids, "vocab_size": vocab}))
    return folder
