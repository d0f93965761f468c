"""Files from anywhere: truncated, mutated, invented. An error with its exit code, nothing else.

Never a traceback, never a hang, never a file outside the run directory.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.lib import format as npy
from sklearn.datasets import load_digits

from residuum.auditing.config import read_config
from residuum.auditing.result import AuditResult
from residuum.cli.main import main
from residuum.errors import DataError, InputError, ResiduumError, UnsafeFileError
from residuum.io.checkpoints import load_checkpoint, save_checkpoint
from residuum.networks import Architecture
from residuum.networks.network import Network
from residuum.records import Dataset, Knowledge, Reconstruction, read_npz
from residuum.records.inputs import SMALL_BYTES
from residuum.surfaces.inspection import inspect_network
from tests.program import listing

FUZZ = settings(
    max_examples=50,
    deadline=20_000,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
CLI = settings(FUZZ, max_examples=10)
ALLOWED = {0, 1, 2, 3, 4}


def checkpoint() -> Network:
    torch.manual_seed(0)
    model = Architecture.parse("mlp:4-3-1").build()
    return Network({k: t.detach() for k, t in model.state_dict().items()}, "mlp:4-3-1")


def safetensors(folder: Path) -> bytes:
    return save_checkpoint(checkpoint(), folder / "seed.safetensors").read_bytes()


def pickled(folder: Path) -> bytes:
    torch.save(dict(checkpoint().theta), folder / "seed.pt")
    return (folder / "seed.pt").read_bytes()


def npz(folder: Path) -> bytes:
    data = Dataset(torch.rand(6, 4), torch.tensor([1.0, -1] * 3), torch.rand(4), classes=("a", "b"))
    return data.to_npz(folder / "seed.npz").read_bytes()


def record(folder: Path) -> bytes:
    return Knowledge(mean=torch.rand(4), sample_count=3).save(folder / "k").read_bytes()


def toml(folder: Path) -> bytes:
    values = {
        "checkpoint": "m.safetensors",
        "seed": 3,
        "baselines": True,
        "budget": "1min",
        "sha256": {"data": "00"},
        "batches": [{"attack": "binary-kkt", "restarts": 1, "steps": 5, "seed": 0}],
    }
    return tomli_w.dumps(values).encode()


def read_checkpoint(path: Path) -> None:
    inspect_network(load_checkpoint(path))


KINDS: dict[str, tuple[str, Callable[[Path], bytes], list[Callable[[Path], Any]]]] = {
    "safetensors": ("c.safetensors", safetensors, [read_checkpoint]),
    "pickle": ("c.pt", pickled, [read_checkpoint]),
    "npz": ("d.npz", npz, [Dataset.from_npz, read_npz]),
    "record": ("k.safetensors", record, [Knowledge.load, Reconstruction.load]),
    "toml": ("config.toml", toml, [read_config]),
}
mutations = st.lists(
    st.tuples(
        st.floats(0, 1), st.sampled_from(["cut", "flip", "insert", "repeat"]), st.binary(max_size=8)
    ),
    min_size=1,
    max_size=4,
)


def mutate(data: bytes, changes: list[tuple[float, str, bytes]]) -> bytes:
    for where, change_kind, extra in changes:
        position = int(where * max(0, len(data) - 1))
        if change_kind == "cut":
            data = data[:position]
        elif change_kind == "flip":
            data = (
                data[:position]
                + bytes(b ^ 255 for b in data[position : position + 1 + len(extra)])
                + data[position + 1 + len(extra) :]
            )
        elif change_kind == "insert":
            data = data[:position] + extra + data[position:]
        else:
            data = data[:position] + data[position : position + 64] + data[position:]
    return data


@pytest.mark.parametrize("kind", KINDS)
@FUZZ
@given(changes=mutations)
def test_mutated_files_are_read_or_refused(
    kind: str, changes: list[tuple[float, str, bytes]], tmp_path: Path
) -> None:
    name, seed, readers = KINDS[kind]
    path = tmp_path / name
    path.write_bytes(mutate(seed(tmp_path), changes))
    before = listing(tmp_path)
    for reader in readers:
        with suppress(InputError, UnsafeFileError):
            reader(path)
    assert listing(tmp_path) == before


@FUZZ
@given(data=st.binary(max_size=200))
def test_any_bytes_are_refused(data: bytes, tmp_path: Path) -> None:
    for name, _, readers in KINDS.values():
        if name == "config.toml":
            continue
        (tmp_path / name).write_bytes(data)
        for reader in readers:
            with pytest.raises(ResiduumError):
                reader(tmp_path / name)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)


@FUZZ
@given(
    header=st.dictionaries(
        st.sampled_from(["__metadata__", "layers.0.weight", "x", "$record"]), json_values
    )
)
def test_invented_safetensors_headers_are_refused(header: dict[str, Any], tmp_path: Path) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "c.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(64))
    for reader in (read_checkpoint, Knowledge.load):
        with pytest.raises(ResiduumError):
            reader(tmp_path / "c.safetensors")


@FUZZ
@given(
    fields=st.dictionaries(
        st.sampled_from(["mean", "shape", "value_range", "loss", "provenance"]), json_values
    )
)
def test_invented_records_are_read_or_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    from safetensors.torch import save

    tree = json.dumps({"$record": "Knowledge", "fields": fields})
    (tmp_path / "k").write_bytes(save({"a": torch.zeros(1)}, {"residuum": tree}))
    with suppress(InputError):
        Knowledge.load(tmp_path / "k")
    (tmp_path / "c.safetensors").write_bytes(safetensors(tmp_path))
    (tmp_path / "with.toml").write_text('knowledge = "k"\n')
    command = ["audit", str(tmp_path / "c.safetensors"), "--config", str(tmp_path / "with.toml")]
    options = ["--steps", "2", "--budget", "0.01", "--out", str(tmp_path / "run"), "--quiet"]
    assert main([*command, *options]) in ALLOWED
    _remove(tmp_path / "run")


@FUZZ
@given(names=st.lists(st.text(min_size=1, max_size=12), max_size=3), data=st.binary(max_size=40))
def test_archives_with_odd_members_write_nothing(
    names: list[str], data: bytes, tmp_path: Path
) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in {"../evil.npy", "/abs.npy", "x.npy", *names}:
            # zipfile cuts a name at NUL and cannot write an empty one.
            written = name.encode("utf-8", "ignore").decode().split("\x00")[0]
            archive.writestr(written or "n", data)
    (tmp_path / "d.npz").write_bytes(buffer.getvalue())
    with pytest.raises(ResiduumError):
        Dataset.from_npz(tmp_path / "d.npz")
    assert listing(tmp_path) == ["d.npz"]
    assert not (tmp_path.parent / "evil.npy").exists()


def test_compressed_digits_are_read_and_compressed_nothing_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ratio decides for arrays beyond ``SMALL_BYTES``. The limit is made small here.

    Digits beyond the real limit, 128 MiB, would take seconds to compress.
    """
    monkeypatch.setattr("residuum.records.inputs.SMALL_BYTES", 1000)
    images = load_digits().images
    for x in (images, images.astype(np.uint8), images > 8, np.kron(images, np.ones((3, 3)))):
        np.savez_compressed(tmp_path / "d.npz", x=x, y=np.zeros(len(x)))
        assert (read_npz(tmp_path / "d.npz")["x"] == x).all()
    black = np.zeros((1797, 8, 8))
    np.savez_compressed(tmp_path / "d.npz", x=black, y=np.zeros(len(black)))
    with pytest.raises(UnsafeFileError, match="or 200 times the size of the file") as caught:
        read_npz(tmp_path / "d.npz")
    assert "numpy.savez(path" in caught.value.remedy
    np.savez(tmp_path / "d.npz", x=black, y=np.zeros(len(black)))
    assert (read_npz(tmp_path / "d.npz")["x"] == 0).all()
    saved = Dataset(torch.from_numpy(black), torch.zeros(len(black))).to_npz(tmp_path / "d.npz")
    assert Dataset.from_npz(saved).x.shape == black.shape


def test_numbers_count_as_float64_and_texts_as_objects(tmp_path: Path) -> None:
    for dtype, item_bytes in ((np.uint8, 8), ("U2", 72)):
        count = SMALL_BYTES // item_bytes
        np.savez_compressed(tmp_path / "d.npz", x=np.zeros(count, dtype))
        read_npz(tmp_path / "d.npz")
        np.savez_compressed(tmp_path / "d.npz", x=np.zeros(count + 1, dtype))
        with pytest.raises(UnsafeFileError, match=f"would take {(count + 1) * item_bytes}"):
            read_npz(tmp_path / "d.npz")


def test_damaged_data_are_refused(tmp_path: Path) -> None:
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "d.npz", x=np.arange(4000.0).reshape(40, 100), y=np.zeros(40))
        content = bytearray((tmp_path / "d.npz").read_bytes())
        content[1000:1400] = bytes(400)
        (tmp_path / "d.npz").write_bytes(content)
        with pytest.raises(DataError, match="reading the file failed"):
            Dataset.from_npz(tmp_path / "d.npz")


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("kind", ["more", "less", "negative", "twice", "bzip2", "objects"])
def test_members_are_what_numpy_writes(tmp_path: Path, kind: str) -> None:
    shape = {"more": (3,), "less": (1,), "negative": (-2,)}.get(kind, (2,))
    buffer = io.BytesIO()
    npy.write_array_header_1_0(
        buffer,
        {"descr": "|O" if kind == "objects" else "<f8", "fortran_order": False, "shape": shape},
    )
    content = buffer.getvalue() + bytes(16)
    method = zipfile.ZIP_BZIP2 if kind == "bzip2" else zipfile.ZIP_STORED
    with zipfile.ZipFile(tmp_path / "d.npz", "w", method) as archive:
        archive.writestr("x.npy", content)
        if kind == "twice":
            archive.writestr("x.npy", content)
    with pytest.raises(DataError):
        read_npz(tmp_path / "d.npz")


def test_a_mean_is_no_archive(tmp_path: Path) -> None:
    """numpy decides by the content whether a file is an array or an archive of them."""
    (tmp_path / "c.safetensors").write_bytes(safetensors(tmp_path))
    np.savez(tmp_path / "m", mean=np.zeros(4))
    (tmp_path / "m.npz").rename(tmp_path / "m.npy")
    command = ["attack", str(tmp_path / "c.safetensors"), "--mean", str(tmp_path / "m.npy")]
    assert main([*command, "--out", str(tmp_path / "run"), "--quiet"]) == 2


# Through the command line


@pytest.mark.parametrize("kind", ["safetensors", "npz", "toml", "record"])
@CLI
@given(changes=mutations)
def test_audits_of_mutated_files_end_with_a_code(
    kind: str,
    changes: list[tuple[float, str, bytes]],
    tmp_path: Path,
) -> None:
    for name, seed, _ in KINDS.values():
        (tmp_path / name).write_bytes(seed(tmp_path))
    name, seed, _ = KINDS[kind]
    (tmp_path / name).write_bytes(mutate(seed(tmp_path), changes))
    command = ["audit", str(tmp_path / "c.safetensors"), "--data", str(tmp_path / "d.npz")]
    if kind == "toml":
        command += ["--config", str(tmp_path / "config.toml")]
    elif kind == "record":
        config = tmp_path / "with.toml"
        config.write_text('knowledge = "k.safetensors"\n')
        command += ["--config", str(config)]
    before = set(listing(tmp_path))
    options = ["--steps", "3", "--budget", "0.01", "--out", str(tmp_path / "run"), "--quiet"]
    assert main([*command, *options]) in ALLOWED
    outside = {name for name in listing(tmp_path) if name.split("/")[0] != "run"}
    assert outside <= before
    _remove(tmp_path / "run")


@CLI
@given(result=json_values | st.dictionaries(st.sampled_from(["artifacts", "verdict"]), json_values))
def test_reports_of_invented_runs_are_refused(result: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "result.json").write_text(json.dumps(result))
    assert main(["report", str(tmp_path / "run"), "--quiet"]) == 2
    assert listing(tmp_path) == ["run", "run/result.json"]
    with pytest.raises(ResiduumError):
        AuditResult.load(tmp_path / "run")


@CLI
@given(text=st.text(max_size=40))
def test_any_text_as_an_option_ends_with_a_code(text: str, tmp_path: Path) -> None:
    (tmp_path / "c.safetensors").write_bytes(safetensors(tmp_path))
    base = ["audit", str(tmp_path / "c.safetensors"), "--out", str(tmp_path / "run"), "--quiet"]
    for option in (
        "--data",
        "--budget",
        "--mean",
        "--shape",
        "--value-range",
        "--arch",
        "--config",
    ):
        assert main([*base, "--steps", "2", option, text]) in ALLOWED
        _remove(tmp_path / "run")


def test_infinite_and_missing_numbers_are_refused(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(6, 4))
    x[0, 0] = np.nan
    np.savez(tmp_path / "d.npz", x=x, y=np.ones(6))
    (tmp_path / "c.safetensors").write_bytes(safetensors(tmp_path))
    command = ["audit", str(tmp_path / "c.safetensors"), "--data", str(tmp_path / "d.npz")]
    assert main([*command, "--out", str(tmp_path / "run"), "--quiet"]) == 2


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
