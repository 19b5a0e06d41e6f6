#!/usr/bin/env python3
"""Run the agents that people use against the server: a first and a second turn of each.

Claude Code, Codex and OpenCode are installed from npm, in the versions below, into a folder of
their own; each runs with a home of its own there, and knows no other server. The server is
`kvcellar serve` in a process of its own, with a small model that is made here: it says one sentence
and ends, its context is long, and its K and V are computed, kept and read again as any model's.

Any answer of the server's that is a 4xx or 5xx fails the run, and so does a second turn that reads
less than 95% of its prompt from the cache. The last lines are a table of what was measured.

    python tools/run_clients.py
    python tools/run_clients.py --folder build/clients --only codex
    python tools/run_clients.py --model path/to/a/checkpoint    # another model than the made one
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PACKAGES = {
    "@anthropic-ai/claude-code": "2.1.197",
    "@openai/codex": "0.169.0",
    "opencode-ai": "1.18.33",
}
LEAST_REUSE = 0.95
PATIENCE_S = 300.0
"""For one turn of one client."""

FIRST, SECOND = "Say hello.", "And once more."
ANSWER = "Hello, there it is."

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    "tie_word_embeddings": False,
    "dtype": "float32",
}


def main() -> int:
    """Run it; 0 where all went well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("build/clients"))
    parser.add_argument("--model", help="a checkpoint; default: one that is made in the folder")
    parser.add_argument("--only", choices=sorted(CLIENTS), action="append", help="some of them")
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if shutil.which("npm") is None:
        print("npm is not installed; it comes with Node.js, https://nodejs.org", file=sys.stderr)
        return 2
    install(folder / "npm")
    model = args.model or str(make_model(folder / "model"))
    rows, problems = [], []
    for name in args.only or CLIENTS:
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name / "project").mkdir(parents=True)
        with serving(model, folder / name) as server:
            client = Client(name, folder / name, folder / "npm" / "node_modules", server.url)
            setup, command, package = CLIENTS[name]
            setup(client)
            for number, says in enumerate((FIRST, SECOND), 1):
                since = server.n_lines
                output = client.run(command(client, says, number == 2))
                turn = Turn(name, PACKAGES[package], number, server.lines_from(since))
                rows.append(turn)
                problems += turn.problems(output)
    print(table(rows))
    for problem in problems:
        print(f"FAILED: {problem}")
    return 1 if problems else 0


# What is run --------------------------------------------------------------------------------------


def install(folder: Path) -> None:
    """Install the clients, where they are not there in these versions."""
    wanted = {"private": True, "dependencies": PACKAGES}
    manifest = folder / "package.json"
    if manifest.is_file() and json.loads(manifest.read_text()) == wanted:
        return
    print(f"installing {', '.join(f'{n} {v}' for n, v in PACKAGES.items())} ...", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    manifest.write_text(json.dumps(wanted))
    try:
        subprocess.run(
            ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--silent"],
            cwd=folder,
            check=True,
        )
        # npm may not run a package's own script; what these two need of theirs is run here.
        for package, script in (
            ("@anthropic-ai/claude-code", "install.cjs"),
            ("opencode-ai", "postinstall.mjs"),
        ):
            place = folder / "node_modules" / package
            subprocess.run(["node", script], cwd=place, check=True, capture_output=True)
    except BaseException:
        manifest.unlink()
        raise


@dataclass(frozen=True)
class Client:
    """One client, with a home of its own."""

    name: str
    folder: Path
    packages: Path
    url: str

    @property
    def home(self) -> Path:
        """Return where it keeps what it keeps."""
        return self.folder / "home"

    def write(self, path: str, text: str) -> None:
        """Put a file into its home."""
        place = self.home / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)

    def run(self, command: list[str]) -> str:
        """Run it in an empty project; return what it printed."""
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "TERM": "dumb",
            "CI": "1",
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": "none",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
        }
        self.home.mkdir(parents=True, exist_ok=True)
        try:
            done = subprocess.run(
                command,
                cwd=self.folder / "project",
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=PATIENCE_S,
            )
        except subprocess.TimeoutExpired as error:
            return f"it did not end within {PATIENCE_S:g} s: {str(error.stdout or '')[-500:]}"
        return done.stdout + done.stderr


def _claude(client: Client, says: str, goes_on: bool) -> list[str]:
    binary = client.packages / "@anthropic-ai/claude-code/bin/claude.exe"
    return [str(binary), *(["--continue"] if goes_on else []), "-p", says]


def _codex(client: Client, says: str, goes_on: bool) -> list[str]:
    binary = client.packages / "@openai/codex/bin/codex.js"
    resume = ["resume", "--last"] if goes_on else []
    return ["node", str(binary), "exec", "--skip-git-repo-check", *resume, says]


def _codex_files(client: Client) -> None:
    client.write(
        ".codex/config.toml",
        'model = "local"\nmodel_provider = "kvcellar"\n'
        f'model_providers.kvcellar = {{ name = "kvcellar", base_url = "{client.url}/v1" }}\n',
    )


def _opencode(client: Client, says: str, goes_on: bool) -> list[str]:
    binary = client.packages / "opencode-ai/bin/opencode.exe"
    return [str(binary), "run", *(["--continue"] if goes_on else []), says]


def _opencode_files(client: Client) -> None:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{client.url}/v1"},
        "models": {"local": {}},
    }
    config = {"provider": {"kvcellar": provider}, "model": "kvcellar/local"}
    client.write(".config/opencode/opencode.json", json.dumps(config, indent=2))


SetupFn = Callable[[Client], None]
CommandFn = Callable[[Client, str, bool], list[str]]

CLIENTS: dict[str, tuple[SetupFn, CommandFn, str]] = {
    "claude": (lambda _: None, _claude, "@anthropic-ai/claude-code"),
    "codex": (_codex_files, _codex, "@openai/codex"),
    "opencode": (_opencode_files, _opencode, "opencode-ai"),
}
"""What each needs in its home, how a turn of it is run, and its package."""


# The server ---------------------------------------------------------------------------------------


@dataclass
class Server:
    """A `kvcellar serve` that runs, and the lines of its log."""

    url: str = ""
    lines: list[str] = field(default_factory=list)

    @property
    def n_lines(self) -> int:
        """Return how many lines there are."""
        return len(self.lines)

    def lines_from(self, first: int) -> list[dict[str, Any]]:
        """Return what the log says of requests, from a line on."""
        said = [json.loads(line) for line in self.lines[first:] if line.startswith("{")]
        return [line for line in said if "route" in line]


@contextmanager
def serving(model: str, folder: Path) -> Iterator[Server]:
    """Serve for as long as the block lasts."""
    command = [
        *(sys.executable, "-m", "kvcellar", "serve", f"local={model}", "--any-model"),
        *("--port", "0", "--store", str(folder / "store")),
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    server, is_up = Server(), threading.Event()

    def read() -> None:
        assert process.stdout is not None
        with (folder / "server.log").open("w") as log:
            for line in process.stdout:
                log.write(line)
                log.flush()
                server.lines.append(line.strip())
                found = re.search(r"http://127\.0\.0\.1:\d+", line)
                if found and not server.url:
                    server.url = found[0]
                    is_up.set()
        is_up.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        if not is_up.wait(PATIENCE_S) or not server.url:
            raise SystemExit("the server did not start: " + " ".join(server.lines)[-500:])
        yield server
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(10)


# What came of it ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """One turn of a client as the server's log has it."""

    client: str
    version: str
    number: int
    requests: list[dict[str, Any]]

    @property
    def main(self) -> dict[str, Any]:
        """The request with the longest prompt: the conversation, not its title."""
        return max(self.requests, key=_prompt_tokens, default={})

    @property
    def reuse(self) -> float:
        """Part of that prompt that was read from the cache."""
        return _cached_tokens(self.main) / max(1, _prompt_tokens(self.main))

    def problems(self, output: str) -> list[str]:
        """Return what is not as it should be."""
        what = f"{self.client} {self.version}, turn {self.number}"
        found = [
            f"{what}: {line['method']} {line['route']} was answered {line['status']}"
            for line in self.requests
            if line["status"] >= 400
        ]
        if not _prompt_tokens(self.main):
            found.append(f"{what}: no answer was asked for; it printed: {output[-500:]!r}")
        elif ANSWER not in output:
            found.append(f"{what}: it does not show the answer; it printed: {output[-500:]!r}")
        if self.number == 2 and self.reuse < LEAST_REUSE:
            found.append(f"{what}: {self.reuse:.3f} of the prompt came from the cache")
        return found


def _prompt_tokens(line: dict[str, Any]) -> int:
    """Return all tokens of a prompt; Anthropic's protocol counts what was cached apart."""
    names = ("prompt_tokens", "input_tokens", "cache_read_input_tokens")
    names += ("cache_creation_input_tokens",)
    return sum(line.get(name, 0) for name in names)


def _cached_tokens(line: dict[str, Any]) -> int:
    return int(line.get("cached_tokens", line.get("cache_read_input_tokens", 0)))


def table(rows: list[Turn]) -> str:
    """Write what was measured as Markdown."""
    lines = [
        "| client | version | turn | requests | prompt tokens | from cache | share | first token |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        first_s = row.main.get("first_token_s")
        lines.append(
            f"| {row.client} | {row.version} | {row.number} | {len(row.requests)} "
            f"| {_prompt_tokens(row.main):,} | {_cached_tokens(row.main):,} | {row.reuse:.3f} "
            f"| {'' if first_s is None else f'{first_s:.2f} s'} |"
        )
    return "\n".join(lines)


# The model ----------------------------------------------------------------------------------------


def make_model(folder: Path) -> Path:
    """Make a Llama that answers everything with ``ANSWER``: its head knows what follows what.

    Its layers are random and add little to what the embeddings say, so the head reads the last
    token, and each token of the answer leads to the next one and to the end.
    """
    if (folder / "config.json").is_file():
        return folder
    import torch
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    from kvcellar.models.hub import DEMO_FOLDER

    tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER)
    vocab, width = len(tokenizer), CONFIG["hidden_size"]
    assert isinstance(width, int)
    torch.manual_seed(1)
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    newline = tokenizer.encode("\n", add_special_tokens=False)
    said = [newline[-1], *tokenizer.encode(ANSWER, add_special_tokens=False), end]
    assert len(set(said)) == len(said), "a token of the answer leads to one other"
    embeddings = torch.nn.functional.normalize(torch.randn(vocab, width), dim=1)
    embeddings[:, 0] = 1.0  # what all have in common leads to the end
    embeddings = torch.nn.functional.normalize(embeddings, dim=1)
    head = torch.zeros(vocab, width)
    head[end, 0] = 4.0
    for token, following in itertools.pairwise(said):
        own = embeddings[token].clone()
        own[0] = 0.0
        head[following] += 20.0 * own / own.norm()
    weights = {"model.embed_tokens.weight": embeddings, "lm_head.weight": head}
    weights["model.norm.weight"] = torch.ones(width)
    inner, heads = CONFIG["intermediate_size"], CONFIG["num_attention_heads"]
    assert isinstance(inner, int) and isinstance(heads, int)
    own, shared = heads * 64, 2 * 64
    for i in range(4):
        for name, rows, columns, scale in (
            ("self_attn.q_proj", own, width, 0.05),
            ("self_attn.k_proj", shared, width, 0.05),
            ("self_attn.v_proj", shared, width, 0.05),
            ("self_attn.o_proj", width, own, 1e-3),
            ("mlp.gate_proj", inner, width, 0.05),
            ("mlp.up_proj", inner, width, 0.05),
            ("mlp.down_proj", width, inner, 1e-3),
        ):
            weights[f"model.layers.{i}.{name}.weight"] = torch.randn(rows, columns) * scale
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{i}.{name}.weight"] = torch.ones(width)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copy(DEMO_FOLDER / name, folder)
    settings = json.loads((DEMO_FOLDER / "tokenizer_config.json").read_text())
    settings["model_max_length"] = CONFIG["max_position_embeddings"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ids = {"bos_token_id": 0, "eos_token_id": end, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(ids))
    (folder / "config.json").write_text(json.dumps({**CONFIG, **ids, "vocab_size": vocab}))
    return folder


if __name__ == "__main__":
    started = time.perf_counter()
    code = main()
    print(f"{time.perf_counter() - started:.0f} s")
    sys.exit(code)
