#!/usr/bin/env python3
"""Train the Eagle3 head of the bundled model, from the same texts as the model itself.

The head (Li et al., 2025, arXiv:2503.01840) guesses what the model says next from the hidden
states of three of its layers, and from its own hidden state where those are not known yet. It is
trained for the latter as for the former: every step unrolls it several times on its own outputs
(the paper's training-time test). It learns the model's probabilities, on the standard library's
sources, less the files that are held out, and on the model's own continuations of them.

    python tools/train_eagle3.py --minutes 60
    python tools/train_eagle3.py --steps 1500 --out /tmp/head

The output folder is a head in the published format, with a ``training.json`` that records how it
was made. Like ``train_demo_model.py`` it can be paused (SIGSTOP) and resumed (``--checkpoint FILE
--resume``); with ``--steps`` the same seed, data, library versions and hardware give the same run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from train_demo_model import (
    DEFAULT_OUT as MODEL_FOLDER,
)
from train_demo_model import (
    END_OF_TEXT,
    LONGEST_STEP_S,
    Progressed,
    Reporter,
    Windows,
    encode_documents,
    hardware,
    is_heldout,
    learning_rate_factor,
    library_files,
    save_checkpoint,
)
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import kvcellar as kv
from kvcellar.backends.torch.eagle3.network import Eagle3Network
from kvcellar.models import LoadedModel, load_model
from kvcellar.models.eagle3.config import Eagle3Config, default_feature_layers

DEFAULT_OUT = MODEL_FOLDER.parent / "demo_eagle3"
MAX_FOLDER_BYTES = 6_000_000

UNROLLED = 3
"""Passes of one training step: the first on the model's features, the others on the head's own."""

CHAIN = 5
"""Guesses behind each other when it is measured."""

PASS_WEIGHT = 0.8
"""Each pass counts this much of the one before."""

STAGES = ((0.0, 512), (0.9, 2048))
"""(share of the run from which it holds, tokens of a window of text)."""

PROMPT, CONTINUED = 160, 352
"""Tokens of text and of the model's own continuation in a window of the latter kind."""

HELDOUT_WINDOWS = 32


# --- the model that is guessed --------------------------------------------------------------------


class Target:
    """The bundled model, frozen: features and probabilities of texts, and its own texts."""

    def __init__(self, folder: Path, layers: tuple[int, ...]) -> None:
        self.model: LlamaForCausalLM = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        ).eval()
        self.layers = layers

    @torch.no_grad()
    def read(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return features ``[B, T, 3 * hidden]`` and logits ``[B, T, vocab]`` of windows."""
        inner = self.model.model
        seen: dict[int, Tensor] = {}
        modules = [*inner.layers, inner.norm]
        hooks = [
            modules[layer].register_forward_pre_hook(
                lambda module, args, layer=layer: seen.__setitem__(layer, args[0])
            )
            for layer in self.layers
        ]
        try:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = self.model(tokens, use_cache=False).logits
        finally:
            for hook in hooks:
                hook.remove()
        return torch.cat([seen[layer].float() for layer in self.layers], dim=-1), logits.float()


def continue_texts(model: LoadedModel, prompts: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Put ``count`` tokens of the model's own behind each of the prompts ``[n, p]``.

    Every second one is greedy; the others are sampled at temperature 0.8.
    """
    n, length = prompts.shape
    drawn = torch.Generator().manual_seed(seed)
    is_greedy = (torch.arange(n) % 2 == 0)[:, None]
    found = [torch.from_numpy(prompts)]
    config = kv.make_config(model.params, n * (length + count))
    with kv.make_seq_session("torch", config) as session:
        runner = model.bind(session)

        def forward(seq_ids: list[int], tokens: np.ndarray, rows: np.ndarray) -> np.ndarray:
            positions = session.cache.begin_step(
                [(one, len([*same])) for one, same in groupby(seq_ids)]
            )
            logits = runner.forward(tokens, positions, rows)
            session.cache.end_step()
            return logits

        ends = []
        for first in range(0, n, 8):  # prefill, a few at a time
            some = prompts[first : first + 8]
            ids = np.repeat(np.arange(first, first + len(some)), length).tolist()
            rows = np.arange(1, len(some) + 1) * length - 1
            ends.append(forward(ids, some.reshape(-1), rows))
        logits = torch.from_numpy(np.concatenate(ends))
        for i in range(count):
            sampled = torch.multinomial(torch.softmax(logits / 0.8, -1), 1, generator=drawn)
            fresh = torch.where(is_greedy, logits.argmax(-1, keepdim=True), sampled)
            found.append(fresh)
            if i + 1 < count:
                tokens = fresh[:, 0].numpy()
                logits = torch.from_numpy(forward(list(range(n)), tokens, np.arange(n)))
    return torch.cat(found, dim=1).numpy()


def own_texts(
    model: LoadedModel, row: np.ndarray, count: int, seed: int, reporter: Reporter, batch: int = 128
) -> np.ndarray:
    """Have the model go on from places in a text: ``[count, PROMPT + CONTINUED]``."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, len(row) - PROMPT, count)
    found = []
    for first in range(0, count, batch):
        some = np.stack([row[start : start + PROMPT] for start in starts[first : first + batch]])
        found.append(continue_texts(model, some, CONTINUED, seed + first))
        reporter.say(f"the model continued {min(count, first + batch)} of {count} texts")
    return np.concatenate(found)


def prepare_texts(
    model: LoadedModel, count: int, seed: int, reporter: Reporter
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the training files as one row, the model's own texts, and held-out greedy ones."""
    files = list(library_files())
    kept = [(path, text) for path, text in files if not is_heldout(path)]
    row = encode_documents(model.tokenizer, kept, seed)
    heldout_text = "".join(END_OF_TEXT + text for path, text in files if is_heldout(path))
    heldout_row = np.asarray(model.tokenizer(heldout_text, verbose=False)["input_ids"])
    # Greedy ones are every second.
    heldout = own_texts(model, heldout_row, 2 * HELDOUT_WINDOWS, seed, reporter)[::2]
    return row, own_texts(model, row, count, seed, reporter), heldout


# --- the head -------------------------------------------------------------------------------------


def make_config(target: LlamaForCausalLM, draft_vocab_size: int) -> Eagle3Config:
    """Describe a head of the target's own dimensions."""
    config = target.config
    return Eagle3Config(
        hidden_size=config.hidden_size,
        target_hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        draft_vocab_size=draft_vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        max_positions=config.max_position_embeddings,
        rope_parameters=dict(config.rope_parameters),
        feature_layers=default_feature_layers(config.num_hidden_layers),
    )


@torch.no_grad()
def make_head(target: LlamaForCausalLM, config: Eagle3Config, kept: np.ndarray) -> Eagle3Network:
    """Make a head that begins as the target's last layer behind its highest feature.

    Args:
        target: the model that it will guess.
        config: its shape.
        kept: the target's tokens that it can say, ascending.
    """
    head = Eagle3Network(config)
    last, hidden = target.model.layers[-1], config.hidden_size
    head.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
    head.embed_tokens.weight.requires_grad_(False)
    head.fc.weight.mul_(0.1)
    head.fc.weight[:, -hidden:] += torch.eye(hidden)
    for name in ("q_proj", "k_proj", "v_proj"):
        own, theirs = getattr(head.midlayer.self_attn, name), getattr(last.self_attn, name)
        own.weight[:, hidden:] = theirs.weight
    head.midlayer.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight)
    head.midlayer.mlp.load_state_dict(last.mlp.state_dict())
    head.midlayer.hidden_norm.weight.copy_(last.input_layernorm.weight)
    head.midlayer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
    head.norm.weight.copy_(target.model.norm.weight)
    head.lm_head.weight.copy_(target.get_output_embeddings().weight[kept])
    head.d2t.copy_(torch.from_numpy(kept) - torch.arange(len(kept)))
    head.t2d.zero_()
    head.t2d[kept] = True
    return head


class UnrolledAttention:
    """Causal over the first pass, whose pairs are true, and over the same place in later ones.

    In pass j the token at place t stands for position t + j: it sees the true pairs up to t and,
    of what stands between, the head's own.
    """

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend in the next pass."""
        group = q.shape[1] // k.shape[1]
        self._keys.append(k.repeat_interleave(group, dim=1))
        self._values.append(v.repeat_interleave(group, dim=1))
        keys, values = self._keys, self._values
        if len(keys) == 1:
            return functional.scaled_dot_product_attention(q, keys[0], values[0], is_causal=True)
        n, scale = q.shape[2], q.shape[3] ** -0.5
        true = (q @ keys[0].transpose(2, 3)).float() * scale
        unseen = torch.ones(n, n, dtype=torch.bool).triu(1)
        true = true.masked_fill(unseen, float("-inf"))
        own = torch.stack([(q * key).sum(-1).float() * scale for key in keys[1:]], dim=-1)
        weights = torch.softmax(torch.cat((true, own), dim=-1), dim=-1).to(q.dtype)
        out = weights[..., :n] @ values[0]
        for i, value in enumerate(values[1:]):
            out = out + weights[..., n + i, None] * value
        return out


def unroll(
    head: Eagle3Network, tokens: Tensor, features: Tensor, passes: int
) -> list[tuple[int, Tensor]]:
    """Yield the head's logits, pass after pass.

    Args:
        head: the network.
        tokens: ``[B, T + 1]``.
        features: ``[B, T + 1, 3 * hidden]`` of the same tokens.
        passes: how many.

    Returns:
        Per pass j how many places n count, and logits ``[B, T, draft_vocab]``: place t guesses the
        token behind ``tokens[t + j + 1]``; those from n on would look past the end.
    """
    length = tokens.shape[1] - 1
    hidden = head.fc(features[:, :-1])
    attend = UnrolledAttention()
    found = []
    for j in range(passes):
        fresh = functional.pad(tokens[:, 1 + j :], (0, j))
        positions = torch.arange(j, length + j)[None]
        hidden = head.step(fresh, hidden, positions, attend)
        found.append((length - j, head.logits(hidden)))
    return found


def guessing_loss(
    head: Eagle3Network, tokens: Tensor, features: Tensor, wanted: Tensor, counts: Tensor
) -> Tensor:
    """Return the cross-entropy with the target's probabilities, of all passes by weight.

    Args:
        head: the network.
        tokens: ``[B, T + 1]``.
        features: ``[B, T + 1, 3 * hidden]`` of the same tokens.
        wanted: ``[B, T + 1, draft_vocab]``, the target's probabilities behind each token.
        counts: ``[B, T + 1]``, whether the target's likeliest is a token that the head can say.
    """
    total = torch.zeros(())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        passes = unroll(head, tokens, features, UNROLLED)
        for j, (n, said) in enumerate(passes):
            place = slice(1 + j, 1 + j + n)
            logp = torch.log_softmax(said[:, :n].float(), dim=-1)
            each = -(wanted[:, place] * logp).sum(-1)
            here = counts[:, place]
            total = total + PASS_WEIGHT**j * (each * here).sum() / here.sum().clamp(min=1)
    return total / sum(PASS_WEIGHT**j for j in range(UNROLLED))


def loss_of(head: Eagle3Network, target: Target, tokens: Tensor, guess: Any) -> Tensor:
    """Return ``guess`` (the loss above, or that compiled) of windows of tokens.

    The target's probabilities are taken among the tokens that the head can say.
    """
    features, logits = target.read(tokens)
    wanted = torch.softmax(logits[..., head.t2d], dim=-1)
    loss: Tensor = guess(head, tokens, features, wanted, head.t2d[logits.argmax(-1)])
    return loss


@torch.no_grad()
def measure(head: Eagle3Network, target: Target, windows: Tensor) -> tuple[list[float], float]:
    """Measure how good guesses are in the target's own greedy texts that were held out.

    Args:
        head: the network.
        target: the model.
        windows: ``[B, PROMPT + CONTINUED]``, every row greedy behind its prompt.

    Returns:
        Per pass the share of places where all guesses up to it are right, and their sum: the
        accepted tokens of a chain of that many guesses.
    """
    hits = torch.zeros(CHAIN)
    places = 0
    for some in windows.split(8):
        features, _ = target.read(some)
        right = None
        last = some.shape[1] - CHAIN - 1  # beyond, a chain would look past the end
        for j, (_, said) in enumerate(unroll(head, some, features, CHAIN)):
            guesses = said.argmax(-1)
            guesses = guesses + head.d2t[guesses]
            same = guesses[:, PROMPT - 1 : last] == some[:, PROMPT + 1 + j : last + 2 + j]
            right = same if right is None else right & same
            hits[j] += right.sum()
        places += right.numel() if right is not None else 0
    shares = (hits / places).tolist()
    return [round(share, 4) for share in shares], sum(shares)


# --- training -------------------------------------------------------------------------------------


def make_optimizers(
    head: Eagle3Network, matrix_lr: float, other_lr: float
) -> list[torch.optim.Optimizer]:
    """Make Muon for the matrices inside, AdamW for what tokens are read from and the norms."""
    matrices = [*head.midlayer.parameters(), *head.fc.parameters()]
    muon = torch.optim.Muon(
        [p for p in matrices if p.ndim == 2],
        lr=matrix_lr,
        weight_decay=0.0,
        adjust_lr_fn="match_rms_adamw",
    )
    others = [p for p in matrices if p.ndim == 1]
    others += [*head.norm.parameters(), *head.lm_head.parameters()]
    adamw = torch.optim.AdamW(others, lr=other_lr, betas=(0.9, 0.95), weight_decay=0.0)
    for optimizer in (muon, adamw):
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return [muon, adamw]


def train(
    head: Eagle3Network,
    target: Target,
    row: np.ndarray,
    own: np.ndarray,
    heldout: Tensor,
    args: argparse.Namespace,
    reporter: Reporter,
) -> Progressed:
    """Train until the budget of steps or minutes is spent."""
    optimizers = make_optimizers(head, args.matrix_lr, args.other_lr)
    progressed = Progressed()
    if args.resume and args.checkpoint.exists():
        state = torch.load(args.checkpoint, weights_only=True)
        head.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        progressed = Progressed(**state["progressed"])
        reporter.say(f"resumed at step {progressed.step} from {args.checkpoint}")
    windows = Windows(row, STAGES[progressed.stage][1], args.seed, progressed.drawn)
    next_check = progressed.active_seconds + args.checkpoint_every * 60
    average = math.nan
    guess = torch.compile(guessing_loss, dynamic=False) if args.compile else guessing_loss
    while True:
        spent = progressed.step / args.steps if args.steps else None
        progress = progressed.active_seconds / (args.minutes * 60) if spent is None else spent
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
        # One step on text, one on the model's own.
        if progressed.step % 2:
            rng = np.random.default_rng([args.seed, progressed.step])
            chosen = rng.choice(len(own), max(1, args.batch_tokens // own.shape[1]), replace=False)
            batch = torch.from_numpy(own[chosen])
        else:
            # As many tokens as the others have, for one compiled loss.
            batch = windows.draw(max(1, args.batch_tokens // windows.length))[:, :-1]
        loss = loss_of(head, target, batch, guess)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        seconds = min(time.monotonic() - started, LONGEST_STEP_S)
        progressed.step += 1
        progressed.active_seconds += seconds
        progressed.tokens += batch.numel()
        progressed.drawn = windows.drawn
        average = loss.item() if math.isnan(average) else 0.95 * average + 0.05 * loss.item()
        reporter.update(
            progress,
            f"step {progressed.step}  loss {average:.3f}  "
            f"{progressed.tokens / 1e6:.2f}M tokens  {batch.numel() / seconds:,.0f}/s",
        )
        if progressed.active_seconds >= next_check:
            next_check += args.checkpoint_every * 60
            shares, accepted = measure(head, target, heldout)
            reporter.say(f"step {progressed.step}: {accepted:.3f} of {CHAIN} accepted, {shares}")
            if args.checkpoint:
                save_checkpoint(args.checkpoint, head, optimizers, progressed)


# --- writing the result ---------------------------------------------------------------------------


def write_head(head: Eagle3Network, out: Path) -> None:
    """Write a folder in the published format, in bfloat16; the embedding is the target's."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in head.state_dict().items()
        if not name.startswith(("embed_tokens.", "rotary."))
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    config = json.dumps(head.config.to_dict() | {"torch_dtype": "bfloat16"}, indent=2)
    (out / "config.json").write_text(config + "\n")


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--minutes", type=float, default=60.0, help="time to spend in training")
    budget.add_argument("--steps", type=int, help="steps to train for, instead of --minutes")
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER, help="the model to guess")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder to write")
    parser.add_argument("--seed", type=int, default=20, help="of weights, texts and their order")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: torch's choice")
    parser.add_argument("--compile", action="store_true", help="faster steps, slower start")
    parser.add_argument("--batch-tokens", type=int, default=2048, help="tokens per step")
    parser.add_argument("--draft-vocab", type=int, default=2048, help="tokens that it can say")
    parser.add_argument("--own-texts", type=int, default=1280, help="continuations to learn from")
    parser.add_argument("--matrix-lr", type=float, default=4e-3, help="peak, for Muon")
    parser.add_argument("--other-lr", type=float, default=2e-3, help="peak, for AdamW")
    parser.add_argument("--texts", type=Path, help="file for the prepared texts (default: none)")
    parser.add_argument("--checkpoint", type=Path, help="file for checkpoints (default: none)")
    parser.add_argument(
        "--checkpoint-every",
        type=float,
        default=5.0,
        metavar="MINUTES",
        help="minutes of training between measurements on held-out texts, and checkpoints",
    )
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint, if there")
    args = parser.parse_args()
    if args.resume and not args.checkpoint:
        parser.error("--resume needs --checkpoint FILE")
    return args


def main() -> None:
    """Prepare the texts, train, write the folder."""
    args = parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    reporter = Reporter()
    probe = json.loads((args.model / "config.json").read_text())
    target = Target(args.model, default_feature_layers(probe["num_hidden_layers"]))
    model = load_model(args.model, backend="torch", dtype="float32")

    with reporter:
        if args.texts and args.texts.exists():
            row, own, heldout = np.load(args.texts).values()
        else:
            row, own, heldout = prepare_texts(model, args.own_texts, args.seed, reporter)
            if args.texts:
                np.savez(args.texts, row=row, own=own, heldout=heldout)
        counts = np.bincount(row, minlength=probe["vocab_size"]).astype(np.float64) / len(row)
        own_counts = np.bincount(own[:, PROMPT:].reshape(-1), minlength=probe["vocab_size"])
        counts += own_counts / own_counts.sum()
        kept = np.sort(np.argsort(-counts, kind="stable")[: args.draft_vocab])
        covered = own_counts[kept].sum() / own_counts.sum()

        torch.manual_seed(args.seed)
        head = make_head(target.model, make_config(target.model, args.draft_vocab), kept)
        parameters = sum(p.numel() for p in head.parameters() if p.requires_grad)
        reporter.say(
            f"{len(row):,} tokens of text and {own.size:,} of the model's own; {parameters:,} "
            f"parameters; {covered:.2%} of the model's tokens can be said; "
            f"{hardware(torch.device('cpu'))}"
        )
        progressed = train(head, target, row, own, torch.from_numpy(heldout), args, reporter)
        shares, accepted = measure(head, target, torch.from_numpy(heldout))

    write_head(head, args.out)
    record = {
        **asdict(progressed),
        "seed": args.seed,
        "minutes": round(progressed.active_seconds / 60, 1),
        "tokens_in_data": len(row),
        "own_tokens_in_data": int(own.size),
        "heldout_chain_shares": shares,
        "heldout_chain_accepted": round(accepted, 4),
        "own_tokens_covered": round(float(covered), 4),
        "parameters": parameters,
        "data": f"standard library of Python {platform.python_version()}, without its tests, and "
        f"the model's continuations of it",
        "unrolled": UNROLLED,
        "pass_weight": PASS_WEIGHT,
        "context_stages": [{"from": start, "tokens": length} for start, length in STAGES],
        "batch_tokens": args.batch_tokens,
        "matrix_lr": args.matrix_lr,
        "other_lr": args.other_lr,
        "hardware": hardware(torch.device("cpu")),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    (args.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    size = sum(path.stat().st_size for path in args.out.iterdir())
    reporter.say(
        f"held-out: {accepted:.3f} of a chain of {CHAIN} accepted ({shares}); "
        f"{progressed.step} steps; {size:,} bytes in {args.out}"
    )
    if size > MAX_FOLDER_BYTES:
        sys.exit(f"the folder is larger than {MAX_FOLDER_BYTES:,} bytes")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    main()
