"""The process that renders chat templates, so that one that never ends can be stopped.

Run as a script by ``rendering.py``; imports nothing of kvcellar. A job comes as a length and a
pickle, an answer goes as a length and JSON. What a job may take is limited by the system: a timer
of CPU time ends this process, whatever it is in, and memory beyond the limit is not granted.
Windows has neither: there whoever asked ends this process when it takes too long.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO

MEMORY_BYTES = 1 << 30
"""What rendering may take beyond what the process holds when it is ready."""


def main() -> None:
    """Answer jobs until nobody sends any."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who asked
    jobs = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # what a library prints is no answer
    from transformers.utils.chat_template_utils import (
        _get_template_literal_text,
        _get_template_variables,
        render_jinja_template,
    )

    _limit_memory()
    _send(answers, {"ready": True})
    while header := jobs.read(4):
        payload = jobs.read(struct.unpack("<I", header)[0])
        job = pickle.loads(payload)
        _limit_time(job.pop("cpu_s"))
        try:
            if "literals" in job:
                found = {"text": _get_template_literal_text(job["literals"])}
            elif "variables" in job:
                found = {"text": "\0".join(sorted(_get_template_variables(job["variables"])))}
            else:
                rendered: Any = render_jinja_template(**job)
                found = _bounded(rendered[0][0], 16 * len(payload) + (1 << 20))
        except MemoryError:
            found = {"exceeded": f"more than {MEMORY_BYTES >> 20} MB of memory"}
        except Exception as error:  # jinja's, or whatever the template raised
            found = {"error": str(error) or type(error).__name__}
        finally:
            _limit_time(0.0)
        _send(answers, found)


def _bounded(text: str, most: int) -> dict[str, str]:
    if len(text) > most:
        return {"exceeded": f"{len(text)} characters of output, where {most} are allowed"}
    return {"text": text}


def _limit_time(cpu_s: float) -> None:
    """Let so much CPU time pass before this process ends; 0: as much as there is."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, cpu_s)


def _limit_memory() -> None:
    """Grant ``MEMORY_BYTES`` more than there is now; where that is unknown, nothing is limited."""
    if sys.platform == "win32":
        return
    import resource

    with contextlib.suppress(OSError, ValueError):  # no /proc, or a lower limit is set
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _send(answers: BinaryIO, value: dict[str, Any]) -> None:
    data = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    answers.write(struct.pack("<I", len(data)) + data)
    answers.flush()


if __name__ == "__main__":
    main()
