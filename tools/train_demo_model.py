#!/usr/bin/env python3
"""Train the demo model that ships with kvcellar, from scratch.

The model is a small Llama (about 7.6 million parameters, grouped-query attention, 4,096 tokens of
context) with its own byte-level BPE tokenizer of 4,096 entries. It is trained on the sources of
the standard library of the Python that runs this script, plus short chats made from the
docstrings in them. Everything it needs is on the machine already: nothing is downloaded.

    python tools/train_demo_model.py --minutes 60
    python tools/train_demo_model.py --steps 20000 --device cuda --out /tmp/demo

The output folder is an ordinary Hugging Face model folder, with a ``training.json`` that records
how it was made. With ``--steps`` the same seed, data, library versions and hardware give the same
run again; with ``--minutes`` the number of steps depends on the machine's speed.

``--minutes`` counts the time spent in training steps, so the process can be paused (SIGSTOP) or
resumed from a checkpoint (``--checkpoint FILE --resume``) without losing its place in the schedule.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import os
import platform
import random
import sys
import sysconfig
import textwrap
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

DEFAULT_OUT = Path(__file__).resolve().parent.parent / "src" / "kvcellar" / "models" / "demo"
MAX_FOLDER_BYTES = 16_000_000

# --- tokenizer ------------------------------------------------------------------------------------

VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|end|>"
ROLES = ("system", "user", "assistant", "tool")
SPECIAL_TOKENS = [END_OF_TEXT, *(f"<|{role}|>" for role in ROLES), END_OF_TURN]

# In order: the newline that follows a special token, always alone, so that a chat turn's tokens do
# not depend on how its text begins; a word with the one character before it (" self", "_name",
# ".append"); up to three digits; punctuation with the newlines after it ("):\n"); empty lines;
# indentation, less the space that the next word takes.
SPLIT_PATTERN = (
    r"\A\n"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)

# Only ever appends, so a conversation's rendering is a prefix of any longer one's: a KV cache of
# the conversation so far stays valid.
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
{{- raise_exception('unknown role: ' + message.role) }}
{%- endif %}
{{- '<|' + message.role + '|>\\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- elif message.content %}
{%- for part in message.content %}{{- part.text }}{%- endfor %}
{%- endif %}
{{- '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>\\n' }}
{%- endif %}
"""

# --- data -----------------------------------------------------------------------------------------

EXCLUDED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
HELDOUT_SHARE = 0.02
CHAT_SHARE = 0.13
FUNCTION_CHARS = range(60, 1600)
SPLIT_SPACE_SHARE = 0.01

SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a Python programmer.",
    "You write Python code.",
    "Answer with Python code.",
    "You are an agent that reads and writes Python code.",
)
VERBS = (
    "add append apply build call check close compare compute connect convert copy create decode "
    "delete determine encode execute find format generate get give handle initialize insert "
    "iterate list load make open parse print process produce read register remove replace return "
    "run search send set show skip sort split start store test turn update wait write"
)
GREETINGS = (
    ("Hello!", "Hello! Ask me for a Python function."),
    ("Hi", "Hi! What should I write?"),
    ("Hello, who are you?", "I am the demo model of kvcellar. I was trained on the sources of the "
     "Python standard library, so what I write looks like Python."),
    ("What can you do?", "I write text that looks like Python. I am a very small model: expect "
     "the look of the standard library, and many mistakes."),
    ("Thanks!", "You are welcome."),
)  # fmt: skip


@dataclass(frozen=True)
class Function:
    """A function of the standard library that has a docstring."""

    name: str
    source: str
    summary: str
    description: str


def library_files() -> Iterator[tuple[str, str]]:
    """Yield (relative path, text) of the standard library's modules, in a fixed order.

    Left out: tests, and two kinds of generated file, the character maps of ``encodings`` (tables)
    and the interpreter's build settings (which hold paths of the machine that built it).
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        if EXCLUDED_FOLDERS.intersection(relative.parts) or "_sysconfigdata" in path.name:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip() and "gencodec.py" not in text[:500]:
            yield relative.as_posix(), text


def is_heldout(relative_path: str) -> bool:
    """Return true if a file is kept for measuring the loss; nothing but its path decides."""
    digest = hashlib.sha256(relative_path.encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELDOUT_SHARE * 2**32


def documented_functions(relative_path: str, text: str) -> list[Function]:
    """Return the functions and methods of a module that have a docstring and a usable length."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    module = relative_path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    lines = text.splitlines(keepends=True)
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        source = textwrap.dedent("".join(lines[first - 1 : node.end_lineno])).strip()
        description = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        summary = description.split(". ")[0].rstrip(".")
        if len(source) in FUNCTION_CHARS and 12 <= len(summary) <= 200:
            found.append(Function(f"{module}.{node.name}", source, summary, description))
    return found


def request_for(function: Function, rng: random.Random) -> str:
    """Phrase a user's request for a function, from its docstring."""
    name = function.name.rpartition(".")[2]
    first, _, rest = function.summary.partition(" ")
    verb = first.lower()
    known = VERBS.split()
    if verb in known:
        return f"Write a {rng.choice(['', 'Python '])}function to {verb} {rest}."
    if verb.removesuffix("s") in known:
        return f"Write a {rng.choice(['', 'Python '])}function that {verb} {rest}."
    return rng.choice([f"{function.summary}.", f"Write {name}: {function.summary}."])


def make_chat(functions: list[Function], rng: random.Random) -> list[dict[str, str]]:
    """Make a conversation about one or two functions of the same module."""
    messages: list[dict[str, str]] = []

    def say(role: str, content: str) -> None:
        messages.append({"role": role, "content": content})

    if rng.random() < 0.3:
        say("system", rng.choice(SYSTEM_MESSAGES))
    if rng.random() < 0.08:
        question, answer = rng.choice(GREETINGS)
        say("user", question)
        say("assistant", answer)
    function = rng.choice(functions)
    kind = rng.random()
    if kind < 0.15:
        say("user", f"What does {function.name} do?")
        say("assistant", function.description)
    elif kind < 0.25:
        say("user", f"What does {function.name} do?")
        say("assistant", f"read_source({function.name!r})")
        say("tool", function.source)
        say("assistant", function.description)
    else:
        say("user", request_for(function, rng))
        say("assistant", function.source)
    if rng.random() < 0.3:
        other = rng.choice(functions)
        say("user", request_for(other, rng))
        say("assistant", other.source)
    return messages


def encode_documents(
    tokenizer: PreTrainedTokenizerFast, files: list[tuple[str, str]], seed: int
) -> np.ndarray:
    """Encode files and the chats made from them as one row of tokens, in a shuffled order."""
    rng = random.Random(seed)
    documents = [END_OF_TEXT + text for _, text in files]
    modules = [found for path, text in files if (found := documented_functions(path, text))]
    sizes = [len(functions) for functions in modules]
    wanted = CHAT_SHARE / (1 - CHAT_SHARE) * sum(map(len, documents))
    chat_chars = 0
    while chat_chars < wanted:
        functions = rng.choices(modules, weights=sizes)[0]
        chat = tokenizer.apply_chat_template(make_chat(functions, rng), tokenize=False)
        documents.append(chat)
        chat_chars += len(chat)
    rng.shuffle(documents)
    rows = tokenizer(documents, verbose=False)["input_ids"]
    row = np.concatenate([np.asarray(row, dtype=np.int64) for row in rows])
    return split_spaces(row, tokenizer, seed)


def split_spaces(row: np.ndarray, tokenizer: PreTrainedTokenizerFast, seed: int) -> np.ndarray:
    """Split a few tokens like " name" in two, " " and "name".

    A text that ends in a space ("def ") ends in a lone " " token, after which a model that had
    only seen whole " name" tokens would be lost.
    """
    vocabulary = tokenizer.get_vocab()
    [space] = tokenizer.encode(" ")
    mark = tokenizer.convert_ids_to_tokens(space)
    rest = np.full(len(vocabulary), -1)
    for token, index in vocabulary.items():
        if token.startswith(mark) and token[1:2].isalpha():
            rest[index] = vocabulary.get(token[1:], -1)
    chosen = np.random.default_rng(seed).random(len(row)) < SPLIT_SPACE_SHARE
    [places] = np.nonzero(chosen & (rest[row] >= 0))
    split = np.insert(row, places, space)
    split[places + np.arange(1, len(places) + 1)] = rest[row[places]]
    return split


class Windows:
    """Draws windows of ``length + 1`` tokens: every epoch cuts and shuffles the row anew.

    What is drawn depends on the seed and on ``drawn`` alone, so a run can be resumed anywhere.
    """

    def __init__(self, row: np.ndarray, length: int, seed: int, drawn: int = 0) -> None:
        self.row = row
        self.length = length
        self.seed = seed
        self.drawn = drawn
        self.per_epoch = (len(row) - 1) // length - 1
        self._epoch = -1
        self._starts = np.empty(0, dtype=np.int64)

    def _start(self, index: int) -> int:
        epoch, place = divmod(index, self.per_epoch)
        if epoch != self._epoch:
            rng = np.random.default_rng([self.seed, self.length, epoch])
            offset = int(rng.integers(self.length))
            self._starts = rng.permutation(self.per_epoch) * self.length + offset
            self._epoch = epoch
        return int(self._starts[place])

    def draw(self, count: int) -> torch.Tensor:
        """Return the next ``count`` windows."""
        starts = [self._start(self.drawn + i) for i in range(count)]
        self.drawn += count
        return torch.from_numpy(np.stack([self.row[s : s + self.length + 1] for s in starts]))


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train the byte-level BPE. Encoding adds no token of its own; the chat template adds BOS."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        extra_special_tokens=SPECIAL_TOKENS[1:],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
        padding_side="left",
    )


# --- model ----------------------------------------------------------------------------------------


def model_config() -> LlamaConfig:
    """Return the demo model's shape: about 7.6 million parameters, 15.2 MB in bfloat16."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=320,
        intermediate_size=832,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


def language_loss(
    model: LlamaForCausalLM, windows: torch.Tensor, *, reduction: str = "mean"
) -> torch.Tensor:
    """Return the cross-entropy, in nats, of every window's tokens after its first."""
    logits = model(windows[:, :-1], use_cache=False).logits.flatten(0, 1)
    return functional.cross_entropy(logits.float(), windows[:, 1:].flatten(), reduction=reduction)


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def heldout_loss(model: LlamaForCausalLM, row: np.ndarray, context: int) -> float:
    """Return the mean loss, in nats per token, over a row cut into windows of ``context``."""
    was_training = model.training
    model.eval()
    tokens = torch.from_numpy(row).to(model.device)
    total = 0.0
    for start in range(0, len(tokens) - 1, context):
        window = tokens[None, start : start + context + 1]
        total += language_loss(model, window, reduction="sum").item()
    model.train(was_training)
    return total / (len(tokens) - 1)


# --- training -------------------------------------------------------------------------------------

# (share of the run from which it holds, tokens of context): most of the run is on short windows,
# which cost least; the end teaches the whole context.
STAGES = ((0.0, 512), (0.72, 2048), (0.90, 4096))
WARMUP = 0.02
DECAY_FROM = 0.4
LONGEST_STEP_S = 30.0  # a step that took longer was paused: count no more than this


@dataclass
class Progressed:
    """Progress of a run."""

    step: int = 0
    active_seconds: float = 0.0
    tokens: int = 0
    stage: int = 0
    drawn: int = 0


def learning_rate_factor(progress: float) -> float:
    """Warm up, hold, then fall in a line to (almost) zero at the end of the run."""
    if progress < WARMUP:
        return max(progress / WARMUP, 0.01)
    return min(1.0, max((1 - progress) / (1 - DECAY_FROM), 0.01))


def make_optimizers(
    model: LlamaForCausalLM, matrix_lr: float, other_lr: float, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """Make Muon for the matrices inside the layers, AdamW for the embeddings and the norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": [model.get_input_embeddings().weight], "weight_decay": weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    muon = torch.optim.Muon(
        matrices, lr=matrix_lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(groups, lr=other_lr, betas=(0.9, 0.95))
    for optimizer in (muon, adamw):
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return [muon, adamw]


class Reporter:
    """Shows progress: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, seconds_between_lines: float = 20.0) -> None:
        self.seconds_between_lines = seconds_between_lines
        self._last = -math.inf
        self._terminal = sys.stdout.isatty()
        self._bar = tqdm(
            total=1.0,
            disable=not self._terminal,
            file=sys.stdout,
            bar_format="{percentage:5.1f}% |{bar}| {elapsed} {desc}",
        )

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        self._bar.write(line, file=sys.stdout)
        sys.stdout.flush()

    def update(self, progress: float, line: str) -> None:
        """Show how far the run is."""
        now = time.monotonic()
        if self._terminal:
            self._bar.n = progress
            self._bar.set_description_str(line)
        elif now - self._last > self.seconds_between_lines:
            self._last = now
            self.say(f"{progress:6.1%}  {line}")


def save_checkpoint(
    path: Path,
    model: LlamaForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    progressed: Progressed,
) -> None:
    """Write all that ``--resume`` needs, replacing the file in one step."""
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "progressed": asdict(progressed),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    torch.save(state, partial)
    partial.replace(path)


def train(
    model: LlamaForCausalLM,
    row: np.ndarray,
    heldout: np.ndarray,
    args: argparse.Namespace,
    reporter: Reporter,
) -> Progressed:
    """Train until the budget of steps or minutes is spent."""
    optimizers = make_optimizers(model, args.matrix_lr, args.other_lr, args.weight_decay)
    progressed = Progressed()
    if args.resume and args.checkpoint.exists():
        state = torch.load(args.checkpoint, map_location=model.device, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        progressed = Progressed(**state["progressed"])
        reporter.say(f"resumed at step {progressed.step} from {args.checkpoint}")

    windows = Windows(row, STAGES[progressed.stage][1], args.seed, progressed.drawn)
    next_check = progressed.active_seconds + args.checkpoint_every * 60
    average = math.nan
    if args.compile:
        model.model.compile(dynamic=False)
    model.train()
    while True:
        if args.steps:
            progress = progressed.step / args.steps
        else:
            progress = progressed.active_seconds / (args.minutes * 60)
        if progress >= 1:
            return progressed
        started = time.monotonic()

        stage = max(i for i, (start, _) in enumerate(STAGES) if progress >= start)
        if stage != progressed.stage:
            progressed.stage = stage
            windows = Windows(row, STAGES[stage][1], args.seed)
        factor = learning_rate_factor(progress)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor

        batch = windows.draw(max(1, args.batch_tokens // windows.length)).to(model.device)
        parts = batch.split(max(1, args.micro_tokens // windows.length))
        loss = 0.0
        for part in parts:
            with torch.autocast(model.device.type, dtype=torch.bfloat16):
                share = language_loss(model, part) * (len(part) / len(batch))
            share.backward()
            loss += share.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

        seconds = min(time.monotonic() - started, LONGEST_STEP_S)
        progressed.step += 1
        progressed.active_seconds += seconds
        progressed.tokens += len(batch) * windows.length
        progressed.drawn = windows.drawn
        average = loss if math.isnan(average) else 0.95 * average + 0.05 * loss
        speed = len(batch) * windows.length / seconds
        reporter.update(
            progress,
            f"step {progressed.step}  loss {average:.3f}  context {windows.length}  "
            f"{progressed.tokens / 1e6:.2f}M tokens  {speed:,.0f}/s",
        )
        if progressed.active_seconds >= next_check:
            next_check += args.checkpoint_every * 60
            measured = heldout_loss(model, heldout, 1024)
            reporter.say(f"held-out loss {measured:.4f} after step {progressed.step}")
            if args.checkpoint:
                save_checkpoint(args.checkpoint, model, optimizers, progressed)


# --- writing the result ---------------------------------------------------------------------------


def hardware(device: torch.device) -> str:
    """Name what the training ran on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"CPU ({name}), {torch.get_num_threads()} threads"


def write_model(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path
) -> LlamaForCausalLM:
    """Write a Hugging Face model folder in bfloat16, and return the model read back from it."""
    out.mkdir(parents=True, exist_ok=True)
    model.to(device="cpu", dtype=torch.bfloat16)
    end_ids = [tokenizer.convert_tokens_to_ids(token) for token in (END_OF_TEXT, END_OF_TURN)]
    model.generation_config = GenerationConfig(
        bos_token_id=end_ids[0], eos_token_id=end_ids, pad_token_id=end_ids[0]
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    # The class's name in every release of transformers; the newest write another.
    path = out / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n")
    (out / "model.safetensors").chmod(0o644)  # written for the owner's eyes alone
    return AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)


def sample(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> str:
    """Return a few sampled texts: two continuations and a chat reply."""
    question = [{"role": "user", "content": "Write a Python function to return the sum of a list."}]
    prompts = [
        END_OF_TEXT + "import os\n",
        END_OF_TEXT + "def ",
        tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True),
    ]
    torch.manual_seed(seed)
    texts = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt")
        tokens = model.generate(
            **inputs, max_new_tokens=150, do_sample=True, temperature=0.7, top_p=0.95
        )
        texts.append(tokenizer.decode(tokens[0]))
    return "\n\n-----\n".join(texts)


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--minutes", type=float, default=60.0, help="time to spend in training")
    budget.add_argument("--steps", type=int, help="steps to train for, instead of --minutes")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder to write")
    parser.add_argument("--seed", type=int, default=20, help="of weights, data order and sample")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: torch's choice")
    parser.add_argument("--compile", action="store_true", help="faster steps, slower start")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="tokens per step")
    parser.add_argument("--micro-tokens", type=int, default=4096, help="tokens per forward pass")
    parser.add_argument("--matrix-lr", type=float, default=4e-3, help="peak, for Muon")
    parser.add_argument("--other-lr", type=float, default=3e-3, help="peak, for AdamW")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--checkpoint", type=Path, help="file for checkpoints (default: none)")
    parser.add_argument(
        "--checkpoint-every",
        type=float,
        default=5.0,
        metavar="MINUTES",
        help="minutes of training between measurements of the held-out loss, and checkpoints",
    )
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint, if there")
    args = parser.parse_args()
    if args.resume and not args.checkpoint:
        parser.error("--resume needs --checkpoint FILE")
    return args


def main() -> None:
    """Prepare the data, train, write the folder and print a sample."""
    args = parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(args.device)
    torch.manual_seed(args.seed)

    reporter = Reporter()
    files = list(library_files())
    training_files = [(path, text) for path, text in files if not is_heldout(path)]
    heldout_files = [(path, text) for path, text in files if is_heldout(path)]
    heldout_text = "".join(END_OF_TEXT + text for _, text in heldout_files)
    heldout_bytes = sum(len(text.encode()) for _, text in heldout_files)

    tokenizer = train_tokenizer([text for _, text in training_files])
    row = encode_documents(tokenizer, training_files, args.seed)
    heldout = np.asarray(tokenizer(heldout_text, verbose=False)["input_ids"], dtype=np.int64)
    model = LlamaForCausalLM(model_config()).to(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    reporter.say(
        f"{len(training_files)} files, {len(row):,} tokens to train on; "
        f"{len(heldout_files)} files, {len(heldout):,} tokens held out; "
        f"{parameters:,} parameters; {hardware(device)}"
    )

    with reporter:
        progressed = train(model, row, heldout, args, reporter)

    trained_on = hardware(device)
    model = write_model(model, tokenizer, args.out)
    losses = {context: heldout_loss(model, heldout, context) for context in (512, 2048, 4096)}
    loss = losses[2048]
    per_byte = loss * (len(heldout) - 1) / heldout_bytes
    record = {
        "seed": args.seed,
        "steps": progressed.step,
        "minutes": round(progressed.active_seconds / 60, 1),
        "tokens_seen": progressed.tokens,
        "tokens_in_data": len(row),
        "epochs": round(progressed.tokens / len(row), 2),
        "heldout_loss_nats_per_token": round(loss, 4),
        "heldout_loss_nats_per_byte": round(per_byte, 4),
        "heldout_bits_per_byte": round(per_byte / math.log(2), 4),
        "heldout_loss_by_context": {str(k): round(v, 4) for k, v in losses.items()},
        "heldout_tokens": len(heldout),
        "heldout_files": [path for path, _ in heldout_files],
        "parameters": parameters,
        "data": f"standard library of Python {platform.python_version()}, without its tests",
        "context_stages": [{"from": start, "tokens": length} for start, length in STAGES],
        "batch_tokens": args.batch_tokens,
        "matrix_lr": args.matrix_lr,
        "other_lr": args.other_lr,
        "weight_decay": args.weight_decay,
        "hardware": trained_on,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }
    (args.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")

    size = sum(path.stat().st_size for path in args.out.iterdir())
    reporter.say(sample(model, tokenizer, args.seed))
    reporter.say(
        f"\nheld-out loss {loss:.4f} nats per token ({per_byte:.4f} per byte); "
        f"{progressed.step} steps; {size:,} bytes in {args.out}"
    )
    if size > MAX_FOLDER_BYTES:
        sys.exit(f"the folder is larger than {MAX_FOLDER_BYTES:,} bytes")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    main()
