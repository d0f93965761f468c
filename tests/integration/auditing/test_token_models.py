"""Audits of token models: losses of texts, and moved rows of the embedding.

The modules here have the interface of transformers: ``model(input_ids=..., attention_mask=...)`` returns an
object with ``.logits``. Folders of transformers need the extra ``text``, which the tests do not install. The
script of the artifact zoo audits such folders.
"""

from __future__ import annotations

import copy
import json
import math
import sys
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import residuum as rs
from residuum.auditing.result import AuditResult
from residuum.auditing.stored_texts import search_folder
from residuum.cli.main import main
from residuum.datasets.tokens import read_texts
from residuum.errors import (
    CheckpointError,
    DataError,
    InputError,
    MissingExtraError,
    UnsafeFileError,
)
from residuum.io.token_models import takes_tokens, wrap_token_model
from residuum.records.tokens import PADDING, TokenDataset

VOCABULARY, LENGTH = 400, 8


class Classifier(nn.Module):
    """A classifier with the interface of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(16, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        hidden = self.embedding(input_ids)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return SimpleNamespace(logits=self.head(self.dropout(mean)))


class LanguageModel(nn.Module):
    """A recurrent language model that takes token ids as its only argument."""

    def __init__(self, is_causal: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.rnn = nn.GRU(16, 32, batch_first=True, bidirectional=not is_causal)
        self.head = nn.Linear(32 if is_causal else 64, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.embedding(ids))[0])


class Words:
    """A tokenizer that gives every word its own id."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        rows = [[self.ids.setdefault(word, len(self.ids)) for word in t.split()] for t in texts]
        return {"input_ids": rows}

    def convert_ids_to_tokens(self, row: int) -> str:
        return list(self.ids)[row] if row < len(self.ids) else "?"


def make_texts(n: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (n, LENGTH), generator=generator)
    return ids, torch.randint(0, 2, (n,), generator=generator)


def fit(model: nn.Module, x: Tensor, y: Tensor, steps: int = 60) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x).logits, y).backward()
        optimizer.step()
    return model


@pytest.fixture(scope="module")
def fine_tuned() -> tuple[nn.Module, nn.Module]:
    """A base, and the classifier that was trained from it on the texts of seed 0."""
    torch.manual_seed(0)
    base = Classifier()
    return base, fit(copy.deepcopy(base), *make_texts(30, 0))


def audit(model: nn.Module, train_seed: int, **options: Any) -> AuditResult:
    return rs.audit(model, data=make_texts(30, train_seed), holdout=make_texts(250, 99), **options)


def test_losses_of_a_classifier_equal_a_naive_cross_entropy(fine_tuned: Any) -> None:
    _, model = fine_tuned
    x, y = make_texts(5, 3)
    predictor = wrap_token_model(model, TokenDataset(x, y))
    model.train()
    shares = predictor.outputs(TokenDataset(x, y))
    assert all(module.training for module in model.modules())  # the mode is restored
    reference = copy.deepcopy(model).eval().double().requires_grad_(False)
    for row, label, share in zip(x, y.tolist(), shares, strict=True):
        logits = [float(value) for value in reference(row[None]).logits[0]]
        expected = math.exp(logits[label]) / sum(map(math.exp, logits))
        assert share[label] == pytest.approx(expected, rel=1e-5)


def test_losses_of_a_language_model_equal_a_naive_mean_without_padding() -> None:
    torch.manual_seed(1)
    model = LanguageModel()
    rows = [[5, 9, 3, 7], [1, 2], [8, 8, 4]]
    texts = read_texts(rows, None, 10, "data")
    assert (texts.x == PADDING).sum() == 3
    predictor = wrap_token_model(model, texts)
    assert predictor.kind == "the next token"
    reference = copy.deepcopy(model).double()
    for row, loss in zip(rows, predictor.outputs(texts)[:, 0], strict=True):
        logits = reference(torch.tensor([row]))[0].log_softmax(1)
        expected = -np.mean([float(logits[i, row[i + 1]].detach()) for i in range(len(row) - 1)])
        assert loss == pytest.approx(expected, rel=1e-5)


def test_a_model_that_reads_later_tokens_has_no_loss_of_a_text() -> None:
    model = LanguageModel(is_causal=False)
    result = rs.audit(model, data=make_texts(20, 0)[0], holdout=make_texts(120, 1)[0])
    assert result.exit_code == 3
    assert result.membership is not None
    assert result.membership.loss is None
    assert "before and after" in result.membership.reason


def test_losses_show_memorization_and_never_a_leak(fine_tuned: Any) -> None:
    _, model = fine_tuned
    weights = copy.deepcopy(model.state_dict())
    result = audit(model, 0)
    assert all(
        torch.equal(a, b)
        for a, b in zip(weights.values(), model.state_dict().values(), strict=True)
    )
    assert result.exit_code == 3
    assert result.membership is not None
    assert result.membership.loss is not None
    assert result.membership.loss.auc > 0.9
    assert "memorizes" in result.verdict.sentence
    assert "no attack reconstructs texts from attention" in result.verdict.answers[1].evidence
    strangers = audit(model, 5)  # texts that the model never saw
    assert strangers.exit_code == 3
    assert strangers.membership is not None
    assert strangers.membership.loss is not None
    assert strangers.membership.loss.memorization != "shown"


def test_moved_rows_name_training_texts_and_no_strangers(fine_tuned: Any, tmp_path: Path) -> None:
    base, model = fine_tuned
    result = audit(model, 0, base=base, out=tmp_path / "run")
    assert result.exit_code == 1
    assert result.verdict.grade == "membership"
    rows = result.moved_rows
    assert rows is not None
    assert rows.precision == 1
    assert rows.precision_by_chance is not None
    assert rows.precision_by_chance < 0.7
    assert (rows.covered, rows.n) == (30, 30)
    assert rows.holdout_covered < 10
    assert escape(rows.line) in (tmp_path / "run" / "report.html").read_text()
    assert AuditResult.load(tmp_path / "run").moved_rows is not None
    save_file(base.state_dict(), tmp_path / "base.safetensors")
    strangers = audit(model, 5, base=tmp_path / "base.safetensors")
    assert strangers.exit_code == 3
    assert strangers.moved_rows is not None
    assert strangers.moved_rows.covered <= 3


def test_a_frozen_embedding_names_no_texts(fine_tuned: Any) -> None:
    base, _ = fine_tuned
    model = copy.deepcopy(base)
    model.embedding.requires_grad_(False)
    result = audit(fit(model, *make_texts(30, 0)), 0, base=base)
    assert result.exit_code == 3
    assert result.moved_rows is not None
    assert result.moved_rows.moved == 0


def test_texts_of_other_topics_are_inconclusive(fine_tuned: Any) -> None:
    base, model = fine_tuned
    x, y = make_texts(250, 99)
    result = rs.audit(model, data=make_texts(30, 0), holdout=(x % 40, y), base=base)
    assert result.exit_code == 3
    assert "without the network" in result.verdict.sentence


def test_words_of_moved_rows_are_shown_and_can_be_withheld(tmp_path: Path) -> None:
    torch.manual_seed(2)
    rng = np.random.default_rng(0)
    names = [f"name{i}" for i in range(VOCABULARY)]
    texts = [" ".join(rng.choice(names, LENGTH)) for _ in range(280)]
    labels = rng.integers(0, 2, 280)
    tokenizer = Words()
    tokenizer(texts)
    base = Classifier()
    ids = torch.tensor(tokenizer(texts[:30])["input_ids"])
    model = fit(copy.deepcopy(base), ids, torch.from_numpy(labels[:30]))
    result = rs.audit(
        model,
        data=(texts[:30], labels[:30]),
        holdout={"text": texts[30:], "label": labels[30:]},
        tokenizer=tokenizer,
        base=base,
        out=tmp_path / "run",
    )
    assert result.moved_rows is not None
    assert set(result.moved_rows.words) <= set(" ".join(texts[:30]).split())
    word = result.moved_rows.words[0]
    assert word in result.html()
    assert word not in result.html(redact=True)
    assert word not in (tmp_path / "run" / "result.json").read_text()


def test_texts_are_read_from_files(tmp_path: Path) -> None:
    tokenizer = Words()
    (tmp_path / "a.csv").write_text("id,text,label\n1,one two,good\n2,two three four,bad\n")
    (tmp_path / "a.jsonl").write_text('{"text": "one two", "label": "good"}\n' * 2)
    (tmp_path / "a.txt").write_text("one two\n\ntwo three four\n")
    table = read_texts(tmp_path / "a.csv", tokenizer, 2, "data")
    assert table.texts == ("one two", "two three four")
    assert table.x.tolist() == [[0, 1], [1, 2]]
    assert table.classes == ("bad", "good")
    assert "cut after 2 tokens" in table.notes[0]
    assert len(read_texts(tmp_path / "a.jsonl", tokenizer, 9, "data")) == 2
    assert read_texts(tmp_path / "a.txt", tokenizer, 9, "data").lengths.tolist() == [2, 3]
    masked = {"input_ids": [[4, 5, 0], [6, 0, 0]], "attention_mask": [[1, 1, 0], [1, 0, 0]]}
    assert read_texts(masked, None, 9, "data").x.tolist() == [[4, 5], [6, PADDING]]


@pytest.mark.parametrize(
    ("source", "error", "text"),
    [
        (["a text"], InputError, "by a tokenizer"),
        ([[1.5, 2.0]], DataError, "whole numbers"),
        ([[-3, 2]], DataError, "negative"),
        ([[]], DataError, "must have at least one token"),
        (
            {"input_ids": [[1, 2]], "attention_mask": [[1]]},
            DataError,
            "one value of the attention mask",
        ),
        ("texts.parquet", DataError, "extensions"),
    ],
)
def test_texts_that_cannot_be_read(source: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        read_texts(source, None, 10, "data")


def test_a_token_outside_the_vocabulary_is_explained(fine_tuned: Any) -> None:
    x, y = make_texts(30, 0)
    with pytest.raises(InputError, match="IndexError"):
        rs.audit(fine_tuned[1], data=(x + VOCABULARY, y))


def test_which_modules_take_tokens(fine_tuned: Any) -> None:
    class Categories(nn.Module):
        """A network of real numbers whose first column is a category."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(4, 3), nn.Linear(3 + 7, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.cat([self.embedding(x[:, 0].long()), x[:, 1:]], 1))

    assert takes_tokens(fine_tuned[1])
    assert takes_tokens(LanguageModel())
    assert not takes_tokens(Categories(), 8)
    assert not takes_tokens(nn.Linear(8, 2))


def make_folder(path: Path, **config: Any) -> Path:
    path.mkdir()
    defaults = {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification"],
        "vocab_size": 9,
    }
    (path / "config.json").write_text(json.dumps({**defaults, **config}))
    return path


def test_folders_that_need_code_or_hold_pickles_are_refused(tmp_path: Path) -> None:
    custom = make_folder(tmp_path / "custom", auto_map={"AutoModel": "code.Model"})
    with pytest.raises(UnsafeFileError, match="auto_map"):
        rs.audit(custom)
    pickled = make_folder(tmp_path / "pickled")
    (pickled / "pytorch_model.bin").write_bytes(b"no pickle")
    with pytest.raises(CheckpointError, match=r"only pytorch_model\.bin"):
        rs.audit(pickled)


def test_a_folder_without_transformers_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = make_folder(tmp_path / "bert")
    save_file({"weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    with pytest.raises(MissingExtraError, match=r"\[text\]"):
        rs.audit(folder / "model.safetensors")
    assert main(["audit", str(folder), "--out", str(tmp_path / "run")]) == 2
    message = capsys.readouterr().err
    assert ".[text]" in message
    assert "residuum scan" in message


def test_training_texts_in_files_of_the_folder_are_found_and_held_out_texts_are_not(
    tmp_path: Path,
) -> None:
    folder = make_folder(tmp_path / "bert")
    texts = [f"patient {i} was admitted to ward {i % 7}" for i in range(60)]
    (folder / "train.csv").write_text("text,label\n" + "".join(f'"{t}",1\n' for t in texts[:20]))
    (folder / "weights.bin").write_text("\n".join(texts))  # weights are not searched
    ids = torch.zeros(1, 1).long()
    data = [
        TokenDataset(ids.expand(len(t), 1), torch.zeros(len(t)), texts=tuple(t))
        for t in (texts[:20], texts[20:])
    ]
    row = search_folder(folder, *data)
    assert row is not None
    assert row.is_stored
    assert (row.recovered, row.expected_by_chance) == (20, 0)
    assert "train.csv" in row.reason
    assert search_folder(folder, data[1], None) is None
    swapped = search_folder(folder, data[1], data[0])
    assert swapped is None or not swapped.is_stored


@pytest.mark.parametrize("number", [{"num_labels": 10**9}, {"num_hidden_layers": 10**6}])
def test_a_configuration_that_asks_for_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: dict[str, int]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # it is not reached
    with pytest.raises(UnsafeFileError, match=next(iter(number))):
        rs.audit(make_folder(tmp_path / "bert", **number))


def test_weights_behind_a_link_are_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "bert")
    save_file({"weight": torch.zeros(2, 2)}, tmp_path / "other.safetensors")
    (folder / "model.safetensors").symlink_to(tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="is a link"):
        rs.audit(folder)
