#!/usr/bin/env python3
"""Score a model by lm-eval twice, through the server and by transformers, and compare.

lm-eval is installed from PyPI into an environment of its own, which sees this one's torch and
transformers. It asks `kvcellar serve --dtype float32` through `local-completions`, and runs the
same checkpoint by its own `hf`; three tasks are written here: choices (log-likelihoods), texts
(rolling log-likelihood), and words (greedy generation).

Every score has to be the same to 0.001, and so has the log-likelihood of every choice; the texts
that are generated have to be equal. The last lines are a table of the scores.

    python tools/run_lm_eval.py
    python tools/run_lm_eval.py --model path/to/a/checkpoint
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PACKAGES = ("lm-eval[api,hf]==0.4.13",)
WITHIN = 1e-3
PATIENCE_S = 900.0

PLACES = ("a hut", "the port", "Rome", "the hills", "a mine", "the north", "a shop", "the lake")
THINGS = ("salt", "oil", "wool", "tin", "glass", "rope", "corn", "ink")

TASK = """\
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
task: {name}
metadata: {{version: 1}}
"""
TASKS = {
    "made_choices": """\
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_target: "{{answer}}"
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "made_text": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "made_words": """\
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{target}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 12, do_sample: false, temperature: 0}
metric_list: [{metric: exact_match}]
""",
}


def main() -> int:
    """Run it; 0 where the scores agree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("build/lm-eval"))
    parser.add_argument("--model", help="a checkpoint that transformers reads; default: the demo")
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    lm_eval = install(folder / "venv")
    write_tasks(folder / "tasks")
    checkpoint = args.model or str(demo())
    by_hf = ["--model", "hf", "--model_args", f"pretrained={checkpoint},dtype=float32"]
    want = scored(lm_eval, folder, "hf", [*by_hf, "--device", "cpu"])
    with serving(checkpoint, folder) as url:
        said = f"base_url={url}/v1/completions,model=made,tokenizer={checkpoint}"
        more = "num_concurrent=2,max_length=1024,tokenized_requests=True"
        ours = ["--model", "local-completions", "--model_args", f"{said},{more}"]
        got = scored(lm_eval, folder, "kvcellar", ours)
    print(table(want, got))
    problems = differences(want, got)
    for problem in problems:
        print(f"FAILED: {problem}")
    return 1 if problems else 0


def demo() -> Path:
    """Return the folder of the bundled model."""
    from kvcellar.models.files.hub import DEMO_FOLDER

    return DEMO_FOLDER


def install(folder: Path) -> Path:
    """Install lm-eval, where it is not there in this version; return its command."""
    mark = folder / "installed.txt"
    if not (mark.is_file() and mark.read_text() == "\n".join(PACKAGES)):
        print(f"installing {', '.join(PACKAGES)} ...", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        own = folder / "lib" / version / "site-packages"
        outer = sysconfig.get_paths()["purelib"]
        (own / "outer.pth").write_text(f"import sys; sys.path.append({outer!r})\n")
        pip = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install"]
        subprocess.run([*pip, "--quiet", *PACKAGES], check=True)
        mark.write_text("\n".join(PACKAGES))
    return folder / "bin" / "lm_eval"


def write_tasks(folder: Path) -> None:
    """Write the tasks and their documents, the same every time."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pairs = [(place, thing) for place in PLACES for thing in THINGS]
    documents: dict[str, list[dict[str, Any]]] = {
        "made_choices": [
            {
                "text": f"They bring {thing} from {place} and sell it. What do they sell?",
                "choices": [f" {other}" for other in THINGS],
                "answer": THINGS.index(thing),
            }
            for place, thing in pairs
        ],
        "made_text": [
            {"text": f"{thing.title()} comes from {place}. " * 12} for place, thing in pairs[::9]
        ],
        "made_words": [
            {"text": f"A ship with {thing} left {place}. The ship had", "target": thing}
            for place, thing in pairs[::5]
        ],
    }
    for name, made in documents.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(one) + "\n" for one in made))
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=data) + TASKS[name])


@contextmanager
def serving(checkpoint: str, folder: Path) -> Iterator[str]:
    """Serve a checkpoint for as long as the block lasts; yield the address."""
    options = ["--port", "0", "--dtype", "float32", "--store", str(folder / "store")]
    command = [sys.executable, "-m", "kvcellar", "serve", f"made={checkpoint}", *options]
    log = folder / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        until = time.monotonic() + PATIENCE_S
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the server did not start: {log.read_text()[-500:]}")
            time.sleep(0.2)
        yield found[0]
    finally:
        process.terminate()
        process.wait(60)


def scored(lm_eval: Path, folder: Path, name: str, model: list[str]) -> dict[str, Any]:
    """Run the tasks with a model; return scores, and what was answered to each document."""
    output = folder / name
    shutil.rmtree(output, ignore_errors=True)
    command = [lm_eval, *model, "--tasks", ",".join(TASKS), "--include_path", folder / "tasks"]
    command += ["--output_path", output, "--log_samples", "--batch_size", "4"]
    quiet = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home"), "OPENAI_API_KEY": "none"}
    with (folder / f"{name}.log").open("w") as log:
        subprocess.run(
            [str(part) for part in command],
            check=True,
            env={**os.environ, **quiet},
            timeout=PATIENCE_S,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    (results,) = output.rglob("results_*.json")
    samples = {}
    for task in TASKS:
        (file,) = output.rglob(f"samples_{task}_*.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        samples[task] = [one["resps"] for one in sorted(lines, key=lambda one: one["doc_id"])]
    return {"scores": json.loads(results.read_text())["results"], "samples": samples}


def metrics(found: dict[str, Any]) -> dict[str, float]:
    """Return the scores of a run by task and metric."""
    return {
        f"{task} {key.split(',')[0]}": value
        for task in TASKS
        for key, value in sorted(found["scores"][task].items())
        if isinstance(value, float) and "stderr" not in key
    }


def differences(want: dict[str, Any], got: dict[str, Any]) -> list[str]:
    """Return what two runs differ in."""
    found = []
    theirs, ours = metrics(want), metrics(got)
    for name, value in theirs.items():
        if abs(value - ours[name]) > WITHIN:
            found.append(f"{name}: {value} by transformers and {ours[name]} by the server")
    for task in TASKS:
        pairs = zip(flat(want["samples"][task]), flat(got["samples"][task]), strict=True)
        for i, (a, b) in enumerate(pairs):
            is_number = isinstance(a, float) or a.lstrip("-").replace(".", "", 1).isdigit()
            if (abs(float(a) - float(b)) > WITHIN) if is_number else a != b:
                found.append(f"{task}, answer {i}: {a!r} by transformers and {b!r} by the server")
    return found


def flat(value: Any) -> list[Any]:
    """Return the numbers and texts in a value; whether a choice was the likeliest left out."""
    if isinstance(value, list):
        return [one for part in value for one in flat(part)]
    return [] if isinstance(value, bool) or value in ("True", "False") else [value]


def table(want: dict[str, Any], got: dict[str, Any]) -> str:
    """Write the scores of both beside each other."""
    theirs, ours = metrics(want), metrics(got)
    lines = [f"{'score':<28} {'transformers':>13} {'kvcellar':>13} {'difference':>11}"]
    for name, value in theirs.items():
        gap = abs(value - ours[name])
        lines.append(f"{name:<28} {value:13.6f} {ours[name]:13.6f} {gap:11.1e}")
    n = sum(len(flat(want["samples"][task])) for task in TASKS)
    return "\n".join([*lines, f"{n} answers compared one by one"])


if __name__ == "__main__":
    sys.exit(main())
