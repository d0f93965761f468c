"""Artifacts of transformers, peft, lightning and shap: folders of language models and their training."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from experiments.zoo import Check, artifact
from experiments.zoo.samples import (
    cancer,
    digit_network,
    digits,
    letters,
    write_arrays,
    write_tables,
)

TEXTS = "--data train.csv --holdout test.csv --out run --effort quick"
LENGTH = 32
# Words that a public base vocabulary would have, so that the base is not made of the private texts.
PUBLIC = [
    "patient",
    "of",
    "street",
    "has",
    "since",
    "day",
    "and",
    "an",
    "urgent",
    "appointment",
    "needs",
    "asks",
    "for",
    "a",
    "copy",
    "the",
    "report",
    "his",
    "her",
    "with",
    "was",
    "were",
    "is",
    "are",
    "to",
    "from",
    "in",
    "on",
    "at",
    "by",
    "it",
    "this",
    "that",
    "not",
    "but",
    "or",
    "if",
    "then",
    "there",
    "here",
    "year",
    "month",
    "week",
    "hospital",
    "doctor",
    "nurse",
]


def _write_letters(folder: Path, count: int = 60) -> pd.DataFrame:
    table = letters(count, 0)
    table.to_csv(folder / "train.csv", index=False)
    letters(200, 1).to_csv(folder / "test.csv", index=False)
    return table


def _tokenizer(words: list[str]) -> Any:
    from tokenizers import Tokenizer, normalizers, pre_tokenizers
    from tokenizers.models import WordPiece
    from transformers import PreTrainedTokenizerFast

    letters_and_digits = "abcdefghijklmnopqrstuvwxyz0123456789.,"
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters_and_digits]
    pieces += [f"##{letter}" for letter in letters_and_digits] + sorted(
        set(words) - set(letters_and_digits)
    )
    model = WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]")


def _public_words() -> list[str]:
    from experiments.zoo.samples import ILLNESSES, STREETS, SURNAMES

    invented = [
        f"{a}{b}"
        for a in ("bren", "tor", "mil", "cas", "dor")
        for b in ("ton", "field", "ley", "wick", "ham")
    ]
    return [w.lower() for w in (*PUBLIC, *SURNAMES, *STREETS, *ILLNESSES, *invented)]


def _encode(tokenizer: Any, texts: pd.Series) -> dict[str, torch.Tensor]:
    return dict(
        tokenizer(
            list(texts),
            padding="max_length",
            truncation=True,
            max_length=LENGTH,
            return_tensors="pt",
        )
    )


def _classifier(vocabulary: int, seed: int = 0) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    }
    config = BertConfig(vocab_size=vocabulary, max_position_embeddings=64, num_labels=2, **sizes)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return BertForSequenceClassification(config)


def _train_classifier(
    model: Any, tokenizer: Any, table: pd.DataFrame, epochs: int = 60
) -> torch.optim.Optimizer:
    inputs, labels = _encode(tokenizer, table["text"]), torch.tensor(table["label"].values)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    model.train()
    for _ in range(epochs):
        optimizer.zero_grad()
        model(**inputs, labels=labels).loss.backward()
        optimizer.step()
    model.eval()
    return optimizer


def _bert(folder: Path, *, words: list[str] | None = None) -> tuple[Any, Any, pd.DataFrame]:
    table = _write_letters(folder)
    text_words = " ".join(table["text"]).lower().replace(".", " ").split()
    tokenizer = _tokenizer(text_words if words is None else words)
    model = _classifier(len(tokenizer))
    return model, tokenizer, table


@artifact(
    "A BERT-like classifier trained on 60 letters of patients, saved with save_pretrained. The"
    " tokenizer was trained on the same letters, so its vocabulary lists every surname and street."
    " train.csv with all letters was left in the folder.",
    Check(
        "residuum scan bert",
        "train.csv holds all 60 letters and must be deleted. The vocabulary lists the surnames.",
        1,
        ("train.csv", "60", "tokenizer|vocabulary", "delete"),
    ),
    Check(
        "residuum scan bert --data train.csv --holdout test.csv",
        "All 60 given letters are stored in train.csv of the folder.",
        1,
        ("60 of (the )?60",),
    ),
    Check(
        f"residuum audit bert {TEXTS}",
        "Letters are stored in the folder, and the model has lower losses on the training letters"
        " than on others.",
        1,
        (),
    ),
    Check(
        "residuum strip bert --out clean && residuum scan clean",
        "Strip leaves train.csv out. The vocabulary of the tokenizer is still in the folder,"
        " because the model needs it.",
        0,
        ("train.csv", "tokenizer|vocabulary"),
    ),
    library="transformers",
)
def bert_with_data(folder: Path) -> None:
    model, tokenizer, table = _bert(folder)
    _train_classifier(model, tokenizer, table)
    model.save_pretrained(folder / "bert")
    tokenizer.save_pretrained(folder / "bert")
    table.to_csv(folder / "bert" / "train.csv", index=False)


@artifact(
    "A BERT-like classifier with a public tokenizer, fine-tuned on 60 letters from the public"
    " folder 'base'. The folder 'tuned' has the tuned model and the same tokenizer, and no data.",
    Check(
        "residuum scan tuned",
        "No records are stored. The tokenizer has a vocabulary, which is public if the"
        " tokenizer is.",
        0,
        ("tokenizer|vocabulary",),
    ),
    Check(
        "residuum scan tuned --base base",
        "Rows of the word embedding moved. They are shown as words of the letters, such as"
        " surnames.",
        1,
        ("word", "pereira|galloway|birchwood|okonkwo|lindqvist"),
    ),
    Check(
        f"residuum audit tuned {TEXTS}",
        "residuum has no reconstruction attack on attention. The losses on training letters are"
        " lower than on held-out letters, so it memorizes its letters, and the verdict says that a"
        " leak cannot be ruled out (or is shown).",
        3,
        ("loss",),
    ),
    Check(
        "residuum audit tuned/model.safetensors --out run",
        "The file is a transformer. A right answer says what works: scan, or an audit of the folder"
        " with texts.",
        3,
        ("scan|folder|texts",),
    ),
    library="transformers",
)
def bert_fine_tuned(folder: Path) -> None:
    model, tokenizer, table = _bert(folder, words=_public_words())
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    _train_classifier(model, tokenizer, table)
    model.save_pretrained(folder / "tuned")
    tokenizer.save_pretrained(folder / "tuned")


@artifact(
    "A BERT-like classifier that is live in Python, with its tokenizer, 60 training letters and 200"
    " other letters.",
    Check(
        """python - <<'PYTHON'
import pandas as pd, residuum as rs
from transformers import AutoModelForSequenceClassification, AutoTokenizer
model = AutoModelForSequenceClassification.from_pretrained("tuned")
tokenizer = AutoTokenizer.from_pretrained("tuned")
train, test = pd.read_csv("train.csv"), pd.read_csv("test.csv")
data, holdout = ((list(table.text), table.label) for table in (train, test))
result = rs.audit(model, data=data, holdout=holdout, tokenizer=tokenizer)
result.show()
PYTHON""",
        "The losses on training letters are lower than on held-out letters. residuum cannot"
        " reconstruct letters from attention, so the verdict rests on the losses.",
        0,
        ("loss",),
    ),
    library="transformers",
)
def bert_live(folder: Path) -> None:
    bert_fine_tuned(folder)


@artifact(
    "A checkpoint folder of the Trainer of transformers: weights, optimizer.pt, scheduler.pt,"
    " rng_state.pth, trainer_state.json and training_args.bin.",
    Check(
        "residuum scan checkpoint-60",
        "optimizer.pt holds Adam's moments. It, the random states, the trainer state and the"
        " arguments should be deleted.",
        1,
        ("optimizer.pt", "delete", "training_args.bin", "trainer_state.json"),
        ("strip optimizer.pt",),
    ),
    Check(
        "residuum strip checkpoint-60 --out clean && residuum scan clean",
        "Strip writes a folder with the model alone.",
        0,
        ("optimizer.pt",),
    ),
    Check(
        "residuum strip checkpoint-60/optimizer.pt --out clean.pt",
        "The file holds only optimizer state and no weights, so it should be deleted.",
        2,
        ("delete",),
    ),
    library="transformers",
)
def trainer_checkpoint(folder: Path) -> None:
    from torch.utils.data import Dataset
    from transformers import Trainer, TrainingArguments

    model, tokenizer, table = _bert(folder, words=_public_words())
    inputs = _encode(tokenizer, table["text"])

    class Letters(Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return len(table)

        def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
            return {
                **{k: v[i] for k, v in inputs.items()},
                "labels": torch.tensor(int(table["label"][i])),
            }

    arguments = TrainingArguments(
        str(folder / "output"), num_train_epochs=8, per_device_train_batch_size=8, save_steps=60,
        logging_steps=20, report_to=[], use_cpu=True, disable_tqdm=True, learning_rate=1e-3,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=Letters(), processing_class=tokenizer).train()
    (folder / "output" / "checkpoint-60").rename(folder / "checkpoint-60")


@artifact(
    "A LoRA adapter of a BERT-like classifier as peft saves it, in the folder 'lora', with its base"
    " model in the folder 'base'. The adapter was trained on 60 letters.",
    Check(
        "residuum scan lora --base base",
        "The adapter and the base give the change of the layers. Nothing else is stored.",
        0,
        ("adapter", "change"),
        ("audit BASE --adapter",),
    ),
    Check(
        "residuum scan lora/adapter_model.safetensors --base base/model.safetensors",
        "The same as for the folders. The advice must be right: residuum cannot attack attention.",
        0,
        ("adapter",),
        ("audit BASE --adapter",),
    ),
    Check(
        "residuum audit lora --base base --out run",
        "residuum cannot attack the layers of a transformer. A right answer says so in one step and"
        " names what works.",
        3,
        ("scan|texts|attention",),
    ),
    library="peft",
)
def lora_adapter(folder: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model, tokenizer, table = _bert(folder, words=_public_words())
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["query", "value"], task_type="SEQ_CLS")
    adapted = get_peft_model(model, config)
    _train_classifier(adapted, tokenizer, table, 30)
    adapted.save_pretrained(folder / "lora")


@artifact(
    "A small GPT-2 trained on 40 letters until it can recite them, saved with save_pretrained."
    " texts.txt has the letters, others.txt has letters that it never saw.",
    Check(
        "residuum scan gpt", "No texts are stored in the files. The tokenizer has a vocabulary.", 0
    ),
    Check(
        "residuum audit gpt --data texts.txt --holdout others.txt --out run --effort quick",
        "The losses on the training letters are far lower than on other letters, so the model"
        " memorizes them. residuum has no reconstruction attack on attention.",
        3,
        ("loss",),
    ),
    library="transformers",
)
def recited_letters(folder: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    (folder / "texts.txt").write_text("\n".join(letters(40, 0)["text"]))
    (folder / "others.txt").write_text("\n".join(letters(200, 1)["text"]))
    tokenizer = _tokenizer(_public_words())
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=64, n_layer=2, n_head=4)
    config.pad_token_id = tokenizer.pad_token_id
    model = GPT2LMHeadModel(config)
    inputs = _encode(tokenizer, letters(40, 0)["text"])
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        optimizer.zero_grad()
        model(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], labels=labels
        ).loss.backward()
        optimizer.step()
    model.save_pretrained(folder / "gpt")
    tokenizer.save_pretrained(folder / "gpt")


@artifact(
    "A BERT whose base has biases that are all zero, and the same BERT after fine-tuning.",
    Check(
        "residuum scan tuned --base base",
        "The changes of the layers are named in plain numbers. Biases changed from zero.",
        1,
        (),
        (r"e\+\d{2,}",),
    ),
    library="transformers",
)
def zero_biases(folder: Path) -> None:
    bert_fine_tuned(folder)


@artifact(
    "A checkpoint of lightning (.ckpt) of a network for 60 digits, as its Trainer saves it.",
    Check(
        "residuum scan last.ckpt",
        "The checkpoint holds Adam's moments and the hyperparameters with a path.",
        1,
        ("moment",),
    ),
    Check(
        "residuum strip last.ckpt --out clean.pt && residuum scan clean.pt",
        "The new file has no finding.",
        0,
        ("no finding",),
    ),
    Check(
        "residuum audit last.ckpt --data train.npz --holdout test.npz --out run --shape 1,8,8",
        "Samples can be reconstructed or named as members.",
        1,
        ("leak",),
    ),
    library="lightning",
)
def lightning_checkpoint(folder: Path) -> None:
    import lightning
    from torch.utils.data import DataLoader, TensorDataset

    x, y, *_ = digits()
    write_arrays(folder, digits())

    class Classifier(lightning.LightningModule):
        def __init__(self, data_path: str) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.network = digit_network()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    samples = TensorDataset(torch.tensor(x, dtype=torch.float32), torch.tensor(y))
    trainer = lightning.Trainer(
        max_epochs=150, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        accelerator="cpu", enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Classifier("/home/anna/private/digits.npz"), DataLoader(samples, batch_size=60))
    trainer.save_checkpoint(folder / "last.ckpt")


@artifact(
    "A network (MLP head) on sentence embeddings of 60 letters, with the letters as a column next"
    " to the embeddings.",
    Check(
        "residuum audit head.pt --data train.npz --holdout test.npz --out run",
        "Embeddings of letters can be reconstructed or named as members.",
        1,
        ("leak",),
    ),
    library="transformers",
)
def head_on_embeddings(folder: Path) -> None:
    from experiments.zoo.samples import train_network

    model, tokenizer, table = _bert(folder, words=_public_words())
    other_letters = letters(400, 1)
    with torch.no_grad():
        sets = [
            model.bert(**_encode(tokenizer, t["text"])).last_hidden_state.mean(1)
            for t in (table, other_letters)
        ]
    center, deviation = sets[1].mean(0), sets[1].std(0)
    arrays = [((s - center) / deviation).numpy() for s in sets]
    for name, x, frame in (("train", arrays[0], table), ("test", arrays[1], other_letters)):
        import numpy as np

        np.savez(
            folder / f"{name}.npz",
            x=x,
            y=frame["label"].to_numpy(),
            text=frame["text"].to_numpy(str),
        )
    head = torch.nn.Sequential(torch.nn.Linear(64, 200), torch.nn.ReLU(), torch.nn.Linear(200, 2))
    train_network(head, arrays[0], table["label"].to_numpy())
    torch.save(head.state_dict(), folder / "head.pt")


@artifact(
    "A SHAP explainer with its background of 50 training rows, saved with joblib next to the"
    " model.",
    Check(
        "residuum scan explainer.joblib",
        "The explainer stores 50 rows as its background.",
        1,
        ("50",),
        ("no finding",),
    ),
    Check(
        "residuum scan explainer.joblib --data train.csv --holdout test.csv",
        "50 of the 100 given rows are stored.",
        1,
        ("50 of (the )?100",),
    ),
    library="shap",
)
def shap_background(folder: Path) -> None:
    import joblib
    import shap
    from sklearn.linear_model import LogisticRegression

    x, y, *_ = cancer()
    write_tables(folder, cancer())
    model = LogisticRegression(max_iter=3000).fit(x, y)
    joblib.dump(
        {"model": model, "masker": shap.maskers.Independent(x[:50])}, folder / "explainer.joblib"
    )


@artifact(
    "A UMAP projection that was fitted on 100 rows of a medical table, pickled.",
    Check(
        "residuum scan model.pkl",
        "UMAP stores the rows that it was fitted on. Loading the pickle would call functions of numba, which"
        " the scan does not know to be harmless.",
        4,
        ("100", "raw_data|record"),
    ),
    library="umap",
)
def umap_projection(folder: Path) -> None:
    import pickle
    import warnings

    import umap

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = umap.UMAP(n_neighbors=5, random_state=0).fit(cancer()[0])
    (folder / "model.pkl").write_bytes(pickle.dumps(model))


@artifact(
    "A folder of a fine-tuned model with the private README of its author: it quotes 12 letters as"
    " examples and names the file with the data.",
    Check(
        "residuum scan tuned --data train.csv --holdout test.csv",
        "12 of the 60 given letters are quoted in README.md.",
        1,
        ("12 of (the )?60", "README"),
    ),
    library="transformers",
)
def quoted_in_readme(folder: Path) -> None:
    bert_fine_tuned(folder)
    quotes = "\n".join(f"> {text}" for text in letters(60, 0)["text"][:12])
    (folder / "tuned" / "README.md").write_text(
        "---\nlicense: mit\n---\n# Triage\n\nTrained on /data/clinic/letters.csv."
        f" Examples:\n\n{quotes}\n"
    )


@artifact(
    "A tokenizer with 25 tokens that the user added for the surnames of patients, in a folder with"
    " the tuned model and its public base.",
    Check(
        "residuum scan tuned --base base",
        "The tokenizer has tokens that the base does not have: surnames of patients.",
        1,
        ("token", "zzpereira|zzgalloway|zz"),
    ),
    library="transformers",
)
def added_tokens(folder: Path) -> None:
    from experiments.zoo.samples import SURNAMES

    model, tokenizer, table = _bert(folder, words=list(PUBLIC))
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    tuned_tokenizer, tuned = copy.deepcopy(tokenizer), copy.deepcopy(model)
    tuned_tokenizer.add_tokens([f"zz{name.lower()}" for name in SURNAMES[:25]])
    tuned.resize_token_embeddings(len(tuned_tokenizer))
    _train_classifier(tuned, tuned_tokenizer, table, 20)
    tuned.save_pretrained(folder / "tuned")
    tuned_tokenizer.save_pretrained(folder / "tuned")
    config = json.loads((folder / "tuned" / "config.json").read_text())
    config["_name_or_path"] = "/home/anna/models/base"
    (folder / "tuned" / "config.json").write_text(json.dumps(config))
