"""How many members do activation boundaries name, where, and what protects?

Part ``power``: networks of width 256 with PyTorch's default initialization, batches of 32, Adam 1e-3 and SGD
0.01 with momentum 0.9, measured after 20, 50 and 200 epochs. The bars are for the mean over both optimizers
and five seeds:

- after 200 epochs: MNIST n = 60 at least 60%, digits n = 60 at least 50%, breast cancer n = 60 at least 15%,
  MNIST n = 1000 with Adam at least 14%,
- after 50 epochs: MNIST n = 60 at least 15%,
- in lists that are half non-members: at most 5% of the named records are false, pooled.

Lists of non-members alone measure the level.

Part ``protect``: one change at a time to the same network with Adam, with its test accuracy.

Part ``shift``: lists of non-members of another kind than the held-out records. None should be a finding.

    python -m experiments.kinks_power --part power --seeds 9100-9104 --workers 1

The stored rows of the parts ``power`` and ``protect`` were measured with the group test over 1,999 random
subsets. The exact test has replaced it. Findings are computed again from the stored counts.

Seeds 1 to 99 are for development. Claims rest on seeds from 9100 on, drawn after this file was committed.
"""

from __future__ import annotations

import argparse
import copy
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import Case, run_cases

DATA = Path(os.environ.get("RESIDUUM_DATA", "data"))  # folder of mnist.npz and cifar10.npz
WIDTH, BATCH, LEARNING_RATE = 256, 32, {"adam": 1e-3, "adamw": 1e-3, "sgd": 0.01, "sgd-plain": 0.1}
EPOCHS = (20, 50, 200)
HOLDOUT = 750  # fewer for breast cancer, which has 569 records in all
SCALINGS = {
    "mnist": lambda x: x / 255,  # torchvision's ToTensor
    "mnist normalized": lambda x: (x / 255 - 0.1307) / 0.3081,
    "digits / 16": lambda x: x / 16,
    "cifar10": lambda x: (x / 255 - 0.5) / 0.25,
}
POWER = [
    {"data": data, "n": n, "optimizer": optimizer, "model": model}
    for data, n, optimizers, model in (
        ("digits", 60, ("adam", "sgd"), "mlp"),
        ("cancer", 60, ("adam", "sgd"), "mlp"),
        ("mnist", 60, ("adam", "sgd"), "mlp"),
        ("mnist", 1000, ("adam",), "mlp"),
        ("mnist", 60, ("adam", "sgd"), "leaky"),
        ("mnist", 60, ("adam", "sgd"), "cnn"),
        ("embeddings", 60, ("adam", "sgd"), "mlp"),
        ("cifar10", 60, ("adam", "sgd"), "mlp"),
        ("mnist normalized", 60, ("adam", "sgd"), "mlp"),
        ("digits / 16", 60, ("adam", "sgd"), "mlp"),
        ("digits", 1000, ("adam",), "mlp"),
        ("mnist", 60, ("adam", "sgd"), "mlp-256-128"),
        ("mnist", 60, ("adam", "sgd"), "fine-tuned"),
        ("digits", 60, ("adam",), "scikit-learn"),
    )
    for optimizer in optimizers
]
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    *({"n": n} for n in (30, 120, 250, 500)),
    *({"width": width} for width in (32, 64, 1024)),
    *({"batch": batch} for batch in (8, 1_000_000)),
    *({"optimizer": optimizer} for optimizer in ("sgd", "sgd-plain", "adamw")),
    *({"epochs": epochs} for epochs in (5, 10, 20, 35, 50, 100, 500)),
    *({"weight_decay": decay} for decay in (1e-4, 1e-3, 1e-2)),
    *({"dropout": share} for share in (0.2, 0.5)),
    {"early_stopping": True},
    *({"activation": name} for name in ("leaky", "gelu", "silu", "tanh")),
    {"depth": 2},
    *(
        {"noise": share} for share in (0.2, 0.3)
    ),  # added after the seeds had shown that 0.1 is too little
)
ROUNDED = ("fp16", "bf16", "int8", "noise 0.003", "noise 0.01", "noise 0.03", "noise 0.1")
SHIFTS = ("none", "60% zeros and ones", "one class", "x 0.5", "x 1.5", "30% blank")
LISTS = 3  # of each shift for each network
BARS = {  # data, n, model, epochs, optimizers: the least mean share of named members
    ("mnist", 60, "mlp", 200): 0.60,
    ("digits", 60, "mlp", 200): 0.50,
    ("cancer", 60, "mlp", 200): 0.15,
    ("mnist", 1000, "mlp", 200): 0.14,
    ("mnist", 60, "mlp", 50): 0.15,
}


def cases(options: argparse.Namespace) -> list[Case]:
    first, _, last = options.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    if options.part == "shift":
        return [
            {"part": "shift", "data": data, "seed": seed}
            for seed in seeds
            for data in ("digits", "mnist")
        ]
    if options.part == "power":
        return [{"part": "power", **setting, "seed": seed} for setting in POWER for seed in seeds]
    return [
        {"part": "protect", "data": data, "change": change, "seed": seed}
        for seed in seeds
        for data in ("digits", "cancer", "mnist")
        for change in CHANGES
    ]


def measure(case: Case) -> Case:
    import torch

    torch.set_num_threads(1)
    measures = {"power": measure_power, "protect": measure_change, "shift": measure_shift}
    return measures[case["part"]](case)


def measure_power(case: Case) -> Case:
    """Train one network, and test it after 20, 50 and 200 epochs."""
    data = load(case["data"], case["n"], case["seed"])
    if case["model"] == "scikit-learn":
        networks = train_estimator(data, case["seed"])
    else:
        model = build(case["model"], data, {})
        if case["model"] == "fine-tuned":  # from a network trained on 2000 other images
            general = {"members": tuple(split[-2000:] for split in data["unused"])}
            ((_, model),) = train(model, general, {"optimizer": "adam"}, (5,), case["seed"])
        change = {"optimizer": case["optimizer"], "keep": case["model"] == "fine-tuned"}
        networks = train(model, data, change, EPOCHS, case["seed"])
    rows = {}
    for epoch, network in networks:
        rows[str(epoch)] = membership_row(network, data, lists=True)
    return {"epochs": rows}


def measure_change(case: Case) -> Case:
    """Train one network with a change of its training, and test it once."""
    change = case["change"]
    if case["data"] == "cancer" and change.get("n", 0) > 120:
        return {"skipped": "too few records"}
    data = load(case["data"], change.get("n", 60), case["seed"])
    model = build(change.get("activation", "mlp"), data, change)
    last = change.get("epochs", 200)
    ((epoch, network),) = train(model, data, change, (last,), case["seed"])
    if "noise" in change:
        network = rounded(network, f"noise {change['noise']}", case["seed"])
    rows = {"as trained": {**membership_row(network, data, lists=False), "epoch": epoch}}
    for rounding in () if change else ROUNDED:
        rows[rounding] = membership_row(rounded(network, rounding, case["seed"]), data, lists=False)
    return {"rows": rows}


def measure_shift(case: Case) -> Case:
    """Train one network, and test lists of shifted non-members."""
    import torch

    from residuum.io.modules import checkpoint_from_module
    from residuum.records import Dataset
    from residuum.risk.membership import measure_membership

    data = load(case["data"], 60, case["seed"])
    ((_, model),) = train(build("mlp", data, {}), data, {"optimizer": "adam"}, (200,), case["seed"])
    network = checkpoint_from_module(model, input_shape=(data["members"][0].shape[1],))
    generator = torch.Generator().manual_seed(case["seed"])
    lists = []
    for shift in SHIFTS * LISTS:
        x, y = shifted(*data["unused"], shift, generator)
        result = measure_membership(network, Dataset(x, y), Dataset(*data["holdout"]))
        lists.append(
            {
                "shift": shift,
                "named": len(result.named),
                "group_p": result.group_p,
                "decoy_named": len(result.decoy_named),
                "n": 60,
            }
        )
    return {"lists": lists}


def shifted(x: Any, y: Any, shift: str, generator: Any) -> tuple[Any, Any]:
    """Return 60 records of another composition, contrast or quality."""
    import torch

    order = torch.randperm(len(x), generator=generator)
    if shift == "one class":
        order = order[y[order] == 1]
    elif shift.startswith("60%"):
        is_low = y[order] < 2
        order = torch.cat([order[is_low][:36], order[~is_low][:24]])
    x, y = x[order[:60]], y[order[:60]]
    if shift.startswith("x "):
        x = x * float(shift[2:])
    elif shift == "30% blank":
        x = x * (torch.rand(x.shape, generator=generator) > 0.3)
    return x, y


# ---- data ----


def load(name: str, n: int, seed: int) -> dict[str, Any]:
    """Members, as many non-members for half lists, held-out records, and test records, drawn by seed."""
    import torch

    x, y = pool_of(name)
    order = np.random.default_rng([seed, n]).permutation(len(x))
    outside_count = min(n, max(0, len(x) - n - HOLDOUT)) if name != "cancer" else n
    cuts = np.cumsum([n, outside_count, min(HOLDOUT, len(x) - n - outside_count)])
    members, outside, holdout, unused = np.split(order, cuts)
    test = np.concatenate([unused, holdout, outside])[:2000]
    if name in (
        "cancer",
        "digits",
    ):  # scikit-learn's StandardScaler, fitted on the training records
        deviation = x[members].std(0)
        x = (x - x[members].mean(0)) / np.where(deviation > 0, deviation, 1)
    elif name in SCALINGS:
        x = SCALINGS[name](x)
    arrays = {"members": members, "non_members": outside, "holdout": holdout, "test": test}
    arrays["unused"] = unused
    split = {
        array: (torch.from_numpy(x[rows]).float(), torch.from_numpy(y[rows]).long())
        for array, rows in arrays.items()
    }
    return {**split, "classes": int(y.max()) + 1}


@cache
def pool_of(name: str) -> tuple[np.ndarray, np.ndarray]:
    """All records (n, d) and labels, training and test file together."""
    from sklearn.datasets import load_breast_cancer, load_digits

    if name in ("digits", "digits / 16", "cancer"):
        x, y = (load_breast_cancer if name == "cancer" else load_digits)(return_X_y=True)
        return x.astype(float), y
    if name == "embeddings":
        return embeddings()
    with np.load(DATA / f"{name.split()[0]}.npz", allow_pickle=False) as archive:
        x = np.concatenate([archive["x_train"], archive["x_test"]])
        y = np.concatenate([archive["y_train"], archive["y_test"]])
    return x.reshape(len(x), -1).astype(float), y


def embeddings() -> tuple[np.ndarray, np.ndarray]:
    """Test images of CIFAR-10 as a backbone sees them that was trained on 3000 other images."""
    import torch
    from torch import nn

    x, y = pool_of("cifar10")
    images = torch.from_numpy((x / 255 - 0.5) / 0.25).float().reshape(-1, 32, 32, 3).movedim(3, 1)
    torch.manual_seed(0)
    backbone = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU()),
        *(nn.Conv2d(64, 128, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()),
    )
    model = nn.Sequential(backbone, nn.Linear(512, 10))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    labels = torch.from_numpy(y).long()
    for _ in range(15):
        for batch in torch.randperm(3000).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        features = torch.cat([backbone(block) for block in images[3000:].split(500)])
    return features.double().numpy(), y[3000:]


# ---- networks ----


def build(name: str, data: dict[str, Any], change: dict[str, Any]) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(int(data["members"][1].sum()))  # replaced by the seed before training
    inputs, classes = data["members"][0].shape[1], data["classes"]
    activation = {"leaky": nn.LeakyReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}.get(
        name, nn.ReLU
    )
    if name == "cnn":
        return nn.Sequential(
            *(nn.Unflatten(1, (1, 28, 28)), nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(1568, WIDTH)),
            *(nn.ReLU(), nn.Linear(WIDTH, classes)),
        )
    width = change.get("width", WIDTH)
    widths = {"mlp-256-128": (256, 128)}.get(name, (width,) * change.get("depth", 1))
    layers: list[nn.Module] = []
    for a, b in zip((inputs, *widths), widths, strict=False):
        layers += [nn.Linear(a, b), activation()]
        layers += [nn.Dropout(change["dropout"])] if change.get("dropout") else []
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


def train(
    model: Any, data: dict[str, Any], change: dict[str, Any], epochs: tuple[int, ...], seed: int
) -> list[tuple[int, Any]]:
    """Return a copy of the network after each of ``epochs``; after the best epoch with early stopping."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    for layer in () if change.get("keep") else model.modules():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    x, y = data["members"]
    validation = x[:0], y[:0]
    if change.get(
        "early_stopping"
    ):  # on the loss of a fifth of the members, patience of ten epochs
        k = len(x) // 5
        validation, (x, y) = (x[:k], y[:k]), (x[k:], y[k:])
    name = change.get("optimizer", "adam")
    decay = change.get("weight_decay", 0.01 if name == "adamw" else 0.0)
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    extra = {} if name in kinds else {"momentum": 0.9 if name == "sgd" else 0.0}
    optimizer = kinds.get(name, torch.optim.SGD)(
        model.parameters(), LEARNING_RATE[name], weight_decay=decay, **extra
    )
    networks, best = [], (float("inf"), 0, None)
    for epoch in range(1, max(epochs) + 1):
        model.train()
        for batch in torch.randperm(len(x)).split(change.get("batch", BATCH)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        model.eval()
        if len(validation[0]):
            with torch.no_grad():
                loss = float(nn.functional.cross_entropy(model(validation[0]), validation[1]))
            if loss < best[0]:
                best = (loss, epoch, copy.deepcopy(model))
            if epoch - best[1] >= 10 or epoch == max(epochs):
                return [(best[1], best[2])]
        if epoch in epochs:
            networks.append((epoch, copy.deepcopy(model)))
    return networks


def train_estimator(data: dict[str, Any], seed: int) -> list[tuple[int, Any]]:
    """Return scikit-learn's MLPClassifier of 100 neurons after each number of epochs, as modules."""
    import torch
    from sklearn.neural_network import MLPClassifier
    from torch import nn

    x, y = (rows.numpy() for rows in data["members"])
    networks = []
    for epochs in EPOCHS:
        estimator = MLPClassifier(max_iter=epochs, tol=0, n_iter_no_change=10**6, random_state=seed)
        estimator.fit(x.astype(float), y)
        layers: list[nn.Module] = []
        for weight, bias in zip(estimator.coefs_, estimator.intercepts_, strict=True):
            layer = nn.Linear(*weight.shape)
            layer.weight.data, layer.bias.data = (
                torch.from_numpy(rows.T.copy()).float() for rows in (weight, bias)
            )
            layers += [layer, nn.ReLU()]
        networks.append((epochs, nn.Sequential(*layers[:-1])))
    return networks


def rounded(model: Any, kind: str, seed: int) -> Any:
    """Return a copy with rounded or noisy weights. Noise is a share of each tensor's rms."""
    import torch

    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if kind == "int8":
                step = p.abs().max() / 127
                p.copy_((p / step).round() * step)
            elif kind.startswith("noise"):
                share = float(kind.split()[1]) * p.square().mean().sqrt()
                p.add_(share * torch.randn(p.shape, generator=generator))
            else:
                p.copy_(p.to({"fp16": torch.float16, "bf16": torch.bfloat16}[kind]).to(p))
    return model


# ---- the test ----


def membership_row(model: Any, data: dict[str, Any], lists: bool) -> dict[str, Any]:
    """Return who is named in the list of members, in half lists and in a list of non-members."""
    import torch

    from residuum.io.modules import checkpoint_from_module
    from residuum.records import Dataset
    from residuum.risk.membership import measure_membership

    network = checkpoint_from_module(model, input_shape=(data["members"][0].shape[1],))
    holdout = Dataset(*data["holdout"])
    result = measure_membership(network, Dataset(*data["members"]), holdout)
    n, outside_count = len(data["members"][0]), len(data["non_members"][0])
    with torch.no_grad():
        accuracy, train_accuracy = (
            float((model(data[subset][0]).argmax(1) == data[subset][1]).float().mean())
            for subset in ("test", "members")
        )
        loss = float(
            torch.nn.functional.cross_entropy(model(data["members"][0]), data["members"][1])
        )
    row: dict[str, Any] = {
        "named": len(result.named),
        "n": n,
        "finding": result.is_finding,
        "accepted": int((result.q <= 0.05).sum()),
        "decoy_named": len(result.decoy_named),
        "group_p": result.group_p,
        "above_tail": result.above_tail,
        "two_boundaries": int((result.boundaries >= 2).sum()),
        "holdout": result.holdout,
        "holdout_two_boundaries": int((result.holdout_boundaries >= 2).sum()),
        "auc": round(result.loss.auc, 4),
        "auc_upper": round(result.loss.auc_upper, 4),
        "tpr": result.loss.true_positive_rate,
        "test": round(accuracy, 4),
        "train": round(train_accuracy, 4),
        "loss": loss,
    }
    if not lists or outside_count < n:
        return row
    half = n // 2
    pairs = [(data["members"][i], data["non_members"][i]) for i in range(2)]
    halves = []
    for take in (slice(0, half), slice(half, 2 * half)):
        x, y = (torch.cat([a[take], b[take]]) for a, b in pairs)
        test = measure_membership(network, Dataset(x, y), holdout)
        halves.append(
            {
                "named": len(test.named),
                "false": int((test.named >= half).sum()),
                "accepted": int((test.q <= 0.05).sum()),
                "accepted_false": int((test.q[half:] <= 0.05).sum()),
                "finding": test.is_finding,
                "decoy_named": len(test.decoy_named),
                "decoy_false": int((test.decoy_named >= half).sum()),
            }
        )
    outside = measure_membership(network, Dataset(*data["non_members"]), holdout)
    row["halves"] = halves
    row["non_members"] = {
        "named": len(outside.named),
        "accepted": int((outside.q <= 0.05).sum()),
        "finding": outside.is_finding,
        "group_p": outside.group_p,
        "decoy_named": len(outside.decoy_named),
    }
    return row


# ---- summary ----


def summarize(rows: list[Case]) -> str:
    lines = summarize_power([row for row in rows if row["case"]["part"] == "power"])
    lines += summarize_changes([row for row in rows if "rows" in row])
    return "\n".join(lines + summarize_shifts([row for row in rows if "lists" in row]))


def summarize_power(rows: list[Case]) -> list[str]:
    lines = [
        "data n model epochs: named, per optimizer; bar; decoys; loss TPR at 1%; AUC; test; nets"
    ]
    settings = dict.fromkeys((r["case"]["data"], r["case"]["n"], r["case"]["model"]) for r in rows)
    for setting in settings:
        selected = [
            r for r in rows if (r["case"]["data"], r["case"]["n"], r["case"]["model"]) == setting
        ]
        for epoch in map(str, EPOCHS):
            entries = [r["epochs"][epoch] for r in selected]
            by_optimizer = {
                name: share(r["epochs"][epoch] for r in selected if r["case"]["optimizer"] == name)
                for name in dict.fromkeys(r["case"]["optimizer"] for r in selected)
            }
            mean = sum(by_optimizer.values()) / len(by_optimizer)
            groups = ", ".join(f"{name} {value:.1%}" for name, value in by_optimizer.items())
            bar = BARS.get((*setting, int(epoch)))
            lines.append(
                f"{' '.join(map(str, setting))} {epoch}: {mean:.1%} ({groups})"
                + (f"; bar {bar:.0%}: {'met' if mean >= bar else 'NOT MET'}" if bar else "")
                + f"; decoys {share(entries, 'decoy_named'):.1%}; TPR {average(entries, 'tpr'):.1%}; "
                f"AUC {average(entries, 'auc'):.2f}; test {average(entries, 'test'):.2f}; {len(entries)}"
            )
    halves = [half for r in rows for e in r["epochs"].values() for half in e.get("halves", ())]
    outside_lists = [
        e["non_members"] for r in rows for e in r["epochs"].values() if "non_members" in e
    ]
    for name, false, label in (
        ("named", "false", "held-out records"),
        ("accepted", "accepted_false", "the same without two boundaries and group test"),
        ("decoy_named", "decoy_false", "decoys"),
    ):
        named, wrong = (sum(half[k] for half in halves) for k in (name, false))
        counts = [test[name] for test in outside_lists]
        lines.append(
            f"{label}: half lists: {wrong} of {named} named records are false "
            f"({wrong / max(1, named):.1%}) in {len(halves)} lists; lists without members: "
            f"{sum(k > 0 for k in counts)} of {len(counts)} name anyone, {sum(counts)} records"
        )
    lines.append(
        f"lists without members: findings {sum(t['finding'] for t in outside_lists)}, group test rejects "
        f"{sum(t['group_p'] <= 0.01 for t in outside_lists)}, of {len(outside_lists)}"
    )
    return lines


def summarize_changes(rows: list[Case]) -> list[str]:
    lines = ["change: named (finding) and test accuracy for each data set"]
    table: dict[str, dict[str, list[Any]]] = {}
    for row in rows:
        change = ", ".join(f"{k} {v}" for k, v in row["case"]["change"].items())
        for name, entry in row["rows"].items():
            label = change or name
            table.setdefault(label, {}).setdefault(row["case"]["data"], []).append(entry)
    for label, by_data in table.items():
        cells = [
            f"{data} {share(entries):.0%} ({sum(map(is_finding, entries))}/{len(entries)}), "
            f"{average(entries, 'test'):.2f}"
            for data, entries in by_data.items()
        ]
        lines.append(f"{label}: {'; '.join(cells)}")
    return lines


def summarize_shifts(rows: list[Case]) -> list[str]:
    lines = [
        "shift: lists; named by held-out records; findings, which decoys confirm; group test rejects"
    ]
    for shift in SHIFTS:
        entries = [entry for row in rows for entry in row["lists"] if entry["shift"] == shift]
        named = sum(entry["named"] >= 3 for entry in entries)
        rejected = sum(entry["group_p"] <= 0.01 for entry in entries)
        findings = sum(map(is_finding, entries))
        lines.append(f"{shift}: {len(entries)}; {named}; {findings}; {rejected}")
    return lines


def is_finding(entry: Case) -> bool:
    """Whether a row is a finding: the first rows were written before decoys had to confirm one."""
    from residuum.risk.membership import MIN_NAMED, min_named

    return entry["named"] >= min_named(entry["n"]) and entry["decoy_named"] >= MIN_NAMED


def share(entries: Any, name: str = "named") -> float:
    return average([{"share": e[name] / e["n"]} for e in entries], "share")


def average(entries: Any, name: str) -> float:
    values = [e[name] for e in entries if e[name] is not None]
    return sum(values) / max(1, len(values))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure kinks_power and print a summary.")
    parser.add_argument("--part", choices=("power", "protect", "shift"), default="power")
    parser.add_argument("--seeds", default="9100-9104", help="FIRST-LAST or one seed")
    run_cases("kinks_power", cases, measure, summarize, parser)
