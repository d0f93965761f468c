"""Artifacts of PyTorch: checkpoints, bundles with samples, gradients and updates."""

from __future__ import annotations

import copy
import pickle
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import nn

from experiments.zoo import Check, artifact
from experiments.zoo.samples import digit_network, digits, loss, train_network, write_arrays

AUDIT = "--data train.npz --holdout test.npz --out run --effort quick"


@cache
def _trained() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    x, y, *_ = digits()
    network = digit_network()
    return network, train_network(network, x, y)


def _images(count: int = 16) -> torch.Tensor:
    return torch.tensor(digits()[0][:count], dtype=torch.float32)


@artifact(
    "A PyTorch file with the state dict of a small network (64-100-100-2) that was trained on 60"
    " digits. It holds the weights and nothing else.",
    Check(
        "residuum scan model.pt",
        "The file stores no records and no optimizer state. Nothing has to be removed. Only the"
        " weights themselves could leak, which an audit tests.",
        0,
        ("no finding",),
    ),
    Check(
        "residuum scan model.pt --data train.npz",
        "None of the given samples is stored in the file.",
        0,
    ),
)
def plain_weights(folder: Path) -> None:
    write_arrays(folder, digits())
    torch.save(_trained()[0].state_dict(), folder / "model.pt")


@artifact(
    "A tutorial checkpoint: a dict of the state dict, Adam's state dict, and the arguments of the"
    " training script with paths. The network was trained on 60 digits.",
    Check(
        "residuum scan checkpoint.pt",
        "The file holds Adam's first moments, from which samples can be reconstructed, and paths of"
        " the training data. residuum strip removes both.",
        1,
        ("first moment", "/home/anna/private/patients.csv|names of files", "strip"),
    ),
    Check(
        "residuum strip checkpoint.pt --out clean.pt && residuum scan clean.pt",
        "Strip writes the weights alone. The new file has no finding.",
        0,
        ("removed", "no finding"),
    ),
)
def tutorial_checkpoint(folder: Path) -> None:
    write_arrays(folder, digits())
    network, optimizer = _trained()
    arguments = {"data": "/home/anna/private/patients.csv", "lr": 0.01, "seed": 17}
    state = {
        "model": network.state_dict(),
        "optimizer": optimizer.state_dict(),
        "args": arguments,
        "epoch": 300,
    }
    torch.save(state, folder / "checkpoint.pt")


@artifact(
    "A PyTorch file with the state dict of a network trained on 60 digits and a tensor"
    " 'example_inputs' that holds 16 of these 60 digits.",
    Check(
        "residuum scan model.pt",
        "The tensor example_inputs looks like 16 samples of the training data. It is not a weight.",
        1,
        ("example_inputs",),
        ("no finding",),
    ),
    Check(
        "residuum scan model.pt --data train.npz --holdout test.npz",
        "16 of the 60 given training samples are stored in example_inputs, no held-out sample is.",
        1,
        ("16 of (the )?60", "example_inputs"),
    ),
    Check(
        f"residuum audit model.pt {AUDIT}",
        "16 of the 60 training samples are stored in the file, so it must not be released: leak"
        " found, verbatim.",
        1,
    ),
)
def example_inputs(folder: Path) -> None:
    write_arrays(folder, digits())
    state = {"model": _trained()[0].state_dict(), "example_inputs": _images()}
    torch.save(state, folder / "model.pt")


class _WithSupport(nn.Module):
    """A network with a buffer of support samples, as few-shot learning uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = digit_network()
        self.register_buffer("h", _images(20))


@artifact(
    "A state dict of a few-shot network. The buffer 'h' (20 x 64) holds 20 of the 60 training"
    " digits; its name says nothing.",
    Check(
        "residuum scan model.pt",
        "The buffer h is no weight. Its rows have as many values as an input of the network, so it"
        " probably holds 20 samples.",
        0,
        (r"\bh\b", "20"),
        ("no finding",),
    ),
    Check(
        "residuum scan model.pt --data train.npz --holdout test.npz",
        "20 of the 60 given samples are stored in the buffer h.",
        1,
        ("20 of (the )?60",),
    ),
)
def support_buffer(folder: Path) -> None:
    write_arrays(folder, digits())
    module = _WithSupport()
    module.body.load_state_dict(_trained()[0].state_dict())
    torch.save(module.state_dict(), folder / "model.pt")


@artifact(
    "A PyTorch file with a policy network and a replay buffer of 60 observations.",
    Check(
        "residuum scan agent.pt",
        "The replay buffer stores 60 observations.",
        1,
        ("replay_buffer", "60"),
    ),
)
def replay_buffer(folder: Path) -> None:
    state = {
        "policy": _trained()[0].state_dict(),
        "replay_buffer": {"obs": torch.tensor(digits()[0])},
    }
    torch.save(state, folder / "agent.pt")


@artifact(
    "A state dict of a prototype network: the class prototypes are means of embeddings, with 10"
    " rows of 100 values.",
    Check(
        "residuum scan model.pt",
        "Prototypes are features of records or means of them. The scan names them.",
        0,
        ("prototype",),
    ),
)
def prototypes(folder: Path) -> None:
    x = digits()[0]
    network, _ = _trained()
    with torch.no_grad():
        features = network[:4](torch.tensor(x, dtype=torch.float32))
    state = {f"body.{name}": value for name, value in network.state_dict().items()}
    state["prototypes"] = torch.stack([features[i::10].mean(0) for i in range(10)])
    torch.save(state, folder / "model.pt")


@artifact(
    "A PyTorch file with a language head and a list of 12 few-shot prompts that name patients.",
    Check(
        "residuum scan model.pt",
        "The file stores 12 texts that name people. They must be removed.",
        1,
        ("text|prompt", "12"),
        ("no finding",),
    ),
)
def few_shot_prompts(folder: Path) -> None:
    from experiments.zoo.samples import letters

    prompts = [f"Example: {text} Answer:" for text in letters(12, 0)["text"]]
    torch.save({"model": _trained()[0].state_dict(), "few_shot": prompts}, folder / "model.pt")


@artifact(
    "A checkpoint with the weights and an exponential moving average (EMA) of the weights.",
    Check(
        "residuum scan model.pt",
        "The averaged copy minus the weights shows the last training steps. One of the two copies"
        " should be released.",
        0,
        ("averag",),
    ),
)
def averaged_copy(folder: Path) -> None:
    network, _ = _trained()
    ema = {name: value * 0.999 for name, value in network.state_dict().items()}
    torch.save({"model": network.state_dict(), "ema": ema}, folder / "model.pt")


class _Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        import os

        return os.system, ("echo this file ran code > ran.txt",)


@artifact(
    "A pickle that would run a shell command when it is loaded.",
    Check(
        "residuum scan model.pkl",
        "Loading the file would run a command. The scan names it and runs nothing.",
        4,
        ("system", "do not load"),
    ),
    Check(
        "residuum strip model.pkl --out clean.pkl",
        "The file is refused because it would run code.",
        4,
        ("system",),
    ),
)
def hostile_pickle(folder: Path) -> None:
    (folder / "model.pkl").write_bytes(pickle.dumps({"weights": np.zeros(3), "x": _Hostile()}))


@artifact(
    "A file of torch.save whose pickle would run a shell command when it is loaded. It also holds"
    " weights.",
    Check(
        "residuum scan model.pt",
        "Loading the file would run a command. Nothing is run.",
        4,
        ("system",),
    ),
    Check(
        "residuum strip model.pt --out clean.pt && residuum scan clean.pt",
        "Strip reads the weights without running the file and writes them alone. The new file is"
        " safe.",
        0,
        ("no finding",),
    ),
)
def hostile_torch_file(folder: Path) -> None:
    torch.save({"model": _trained()[0].state_dict(), "x": _Hostile()}, folder / "model.pt")


def _federated(
    folder: Path, count: int, steps: int, lr: float
) -> tuple[dict[str, torch.Tensor], nn.Module]:
    """Write ``base.pt`` and the samples of a client. Return the client's mean gradient and its network."""
    data = digits(count)
    write_arrays(folder, data)
    torch.manual_seed(3)
    network = digit_network(300)
    torch.save(network.state_dict(), folder / "base.pt")
    x, y = torch.tensor(data[0], dtype=torch.float32), torch.tensor(data[1])
    client = copy.deepcopy(network)
    optimizer = torch.optim.SGD(client.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(client, x, y).backward()
        optimizer.step()
    loss(network, x, y).backward()
    gradient = {
        name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None
    }
    return gradient, client


@artifact(
    "A federated client sends the gradient of the loss at the public weights base.pt on its 8"
    " digits. The file has the names and shapes of the network, but it holds no weights.",
    Check(
        "residuum scan gradient.pt",
        "The file is no model: it holds a gradient (or a weight difference), from which samples can"
        " be reconstructed.",
        1,
        ("gradient|update|difference",),
        ("no finding",),
    ),
    Check(
        "residuum scan gradient.pt --base base.pt",
        "The file holds a gradient or update of the base, not weights near the base.",
        1,
        ("gradient|update|difference",),
    ),
    Check(
        f"residuum audit --update gradient.pt --base base.pt {AUDIT}",
        "Most of the 8 images can be reconstructed from this gradient: a leak in the update, not in"
        " trained weights.",
        1,
        ("leak",),
        ("retrain",),
    ),
)
def federated_gradient(folder: Path) -> None:
    gradient, _ = _federated(folder, 8, 1, 0.1)
    torch.save(gradient, folder / "gradient.pt")


@artifact(
    "A federated client sends the difference between its weights after 5 steps of SGD on its 20"
    " digits and the public weights base.pt.",
    Check(
        "residuum scan update.pt",
        "The file holds a weight difference or a gradient and no weights. Samples can be"
        " reconstructed from it.",
        1,
        ("gradient|update|difference",),
        ("no finding",),
    ),
    Check(
        f"residuum audit --update update.pt --base base.pt {AUDIT}",
        "Images can be reconstructed from this update.",
        1,
        ("leak",),
        ("retrain",),
    ),
    Check(
        f"residuum audit update.pt {AUDIT}",
        "The file is an update and no model. A right answer says so, and either audits it as an"
        " update or names the command for it.",
        1,
        ("update|difference|gradient",),
    ),
)
def federated_update(folder: Path) -> None:
    _, client = _federated(folder, 20, 5, 0.2)
    base = torch.load(folder / "base.pt")
    update = {name: value - base[name] for name, value in client.state_dict().items()}
    torch.save(update, folder / "update.pt")


@artifact(
    "A federated client sends its whole weights after 5 steps of SGD on its 20 digits. The weights"
    " before these steps are public (base.pt).",
    Check(
        "residuum scan local.pt --base base.pt",
        "The base shows the weight update, which is a sum over the 20 samples. An audit with --base"
        " tests it.",
        0,
        ("base", "audit"),
    ),
    Check(
        f"residuum audit local.pt --base base.pt {AUDIT}",
        "Images can be reconstructed from the update.",
        1,
        ("leak",),
    ),
)
def local_weights(folder: Path) -> None:
    _, client = _federated(folder, 20, 5, 0.2)
    torch.save(client.state_dict(), folder / "local.pt")


@artifact(
    "Weights of a network for digits together with 60 training digits as uint8 images (0 to 16 in"
    " steps, 8 x 8), under the name 'cache'.",
    Check(
        "residuum scan model.pt --data train.npz --holdout test.npz",
        "All 60 given samples are stored in the array cache, as whole numbers.",
        1,
        ("60 of (the )?60", "cache"),
    ),
)
def integer_images(folder: Path) -> None:
    write_arrays(folder, digits())
    images = torch.tensor((digits()[0] * 16).astype(np.uint8).reshape(-1, 8, 8))
    torch.save({"model": _trained()[0].state_dict(), "cache": images}, folder / "model.pt")


@artifact(
    "A safetensors file of a network with a transposed, standardized copy of the 60 training digits"
    " under the name 'w9'.",
    Check(
        "residuum scan model.safetensors --data train.npz --holdout test.npz",
        "All 60 given samples are stored in w9, transposed and standardized.",
        1,
        ("60 of (the )?60", "w9"),
    ),
)
def transposed_samples(folder: Path) -> None:
    from safetensors.torch import save_file

    write_arrays(folder, digits())
    x = digits()[0]
    standardized = (x - x.mean(0)) / (x.std(0) + 1e-9)
    tensors = {name: value.contiguous() for name, value in _trained()[0].state_dict().items()}
    tensors["w9"] = torch.tensor(standardized.T.copy(), dtype=torch.float32)
    save_file(tensors, folder / "model.safetensors")
