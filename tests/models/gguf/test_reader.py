"""GGUF files that cannot be right get one clear error, and cost what their size costs."""

from __future__ import annotations

import os
import random
import resource
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from kvcellar.errors import ModelError
from kvcellar.models import check_model, load_model
from kvcellar.models.gguf.reader import read_gguf
from kvcellar.models.options import LoadOptions
from tests.models.gguf.families import CASES

N_MUTATIONS = 2000 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 200
MOST_SECONDS = 30
MOST_BYTES = 1 << 30


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    """A small model as GGUF."""
    path = tmp_path_factory.mktemp("whole") / "model.gguf"
    CASES["qwen3moe"].write(path, kind=gguf.GGMLQuantizationType.Q8_0)
    return path.read_bytes()


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(*keys: bytes, n_keys: int | None = None, tensors: bytes = b"", n_tensors: int = 0):
    n_keys = len(keys) if n_keys is None else n_keys
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_keys) + b"".join(keys) + tensors


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


NESTED = text("k") + struct.pack("<IIQ", 9, 9, 1) * 40
HUGE = 1 << 62

WRONG = {
    "begins with b''": b"",
    "begins with b'PK": b"PK\x03\x04" + bytes(60),
    "from before GGUF": b"tjgg" + bytes(60),
    "a web page": b"\n<!DOCTYPE html><html>Access denied",
    "Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\n",
    "truncated: it has 10 bytes": b"GGUF" + bytes([3, 0, 0, 0, 0, 0]),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(8),
    "version 1 of GGUF": b"GGUF" + struct.pack("<IQQ", 1, 0, 0) + bytes(8),
    f"{HUGE} keys": header(n_keys=HUGE),
    f"{HUGE} tensors": header(n_tensors=HUGE),
    f"a name of {HUGE} bytes": header(struct.pack("<Q", HUGE) + bytes(20)),
    f"a text of {HUGE} bytes": header(text("k") + struct.pack("<IQ", 8, HUGE)),
    f"{HUGE} numbers": header(text("k") + struct.pack("<IIQ", 9, 4, HUGE)),
    f"{HUGE} texts": header(text("k") + struct.pack("<IIQ", 9, 8, HUGE)),
    "a list of type 9 for 'k'": header(NESTED),
    "a value of type 77 for 'k'": header(text("k") + struct.pack("<IQ", 77, 0)),
    "the key 'k' twice": header(*[text("k") + struct.pack("<IB", 0, 1)] * 2, bytes(60)),
    "general.alignment=0": header(
        text("general.alignment") + struct.pack("<II", 4, 0), bytes(60), n_keys=1
    ),
    "9 dimensions": header(tensors=tensor("t", (1,) * 9), n_tensors=1),
    "in type 36 of GGUF": header(tensors=tensor("t", (32,), 36), n_tensors=1),
    "the tensor 't' twice": header(tensors=tensor("t", (1,)) * 2 + bytes(99), n_tensors=2),
    "'b' where another tensor lies": header(
        tensors=tensor("a", (16,)) + tensor("b", (16,)) + bytes(200), n_tensors=2
    ),
    "[16] numbers of Q8_0": header(tensors=tensor("t", (16,), 8) + bytes(99), n_tensors=1),
    "[0] numbers of F32": header(tensors=tensor("t", (0,)) + bytes(99), n_tensors=1),
    "ends at byte": header(tensors=tensor("t", (HUGE, 9)) + bytes(99), n_tensors=1),
    "cannot be read": header(struct.pack("<Q", 2) + b"\xff\xfe" + bytes(60)),
    "holds no language model": header(
        text("general.architecture") + struct.pack("<I", 8) + text("llama"),
        tensors=tensor("t", (1,)) + bytes(99),
        n_tensors=1,
    ),
}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("adapter", r"no language model \(it is an adapter \(LoRA\)"),
        ("mmproj", r"no language model \(it is what sees or hears for a model"),
        ("imatrix", "no language model .*quantised"),
        ("vocab", "no language model .*of type 'vocab'"),
        (None, "'bert' that makes embeddings and writes no text"),
    ],
)
def test_what_lies_beside_models_is_refused_by_what_it_is(kind, said, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "bert")
    writer.add_uint32("bert.block_count", 2)
    writer.add_uint32("bert.pooling_type", 1)
    if kind is not None:
        writer.add_string("general.type", kind)
    name = "token_embd.weight" if kind is None else "blk.0.attn_q.weight.lora_a"
    writer.add_tensor(name, np.zeros((8, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=said):
        check_model(LoadOptions(tmp_path / "a.gguf"))


@pytest.mark.parametrize("said", WRONG)
def test_a_file_that_cannot_be_right_is_refused_by_name(said, tmp_path):
    path = tmp_path / "strange.gguf"
    path.write_bytes(WRONG[said])
    with pytest.raises(ModelError) as caught:
        check_model(LoadOptions(path))
    assert said in str(caught.value) and str(path) in str(caught.value)


def test_values_come_as_they_were_written(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_bool("yes", True)
    writer.add_int64("low", -(1 << 40))
    writer.add_float64("half", 0.5)
    writer.add_array("numbers", [3, 1, 2])
    writer.add_array("texts", ["a", "", "\u00e9"])
    writer.add_tensor("t", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(tmp_path / "a.gguf")
    assert file.flag("yes") is True and file.whole("low") == -(1 << 40)
    assert file.number("half") == 0.5 and file.numbers("numbers") == [3, 1, 2]
    assert file.texts("texts") == ["a", "", "\u00e9"] and file.text("none") is None
    assert file.tensors["t"].shape == (2, 3)
    assert file.stored(file.tensors["t"]).view("<f4").tolist() == [[0, 1, 2], [3, 4, 5]]
    for ask in (file.text, file.flag, file.numbers, file.texts, file.number):
        with pytest.raises(ModelError, match=r"has texts=|has low="):
            ask("low" if ask in (file.text, file.flag, file.texts, file.numbers) else "texts")


def test_a_file_that_changed_is_read_again(tmp_path, whole):
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    assert read_gguf(path) is read_gguf(path)
    path.write_bytes(whole[:-1])
    with pytest.raises(ModelError, match="truncated"):
        read_gguf(path)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A file with one to four things wrong, most of them where its lengths and counts are."""
    found = bytearray(data)
    head = data.rindex(b"blk.") + 60
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(4, head if rng.random() < 0.9 else len(found)) % len(found)
        match rng.randrange(6):
            case 0:
                found[at] ^= 1 << rng.randrange(8)
            case 1:
                found[at] = rng.randrange(256)
            case 2:
                value = rng.choice(
                    [0, 1, 0xFF, 1 << 31, 1 << 40, (1 << 64) - 1, rng.getrandbits(64)]
                )
                found[at : at + 8] = struct.pack("<Q", value)
            case 3:
                del found[at : at + rng.choice([1, 4, 8, 1000])]
            case 4:
                found[at:at] = rng.randbytes(rng.choice([1, 4, 8, 100]))
            case 5:
                del found[at if rng.random() < 0.3 else len(found) - rng.randrange(1, 99) :]
        head = min(head, len(found))
        if len(found) < 40:
            break
    return bytes(found)


@pytest.mark.filterwarnings("ignore::kvcellar.models.check.InexactModelWarning")
def test_a_damaged_file_is_refused_or_loaded_and_nothing_else(whole, tmp_path):
    rng = random.Random(43)
    path = tmp_path / "damaged.gguf"
    refused = loaded = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for at in range(N_MUTATIONS):
        path.write_bytes(mutated(whole, rng))
        start = time.process_time()
        try:
            load_model(path, is_unchecked=True, dtype="float32", weights="none")
            loaded += 1
        except ModelError as error:
            assert len(str(error)) < 2000, at
            refused += 1
        assert time.process_time() - start < MOST_SECONDS, at
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 < MOST_BYTES
    assert refused > loaded > 0
    print(f"{refused} refused, {loaded} loaded, {grown / 1024:.0f} MiB more at most")


def test_folders_with_several_files_ask_which(tmp_path, whole):
    for name in ("a.gguf", "b.gguf"):
        Path(tmp_path / name).write_bytes(whole)
    with pytest.raises(ModelError, match=r"holds 2 GGUF files: a.gguf, b.gguf; give one of them"):
        load_model(tmp_path)
