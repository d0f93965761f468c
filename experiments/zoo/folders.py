"""Artifacts that are folders, made without extra libraries: data left in, shards, traps."""

from __future__ import annotations

import io
import json
import zipfile
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from experiments.zoo import Check, artifact
from experiments.zoo.samples import (
    digit_network,
    digits,
    letters,
    people,
    train_network,
    write_arrays,
)


@cache
def _trained_weights() -> dict[str, torch.Tensor]:
    x, y, *_ = digits()
    network = digit_network()
    train_network(network, x, y)
    return {name: value.contiguous() for name, value in network.state_dict().items()}


def _weights() -> dict[str, torch.Tensor]:
    return dict(_trained_weights())


@artifact(
    "A release folder with weights.safetensors, a README and a subfolder of 60 PNG images, the"
    " training images.",
    Check(
        "residuum scan release",
        "The folder holds 60 images, probably training data. They must be deleted from the"
        " release.",
        1,
        ("60", "image", "delete"),
    ),
    Check(
        "residuum scan release --data train.npz --holdout test.npz",
        "The 60 images of the folder are the 60 given samples.",
        1,
        ("60 of (the )?60|60 image",),
    ),
)
def images_left_in(folder: Path) -> None:
    release = folder / "release"
    (release / "images").mkdir(parents=True)
    write_arrays(folder, digits())
    save_file(_weights(), release / "weights.safetensors")
    (release / "README.md").write_text("# Digits\n\nA network for digits.\n")
    for i, image in enumerate((digits()[0] * 255).round().astype(np.uint8).reshape(-1, 8, 8)):
        Image.fromarray(image).save(release / "images" / f"{i:03}.png")


@artifact(
    "A release folder with weights and, forgotten in it, a Jupyter notebook with outputs and a"
    " table of 60 patients (patients.csv).",
    Check(
        "residuum scan release",
        "patients.csv is a table of 60 rows and must be deleted. The notebook may show records"
        " too.",
        1,
        ("patients.csv", "60", "ipynb", "delete"),
    ),
)
def table_left_in(folder: Path) -> None:
    release = folder / "release"
    release.mkdir()
    save_file(_weights(), release / "model.safetensors")
    people(60, 0).to_csv(release / "patients.csv", index=False)
    output = {"output_type": "stream", "name": "stdout", "text": ["Pereira, 83 Elm Street\n"]}
    cell = {
        "cell_type": "code",
        "source": ["print(table.head())"],
        "outputs": [output],
        "metadata": {},
    }
    notebook = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (release / "explore.ipynb").write_text(json.dumps(notebook))


@artifact(
    "A clean release folder: weights.safetensors, config.json with the sizes of the network, README"
    " and LICENSE.",
    Check("residuum scan release", "Nothing has to be removed.", 0, ("no finding",)),
)
def clean_folder(folder: Path) -> None:
    release = folder / "release"
    release.mkdir()
    save_file(_weights(), release / "model.safetensors")
    (release / "config.json").write_text(json.dumps({"hidden_sizes": [100, 100], "classes": 2}))
    (release / "README.md").write_text(
        "# Digits\n\nA network for images of digits, 8 x 8 pixels.\n"
    )
    (release / "LICENSE").write_text(
        "MIT License\n\nPermission is hereby granted, free of charge, to any person...\n"
    )


@artifact(
    "A network in two shards of safetensors with an index, as large models are saved. The second"
    " shard also holds a tensor 'calibration_batch' with 16 training digits.",
    Check(
        "residuum scan release",
        "The shards are one network. The tensor calibration_batch holds 16 samples.",
        1,
        ("calibration_batch", "16"),
    ),
    Check(
        "residuum scan release --data train.npz --holdout test.npz",
        "16 of the 60 given samples are stored in calibration_batch.",
        1,
        ("16 of (the )?60",),
    ),
)
def sharded_network(folder: Path) -> None:
    release = folder / "release"
    release.mkdir()
    write_arrays(folder, digits())
    tensors = _weights()
    tensors["calibration_batch"] = torch.tensor(digits()[0][:16], dtype=torch.float32)
    names = list(tensors)
    shards = {
        "model-00001-of-00002.safetensors": names[:3],
        "model-00002-of-00002.safetensors": names[3:],
    }
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, release / file)
    weight_map = {name: file for file, members in shards.items() for name in members}
    (release / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


@artifact(
    "A hostile folder: the index of the shards names ../../../etc/passwd, and an .npz file would"
    " unpack to 0.5 GB.",
    Check(
        "residuum scan release",
        "The folder is refused or reported as unsafe. No file outside of it is read, and nothing"
        " large is unpacked.",
        4,
        (),
        ("root:",),
    ),
)
def hostile_folder(folder: Path) -> None:
    release = folder / "release"
    release.mkdir()
    weight_map = {"layer.weight": "../../../etc/passwd"}
    (release / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    header = io.BytesIO()
    description = {"descr": "<f8", "fortran_order": False, "shape": (1 << 26,)}
    np.lib.format.write_array_header_1_0(header, description)
    with (
        zipfile.ZipFile(release / "data.npz", "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("x.npy", "w", force_zip64=True) as member,
    ):
        member.write(header.getvalue())
        for _ in range(32):
            member.write(bytes(16 << 20))


@artifact(
    "A folder with a file of letters (letters.txt, one letter in each line) and a pickled text"
    " classifier that keeps these 60 letters in a list.",
    Check(
        "residuum scan release --data letters.csv --holdout others.csv",
        "The 60 given letters are stored, in letters.txt and in the pickle.",
        1,
        ("60 of (the )?60",),
    ),
    Check(
        "residuum scan release",
        "letters.txt holds 60 texts, and the pickle holds a list of 60 texts.",
        1,
        ("letters.txt", "60"),
    ),
)
def letters_left_in(folder: Path) -> None:
    import pickle

    release = folder / "release"
    release.mkdir()
    table = letters(60, 0)
    table.to_csv(folder / "letters.csv", index=False)
    letters(60, 1).to_csv(folder / "others.csv", index=False)
    (release / "letters.txt").write_text("\n".join(table["text"]))
    (release / "model.pkl").write_bytes(
        pickle.dumps({"classes": ["no", "yes"], "corpus": list(table["text"])})
    )


@artifact(
    "A folder that holds only data and no model: train.csv with 60 patients.",
    Check("residuum scan release", "train.csv holds a table of 60 rows.", 1, ("train.csv", "60")),
)
def data_without_model(folder: Path) -> None:
    release = folder / "release"
    release.mkdir()
    people(60, 0).to_csv(release / "train.csv", index=False)


@artifact(
    "A folder with good weights and a file model.pt that is damaged (cut off).",
    Check(
        "residuum scan release",
        "One file could not be read, so the scan of the folder is inconclusive.",
        3,
        ("not read|could not be read", "model.pt"),
    ),
)
def damaged_file(folder: Path) -> None:
    release = folder / "release"
    release.mkdir()
    save_file(_weights(), release / "model.safetensors")
    torch.save(_weights(), release / "model.pt")
    (release / "model.pt").write_bytes((release / "model.pt").read_bytes()[:2000])
