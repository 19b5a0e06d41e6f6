"""A process without what only Unix has: it generates, chats and serves, and says what came out.

python -m tests.unixless STORE

Libraries are loaded before their platform is taken away, so this says of our code alone that it
does without. The kernel is left out, too: nothing builds it there yet.
"""

from __future__ import annotations

import importlib
import io
import json
import mmap
import os
import queue
import runpy
import select
import signal
import socket
import sys
import threading
import urllib.request
from pathlib import Path

MODULES = "fcntl resource pwd grp termios tty pty readline uvloop syslog posix curses"
OS = """
O_NOFOLLOW O_NONBLOCK O_CLOEXEC O_DIRECTORY O_SYNC fork forkpty killpg getpgid setsid setpriority
getpriority PRIO_PROCESS nice sched_getaffinity sched_setaffinity posix_fadvise posix_fallocate
getuid geteuid getgid getegid register_at_fork sysconf pread preadv pwrite pwritev statvfs fchmod
fchown chown mkfifo uname wait4 openpty getloadavg memfd_create"""
SIGNALS = "setitimer ITIMER_PROF SIGPROF SIGUSR1 SIGUSR2 SIGALRM SIGHUP SIGPIPE pthread_sigmask"
MAPS = "MAP_PRIVATE MAP_ANONYMOUS MAP_ANON MAP_SHARED MADV_HUGEPAGE MADV_DONTNEED MADV_WILLNEED"
LIBRARIES = """
torch transformers safetensors.torch gguf uvicorn fastapi httpx typer rich.progress rich.console
rich.table rich.markdown tokenizers jinja2 filelock psutil sqlite3 prometheus_client llguidance
multiprocessing.util concurrent.futures.thread uvicorn.protocols.http.h11_impl asyncio subprocess"""


def hide() -> None:
    """Take away what Windows has not."""
    for name in MODULES.split():
        sys.modules[name] = None  # type: ignore[assignment]
    for module, names in ((os, OS), (signal, SIGNALS), (mmap, MAPS), (select, "poll epoll")):
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    sys.modules["kvcellar.kernel._native"] = None  # type: ignore[assignment]
    sys.platform = "win32"


def load_by_transformers() -> None:
    """Have transformers load what it imports when a model is asked for."""
    from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

    folder = Path(__file__).parents[1] / "src" / "kvcellar" / "models" / "demo"
    AutoTokenizer.from_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(folder)
    assert AttentionInterface


def worker() -> None:
    """Render chat templates, as ``kvcellar/models/text/render_worker.py`` does, without Unix."""
    importlib.import_module("transformers.utils.chat_template_utils")
    script = Path(__file__).parents[1] / "src" / "kvcellar" / "models" / "text" / "render_worker.py"
    hide()
    runpy.run_path(str(script), run_name="__main__")


def main(store: str) -> None:
    sys.modules["torchao"] = None  # type: ignore[assignment]  # seconds, for nothing here
    for name in LIBRARIES.split():
        importlib.import_module(name)
    load_by_transformers()
    hide()
    from kvcellar.cli import app
    from kvcellar.models.text import rendering

    rendering._SCRIPT = Path(__file__)

    def run(*args: str) -> None:
        app([*args], standalone_mode=False)

    asked = ("--max-tokens", "4", "--temperature", "0", "--store", store, "--json")
    run("generate", "demo", "-p", "def add(a, b):", *asked[:4], "--json")
    run("agents", "create", "poet", "--model", "demo", "--store", store, "--json")
    run("agents", "generate", "poet", "import os", *asked)
    sys.stdin = io.StringIO("import os\n")
    run("chat", "demo", *asked[:4], "--json")
    client = threading.Thread(target=ask_and_stop, args=(noted_port(),))
    client.start()
    run("serve", "demo", "--port", "0", "--store", store, "--capacity", "512")
    client.join()


def noted_port() -> queue.Queue[int]:
    """Return a queue that gets the port on which a server will listen."""
    from kvcellar.server import run

    ports: queue.Queue[int] = queue.Queue()
    listen = run.listen

    def noting(host: str, port: int) -> socket.socket:
        listener = listen(host, port)
        ports.put(listener.getsockname()[1])
        return listener

    run.listen = noting
    return ports


def ask_and_stop(ports: queue.Queue[int]) -> None:
    """Ask a server for one answer, and send it Ctrl-C."""
    url = f"http://127.0.0.1:{ports.get(timeout=300)}/v1/chat/completions"
    body = {"messages": [{"role": "user", "content": "import re"}], "max_tokens": 4}
    headers = {"X-Agent-Id": "poet", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            print(json.dumps(json.load(answer)), flush=True)
    finally:
        os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    if sys.argv[1:]:
        main(sys.argv[1])
    else:
        worker()
