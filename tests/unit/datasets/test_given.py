"""Samples as people have them: read from files and objects, recognized by the network, shown as rows."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import residuum as rs
from residuum.auditing.inputs import as_knowledge, check_inputs, check_scales
from residuum.cli.main import main
from residuum.datasets.given import as_dataset, hash_path, read_samples, read_train_and_holdout
from residuum.errors import DataError, InputError
from residuum.evaluation.adapting import adapt_samples
from residuum.io.checkpoints import as_network
from residuum.networks.network import Network
from residuum.records import Dataset, Knowledge
from residuum.report.html import TOLERANCE, items_of, render
from tests import pages

X = torch.arange(24.0).reshape(6, 4) / 10
Y = torch.tensor([0, 1, 0, 1, 0, 1])


def table(path: Path, x: np.ndarray, y: list[Any], names: list[str]) -> Path:
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows(
            [names, *([*row, label] for row, label in zip(x, y, strict=True))]
        )
    return path


def test_one_archive_may_hold_both_parts(tmp_path: Path) -> None:
    file = tmp_path / "all.npz"
    np.savez(file, x_train=X, y_train=Y, x_test=X + 9, y_test=Y, features=list("abcd"))
    train, test = read_samples(file)
    assert torch.equal(train.x, X)
    assert test is not None
    assert torch.equal(test.x, X + 9)
    assert train.features == test.features == tuple("abcd")
    assert torch.equal(
        read_train_and_holdout(None, file)[1].x, X + 9
    )  # as held-out samples its test part is meant
    assert torch.equal(read_train_and_holdout(file, (X, Y))[1].x, X)  # what is said wins
    np.savez(tmp_path / "half.npz", x_train=X)
    with pytest.raises(DataError, match="must also have the array 'y_train'"):
        read_samples(tmp_path / "half.npz")


def test_a_csv_has_names_units_and_a_label(tmp_path: Path) -> None:
    names = ["age [years]", "label", "height (cm)"]
    with (tmp_path / "t.csv").open("w") as stream:
        stream.write("\ufeff" + ",".join(names) + "\n30,yes,170\n\n40,no,180\n")
    dataset = read_samples(tmp_path / "t.csv")[0]
    assert (dataset.features, dataset.units) == (("age", "height"), ("years", "cm"))
    assert dataset.x.tolist() == [[30, 170], [40, 180]]
    assert (dataset.y.tolist(), dataset.classes) == ([1, 0], ("no", "yes"))
    assert "'label'" in dataset.notes[0]
    numbers = table(tmp_path / "n.csv", X.numpy(), [0.5] * 6, [*"abcd", "price"])
    assert read_samples(numbers)[0].y.tolist() == [0.5] * 6  # the last column; targets stay


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "header"),
        ("a,b\n1,2,3\n", "as many values"),
        ("1,2\n3,4\n", "must hold the names of the columns"),
        ("a,a,y\n1,1,0\n", "different names"),
    ],
)
def test_other_tables_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        read_samples(tmp_path / "t.csv")


def test_a_folder_of_images_is_read_with_its_test_part(tmp_path: Path) -> None:
    for split_name, value in (("train", 255), ("test", 51)):
        for label in "ab":
            (tmp_path / split_name / label).mkdir(parents=True)
            Image.new("L", (3, 2), value).save(tmp_path / split_name / label / "0.png")
    train, test = read_samples(tmp_path)
    assert test is not None
    assert (train.shape, train.classes) == ((1, 2, 3), ("a", "b"))
    assert (float(train.x.max()), float(test.x.max())) == (1.0, 0.2)
    before = hash_path(tmp_path)
    Image.new("L", (3, 2), 7).save(tmp_path / "test" / "a" / "0.png")
    assert hash_path(tmp_path) != before


class Items:
    """A dataset of one's own: a length, and items."""

    classes = ("no", "yes")

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        if i >= len(X):
            raise IndexError
        return X[i].numpy(), int(Y[i])


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(zip(X, Y, strict=True))


@dataclass
class Frame:
    """What a table of another library has: columns, and to_numpy."""

    values: dict[str, np.ndarray]

    @property
    def columns(self) -> list[str]:
        return list(self.values)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.values[name]

    def to_numpy(self) -> np.ndarray:
        return np.stack(list(self.values.values()), 1)


FRAME = Frame({name: X[:, i].numpy() for i, name in enumerate("abcd")})
GIVEN = [
    (X, Y),
    (X.numpy(), Y.tolist()),
    TensorDataset(X, Y),
    DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True),
    DataLoader(Items(), batch_size=2),
    Items(),
    Stream(),
    (FRAME, Y.numpy()),
    Frame({**FRAME.values, "target": Y.numpy()}),
]


@pytest.mark.parametrize("source", GIVEN, ids=lambda source: type(source).__name__)
def test_whatever_holds_samples_is_read_alike(source: Any) -> None:
    dataset = as_dataset(source, "data")
    assert torch.allclose(dataset.x.double(), X.double())
    assert dataset.y.tolist() == Y.tolist()
    assert dataset.classes == (
        ("no", "yes") if isinstance(getattr(source, "dataset", source), Items) else ()
    )


def test_a_data_frame_of_pandas_is_one() -> None:
    import pandas

    frame = pandas.DataFrame(X.numpy(), columns=["a [m]", *"bcd"])
    dataset = as_dataset((frame, pandas.Series(["x", "y"] * 3)), "data")
    assert (dataset.features, dataset.units, dataset.classes) == (
        tuple("abcd"),
        ("m", "", "", ""),
        ("x", "y"),
    )


@pytest.mark.parametrize(
    "source", [7, object(), (X, Y, Y), [("a", 1)], Frame({"y": np.array([1.0])})]
)
def test_anything_else_is_refused_with_what_would_do(source: Any) -> None:
    with pytest.raises(DataError):
        as_dataset(source, "data")


def network(inputs: int = 4, outputs: int = 1) -> Network:
    """Right on samples where the first column is large: y = x_0 - 1/2, or one output each way."""
    model = nn.Sequential(nn.Linear(inputs, 4), nn.ReLU(), nn.Linear(4, outputs))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model[0].weight[0, 0] = model[2].weight[outputs - 1, 0] = 1.0
        model[2].bias[outputs - 1] = -0.5
    return as_network(model, None, (inputs,))


def samples(n: int = 40, inputs: int = 4) -> Dataset:
    x = torch.rand(n, inputs, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[: n // 2, 0], x[n // 2 :, 0] = 0.0, 1.0
    return Dataset(x, (torch.arange(n) >= n // 2).long())


def test_samples_that_suit_stay_as_they_are() -> None:
    dataset = samples()
    train, control = adapt_samples(network(), dataset, dataset, Knowledge())
    assert train is not None
    assert (train.x is dataset.x, train.y is dataset.y, train.notes) == (True, True, ())
    assert control is dataset


def test_one_column_for_each_class_is_read_as_classes() -> None:
    dataset, checkpoint = samples(), network(outputs=2)
    hot = dataset.replace(y=nn.functional.one_hot(dataset.y, 2).double())
    train, _ = adapt_samples(checkpoint, hot, None, Knowledge())
    assert train is not None
    assert torch.equal(train.y, dataset.y)
    assert "class indices" in train.notes[0]
    targets = hot.replace(y=hot.y * 0.9)  # no labels but numbers
    assert torch.equal(adapt_samples(checkpoint, targets, None, Knowledge())[0].y, targets.y)


def test_channels_last_are_turned_where_the_network_has_them_first() -> None:
    x = torch.rand(6, 8, 8, 3, dtype=torch.float64)
    dataset = Dataset(x, Y)
    checkpoint = Network(
        dict(rs.Architecture.parse("convnet:3x8x8-4-1").build().state_dict()), "convnet:3x8x8-4-1"
    )
    train, _ = adapt_samples(checkpoint, dataset, dataset, Knowledge())
    assert torch.equal(train.x, x.movedim(-1, 1))
    assert "channels last" in train.notes[0]
    flat = adapt_samples(network(192), dataset, None, Knowledge())[0]
    assert flat.x is x  # which way the network was trained on them is not known


def test_pixels_of_files_are_divided_where_the_network_knows_them_so() -> None:
    dataset = samples()
    pixels = dataset.replace(x=(dataset.x * 255).round())
    train, control = adapt_samples(network(), pixels, pixels, Knowledge())
    assert float(train.x.max()) == float(control.x.max()) == 1.0
    assert "divided by 255" in train.notes[0]
    granted = adapt_samples(network(), pixels, None, Knowledge(value_range=(0, 255)))[0]
    assert granted.x is pixels.x
    assert "is this what the network receives?" in check_scales(granted, None, Knowledge())[0]
    strangers = pixels.replace(y=1 - pixels.y)
    assert adapt_samples(network(), strangers, None, Knowledge())[0].x is strangers.x


def test_a_table_on_its_own_scale_is_standardized_where_the_network_knows_it_so() -> None:
    dataset = samples()
    own_scale = dataset.replace(
        x=(dataset.x + 5) * torch.tensor([3.0, 1, 1, 1]) - 20, classes=("well", "ill")
    )
    checkpoint = network()
    train, _ = adapt_samples(checkpoint, own_scale, None, Knowledge())
    assert torch.allclose(train.x * train.scale + train.offset, own_scale.x)
    assert "standardized" in train.notes[0]
    turned, _ = adapt_samples(checkpoint, own_scale.replace(y=1 - own_scale.y), None, Knowledge())
    assert torch.equal(turned.y, own_scale.y)
    assert turned.classes == ("ill", "well")
    assert "'ill' is read as class 0" in turned.notes[0]
    unnamed = own_scale.replace(y=1 - own_scale.y, classes=())  # numbers say which class is which
    assert adapt_samples(checkpoint, unnamed, None, Knowledge())[0].x is unnamed.x


def test_labels_that_are_missing_are_asked_for() -> None:
    with pytest.raises(DataError, match=r"need the labels.*data=\(x, y\)"):
        check_inputs(network(), as_dataset(X, "data"), None)


def test_knowledge_may_be_a_dictionary() -> None:
    knowledge = as_knowledge({"value_range": [0, 1], "mean": [1, 2], "sample_count": 3})
    assert (knowledge.value_range, knowledge.sample_count) == ((0, 1), 3)
    assert knowledge.mean is not None
    assert knowledge.mean.tolist() == [1.0, 2.0]
    with pytest.raises(InputError, match="Did you mean 'value_range'"):
        as_knowledge({"value_rnage": (0, 1)})


def test_names_and_scales_of_a_table_are_kept_in_its_file(tmp_path: Path) -> None:
    columns = {
        "features": tuple("abcd"),
        "units": ("m", "", "", ""),
        "scale": X[0] + 1,
        "offset": X[1],
    }
    dataset = Dataset.from_npz(Dataset(X, Y, **columns).to_npz(tmp_path / "t.npz"))
    assert (dataset.features, dataset.units) == (columns["features"], columns["units"])
    assert torch.equal(dataset.scale, columns["scale"])
    assert torch.equal(dataset.offset, columns["offset"])
    for name, wrong in (("features", ("a",)), ("scale", X[0, :2])):
        with pytest.raises(DataError, match=name):
            Dataset(X, Y, **{name: wrong})


def test_rows_are_reported_with_names_units_and_the_nearest_held_out_row() -> None:
    """Column by column against a plain calculation; none of it in a redacted report."""
    result = pages.audited(12, (5,), recovered_every=1)
    evidence = result.evidence
    scale, offset = torch.tensor([10.0, 1, 1, 1, 1]), torch.tensor([500.0, 0, 0, 0, 0])
    spread = torch.full((5,), 4.0, dtype=torch.float64)
    evidence = evidence.replace(
        nearest_holdout=evidence.x + 1.0,
        features=("age", "b", "c", "d", "e"),
        units=("years", "", "", "", ""),
        scale=scale,
        offset=offset,
        spread=spread,
    )
    result = result.replace(evidence=evidence, knowledge=Knowledge())
    item = items_of(result)[0]
    row = torch.from_numpy(item.reconstruction)
    away = (row - evidence.x[0]).abs()
    assert item.row.within == sum(float(d) <= TOLERANCE * 4 for d in away)
    assert (item.row.total, item.row.held_out_within) == (5, 0)
    (age,) = (column for column in item.row.columns if column.name == "age")
    assert age.unit == "years"
    assert float(age.training) == pytest.approx(float(evidence.x[0, 0] * 10 + 500), rel=5e-3)
    assert float(age.held_out) == pytest.approx(float((evidence.x[0, 0] + 1) * 10 + 500), rel=5e-3)
    text = render(result)
    for phrase in (
        ">age<",
        ">years<",
        f"<td>{age.training}</td>",
        "columns were reconstructed within 10% of their spread",
    ):
        assert phrase in text
    redacted = render(result, redact=True)
    assert f"<td>{age.training}</td>" not in redacted
    assert ">years<" not in redacted


def test_an_embedding_is_summed_up_in_the_columns_in_which_it_stands_out() -> None:
    result = pages.audited(6, (768,), recovered_every=1)
    spread = torch.ones(768, dtype=torch.float64)
    evidence = result.evidence.replace(nearest_holdout=result.evidence.x + 1.0, spread=spread)
    result = result.replace(evidence=evidence, knowledge=Knowledge())
    row = items_of(result)[0].row
    assert (len(row.columns), row.total, row.held_out_within) == (12, 768, 0)
    away = (evidence.x[0] - evidence.x.median(0).values).abs()
    assert row.columns[0].name == f"column {int(away.argmax())}"
    text = render(result)
    assert f"{row.within} of 768 columns were reconstructed within 10% of their spread" in text
    assert 'class="vector"' not in text


def test_one_archive_is_enough_for_the_command(tmp_path: Path, capsys: Any) -> None:
    dataset, holdout = samples(), samples(300)
    np.savez(
        tmp_path / "all.npz",
        x_train=dataset.x,
        y_train=dataset.y,
        x_test=holdout.x,
        y_test=holdout.y,
    )
    torch.save(network().theta, tmp_path / "m.pt")
    command = ["audit", str(tmp_path / "m.pt"), "--data", str(tmp_path / "all.npz"), "--dry-run"]
    assert main([*command, "--json"]) == 0
    output = capsys.readouterr().out
    assert "no held-out" not in output
    assert "can be reached" in output
