"""Datasets: every source, the choice of samples, and files that are broken or mean harm."""

from __future__ import annotations

import gzip
import os
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from residuum.datasets import DATASETS, load_dataset
from residuum.datasets.files import MAX_PIXELS
from residuum.datasets.formats import read_cifar_batch, read_idx
from residuum.datasets.selection import spread_quotas
from residuum.errors import DataError, UnsafeFileError
from residuum.records import TASKS, Dataset, Split, same

PER_CLASS = 6


@pytest.fixture(autouse=True)
def _no_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RESIDUUM_DATA", raising=False)


def published(shape: tuple[int, ...], per_class: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Random bytes with labels 0..9 in a shuffled order."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(10, dtype=np.uint8), per_class))
    return rng.integers(0, 256, (len(labels), *shape), dtype=np.uint8), labels


def idx_bytes(array: np.ndarray) -> bytes:
    sizes = struct.pack(f">{array.ndim}I", *array.shape)
    return bytes((0, 0, 8, array.ndim)) + sizes + array.tobytes()


def write_mnist_idx(root: Path, packed: bool = False) -> None:
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for prefix, seed in (("train", 0), ("t10k", 1)):
        images, labels = published((28, 28), PER_CLASS, seed)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            content = idx_bytes(array)
            name = f"{prefix}-{kind}-ubyte"
            if packed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (folder / name).write_bytes(content)


def write_npz(root: Path, name: str, shape: tuple[int, ...]) -> None:
    (x, y), (x_test, y_test) = published(shape, PER_CLASS, 0), published(shape, PER_CLASS, 1)
    np.savez(root / f"{name}.npz", x_train=x, y_train=y, x_test=x_test, y_test=y_test)


def python2_batch(data: np.ndarray, labels: list[int]) -> bytes:
    """The opcodes Python 2 writes for {'data': uint8 array, 'labels': list} in protocol 2."""

    def text(value: bytes) -> bytes:  # a Python 2 str
        short = len(value) < 256
        size = struct.pack("<B" if short else "<i", len(value))
        return (b"U" if short else b"T") + size + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    dtype = (
        b"cnumpy\ndtype\n" + text(b"u1") + number(0) + number(1) + b"\x87R"
        b"(" + number(3) + text(b"|") + b"NNN" + number(-1) * 2 + number(0) + b"tb"
    )
    shape = b"".join(map(number, data.shape)) + b"\x86"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
        + number(0)
        + b"\x85"
        + text(b"b")
        + b"\x87R"
        b"(" + number(1) + shape + dtype + b"\x89" + text(data.tobytes()) + b"tb"
    )
    items = text(b"data") + array + text(b"labels") + b"](" + b"".join(map(number, labels)) + b"e"
    return b"\x80\x02}(" + items + b"u."


def write_cifar_batches(root: Path, encode: Callable[[np.ndarray, list[int]], bytes]) -> None:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    images, labels = (np.array_split(a, 5) for a in published((3072,), PER_CLASS, 0))
    for i in range(5):
        (folder / f"data_batch_{i + 1}").write_bytes(encode(images[i], labels[i].tolist()))
    test, test_labels = published((3072,), PER_CLASS, 1)
    (folder / "test_batch").write_bytes(encode(test, test_labels.tolist()))


def batch_with_keys(*keys: Any, protocol: int = 2) -> Callable[[np.ndarray, list[int]], bytes]:
    return lambda x, y: pickle.dumps(dict(zip(keys, (x, y), strict=True)), protocol=protocol)


CIFAR_ENCODINGS = {
    "python 2": python2_batch,
    "bytes keys": batch_with_keys(b"data", b"labels"),
    "text keys": batch_with_keys("data", "labels"),
    "protocol 4": batch_with_keys("data", "labels", protocol=4),
    "column order": lambda x, y: batch_with_keys("data", "labels")(np.asfortranarray(x), y),
}


def write_folder(
    root: Path, classes: dict[str, int], mode: str = "RGB", side: int = 6, suffix: str = ".png"
) -> None:
    rng = np.random.default_rng(0)
    for name, count in classes.items():
        (root / name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(0, 256, (side, side, 3), dtype=np.uint8)
            Image.fromarray(pixels).convert(mode).save(root / name / f"{i:03d}{suffix}")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    write_mnist_idx(path)
    write_cifar_batches(path, python2_batch)
    return path


def assert_sound(split: Split) -> None:
    """What every split keeps, whatever its source."""
    train, held = split.train, split.holdout
    assert train.x.dtype == held.x.dtype
    assert train.shape == held.shape
    counts = train.y.unique(return_counts=True)[1]
    assert len(counts) == len(train.classes) >= 2
    assert len(set(counts.tolist())) == 1
    assert same(train.mean, held.mean)
    rows = {row.numpy().tobytes() for row in train.x}
    assert not any(row.numpy().tobytes() in rows for row in held.x)


def test_photos_share_no_pixel_and_none_is_smooth() -> None:
    split = load_dataset("photos", 40, seed=3, center=False)
    images = torch.cat([split.train.x, split.holdout.x])
    assert split.train.shape == (3, 32, 32)
    assert len(split.holdout) >= 100
    assert split.train.y.sum() == 0
    steps = [images.diff(dim=axis).abs().mean((1, 2, 3)) for axis in (-1, -2)]
    assert float((sum(steps) / 2).min()) > 4 / 255
    assert 0 <= float(images.min()) < float(images.max()) <= 1
    assert len({tuple(row.tolist()) for row in images.flatten(1)[:, :200]}) == len(images)
    second = load_dataset("photos", 40, seed=3, center=False)
    assert torch.equal(second.train.x, split.train.x)
    assert not torch.equal(load_dataset("photos", 40, seed=4, center=False).train.x, split.train.x)


@pytest.mark.parametrize("name", DATASETS)
def test_every_dataset_keeps_the_contract(name: str, root: Path) -> None:
    for task in TASKS:
        n = 20
        split = load_dataset(name, n, root=root, task=task)
        assert_sound(split)
        assert len(split.train) == n
        assert split.train.name == name
        values = set(split.train.y.tolist())
        if task == "multiclass":
            assert split.train.y.dtype == torch.int64
            assert values == set(range(len(split.train.classes)))
        else:
            assert values == {-1, 1}
            assert split.train.y.dtype == (torch.int64 if task == "binary" else torch.float64)
        second = load_dataset(name, n, root=root, task=task)
        assert same(split, second)


@pytest.mark.parametrize("name", DATASETS)
def test_a_seed_decides_and_the_global_generator_is_left_alone(name: str, root: Path) -> None:
    state = torch.random.get_rng_state()
    first, second, other = (load_dataset(name, 20, root=root, seed=s) for s in (1, 1, 2))
    assert same(first, second)
    assert not torch.equal(first.train.x, other.train.x)
    assert not torch.equal(first.holdout.x, other.holdout.x)
    assert torch.equal(state, torch.random.get_rng_state())
    assert_sound(first)


@pytest.mark.parametrize("name", ["digits", "mnist", "cifar10"])
def test_the_mean_is_subtracted_from_both_and_recorded(name: str, root: Path) -> None:
    split = load_dataset(name, 20, root=root)
    raw = load_dataset(name, 20, root=root, center=False)
    assert split.train.mean is not None
    assert raw.train.mean is raw.holdout.mean is None
    torch.testing.assert_close(split.train.mean, raw.train.x.mean(0))
    for centered, plain in ((split.train, raw.train), (split.holdout, raw.holdout)):
        torch.testing.assert_close(centered.images, plain.x)
        assert plain.x.min() >= 0
        assert plain.x.max() <= 1
        assert plain.x.max() > 0.9
    assert load_dataset(name, 20, root=root, dtype=torch.float32).holdout.x.dtype == torch.float32


def test_without_a_seed_the_first_of_each_label_in_file_order(root: Path) -> None:
    images, labels = published((28, 28), PER_CLASS, 0)
    odd = labels % 2 == 1
    rows = np.sort(np.r_[np.nonzero(odd)[0][:7], np.nonzero(~odd)[0][:7]])
    train = load_dataset("mnist", 14, root=root, center=False).train
    np.testing.assert_allclose(train.x.numpy()[:, 0] * 255, images[rows])
    np.testing.assert_array_equal(train.y.numpy(), np.where(odd[rows], 1, -1))
    assert train.classes == ("even", "odd")


def test_digits_are_grouped_by_parity() -> None:
    binary, classes = (load_dataset("digits", 40, task=t) for t in ("binary", "multiclass"))
    assert binary.train.shape == (1, 8, 8)
    label_of_image = {
        image.numpy().tobytes(): label
        for image, label in zip(
            classes.train.images.round(decimals=6), classes.train.y, strict=True
        )
    }
    seen = [
        (label_of_image[key] % 2 == 1) == (label == 1)
        for image, label in zip(binary.train.images.round(decimals=6), binary.train.y, strict=True)
        if (key := image.numpy().tobytes()) in label_of_image
    ]
    assert len(seen) > 20
    assert all(seen)


def test_held_out_samples_are_as_even_as_there_are() -> None:
    default = load_dataset("digits", 100).holdout
    assert default.y.sum() == 0
    assert len(default) > 1600
    assert load_dataset("digits", 100, holdout=31).holdout.y.sum().abs() == 1
    assert spread_quotas([1, 10, 10], 9) == [1, 4, 4]
    assert spread_quotas([2, 2, 2], 5) == [1, 2, 2]
    assert spread_quotas([0, 3], 3) == [0, 3]


def test_held_out_samples_are_the_same_for_every_n(root: Path) -> None:
    a, b = (load_dataset("mnist", n, root=root, seed=3, center=False).holdout for n in (10, 20))
    assert same(a, b)


def test_circle() -> None:
    split = load_dataset("circle", 20, seed=5)
    x, held = split.train.x, split.holdout.x
    torch.testing.assert_close(x.norm(dim=1), torch.ones(20, dtype=x.dtype))
    cosines = x[:-1].mul(x[1:]).sum(1).numpy()
    np.testing.assert_allclose(cosines, np.cos(np.pi / 10))
    assert (split.train.y[:-1] * split.train.y[1:] == -1).all()
    assert split.train.mean is None
    nearest = torch.cdist(held, x).min(dim=1).values.numpy()
    np.testing.assert_allclose(nearest, 2 * np.sin(np.pi / 40))


def test_sphere() -> None:
    split = load_dataset("sphere", 50, dim=5, holdout=30)
    assert split.train.shape == (5,)
    assert len(split.holdout) == 30
    for dataset in (split.train, split.holdout):
        torch.testing.assert_close(
            dataset.x.norm(dim=1), torch.ones(len(dataset), dtype=dataset.x.dtype)
        )
        assert torch.equal(dataset.x[:, 0].sign().long(), dataset.y)
    assert load_dataset("sphere").train.x.shape == (500, 784)
    with pytest.raises(DataError, match="at least 2 coordinates"):
        load_dataset("sphere", 4, dim=1)


def test_mnist_reads_the_same_from_every_layout(tmp_path: Path, root: Path) -> None:
    for name in ("packed", "archive"):
        (tmp_path / name).mkdir()
    write_mnist_idx(tmp_path / "packed", packed=True)
    write_npz(tmp_path / "archive", "mnist", (28, 28))
    expected = load_dataset("mnist", 20, root=root, seed=1)
    assert expected.train.shape == (1, 28, 28)
    for name in ("packed", "archive"):
        assert same(load_dataset("mnist", 20, root=tmp_path / name, seed=1), expected)


@pytest.mark.parametrize("encoding", CIFAR_ENCODINGS)
def test_cifar10_reads_the_same_from_every_batch(encoding: str, tmp_path: Path, root: Path) -> None:
    write_cifar_batches(tmp_path, CIFAR_ENCODINGS[encoding])
    expected = load_dataset("cifar10", 20, root=root)
    assert expected.train.shape == (3, 32, 32)
    assert same(load_dataset("cifar10", 20, root=tmp_path), expected)


def test_cifar10_archive_has_channels_last_and_animals_positive(tmp_path: Path) -> None:
    write_npz(tmp_path, "cifar10", (32, 32, 3))
    images, labels = published((32, 32, 3), PER_CLASS, 0)
    split = load_dataset("cifar10", root=tmp_path, center=False)
    assert len(split.train) == 2 * 4 * PER_CLASS
    assert split.train.classes == ("vehicle", "animal")
    animal = (labels >= 2) & (labels <= 7)
    first = images[np.nonzero(animal)[0][0]].transpose(2, 0, 1) / 255
    np.testing.assert_allclose(split.train.x[split.train.y == 1][0].numpy(), first)


def test_full_size_batch_is_read(tmp_path: Path) -> None:
    data = np.arange(10_000, dtype=np.uint16).astype(np.uint8)[:, None].repeat(3072, axis=1)
    batch = tmp_path / "data_batch_1"
    batch.write_bytes(python2_batch(data, [i % 10 for i in range(10_000)]))
    images, labels = read_cifar_batch(batch)
    assert images.shape == (10_000, 3, 32, 32)
    assert (images[:, 0, 0, 0] == data[:, 0]).all()
    assert labels[:11].tolist() == [*range(10), 0]


class Payload:
    """A pickle that runs a command when it is loaded the ordinary way."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.target}",)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_batch_that_runs_code_is_refused(tmp_path: Path, protocol: int) -> None:
    write_cifar_batches(tmp_path, python2_batch)
    target = tmp_path / "executed"
    evil = pickle.dumps({b"data": Payload(target), b"labels": [0]}, protocol=protocol)
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").write_bytes(evil)
    with pytest.raises(
        UnsafeFileError, match=r"refers to the function '(posix|nt)\.system'"
    ) as caught:
        load_dataset("cifar10", 2, root=tmp_path)
    assert caught.value.exit_code == 4
    assert not target.exists()
    pickle.loads(evil)
    assert target.exists()


@pytest.mark.parametrize("name", ["builtins.eval", "numpy.load", "numpy.core.multiarray.fromfile"])
def test_names_near_the_allowed_ones_are_refused(tmp_path: Path, name: str) -> None:
    module, _, attribute = name.rpartition(".")
    (tmp_path / "batch").write_bytes(f"c{module}\n{attribute}\n.".encode())
    with pytest.raises(UnsafeFileError):
        read_cifar_batch(tmp_path / "batch")


BROKEN_BATCHES = {
    "empty": b"",
    "no pickle": b"\x89PNG",
    "truncated": python2_batch(np.zeros((2, 3072), np.uint8), [0, 1])[:-40],
    "no dictionary": pickle.dumps([1]),
    "no data": pickle.dumps({b"labels": [1]}),
    "wrong width": python2_batch(np.zeros((2, 10), np.uint8), [0, 1]),
    "wrong dtype": pickle.dumps({"data": np.zeros((2, 3072)), "labels": [0, 1]}, protocol=2),
    "claims more": python2_batch(np.zeros((2, 3072), np.uint8), [0, 1]).replace(
        struct.pack("<i", 2) + b"J" + struct.pack("<i", 3072),
        struct.pack("<i", 2**31 - 1) + b"J" + struct.pack("<i", 3072),
    ),
    "huge memo": b"\x80\x02}r\xff\xff\xff\xff.",
    "labels out of range": python2_batch(np.zeros((2, 3072), np.uint8), [0, 10]),
    "labels missing": python2_batch(np.zeros((2, 3072), np.uint8), [0]),
}


@pytest.mark.parametrize("kind", BROKEN_BATCHES)
def test_broken_batches_are_reported(tmp_path: Path, kind: str) -> None:
    (tmp_path / "batch").write_bytes(BROKEN_BATCHES[kind])
    with pytest.raises(DataError, match="python batch"):
        read_cifar_batch(tmp_path / "batch")


def test_random_damage_never_escapes_as_another_error(tmp_path: Path) -> None:
    good = pickle.dumps({b"data": np.zeros((1, 8), np.uint8), b"labels": [1, 2]}, protocol=2)
    rng = random.Random(0)
    for _ in range(300):
        damaged = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        (tmp_path / "batch").write_bytes(damaged)
        with pytest.raises((DataError, UnsafeFileError)):
            read_cifar_batch(tmp_path / "batch")


IDX = idx_bytes(np.arange(24, dtype=np.uint8).reshape(4, 3, 2))
BROKEN_IDX = {
    "empty": (b"", "nothing"),
    "wrong magic": (b"\x00\x00\x0d\x03" + IDX[4:], "00 00 0d 03"),
    "wrong dimensions": (b"\x00\x00\x08\x01" + IDX[4:], "00 00 08 01"),
    "truncated header": (IDX[:9], "begins"),
    "truncated": (IDX[:-1], "claims"),
    "too long": (IDX + b"\x00", "more"),
    "claims 10^28 bytes": (IDX[:4] + b"\xff" * 12 + IDX[16:], "claims"),
}


@pytest.mark.parametrize("kind", BROKEN_IDX)
def test_broken_idx_files_are_reported(tmp_path: Path, kind: str) -> None:
    for packed in [False, True]:
        content, words = BROKEN_IDX[kind]
        path = tmp_path / ("file.gz" if packed else "file")
        path.write_bytes(gzip.compress(content) if packed else content)
        with pytest.raises(DataError, match=words):
            read_idx(path, 3)


def test_broken_gzip_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "file.gz"
    for content in (gzip.compress(IDX)[:-9], b"plain", gzip.compress(IDX)[:12] + b"\xff" * 40):
        path.write_bytes(content)
        with pytest.raises(DataError):
            read_idx(path, 3)
    path.write_bytes(gzip.compress(IDX))
    assert read_idx(path, 3).tolist() == np.arange(24).reshape(4, 3, 2).tolist()


def test_missing_files_say_where_and_how(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, layout in (("mnist", "MNIST/raw/"), ("cifar10", "cifar-10-batches-py/")):
        with pytest.raises(DataError, match="no data folder was given") as caught:
            load_dataset(name, 10)
        for words in (layout, f"{name}.npz", "RESIDUUM_DATA", "--data-root"):
            assert words in str(caught.value)
        with pytest.raises(DataError, match="holds neither") as caught:
            load_dataset(name, 10, root=tmp_path)
        assert str(tmp_path) in str(caught.value)
    monkeypatch.setenv("RESIDUUM_DATA", str(root))
    assert same(load_dataset("mnist", 10), load_dataset("mnist", 10, root=root))
    write_mnist_idx(tmp_path)
    (tmp_path / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="has no t10k-labels-idx1-ubyte"):
        load_dataset("mnist", 10, root=tmp_path)


def test_published_sets_must_look_published(tmp_path: Path) -> None:
    write_npz(tmp_path, "mnist", (8, 8))
    with pytest.raises(DataError, match=r"shape \(1, 28, 28\); .* shape \(1, 8, 8\)"):
        load_dataset("mnist", 10, root=tmp_path)
    np.savez(tmp_path / "mnist.npz", x=np.zeros((4, 28, 28)), y=[0, 1, 0, 1])
    with pytest.raises(DataError, match="images of type uint8"):
        load_dataset("mnist", 2, root=tmp_path)


def test_unknown_names_and_options() -> None:
    with pytest.raises(DataError, match="Did you mean 'mnist'") as caught:
        load_dataset("mnits")
    assert caught.value.exit_code == 2
    assert all(name in str(caught.value) for name in DATASETS)
    with pytest.raises(DataError, match="Did you mean 'multiclass'"):
        load_dataset("digits", 20, task="multi-class")
    with pytest.raises(DataError, match="Did you mean 'dim'"):
        load_dataset("sphere", 20, dims=3)
    with pytest.raises(DataError, match="does not have the option 'size'"):
        load_dataset("digits", 20, size=(3, 3))
    with pytest.raises(DataError, match="does not have the option 'path'"):
        load_dataset("circle", path="x")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"n": 51}, "each of the 2 labels has equally many samples; got n=51"),
        ({"n": 15, "task": "multiclass"}, "equally many samples; got n=15. Use n=10"),
        ({"n": 2, "task": "multiclass"}, "Use n=10"),
        ({"n": 1}, "at least 2 samples; got n=1"),
        ({"n": -4}, "got n=-4"),
        ({"n": 5000}, "has 891 of 'even', 906 of 'odd'. Use n=1782"),
        ({"n": 1782, "holdout": 100}, "Use holdout=15"),
        ({"n": 10, "holdout": 0}, "at least 1 sample"),
        ({"n": 10, "seed": -1}, "seed must be between"),
        ({"n": 10, "dtype": torch.int64}, "floating"),
        ({"n": 10, "positive": ("ten",)}, "no class 'ten'"),
        ({"n": 10, "positive": tuple("0123456789")}, "10 of the 10"),
    ],
)
def test_impossible_requests(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError) as caught:
        load_dataset("digits", **arguments)
    assert words in str(caught.value)
    assert caught.value.exit_code == 2
    assert caught.value.remedy


@pytest.mark.parametrize("name", ["circle", "sphere"])
def test_synthetic_sets_need_even_n(name: str) -> None:
    with pytest.raises(DataError, match=r"got n=7\. Use n=6"):
        load_dataset(name, 7)


def test_positive_regroups_any_set() -> None:
    train = load_dataset("digits", 20, positive=(3, "5")).train
    assert train.classes[1] == "3 or 5"
    assert train.y.sum() == 0


def test_npz_of_images_is_scaled_and_split(tmp_path: Path) -> None:
    x, y = published((5, 4, 3), 4, 0)
    np.savez(tmp_path / "own.npz", x=x, y=np.where(y < 5, "cat", "dog"))
    split = load_dataset(str(tmp_path / "own.npz"), center=False)
    assert_sound(split)
    assert split.train.shape == (3, 5, 4)
    assert split.train.classes == ("cat", "dog")
    assert (split.train.name, len(split.train), len(split.holdout)) == ("own", 20, 20)
    together = torch.cat((split.train.x, split.holdout.x)).numpy()
    assert np.isclose(together.sum(), x.sum() / 255)


def test_npz_of_numbers_is_taken_as_it_is(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(12, 3))
    np.savez(tmp_path / "own.npz", x=x, y=np.tile([-1.0, 1.0], 6))
    split = load_dataset(tmp_path / "own.npz", 8, center=False)
    np.testing.assert_array_equal(split.train.x.numpy(), x[:8])
    np.testing.assert_array_equal(split.train.y.numpy(), np.tile([-1, 1], 4))
    assert sorted(split.holdout.x[:, 0].tolist()) == sorted(x[8:, 0])


@pytest.mark.parametrize(("n", "holdout", "most"), [(99, None, 10), (98, None, 10), (99, 5, 6)])
def test_the_largest_n_that_works_is_named(
    n: int, holdout: int | None, most: int, tmp_path: Path
) -> None:
    x = np.random.default_rng(0).normal(size=(12, 3))
    np.savez(tmp_path / "own.npz", x=x, y=np.arange(12) % 2)
    with pytest.raises(DataError, match=f"Use n={most}"):
        load_dataset(tmp_path / "own.npz", n, holdout=holdout)
    split = load_dataset(tmp_path / "own.npz", most, holdout=holdout)
    assert (len(split.train), split.available) == (most, 12)
    with pytest.raises(DataError):
        load_dataset(tmp_path / "own.npz", most + 2, holdout=holdout)


def test_a_saved_dataset_is_read_back_exactly(tmp_path: Path) -> None:
    saved = load_dataset("digits", 60).train
    path = saved.to_npz(tmp_path / "train.npz")
    half = load_dataset(path, 30)
    assert half.train.mean is not None
    assert torch.equal(half.train.mean, saved.mean)
    assert half.train.classes == saved.classes
    known_rows = {row.numpy().tobytes() for row in saved.x}
    assert all(row.numpy().tobytes() in known_rows for row in half.train.x)
    assert isinstance(half.holdout, Dataset)


def test_held_out_copies_of_training_images_are_skipped(tmp_path: Path) -> None:
    x = np.arange(40, dtype=np.uint8).reshape(10, 1, 2, 2)
    y = np.tile([0, 1], 5)
    np.savez(tmp_path / "a.npz", x_train=x[:4], y_train=y[:4], x_test=x, y_test=y)
    split = load_dataset(tmp_path / "a.npz")
    assert_sound(split)
    assert (len(split.train), len(split.holdout)) == (4, 6)
    np.savez(tmp_path / "b.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    with pytest.raises(DataError, match=r"at least 1; only 0 samples of .* differ"):
        load_dataset(tmp_path / "b.npz")


def test_npz_labels_need_two_sides(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    x = np.random.default_rng(0).normal(size=(12, 3))
    np.savez(path, x=x, y=np.tile([0, 1, 2], 4), classes=["ant", "bee", "cow"])
    with pytest.raises(DataError, match="0 of the 3") as caught:
        load_dataset(path)
    assert "positive=('cow',)" in str(caught.value)
    assert load_dataset(path, 4, positive=("bee",)).train.classes == ("ant or cow", "bee")
    assert load_dataset(path, 6, task="multiclass").train.classes == ("ant", "bee", "cow")
    np.savez(path, x=x, y=np.ones(12))
    for task in TASKS:
        with pytest.raises(DataError, match="all 12 samples of the dataset 'own' are of class '1'"):
            load_dataset(path, task=task)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.zeros((4, 2))}, r"lacks \['y'\]"),
        (
            {"x_train": np.zeros((4, 2)), "y_train": [0, 1, 0, 1], "x_test": np.ones((2, 2))},
            "y_test",
        ),
        ({"a": np.zeros(3)}, "lacks"),
        ({"x": np.zeros(4), "y": [0, 1, 0, 1]}, "one row per sample"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0)}, "one row per sample"),
        ({"x": np.zeros((4, 2)), "y": [0, 1, 0]}, "one label"),
        ({"x": np.full((4, 2), np.nan), "y": [0, 1, 0, 1]}, "finite"),
        ({"x": np.zeros((4, 2)), "y": [0.5, 1, 0, 1]}, "whole numbers"),
        ({"x": np.zeros((4, 2)), "y": np.eye(4)}, "one class per sample"),
        (
            {"x": np.zeros((4, 2)), "y": [0, 1, 0, 1], "mean": np.zeros(3)},
            "'mean' must have the shape",
        ),
        (
            {
                "x_train": np.zeros((2, 2)),
                "y_train": [0, 1],
                "x_test": np.zeros((2, 3)),
                "y_test": [0, 1],
            },
            "the same shape and type",
        ),
    ],
)
def test_unusable_archives(tmp_path: Path, arrays: dict[str, Any], words: str) -> None:
    np.savez(tmp_path / "own.npz", **arrays)
    with pytest.raises(DataError, match=words):
        load_dataset(tmp_path / "own.npz")


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("1,2")
    with pytest.raises(DataError, match=r"must be an \.npz archive"):
        load_dataset(tmp_path / "data.csv")
    with pytest.raises(DataError, match="A data file must exist"):
        load_dataset(tmp_path / "absent.npz")
    with pytest.raises(DataError, match="no file or folder"):
        load_dataset(str(tmp_path / "absent"))
    (tmp_path / "fake.npz").write_bytes(b"no archive")
    with pytest.raises(DataError, match="reading the file failed"):
        load_dataset(tmp_path / "fake.npz")


def test_folder_of_images(tmp_path: Path) -> None:
    write_folder(tmp_path / "pets", {"dog": 5, "<cat>": 6})
    (tmp_path / "pets" / "dog" / "notes.txt").write_text("not an image")
    (tmp_path / "pets" / "README.md").write_text("not a class")
    (tmp_path / "pets" / ".cache").mkdir()
    split = load_dataset(tmp_path / "pets", 4, center=False)
    assert_sound(split)
    assert split.train.classes == ("<cat>", "dog")
    assert (split.train.name, split.train.shape) == ("pets", (3, 6, 6))
    with Image.open(tmp_path / "pets" / "dog" / "000.png") as image:
        first = np.asarray(image).transpose(2, 0, 1) / 255
    np.testing.assert_allclose(split.train.x[split.train.y == 1][0].numpy(), first)
    small = load_dataset(tmp_path / "pets", 4, size=(2, 3), gray=True)
    assert small.train.shape == (1, 2, 3)


def test_folder_with_its_own_test_part(tmp_path: Path) -> None:
    write_folder(tmp_path / "train", {"a": 4, "b": 4}, mode="L", side=5, suffix=".PNG")
    write_folder(tmp_path / "test", {"a": 3, "b": 2}, mode="L", side=5, suffix=".bmp")
    for file in (tmp_path / "test").rglob("*.bmp"):  # unlike the training images
        Image.fromarray(255 - np.asarray(Image.open(file))).save(file)
    split = load_dataset(tmp_path)
    assert_sound(split)
    assert (len(split.train), len(split.holdout), split.train.shape) == (8, 4, (1, 5, 5))


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    write_folder(tmp_path, {"train": 4, "bus": 4})
    assert load_dataset(tmp_path, 4).train.classes == ("bus", "train")


def test_unusable_folders(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="one subfolder per class"):
        load_dataset(tmp_path / "empty")
    write_folder(tmp_path / "single", {"only": 3})
    with pytest.raises(DataError, match="of class 'only'"):
        load_dataset(tmp_path / "single")
    write_folder(tmp_path / "sizes", {"a": 2}, side=4)
    write_folder(tmp_path / "sizes", {"b": 2}, side=5)
    with pytest.raises(DataError, match="the same size and number of channels"):
        load_dataset(tmp_path / "sizes")
    assert load_dataset(tmp_path / "sizes", 2, size=(4, 4)).train.shape == (3, 4, 4)
    with pytest.raises(DataError, match=r"\(height, width\)"):
        load_dataset(tmp_path / "sizes", 2, size=(0, 4))
    write_folder(tmp_path / "modes", {"a": 2}, mode="L")
    write_folder(tmp_path / "modes", {"b": 2}, mode="RGBA")
    with pytest.raises(DataError, match="gray=True"):
        load_dataset(tmp_path / "modes")
    assert load_dataset(tmp_path / "modes", 2, gray=False).train.shape == (3, 6, 6)


def test_images_that_are_none_or_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path, {"a": 2, "b": 2}, side=8)
    victim = tmp_path / "b" / "001.png"
    content = victim.read_bytes()
    for damaged in (b"", b"%!PS-Adobe-3.0 EPSF-3.0\n", content[: len(content) // 2]):
        victim.write_bytes(damaged)
        with pytest.raises(DataError, match="cannot be read as an image"):
            load_dataset(tmp_path)
    Image.new("I;16", (8, 8)).save(victim)
    with pytest.raises(DataError, match="8 bits"):
        load_dataset(tmp_path)
    victim.write_bytes(content)
    width = 4000
    Image.new("L", (width, MAX_PIXELS // width)).save(victim)
    load_dataset(tmp_path, 2, size=(8, 8), gray=True)
    pixels = width * (MAX_PIXELS // width + 1)
    Image.new("L", (width, pixels // width)).save(victim)
    # PIL warns above its own limit and raises above twice that.
    for limit in (pixels, pixels * 2 // 3, pixels // 3):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(UnsafeFileError, match=f"at most {MAX_PIXELS} pixels"):
            load_dataset(tmp_path)
