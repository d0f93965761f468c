"""Reading, writing and inspecting checkpoints, with every hostile file written by the test itself."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import pickle
import resource
import struct
import time
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_linear_bn_eval

from residuum.errors import (
    ArchitectureError,
    CheckpointError,
    ResiduumError,
    UnsafeFileError,
)
from residuum.io.checkpoints import as_network, load_checkpoint, save_checkpoint
from residuum.io.modules import checkpoint_from_module
from residuum.io.pickle_reader import MAX_OBJECT_BYTES, PickleReader
from residuum.networks import MLP, Architecture, ConvNet, Polynomial, PolynomialNetwork, ReLU
from residuum.networks.activations import Softplus
from residuum.networks.kinds import ASSUMED_RELU, ASSUMED_STRIDES
from residuum.networks.network import Network
from residuum.records import same
from residuum.surfaces.inspection import TOLERANCES, Inspection, inspect_network

ARCH = "mlp:5-7-6-2"


def weights(arch: str = ARCH, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: t.shape for name, t in Architecture.parse(arch).build().state_dict().items()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write_torch(path: Path, content: object, legacy: bool = False) -> Path:
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    return path


def write_safetensors(path: Path, header: dict | bytes, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def write_archive(path: Path, content: bytes, storages: dict[str, bytes] | None = None) -> Path:
    """A torch archive around a pickle written by hand."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", content)
        archive.writestr("a/byteorder", "little")
        for key, data in (storages or {}).items():
            archive.writestr(f"a/data/{key}", data)
        archive.writestr("a/version", "3\n")
    return path


def tensor_code(size: str, stride: str, numel: int = 1, kind: str = "FloatStorage") -> bytes:
    """Pickle instructions of {"w": tensor}, every number written as nine bytes."""

    def integers(text: str) -> bytes:
        values = [int(n) for n in text.split(",")]
        return b"(" + b"".join(b"\x8a\x09" + n.to_bytes(9, "little") for n in values) + b"t"

    storage = (
        b"(X\x07\x00\x00\x00storagectorch\n" + kind.encode() + b"\nX\x01\x00\x00\x000"
        b"X\x03\x00\x00\x00cpu\x8a\x09" + numel.to_bytes(9, "little") + b"tQ"
    )
    arguments = storage + b"K\x00" + integers(size) + integers(stride) + b"\x89}"
    return b"}X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n(" + arguments + b"tRs"


# Reading


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("suffix", ["pt", "pth", "bin", "safetensors"])
def test_content_decides_the_format(tmp_path: Path, suffix: str, legacy: bool) -> None:
    state = weights()
    checkpoint = load_checkpoint(write_torch(tmp_path / f"m.{suffix}", state, legacy))
    assert checkpoint.arch == ARCH
    assert same(checkpoint.theta, state)
    assert checkpoint.assumptions == (ASSUMED_RELU,)


def test_safetensors_of_others(tmp_path: Path) -> None:
    state = weights()
    save_file(state, tmp_path / "m.pt", {"format": "pt", "architecture": "ResNet"})
    checkpoint = load_checkpoint(str(tmp_path / "m.pt"))
    assert checkpoint.arch == ARCH
    assert same(checkpoint.theta, state)


@pytest.mark.parametrize(
    "arch",
    [
        ARCH,
        "mlp:5-4-1,bias=none,activation=linear",
        "convnet:1x4x4-2-3-2,bias=all",
        "polynomial:4-3-1,coefficients=0/1/0/2",
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_round_trip_is_exact(tmp_path: Path, arch: str, dtype: torch.dtype) -> None:
    theta = {name: t.to(dtype) for name, t in weights(arch).items()}
    shape = (1, 4, 4) if arch.startswith("convnet") else (Architecture.parse(arch).inputs,)
    names = {name: name for name in theta}
    checkpoint = Network(
        theta, arch, shape, ("cat", "größe"), "multiclass", (ASSUMED_STRIDES,), names
    )
    path = save_checkpoint(checkpoint, tmp_path / "run" / "model.safetensors")
    assert same(load_checkpoint(path), checkpoint)
    assert same(load_checkpoint(path.parent), checkpoint)
    assert same(load_file(path), dict(sorted(theta.items())))
    assert path.read_bytes() == save_checkpoint(checkpoint, tmp_path / "again").read_bytes()


@pytest.mark.parametrize("key", ["state_dict", "model", "model_state_dict", "net"])
def test_nested_dicts_are_unwrapped(tmp_path: Path, key: str) -> None:
    state = OrderedDict(weights())
    optimizer = {"state": {0: {"step": torch.tensor(3.0), "n": torch.tensor(1)}}, "lr": 0.1}
    content = {
        "epoch": 3,
        "loss": torch.tensor(0.1),
        "optimizer": optimizer,
        "dtype": torch.float32,
        "scheduler": {"milestones": Counter([10, 20])},
        "names": ("a", [None, True]),
        key: state,
    }
    assert same(load_checkpoint(write_torch(tmp_path / "m.pt", content)).theta, dict(state))
    twice = write_torch(tmp_path / "n.pt", {"state_dict": content})
    assert same(load_checkpoint(twice).theta, dict(state))


def test_a_checkpoint_of_a_whole_training_is_read_within_its_budget(tmp_path: Path) -> None:
    """Schedulers keep a Counter, optimizers two tensors for each weight."""
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(40)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5, 5])
    content = {
        "epoch": 3,
        "model_state_dict": model.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
        "scheduler_state_dict": scheduler.state_dict(),
        "losses": [0.5 / (i + 1) for i in range(1000)],
    }
    assert isinstance(content["scheduler_state_dict"]["milestones"], Counter)
    checkpoint = load_checkpoint(write_torch(tmp_path / "m.pt", content))
    assert same(checkpoint.theta["layers.39.weight"], model[39].weight.detach())
    with zipfile.ZipFile(tmp_path / "m.pt") as archive:
        pickled = archive.read("m/data.pkl")
    reader = PickleReader()
    reader.run(io.BytesIO(pickled))
    assert len(pickled) / 4 < reader.work < 2 * len(pickled)


def test_parallel_prefix_and_parameters(tmp_path: Path) -> None:
    state = weights()
    wrapped = {f"module.{name}": nn.Parameter(t) for name, t in state.items()}
    checkpoint = load_checkpoint(write_torch(tmp_path / "m.pt", wrapped), ARCH)
    assert same(checkpoint.theta, state)
    assert checkpoint.source_names["layers.0.bias"] == "module.layers.0.bias"
    assert not any(t.requires_grad for t in checkpoint.theta.values())


def test_other_names_in_any_order(tmp_path: Path) -> None:
    state = weights("mlp:5-7-6-2,bias=hidden")
    names = {"layers.0": "out", "layers.1": "body", "layers.2": "alpha"}
    renamed = {f"{names[n[:8]]}{n[8:]}": t for n, t in reversed(state.items())}
    checkpoint = load_checkpoint(write_torch(tmp_path / "m.pt", renamed))
    assert checkpoint.arch == "mlp:5-7-6-2,bias=hidden"
    assert same(checkpoint.theta, state)
    assert list(checkpoint.theta) == list(state)
    assert checkpoint.source_names["layers.1.weight"] == "body.weight"


def test_sequential_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4, bias=False))
    path = write_torch(tmp_path / "m.pt", model.state_dict())
    checkpoint = load_checkpoint(path, input_shape=(1, 2, 2))
    assert checkpoint.arch == "mlp:4-4-4"
    assert checkpoint.input_shape == (1, 2, 2)
    assert same(checkpoint.theta["layers.1.weight"], model[3].weight.detach())
    with pytest.raises(ArchitectureError, match="must have 4 values"):
        load_checkpoint(path, input_shape=(1, 2, 3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("safe", [True, False])
def test_half_precision_becomes_float32(tmp_path: Path, dtype: torch.dtype, safe: bool) -> None:
    state = {name: t.to(dtype) for name, t in weights().items()}
    path = tmp_path / "m"
    save_file(state, path) if safe else write_torch(path, state)
    checkpoint = load_checkpoint(path)
    assert same(checkpoint.theta, {name: t.float() for name, t in state.items()})
    assert any("converted to float32" in note for note in checkpoint.assumptions)


def test_views_and_transposes_are_read_as_owned_tensors(tmp_path: Path) -> None:
    block = torch.randn(100)
    state = {"weight": block[4:10].view(3, 2).T, "bias": block[20:22]}
    checkpoint = load_checkpoint(write_torch(tmp_path / "m.pt", state))
    assert checkpoint.arch == "mlp:3-2"
    assert torch.equal(checkpoint.theta["layers.0.weight"], state["weight"])
    assert all(t.is_contiguous() and t.storage_offset() == 0 for t in checkpoint.theta.values())


def test_architecture_argument_wins_and_must_fit(tmp_path: Path) -> None:
    path = write_torch(tmp_path / "m.pt", weights())
    assert load_checkpoint(path, ARCH).assumptions == (ASSUMED_RELU,)
    assert load_checkpoint(path, ARCH + ",activation=relu").assumptions == ()
    linear = load_checkpoint(path, ARCH + ",activation=linear")
    assert linear.arch.endswith("activation=linear")
    assert linear.assumptions == ()
    for wrong in ("mlp:5-7-6-3", "mlp:5-7-2", "mlp:5-7-6-2,bias=all", "polynomial:5-7-1"):
        with pytest.raises(ArchitectureError):
            load_checkpoint(path, wrong)


def test_an_assumed_activation_is_kept_with_the_checkpoint_until_it_is_named(
    tmp_path: Path,
) -> None:
    bare = load_checkpoint(write_torch(tmp_path / "m.pt", weights()))
    saved = save_checkpoint(bare, tmp_path / "m.safetensors")
    assert load_checkpoint(saved).assumptions == (ASSUMED_RELU,)
    assert load_checkpoint(saved, ARCH).assumptions == (ASSUMED_RELU,)
    assert load_checkpoint(saved, ARCH + ",activation=relu").assumptions == ()
    stated = save_checkpoint(bare.replace(assumptions=()), tmp_path / "s.safetensors")
    assert load_checkpoint(stated, ARCH).assumptions == ()


@pytest.mark.parametrize(
    ("arch", "assumptions"),
    [
        ("mlp:5-2", ()),
        ("mlp:5-3-2,bias=none", (ASSUMED_RELU,)),
        ("convnet:1x4x4-2-2", (ASSUMED_RELU, ASSUMED_STRIDES)),
        ("convnet:1x4x4-2-3-2,activation=relu", (ASSUMED_STRIDES,)),
        ("polynomial:4-3-1", ()),
    ],
)
def test_what_a_bare_file_leaves_open_is_assumed_in_words(
    tmp_path: Path, arch: str, assumptions: tuple[str, ...]
) -> None:
    assert (
        load_checkpoint(write_torch(tmp_path / "m", weights(arch)), arch).assumptions == assumptions
    )


class Strided(nn.Module):
    """A convnet of residuum's form under names of its own."""

    stride, pool = 2, nn.Identity()

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, self.stride, padding=1)
        self.conv2 = nn.Conv2d(4, 6, 3, self.stride, padding=1)
        self.fc = nn.Linear(6 * 7 * 7, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.conv1(x)))
        return self.fc(self.pool(torch.relu(self.conv2(x))).flatten(1))


class Pooled(Strided):
    """Another function with the same shapes."""

    stride, pool = 1, nn.MaxPool2d(2)


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("kind", [Strided, Pooled])
def test_a_convnet_of_others_is_read_and_its_strides_are_an_assumption(
    tmp_path: Path, kind: type[Strided], safe: bool
) -> None:
    model, path = kind(), tmp_path / "m"
    save_file(model.state_dict(), path) if safe else write_torch(path, model.state_dict())
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    arch = "convnet:1x28x28-4-6-10,bias=all"
    assert f"no pooling, pass --arch {arch}." in caught.value.remedy
    checkpoint = load_checkpoint(path, arch)
    assert checkpoint.source_names["convolutions.0.bias"] == "conv1.bias"
    assert ASSUMED_STRIDES in checkpoint.assumptions
    x = torch.rand(3, 1, 28, 28)
    assert torch.equal(checkpoint.copy_module()(x), model(x)) == (kind is Strided)


def test_an_architecture_that_cannot_be_built_is_an_error(tmp_path: Path) -> None:
    path = write_torch(tmp_path / "m.pt", weights())
    begin = time.perf_counter()
    for wrong in ("polynomial:9999999999-9999999999-1", "mlp:99999-9999-1", "mlp:1xx8-3", "mlp"):
        with pytest.raises(ArchitectureError):
            load_checkpoint(path, wrong)
    assert time.perf_counter() - begin < 2


# Hostile and broken files


class Payload:
    """Runs a shell command when it is unpickled the ordinary way."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("kind", ["zip", "legacy", "pickle-2", "pickle-4", "pickle-5"])
def test_code_is_refused_and_never_run(tmp_path: Path, kind: str) -> None:
    marker, path = tmp_path / "ran", tmp_path / "m.pt"
    content = {**weights(), "extra": Payload(marker)}
    if kind.startswith("pickle"):
        path.write_bytes(pickle.dumps(content["extra"], protocol=int(kind[-1])))
    else:
        write_torch(path, content, legacy=kind == "legacy")
    with pytest.raises(UnsafeFileError, match="system") as caught:
        load_checkpoint(path)
    assert caught.value.exit_code == 4
    assert "as safetensors" in caught.value.remedy
    assert not marker.exists()


@pytest.mark.parametrize("legacy", [False, True])
def test_pickled_modules_are_refused(tmp_path: Path, legacy: bool) -> None:
    with pytest.raises(CheckpointError, match="Linear") as caught:
        load_checkpoint(write_torch(tmp_path / "m.pt", nn.Linear(2, 1), legacy))
    assert "safetensors" in caught.value.remedy
    assert caught.value.exit_code == 2


BOMBS = {
    "bytearray": b"\x80\x02cbuiltins\nbytearray\n(\x8a\x06\x00\x00\x00\x00\x00\x7ftR.",
    "tensor class": b"\x80\x02ctorch\nTensor\n(J\xff\xff\xff\x7ftR.",
    "untyped storage": b"\x80\x02ctorch.storage\nUntypedStorage\n(J\xff\xff\xff\x7ftR.",
    "conversion": b"\x80\x02ctorch._utils\n_rebuild_device_tensor_from_cpu_tensor\n.",
    "new object": b"\x80\x02ccollections\nOrderedDict\n)\x81.",
    "extension": b"\x80\x02\x82\x01.",
    "storage called": b"\x80\x02ctorch\nFloatStorage\n(J\xff\xff\xff\x7ftR.",
    "set_ of a tensor": b"\x80\x02" + tensor_code("5,5", "5,1", 1) + b".",
    "huge storage": b"\x80\x02" + tensor_code(f"{10**12}", "1", 10**12) + b".",
    "huge sizes": b"\x80\x02" + tensor_code(f"{2**62},{2**62}", "0,0", 1) + b".",
    "far stride": b"\x80\x02" + tensor_code("1,1,2", f"1,1,{2**40}", 4) + b".",
    "two sizes": b"\x80\x02" + tensor_code("1", "1", 1) + tensor_code("1", "1", 4) + b"\x86.",
}


UNREAD = ("conversion", "new object", "extension")  # harmless, and not what torch.save writes


@pytest.mark.parametrize("name", BOMBS)
def test_claims_beyond_the_file_are_refused(tmp_path: Path, name: str) -> None:
    path = write_archive(tmp_path / "m.pt", BOMBS[name], {"0": bytes(4)})
    with pytest.raises(CheckpointError if name in UNREAD else UnsafeFileError):
        load_checkpoint(path)


MALFORMED = {
    "negative size": b"\x80\x02"
    + tensor_code("2", "1", 4).replace((2).to_bytes(9, "little"), b"\xff" * 9)
    + b".",
    "many dimensions": b"\x80\x02"
    + tensor_code(",".join(["9"] * 9999), ",".join(["1"] * 9999))
    + b".",
    "unhashable key": b"\x80\x02}]K\x01s.",
    "nested key": b"\x80\x02})" + b"\x85" * 200_000 + b"K\x01s.",
    "empty stack": b"\x80\x02.",
    "no memo": b"\x80\x02h\x05.",
    "no end": b"\x80\x02}",
    "mark missing": b"\x80\x02t.",
    "build of a tensor": b"\x80\x02" + tensor_code("1", "1", 1)[:-1] + b"}bs.",
    "unknown storage": b"\x80\x02" + tensor_code("1", "1", 1, "QInt8Storage") + b".",
    "sparse": b"\x80\x02ctorch._utils\n_rebuild_sparse_tensor\n.",
    "quantized": b"\x80\x02ctorch._utils\n_rebuild_qtensor\n.",
    "nested list": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "nested tuple": b"\x80\x02)" + b"\x85" * 200_000 + b".",
    "huge integer": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "huge text": b"\x80\x02X\xff\xff\xff\xff.",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_pickles_are_errors(tmp_path: Path, name: str) -> None:
    path = write_archive(tmp_path / "m.pt", MALFORMED[name], {"0": bytes(16)})
    with pytest.raises(ResiduumError) as caught:
        load_checkpoint(path)
    assert caught.value.exit_code in (2, 4)


def test_laughing_tuples_take_no_time(tmp_path: Path) -> None:
    """((t, t), (t, t)) sixty levels deep: short to write, endless to walk or to hash."""
    doubling = b"".join(b"q\x00h\x00\x86" for _ in range(60))
    path = write_archive(tmp_path / "m.pt", b"\x80\x02})" + doubling + b"K\x01s.")
    with pytest.raises(CheckpointError):
        load_checkpoint(path)


def test_copies_are_paid_before_they_are_made() -> None:
    """A dict of 100 numbers and 6 bytes for each copy of it: five are read, ten thousand are not."""
    numbers = b"}(" + b"".join(b"J" + struct.pack("<i", i) + b"N" for i in range(100)) + b"u"

    def content(count: int) -> bytes:
        calls = b"\x85q\x00ccollections\nCounter\nq\x01" + b"h\x01h\x00R" * count
        return b"\x80\x02" + numbers + calls + b"."

    assert PickleReader().run(io.BytesIO(content(5))) == dict.fromkeys(range(100))
    reader = PickleReader()
    with pytest.raises(UnsafeFileError, match="MB of memory in addition to the size"):
        reader.run(io.BytesIO(content(10_000)))
    assert reader.memory <= MAX_OBJECT_BYTES + 10_000


@pytest.mark.parametrize("legacy", [False, True])
def test_expanded_tensors_are_refused(tmp_path: Path, legacy: bool) -> None:
    path = write_torch(tmp_path / "m.pt", {"w": torch.zeros(1).expand(10**5, 10**4)}, legacy)
    assert path.stat().st_size < 4096
    with pytest.raises(UnsafeFileError, match="1000000000 elements"):
        load_checkpoint(path)


def test_many_names_of_one_tensor_are_refused(tmp_path: Path) -> None:
    shared = torch.randn(50, 50)
    two = load_checkpoint(write_torch(tmp_path / "two.pt", {"a": shared, "b": shared}))
    assert two.arch == "mlp:50-50-50,bias=none"
    path = write_torch(tmp_path / "m.pt", {str(i): shared for i in range(1000)})
    with pytest.raises(UnsafeFileError, match="times as large as the file"):
        load_checkpoint(path)


@pytest.mark.parametrize("name", [b"items", b"get", b"keys", b"__class__"])
def test_attributes_of_the_dict_change_nothing(tmp_path: Path, name: bytes) -> None:
    """BUILD can give a state dict an attribute that shadows a method."""
    attribute = b"}X" + struct.pack("<I", len(name)) + name + b"K\x05sb"
    body = tensor_code("1,1", "1,1", 1)[1:-1]  # the name and the tensor
    content = b"\x80\x02ccollections\nOrderedDict\n)R" + body + b"s" + attribute + b"."
    path = write_archive(tmp_path / "m.pt", content, {"0": struct.pack("<f", 2.5)})
    assert load_checkpoint(path).theta["layers.0.weight"].tolist() == [[2.5]]


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    """torch reads an archive without looking at its checksums."""
    path = write_torch(tmp_path / "m.pt", {"w": torch.ones(40, 40)})
    content = path.read_bytes()
    position = content.index(torch.ones(40, 40).numpy().tobytes()) + 800
    path.write_bytes(content[:position] + bytes(400) + content[position + 400 :])
    assert (torch.load(path, weights_only=True)["w"] == 0).sum() == 100
    with pytest.raises(
        CheckpointError, match="checksums \\(CRC\\); the member 'm/data/0' does not"
    ):
        load_checkpoint(path)


def test_archives_without_checksums_are_refused_with_the_reason(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        path = write_torch(tmp_path / "m.pt", weights())
    finally:
        torch.serialization.set_crc32_options(True)
    with pytest.raises(CheckpointError, match="set_crc32_options"):
        load_checkpoint(path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_recognized_and_its_weights_can_be_taken(tmp_path: Path) -> None:
    model = MLP((5, 7, 2))
    path = tmp_path / "program.pt"
    torch.jit.trace(model, torch.ones(1, 5)).save(path)
    with pytest.raises(CheckpointError, match="TorchScript") as caught:
        load_checkpoint(path)
    advice = "torch.save(torch.jit.load(path).state_dict(), 'weights.pt')"
    assert advice in caught.value.remedy
    torch.save(torch.jit.load(path).state_dict(), tmp_path / "weights.pt")
    checkpoint = load_checkpoint(tmp_path / "weights.pt")
    assert same(checkpoint.theta["layers.0.weight"], model.layers[0].weight.detach())


def test_an_archive_has_one_directory(tmp_path: Path) -> None:
    """A wide directory next to the narrow one would show two readers different members."""
    path = write_torch(tmp_path / "m.pt", weights())
    content = bytearray(path.read_bytes())
    position = content.rindex(b"PK\x06\x06")
    for change in (
        slice(position, position + 4),
        slice(position + 40, position + 48),
        slice(position + 48, position + 56),
    ):
        other = bytearray(content)
        other[change] = bytes(byte ^ 1 for byte in other[change])
        path.write_bytes(other)
        with pytest.raises(CheckpointError, match="damaged"):
            load_checkpoint(path)


def test_a_network_has_few_tensors(tmp_path: Path) -> None:
    path = write_torch(tmp_path / "m.pt", {str(i): torch.ones(1, 1) for i in range(1001)})
    with pytest.raises(CheckpointError, match="1001"):
        load_checkpoint(path)


def test_half_precision_counts_as_what_it_becomes(tmp_path: Path) -> None:
    """Two names of one float16 block, and one double that makes all of them doubles."""
    shared = torch.ones(100, 100, dtype=torch.float16)
    state = {"a": shared, "b": shared}
    load_checkpoint(write_torch(tmp_path / "m.pt", state))
    path = write_torch(tmp_path / "n.pt", state | {"d": torch.ones(1, 100, dtype=torch.float64)})
    with pytest.raises(UnsafeFileError, match="times as large as the file"):
        load_checkpoint(path)


def test_legacy_file_may_not_claim_a_storage_it_lacks(tmp_path: Path) -> None:
    path = write_torch(tmp_path / "m.pt", {"w": torch.zeros(7, 3)}, legacy=True)
    claim = b"K\x15"  # 21 elements
    assert path.read_bytes().count(claim) == 1
    path.write_bytes(path.read_bytes().replace(claim, b"J\xff\xff\xff\x7f"))
    with pytest.raises(ResiduumError):
        load_checkpoint(path)
    with pytest.raises(UnsafeFileError):
        load_checkpoint(path, max_bytes=1 << 20)


def test_zip_bomb(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\x80\x02}.")
        archive.writestr("a/data/0", bytes(20_000_000))
    assert path.stat().st_size < 100_000
    with pytest.raises(UnsafeFileError, match="uncompressed") as caught:
        load_checkpoint(path)
    assert caught.value.exit_code == 4


def test_overlapping_members(tmp_path: Path) -> None:
    """Many directory entries that point to one stored member unpack to more than the file."""
    path = write_archive(tmp_path / "m.pt", b"\x80\x02}.", {"0": bytes(10_000)})
    with zipfile.ZipFile(path, "a") as archive:
        big = archive.getinfo("a/data/0")
        for i in range(20):
            duplicate = zipfile.ZipInfo(f"a/data/{i + 1}")
            for field in ("file_size", "compress_size", "CRC", "header_offset"):
                setattr(duplicate, field, getattr(big, field))
            archive.filelist.append(duplicate)
        archive._didModify = True
    with pytest.raises(UnsafeFileError, match="would unpack"):
        load_checkpoint(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", ["a/data.pkl", "a/DATA.pkl", "b/x", "a/../x", "/x", "a/d\x01"])
def test_odd_member_names(tmp_path: Path, name: str) -> None:
    path = write_archive(tmp_path / "m.pt", b"\x80\x02}.")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, b"x")
    with pytest.raises(UnsafeFileError, match="names"):
        load_checkpoint(path)


@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors"])
def test_truncated_files(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "m"
    save_file(weights(), path) if kind == "safetensors" else None
    write_torch(path, weights(), kind == "legacy") if kind != "safetensors" else None
    content = path.read_bytes()
    for end in (
        1,
        4,
        9,
        30,
        len(content) // 3,
        len(content) // 2,
        len(content) - 40,
        len(content) - 1,
    ):
        path.write_bytes(content[:end])
        with pytest.raises(ResiduumError) as caught:
            load_checkpoint(path)
        assert isinstance(caught.value, CheckpointError)
    path.write_bytes(content + b"trailing")
    if kind != "legacy":
        with pytest.raises(CheckpointError):
            load_checkpoint(path)


ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
HEADERS = {
    "too many elements": {"w": {**ENTRY, "shape": [10**6, 10**6]}},
    "overflowing shape": {"w": {**ENTRY, "shape": [2**62, 4]}},
    "beyond the file": {"w": {**ENTRY, "shape": [4, 4], "data_offsets": [0, 64]}},
    "terabytes": {"w": {**ENTRY, "shape": [10**12], "data_offsets": [0, 4 * 10**12]}},
    "overlap": {"w": ENTRY, "v": ENTRY},
    "gap": {"w": {**ENTRY, "shape": [2], "data_offsets": [8, 16]}},
    "backwards": {"w": {**ENTRY, "data_offsets": [16, 0]}},
    "negative shape": {"w": {**ENTRY, "shape": [-2, -2]}},
    "truth as size": {"w": {**ENTRY, "shape": [True, 4]}},
    "unknown dtype": {"w": {**ENTRY, "dtype": "F31"}},
    "dtype not text": {"w": {**ENTRY, "dtype": ["F32"]}},
    "no shape": {"w": {"dtype": "F32", "data_offsets": [0, 16]}},
    "not a dict": {"w": 3},
    "metadata not text": {"__metadata__": {"a": 1}, "w": ENTRY},
    "metadata a list": {"__metadata__": [], "w": ENTRY},
    "not json": b"{nonsense",
    "twice": b'{"w":%b,"w":%b}' % ((json.dumps(ENTRY).encode(),) * 2),
    "deep": b'{"w":' + b"[" * 100_000,
    "long number": b'{"w":' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("name", HEADERS)
def test_hostile_safetensors_headers(tmp_path: Path, name: str) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", HEADERS[name], bytes(16))
    with pytest.raises(ResiduumError) as caught:
        load_checkpoint(path)
    assert caught.value.exit_code in (2, 4)
    if name in ("too many elements", "overflowing shape", "terabytes", "overlap"):
        assert isinstance(caught.value, UnsafeFileError)


def test_safetensors_header_longer_than_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", 2**60) + b"{}" + bytes(100))
    with pytest.raises(CheckpointError, match="header claims"):
        load_checkpoint(path)


OURS = {"residuum_format": "1", "architecture": ARCH}


@pytest.mark.parametrize(
    "change",
    [
        {"architecture": "mlp:5-7-6-3"},
        {"architecture": "mlp:9" + "9" * 300},
        {"architecture": ""},
        {"architecture": "mlp:99999-99999-99999"},
        {"architecture": "polynomial:99999999-99999999-1"},
        {"input_shape": "[2, 2]"},
        {"input_shape": "[-5]"},
        {"input_shape": "[true, 5]"},
        {"input_shape": "5"},
        {"input_shape": "["},
        {"labels": json.dumps(["x" * 1000])},
        {"labels": json.dumps(["x"] * 20_000)},
        {"labels": '["\\u001b[31m"]'},
        {"labels": "[1]"},
        {"labels": "[" * 100_000},
        {"task": "evil"},
        {"residuum_format": "99"},
        {"assumptions": '{"a": 1}'},
    ],
)
def test_metadata_are_not_trusted(tmp_path: Path, change: dict[str, str]) -> None:
    (tmp_path / "m").write_bytes(save(weights(), OURS | change))
    with pytest.raises((CheckpointError, ArchitectureError)):
        load_checkpoint(tmp_path / "m")


def test_what_cannot_be_read_back_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="labels"):
        save_checkpoint(Network(weights(), ARCH, labels=("a\nb",)), tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


BAD_TENSORS = {
    "nan": torch.tensor([[1.0, float("nan")]]),
    "inf": torch.tensor([[1.0, float("-inf")]]),
    "complex": torch.zeros(1, 2, dtype=torch.complex64),
    "integer": torch.zeros(1, 2, dtype=torch.int64),
    "truth": torch.zeros(1, 2, dtype=torch.bool),
    "float8": torch.zeros(1, 2).to(torch.float8_e4m3fn),
    "sparse": torch.eye(2).to_sparse(),
    "meta": torch.empty(1, 2, device="meta"),
    "empty": torch.zeros(0, 2),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_only_finite_dense_real_tensors(tmp_path: Path, name: str) -> None:
    path = write_torch(tmp_path / "m.pt", {"body.weight": BAD_TENSORS[name]})
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    assert caught.value.exit_code == 2
    if name in ("nan", "inf", "complex", "integer"):
        assert "'body.weight'" in caught.value.message


def test_subclasses_and_batch_norm(tmp_path: Path) -> None:
    buffer = nn.Buffer(torch.ones(1, 2))
    marked = load_checkpoint(write_torch(tmp_path / "b.pt", {"w": buffer.as_subclass(Marked)}))
    assert type(marked.theta["layers.0.weight"]) is Tensor
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    with pytest.raises(CheckpointError, match=r"batch norm \('1.running_mean' .* and 2 more"):
        load_checkpoint(write_torch(tmp_path / "m.pt", model.state_dict()), "mlp:3-4-1")


def test_a_folded_batch_norm_is_read_as_the_refusal_says(tmp_path: Path) -> None:
    first, norm, last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
    norm(torch.randn(9, 4))
    model = nn.Sequential(first, norm, nn.ReLU(), last).eval()
    folded = nn.Sequential(fuse_linear_bn_eval(first.eval(), norm), nn.ReLU(), last)
    checkpoint = load_checkpoint(write_torch(tmp_path / "m.pt", folded.state_dict()))
    x = torch.randn(5, 3)
    torch.testing.assert_close(checkpoint.copy_module()(x), model(x))


@pytest.mark.parametrize("arch", [None, "mlp:784-4-128,bias=none"])
@pytest.mark.parametrize("is_whole", [False, True])
def test_adapters_are_refused_by_name(tmp_path: Path, arch: str | None, is_whole: bool) -> None:
    """Two matrices of LoRA are a chain of layers; only their names tell."""
    state = {"lora_A.weight": torch.randn(4, 784), "lora_B.weight": torch.randn(128, 4)}
    state = {f"base_model.model.fc1.{name}": t for name, t in state.items()}
    if is_whole:
        state |= {f"base_model.model.{name}": t for name, t in weights("mlp:784-128-10").items()}
    save_file(state, tmp_path / "adapter_model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"an adapter \('base_model.model.fc1.lora_A"
    ) as caught:
        load_checkpoint(tmp_path / "adapter_model.safetensors", arch)
    assert "merge_and_unload()" in caught.value.remedy
    assert "residuum audit merged.pt --init base.pt" in caught.value.remedy
    assert caught.value.exit_code == 2


def test_transformers_are_named_before_their_integer_buffers(tmp_path: Path) -> None:
    state = {
        "position_ids": torch.arange(8),
        "wte.weight": torch.randn(9, 4),
        "h.0.attn.c_attn.weight": torch.randn(4, 12),
    }
    with pytest.raises(CheckpointError, match=r"hold attention .*, an embedding"):
        load_checkpoint(write_torch(tmp_path / "m.pt", state))


class Marked(Tensor):
    """A tensor subclass."""


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"epoch": 3},
        [],
        3,
        torch.ones(2, 2),
        {"model": {}},
        {3: torch.ones(2, 2)},
        {"a\x1b[31m": torch.ones(2, 2)},
        {"x" * 1000: torch.ones(2, 2)},
    ],
)
def test_files_without_usable_weights(tmp_path: Path, content: object) -> None:
    for legacy in [False, True]:
        with pytest.raises(CheckpointError):
            load_checkpoint(write_torch(tmp_path / "m.pt", content, legacy))


def test_files_that_are_not_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "text.pt").write_text("a,b,c\n1,2,3\n" * 10)
    (tmp_path / "noise.pt").write_bytes(b"\x80" + os.urandom(300))
    (tmp_path / "net.onnx").write_bytes(b"\x08\x08\x12\x07pytorch\x1a\x05" + bytes(40))
    with pytest.raises(CheckpointError, match="must be an ONNX graph"):
        load_checkpoint(tmp_path / "net.onnx")
    os.mkfifo(tmp_path / "pipe")
    for name in ("empty", "text.pt", "noise.pt", "missing.pt", "pipe", "."):
        with pytest.raises(ResiduumError) as caught:
            load_checkpoint(tmp_path / name)
        assert isinstance(caught.value, CheckpointError) or name == "noise.pt"
        assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("legacy", [False, True])
def test_large_files_are_refused(tmp_path: Path, legacy: bool) -> None:
    path = write_torch(tmp_path / "m.pt", weights(), legacy)
    with pytest.raises(UnsafeFileError, match="max_bytes"):
        load_checkpoint(path, max_bytes=path.stat().st_size - 1)
    load_checkpoint(path, max_bytes=path.stat().st_size)


def valid_files() -> dict[str, bytes]:
    state = weights("mlp:3-4-1")
    checkpoint = Network(state, "mlp:3-4-1")
    files = {"safetensors": save(checkpoint.theta, {**OURS, "architecture": "mlp:3-4-1"})}
    for name, zipped in (("zip", True), ("legacy", False)):
        buffer = io.BytesIO()
        torch.save(OrderedDict(state), buffer, _use_new_zipfile_serialization=zipped)
        files[name] = buffer.getvalue()
    return files


VALID = valid_files()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", VALID)
@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_mutated_files_raise_only_our_errors(
    tmp_path: Path, kind: str, data: st.DataObject
) -> None:
    content = bytearray(VALID[kind])
    place = st.integers(0, len(content) - 1)
    value = st.one_of(st.integers(0, 255), st.sampled_from([0x00, 0xFF, 0x7F, 0x2E, 0x80]))
    for position, byte in data.draw(st.lists(st.tuples(place, value), min_size=1, max_size=8)):
        content[position] = byte
    path = tmp_path / "m"
    path.write_bytes(content[: data.draw(st.sampled_from([None, None, len(content) // 2]))])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.suppress(ResiduumError):
        inspect_network(load_checkpoint(path, max_bytes=1 << 24))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB


# Live networks


def test_build_model(tmp_path: Path) -> None:
    checkpoint = Network(weights(), ARCH)
    state = torch.get_rng_state()
    model = checkpoint.copy_module()
    assert torch.equal(state, torch.get_rng_state())
    assert not model.training
    assert same(dict(model.state_dict()), checkpoint.theta)
    assert all(p.requires_grad for p in model.parameters())
    with torch.no_grad():
        next(model.parameters()).zero_()
    assert checkpoint.theta["layers.0.weight"].any()
    assert checkpoint.copy_module(torch.float64)(torch.ones(2, 5).double()).dtype == torch.float64
    with pytest.raises(ArchitectureError, match="must fit"):
        checkpoint.replace(arch="mlp:5-7-6-3").copy_module()


MODULES = {
    ARCH: lambda: MLP((5, 7, 6, 2)),
    "mlp:4-4-4-4,bias=all": lambda: MLP((4, 4, 4, 4), "all", ReLU()),
    "convnet:1x4x4-2-3-2,bias=hidden": lambda: ConvNet((1, 4, 4), (2, 3), 2, "hidden"),
    "polynomial:4-3-1,coefficients=0/0/0/1": lambda: PolynomialNetwork(
        4, 3, Polynomial((0, 0, 0, 1))
    ),
    "mlp:4-3-2,bias=all": lambda: nn.Sequential(
        nn.Flatten(), nn.Sequential(nn.Linear(4, 3), nn.ReLU()), nn.Linear(3, 2)
    ),
    "mlp:4-3-2,bias=none,activation=linear": lambda: nn.Sequential(
        nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False)
    ),
}


@pytest.mark.parametrize("arch", MODULES)
def test_checkpoint_from_module(arch: str, tmp_path: Path) -> None:
    model = MODULES[arch]().double()
    checkpoint = checkpoint_from_module(model, labels=("a", "b"), task="multiclass")
    assert checkpoint.arch == arch
    x = torch.randn(3, Architecture.parse(arch).inputs, dtype=torch.float64)
    torch.testing.assert_close(checkpoint.copy_module()(x), model(x), rtol=0, atol=0)
    assert set(checkpoint.source_names.values()) == set(model.state_dict())
    loaded = load_checkpoint(save_checkpoint(checkpoint, tmp_path / "m"))
    assert same(loaded.replace(source_names=checkpoint.source_names), checkpoint)


def test_a_relu_may_be_used_twice() -> None:
    relu = nn.ReLU()
    model = nn.Sequential(
        nn.Linear(3, 4), relu, nn.Linear(4, 4, bias=False), relu, nn.Linear(4, 1, bias=False)
    )
    checkpoint = checkpoint_from_module(model)
    assert checkpoint.arch == "mlp:3-4-4-1"
    x = torch.randn(5, 3)
    torch.testing.assert_close(checkpoint.copy_module()(x), model(x), rtol=0, atol=0)


class Own(nn.Module):
    """What people write: what its forward does is not to be read off its layers."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


# Drawn once and for all: a layer whose outputs are never negative is the same with a ReLU after it.
torch.manual_seed(0)
CNN = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 2))
KEPT: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "module:2-1,class=Own": (Own(nn.Linear(2, 2), nn.Mish(), nn.Linear(2, 1)), ()),
    "module:1x6x6-2,class=Sequential": (CNN, (1, 6, 6)),
    "module:2-1,class=MLP": (MLP((2, 2, 1), activation=Softplus()), ()),
    "batch norm": (
        nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 1)),
        (),
    ),
    "dropout": (Own(nn.Linear(2, 3), nn.Dropout(), nn.Softsign(), nn.Linear(3, 1)), (2,)),
    "layer norm": (nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.LayerNorm(3)), ()),
    "order": (nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 1)), ()),
    "end": (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), ()),
    "no rule of biases": (
        nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 1)),
        (),
    ),
    "half": (Own(nn.Linear(2, 2), nn.Tanh()).half(), ()),
    **{
        kind.__name__: (nn.Sequential(nn.Linear(2, 2), kind(), nn.Linear(2, 1)), ())
        for kind in (nn.Softplus, nn.RReLU, nn.Hardtanh)
    },
}


@pytest.mark.parametrize("name", KEPT)
def test_any_other_module_is_kept_as_given(name: str, tmp_path: Path) -> None:
    model, shape = KEPT[name]
    model.train()
    checkpoint = checkpoint_from_module(model, input_shape=shape)
    assert model.training
    assert checkpoint.arch == name or not name.startswith("module:")
    assert "is run as it is" in checkpoint.assumptions[0]
    copied = copy.deepcopy(model).float().eval()
    x = torch.randn(3, *checkpoint.input_shape)
    built = checkpoint.copy_module()
    torch.testing.assert_close(built(x), copied(x), rtol=0, atol=0)
    torch.testing.assert_close(built(x.flatten(1)), copied(x), rtol=0, atol=0)
    torch.testing.assert_close(
        checkpoint.copy_module(torch.float64)(x.double()), copied.double()(x.double())
    )
    assert same(checkpoint.theta, {n: p.detach().float() for n, p in model.named_parameters()})
    zeros = checkpoint.replace(theta={n: torch.zeros_like(t) for n, t in checkpoint.theta.items()})
    assert not next(zeros.copy_module().parameters()).any()
    assert next(model.parameters()).any()
    with pytest.raises(
        ArchitectureError,
        match=r"the file holds the weights of a PyTorch module \(.*\), but not its code",
    ):
        load_checkpoint(save_checkpoint(checkpoint, tmp_path / "m"))
    back = Network.load(checkpoint.save(tmp_path / "record"))
    assert back.live is None
    assert same(back, checkpoint.replace(live=None))


def test_weights_that_two_layers_share_stay_shared() -> None:
    layer = nn.Linear(2, 2)
    checkpoint = checkpoint_from_module(Own(layer, nn.ReLU(), layer))
    moved = checkpoint.replace(theta={name: t + 1 for name, t in checkpoint.theta.items()})
    x = torch.randn(3, 2)
    with torch.no_grad():
        layer.weight += 1
        layer.bias += 1
    assert torch.equal(moved.copy_module()(x), layer(layer(x).relu()))


class Twice(Own):
    """Not one row per sample."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).repeat(2, 1)


@pytest.mark.parametrize(
    ("model", "shape", "words"),
    [
        (nn.Sequential(), (), "this module of the class Sequential has no weights"),
        (nn.Sequential(nn.Flatten()), (2,), "needs a layer with weights"),
        (
            nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(3, 1)),
            (),
            "of shape (2,); the forward method of Sequential raised: mat1 and mat2",
        ),
        (
            nn.Sequential(nn.Linear(2, 1), nn.GELU()),
            (3,),
            "of shape (3,); the forward method of Seq",
        ),
        (CNN, (), "needs the shape of a sample"),
        (CNN, (1, 5, 5), "of shape (1, 5, 5); the forward method of Sequential raised:"),
        (
            nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Flatten(0)),
            (),
            "this network returned (4,)",
        ),
        (Twice(nn.Linear(2, 1), nn.GELU()), (), "for 2 samples, this network returned (4, 1)"),
        (nn.LSTM(2, 2), (4, 2), "this network returned tuple"),
    ],
)
def test_a_module_that_cannot_run_is_refused_with_the_reason(
    model: nn.Module, shape: tuple[int, ...], words: str
) -> None:
    with pytest.raises(ArchitectureError) as problem:
        checkpoint_from_module(model, input_shape=shape)
    assert words in str(problem.value)
    assert problem.value.remedy


def test_a_kept_module_needs_finite_weights() -> None:
    model = Own(nn.Linear(2, 1), nn.Tanh())
    with torch.no_grad():
        model.layers[0].weight[0, 0] = float("nan")  # type: ignore[index]
    with pytest.raises(CheckpointError, match="must be finite real numbers; the weights 'layers"):
        checkpoint_from_module(model)


def test_dropout_and_identity_are_passed_over() -> None:
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(4, 3), nn.Dropout(), nn.ReLU(), nn.Identity(), nn.Linear(3, 2)
    ).eval()
    checkpoint = checkpoint_from_module(model)
    assert checkpoint.arch == "mlp:4-3-2,bias=all"
    assert checkpoint.source_names["layers.1.bias"] == "5.bias"
    x = torch.randn(5, 4)
    torch.testing.assert_close(checkpoint.copy_module()(x), model(x), rtol=0, atol=0)


def test_a_state_dict_is_read_as_its_file(tmp_path: Path) -> None:
    state = OrderedDict(weights())
    nested = {"epoch": 3, "model_state_dict": state}
    from_file = load_checkpoint(write_torch(tmp_path / "m.pt", state))
    assert same(as_network(state), from_file)
    assert same(as_network(nested), from_file)
    assert as_network(state, ARCH + ",activation=linear").arch == ARCH + ",activation=linear"
    as_network(state).theta["layers.0.weight"].zero_()
    assert state["layers.0.weight"].any()
    with pytest.raises(CheckpointError, match="must contain tensors"):
        as_network({"value_range": (0, 1)})
    with pytest.raises(CheckpointError, match="an object of type list"):
        as_network([state])  # type: ignore[arg-type]


def test_module_input_shape() -> None:
    assert checkpoint_from_module(MLP((4, 3, 1)), input_shape=(1, 2, 2)).input_shape == (1, 2, 2)
    assert checkpoint_from_module(ConvNet((1, 4, 4), (2,), 1)).input_shape == (1, 4, 4)
    with pytest.raises(ArchitectureError, match="4 values"):
        checkpoint_from_module(MLP((4, 3, 1)), input_shape=(5,))


# Inspection


def test_inspection_against_numpy() -> None:
    theta = weights("mlp:20-30-6-2,bias=hidden")
    theta["layers.0.weight"] *= torch.logspace(0, -5, 20)
    inspection = inspect_network(Network(theta, "mlp:20-30-6-2,bias=hidden", assumptions=("a",)))
    w = {name: t.double().numpy() for name, t in theta.items()}
    singular = np.linalg.svd(w["layers.0.weight"], compute_uv=False)
    ranks = [int((singular > t * singular[0]).sum()) for t in TOLERANCES]
    assert [*inspection.ranks.values()] == ranks
    assert ranks == sorted(ranks)
    gap = larger = 0.0
    for i in range(2):
        for j in range(len(w[f"layers.{i}.bias"])):
            into = (w[f"layers.{i}.weight"][j] ** 2).sum() + w[f"layers.{i}.bias"][j] ** 2
            out = (w[f"layers.{i + 1}.weight"][:, j] ** 2).sum()
            gap += abs(into - out)
            larger += max(into, out)
    assert inspection.balance == pytest.approx(gap / larger, rel=1e-12)
    assert inspection.parameters == 20 * 30 + 30 + 30 * 6 + 6 + 6 * 2
    assert inspection.bytes == 4 * inspection.parameters
    assert (inspection.dtype, inspection.outputs) == ("float32", 2)
    assert [layer.name for layer in inspection.layers] == list(theta)
    assert inspection.layers[0].norm == pytest.approx(
        np.linalg.norm(w["layers.0.weight"]), rel=1e-12
    )
    assert inspection.homogeneity_order is None
    assert inspection.assumptions == ("a",)


@pytest.mark.parametrize(
    ("arch", "order"),
    [
        (ARCH, 3.0),
        ("mlp:5-4-1", 2.0),
        ("mlp:5-1", 1.0),
        ("mlp:5-4-1,bias=all", None),
        ("convnet:1x4x4-2-3-2", 3.0),
        ("polynomial:4-3-1", 4.0),
    ],
)
def test_measured_homogeneity(arch: str, order: float | None) -> None:
    assert inspect_network(Network(weights(arch), arch)).homogeneity_order == order


def test_balance_of_a_balanced_network() -> None:
    theta = weights("mlp:5-7-1")
    size = (theta["layers.0.weight"].square().sum(1) + theta["layers.0.bias"].square()).sqrt()
    theta["layers.1.weight"] = size[None]
    assert inspect_network(Network(theta, "mlp:5-7-1")).balance < 1e-6
    theta["layers.0.bias"] = theta["layers.0.bias"] + 1
    assert inspect_network(Network(theta, "mlp:5-7-1")).balance > 0.01
    assert inspect_network(Network(weights("mlp:5-1"), "mlp:5-1")).balance is None


def test_filters_of_a_convolution_have_ranks_and_no_directions() -> None:
    arch = "convnet:1x8x8-4-6-1"
    inspection = inspect_network(Network(weights(arch), arch))
    assert inspection.directions is None
    assert "convolution" in inspection.directions_of
    assert inspection.ranks["0.01"] == 4  # filters, of nine weights each


def test_inspection_as_json_and_as_record(tmp_path: Path) -> None:
    for scale in (0.0, 1.0, 1e200):
        theta = {name: scale * t.double() for name, t in weights("mlp:5-7-1").items()}
        inspection = inspect_network(Network(theta, "mlp:5-7-1", (5,)))
        published = json.loads(json.dumps(inspection.to_json(), allow_nan=False))
        assert published["ranks"] == inspection.ranks
        assert published["directions"] == inspection.directions
        assert published["layers"][0]["shape"] == [7, 5]
    assert same(Inspection.load(inspection.save(tmp_path / "i")), inspection)
