"""Small files that ask for much: each is refused within seconds and without the memory it claims."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.lib import format as npy
from PIL import Image
from safetensors.torch import save

from residuum.io.checkpoints import save_checkpoint
from residuum.io.pickle_files import LEGACY_PROTOCOL
from residuum.io.pickle_reader import LEGACY_MAGIC
from residuum.networks import Architecture
from residuum.networks.network import Network
from tests.confined import confined

SECONDS, BYTES = 5, 300_000_000
DOUBLED = b")" + b"q\x00h\x00\x86" * 60  # ((t, t), (t, t)): short to write, endless to walk


# Pickles


def text(value: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value


def table(count: int) -> bytes:
    """A dict of numbers."""
    return b"}(" + b"".join(b"J" + struct.pack("<i", i) + b"N" for i in range(count)) + b"u"


def copies(function: bytes, argument: bytes, count: int) -> bytes:
    """``function(argument)``, six bytes for each call."""
    return argument + b"\x85q\x00c" + function + b"\nq\x01" + b"h\x01h\x00R" * count


def storage(key: bytes = b"0") -> bytes:
    return b"(" + text(b"storage") + b"ctorch\nFloatStorage\n" + text(key) + text(b"cpu") + b"K\x01"


def tensors(count: int) -> bytes:
    """One tensor over one storage of one number, rebuilt again and again."""
    arguments = b"(" + storage() + b"tQK\x00(K\x01K\x01t(K\x01K\x01t\x89}tq\x00"
    return arguments + b"ctorch._utils\n_rebuild_tensor_v2\nq\x01](" + b"h\x01h\x00R" * count + b"e"


def equal_hashes(count: int) -> bytes:
    """A dict whose keys are multiples of 2^61 - 1, the modulus of Python's hash of a number."""
    keys = ((i * (2**61 - 1)).to_bytes(10, "little") for i in range(1, count + 1))
    return b"}(" + b"".join(b"\x8a\x0a" + key + b"N" for key in keys) + b"u"


PICKLES: dict[str, Callable[[], bytes]] = {
    "Counter copies": lambda: copies(b"collections\nCounter", table(100_000), 100),
    "Counter copies, endless": lambda: copies(b"collections\nCounter", table(100_000), 330_000),
    "Size copies": lambda: copies(b"torch\nSize", b"](" + b"K\x01" * 500_000 + b"e", 100),
    "nested tuples": lambda: b")" + b"\x85" * 2_000_000,
    "nested tuples within the budget": lambda: b")" + b"\x85" * 499_000,
    "tensors within the budget": lambda: text(b"x" * 200_000) + tensors(20_000),
    "empty dicts": lambda: b"}" * 4_000_000,
    "empty sets": lambda: b"\x8f" * 4_000_000,
    "tensors of one number": lambda: tensors(800_000),
    "BUILD copies": lambda: (
        table(100_000) + b"q\x00ccollections\nOrderedDict\nq\x01" + b"h\x01)Rh\x00b" * 20_000
    ),
    "device copies": lambda: (
        b"(" + text(b"x" * 1_000_000) + b"tq\x00ctorch\ndevice\nq\x01" + b"h\x01h\x00R" * 10_000
    ),
    "equal hashes": lambda: equal_hashes(150_000),
    "equal long keys": lambda: (
        text(b"x" * 1_900_000)
        + b"q\x00"
        + text(b"x" * 1_900_000)
        + b"q\x01}h\x00Ns"
        + b"h\x01Ns" * 90_000
    ),
    "long storages": lambda: storage() + b"N" * 1_000_000 + b"tq\x00" + b"h\x00Q" * 100_000,
    "endless name": lambda: DOUBLED + text(b"x") + b"\x93",
}


def torch_zip(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02" + content + b".")
        archive.writestr("a/data/0", bytes(4))
        archive.writestr("a/version", "3\n")
    return buffer.getvalue()


def legacy(head: bytes = b"}", body: bytes = b"}", keys: bytes = b"]") -> bytes:
    begin = pickle.dumps(LEGACY_MAGIC, 2) + pickle.dumps(LEGACY_PROTOCOL, 2)
    return begin + b"".join(b"\x80\x02" + section + b"." for section in (head, body, keys))


def tar_as_legacy(digits: int = 500_000) -> bytes:
    """Pickles whose first text is also a tar header, with fields that take quadratic time to find."""
    start = len(legacy().split(b"}")[0]) + len(text(b""))
    header = bytearray(512)
    header[124:136] = b"%011o\0" % digits
    header[156:157] = b"x"
    archive = legacy(text(bytes(header[start:]) + b"1" * digits))
    header[148:156] = b"%06o\0 " % (sum(archive[:512]) + 8 * ord(" "))
    return legacy(text(bytes(header[start:]) + b"1" * digits))


# Archives


def directory(count: int, extra: bytes = b"") -> bytes:
    """A zip whose directory names one empty member ``count`` times."""
    entry = struct.Struct("<4s4B4HL2L5H2L")
    local = struct.pack("<4s5HL2L2H", b"PK\3\4", 20, 0, 0, 0, 0, 0, 0, 0, 1, 0) + b"x"
    entries = b"".join(
        entry.pack(b"PK\1\2", 20, 3, 20, 0, 0, 0, 0, 0, 0, 0, 0, 8, len(extra), 0, 0, 0, 0, 0)
        + b"a/%06d" % i
        + extra
        for i in range(count)
    )
    end = struct.pack(
        "<4s4H2LH", b"PK\5\6", 0, 0, count % 65536, count % 65536, len(entries), len(local), 0
    )
    return local + entries + end


def packed_images() -> bytes:
    """400 images of a thousand by a thousand black pixels."""
    begin = bytes((0, 0, 8, 3)) + struct.pack(">3I", 400, 1000, 1000)
    return gzip.compress(begin) + gzip.compress(bytes(100_000_000)) * 4


def many_tensors(count: int) -> bytes:
    """A safetensors file of numbers, each a matrix and a bias of its own."""
    entry = '"w%d%s":{"dtype":"F16","shape":[1%s],"data_offsets":[%d,%d]}'
    entries = (
        entry % (i // 2, ".bias" if i % 2 else "", "" if i % 2 else ",1", 2 * i, 2 * i + 2)
        for i in range(count)
    )
    text = ("{" + ",".join(entries) + "}").encode()
    return len(text).to_bytes(8, "little") + text + bytes(2 * count)


def header(shape: tuple[int, ...], kind: str = "<f8") -> bytes:
    buffer = io.BytesIO()
    claim = {"descr": kind, "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(buffer, claim)
    return buffer.getvalue()


def old_header() -> bytes:
    """As Python 2 wrote it: numpy takes it apart word by word."""
    shape = ", ".join(["1L"] * 200)
    text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({shape}), }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(8)


def npz(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return buffer.getvalue()


LABELS = header((2,)) + np.array([1.0, -1.0]).tobytes()


def packed_zeros(kind: str, blocks: int) -> bytes:
    """x of ``blocks`` times 100 MB of zeros, of which only one block is ever packed."""
    zeros = bytes(100_000_000)
    begin = header((2, len(zeros) * blocks // 2 // np.dtype(kind).itemsize), kind)
    packer = zlib.compressobj(9, wbits=-15)
    first = packer.compress(begin) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(zeros) + packer.flush(zlib.Z_FULL_FLUSH)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("y.npy", LABELS)
        archive.writestr("x.npy", first + block * blocks + packer.flush())
        info = archive.getinfo("x.npy")
        info.compress_type, info.file_size = zipfile.ZIP_DEFLATED, len(begin) + len(zeros) * blocks
        info.CRC = zlib.crc32(begin)
        for _ in range(blocks):
            info.CRC = zlib.crc32(zeros, info.CRC)
    return buffer.getvalue()


def overlapping(count: int = 150, size: int = 4_000_000) -> bytes:
    """Stored arrays of which each holds the next one, its zip header included, as its numbers."""
    content, entries, names = header((2, size // 16)) + bytes(size), [], []
    for i in range(count):
        name, extra = b"x%03d.npy" % i, struct.pack("<HH22x", 0xCAFE, 22)
        sizes = struct.pack("<3L", zlib.crc32(content), len(content), len(content))
        fields = (
            struct.pack("<5H", 20, 0, 0, 0, 0) + sizes + struct.pack("<2H", len(name), len(extra))
        )
        content = b"PK\3\4" + fields + name + extra + content
        names.append((fields, name, len(content)))
        content = header((2, len(content) // 16)) + content
    content = content[len(header((2, 1))) :]
    for fields, name, length in names:
        place = struct.pack("<3H2L", 0, 0, 0, 0, len(content) - length)
        entries.append(b"PK\1\2\x14\3" + fields[:24] + b"\0\0" + place + name)
    end = struct.pack("<4H2LH", 0, 0, count, count, len(b"".join(entries)), len(content), 0)
    return content + b"".join(entries) + b"PK\5\6" + end


CHECKPOINTS: dict[str, Callable[[], bytes]] = {
    "keys without end": lambda: legacy(keys=b"]" + DOUBLED + b"a"),
    "tar header": tar_as_legacy,
    "many members": lambda: directory(400_000),
    "quadratic extra fields": lambda: directory(300, struct.pack("<HH", 0xCAFE, 0) * 16_000),
    "lists in a header": lambda: (
        (15 << 20).to_bytes(8, "little") + b'{"a":[' + b"[]," * (5 << 20) + b"[]]}"
    ),
    "many tensors": lambda: many_tensors(50_000),
    **{name: lambda make=make: torch_zip(make()) for name, make in PICKLES.items()},
}
DATA: dict[str, Callable[[], bytes]] = {
    "3 GB of zeros": lambda: packed_zeros("<f8", blocks=32),
    "bytes that become numbers": lambda: packed_zeros("|u1", blocks=1),
    "overlapping members": overlapping,
    "texts without letters": lambda: npz(
        x=header((2, 1)) + bytes(16), y=LABELS, classes=header((10**9,), "<U0")
    ),
    "array before an archive": lambda: LABELS + npz(x=header((2, 1)) + bytes(16), y=LABELS),
    "many members": lambda: directory(400_000),
    "many arrays": lambda: npz(**{f"x{i}": old_header() for i in range(5000)}),
}
RECORDS: dict[str, Callable[[], str]] = {
    "lists": lambda: "[" + "[]," * 8_000_000 + "[]]",
    "equal hashes": lambda: json.dumps({"$dict": [[i * (2**61 - 1), 0] for i in range(150_000)]}),
}
BATCHES: dict[str, Callable[[], bytes]] = {
    "bytes copied": lambda: (
        b"\x80\x02"
        + text(b"x" * 1_000_000)
        + text(b"latin1")
        + b"\x86q\x00c_codecs\nencode\nq\x01"
        + b"h\x01h\x00R" * 10_000
        + b"."
    ),
    "bytes claimed": lambda: b"\x80\x05\x96" + struct.pack("<Q", 3 << 30) + b".",
    "lists": lambda: b"\x80\x02" + b"]" * 20_000_000 + b".",
    "endless key": lambda: b"\x80\x02}" + DOUBLED + b"Ns.",
    "deep key": lambda: b"\x80\x02})" + b"\x85" * 400_000 + b"Ns.",
}


@pytest.fixture
def commands(tmp_path: Path) -> dict[str, list[str]]:
    """A command that reads each of the files, and one sound archive of 80 MB."""
    theta = Architecture.parse("mlp:4-3-1").build().state_dict()
    model = save_checkpoint(Network(dict(theta), "mlp:4-3-1"), tmp_path / "model.safetensors")
    quick = ["--steps", "2", "--quiet", "--out", str(tmp_path / "run")]

    def write(name: str, content: bytes) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return str(path)

    def audit(path: str) -> list[str]:
        return ["audit", str(model), "--data", path, "--budget", "0.01", *quick]

    def train(name: str, root: Path) -> list[str]:
        arguments = ["--data", name, "--data-root", str(root), "--n", "2", "--arch", "mlp:784-3-1"]
        return ["train", *arguments, *quick]

    command_lists = {"scan": ["scan", str(model)], "audit": audit("missing.npz")}
    np.savez(tmp_path / "sound.npz", x=np.ones((2, 5_000_000)), y=[1.0, -1.0])
    command_lists["sound"] = audit(str(tmp_path / "sound.npz"))
    for name, make in CHECKPOINTS.items():
        command_lists[f"checkpoint: {name}"] = ["attack", write(f"{name}.pt", make()), "--dry-run"]
        command_lists[f"scan: {name}"] = ["scan", str(tmp_path / f"{name}.pt")]
    for name, make in DATA.items():
        command_lists[f"data: {name}"] = audit(write(f"{name}.npz", make()))
    for name, make in BATCHES.items():
        write(f"{name}/cifar-10-batches-py/test_batch", make())
        command_lists[f"batch: {name}"] = train("cifar10", tmp_path / name)
    for name, text in RECORDS.items():
        write(f"{name}.safetensors", save({"a": torch.zeros(1)}, {"residuum": text()}))
        config = write(f"{name}.toml", f'knowledge = "{name}.safetensors"\n'.encode())
        command_lists[f"record: {name}"] = ["audit", str(model), "--config", config, *quick]
    black = io.BytesIO()
    Image.new("RGBA", (8000, 8000)).save(black, "PNG", compress_level=1)
    for name in ("a", "b"):
        write(f"photos/{name}/black.png", black.getvalue())
    command_lists["images: black"] = train(str(tmp_path / "photos"), tmp_path)
    write("zeros/MNIST/raw/t10k-images-idx3-ubyte.gz", packed_images())
    command_lists["images: zeros"] = train("mnist", tmp_path / "zeros")
    return command_lists


def test_bombs_are_refused_before_they_go_off(commands: dict[str, list[str]]) -> None:
    """One test, so that all of them share one idle process."""
    warm_up = [commands.pop("scan"), commands.pop("audit")]
    outcomes = dict(zip(commands, confined(warm_up, [*commands.values()]), strict=True))
    assert 80_000_000 < outcomes.pop("sound").bytes < BYTES, "memory is not measured"
    assert len(outcomes) == 2 * len(CHECKPOINTS) + len(DATA) + len(BATCHES) + len(RECORDS) + 2
    for name, (code, seconds, size) in outcomes.items():
        # Some of these files can be scanned. None of them holds a network that is read.
        assert code in ((0, 1, 2, 4) if name.startswith("scan: ") else (2, 4)), name
        assert seconds < SECONDS, name
        assert size < BYTES, name
