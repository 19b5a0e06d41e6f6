"""Finds a checkpoint: bundled, in a folder, or on the Hugging Face hub."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcellar.errors import ModelError
from kvcellar.models.options import DEMO, ProgressFn

DEMO_FOLDER = Path(__file__).parent / "demo"

CHECKPOINT_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""What is downloaded of a checkpoint."""

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def is_local(name_or_path: str | Path) -> bool:
    """Return true if a model cannot be one of the hub's: it is here, or its name is a path."""
    return (
        name_or_path == DEMO
        or Path(name_or_path).expanduser().exists()
        or isinstance(name_or_path, Path)
        or not HUB_ID.fullmatch(name_or_path)
    )


def find_checkpoint(name_or_path: str | Path, report: ProgressFn) -> Path:
    """Return the folder of a checkpoint; download it where the name is one of the hub's.

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
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        hint = "; GGUF files are not supported" if path.suffix == ".gguf" else ""
        if path.suffix == ".pte":
            hint = "; for an ExecuTorch program choose the backend executorch"
        raise ModelError(
            f"{path} is a file; give the folder of a Hugging Face checkpoint, with its config, "
            f"tokenizer and safetensors{hint}"
        )
    if isinstance(name_or_path, Path) or not HUB_ID.fullmatch(name_or_path):
        raise ModelError(f"there is no folder {path}; give a checkpoint's folder, or {DEMO!r}")
    return from_hub(name_or_path, report)


def from_hub(name: str, report: ProgressFn, patterns: Sequence[str] = CHECKPOINT_FILES) -> Path:
    """Download a checkpoint, or take the local copy of an earlier download.

    Args:
        name: as the hub calls it.
        report: told about the progress.
        patterns: which files.

    Raises:
        ModelError: no such model, a licence to accept, or no connection.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        folder = snapshot_download(
            name,
            allow_patterns=list(patterns),
            ignore_patterns=["*/*", "consolidated*"],  # other formats of the same weights
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
            f"check the spelling, or log in where it is private"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"there is no folder {name!r} here, no copy of a model of that name from an earlier "
            f"download, and the Hugging Face hub cannot be reached (offline?); connect, or give a "
            f"checkpoint's folder, or {DEMO!r}"
        ) from error
    except (OSError, ValueError) as error:
        raise ModelError(f"downloading {name!r} failed: {error}; try again") from error
    return Path(folder)


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
