"""``residuum --version --verbose``: print versions, device, installed extras, datasets and a self-test."""

from __future__ import annotations

from typing import Any

from residuum.cli.output import format_number, print_line, print_table

EXTRAS = {"cluster": "ray", "dp": "opacus", "onnx": "onnx", "trees": "ortools"}
DATASETS = ("digits", "mnist", "cifar10")
# The self-test runs the default attack on this network, with this number of candidates.
# It measures the time of one step, for MEASURED seconds.
ARCH, CANDIDATES, MEASURED = "mlp:784-1000-1000-1", 100, 1.0


def show_versions() -> None:
    """Print versions of dependencies, the device, installed extras, available datasets and a self-test."""
    from importlib.util import find_spec

    import torch

    from residuum.records.rundir import environment

    device = "cuda" if torch.cuda.is_available() else "cpu"
    environment_facts = environment(device)
    step_time = _time_step(device)
    print_table(
        "versions",
        ("what", "version"),
        [("python", environment_facts["python"]), *environment_facts["packages"].items()],
    )
    machine_rows = [
        (
            "device",
            f"{device}, {environment_facts['cpus']} CPUs, {environment_facts['threads']} threads",
        ),
        (
            "self-test",
            f"one attack step takes {format_number(1e3 * step_time['seconds'], 3)} ms ({ARCH}, "
            f"{CANDIDATES} candidates, {step_time['dtype']})",
        ),
    ]
    machine_rows += [(f"data {name}", _find_dataset(name)) for name in DATASETS]
    for name, package in EXTRAS.items():
        not_installed = f'not installed (in a clone: pip install ".[{name}]")'
        machine_rows.append((f"extra {name}", "installed" if find_spec(package) else not_installed))
    print_table("this machine", ("what", "state"), machine_rows)
    if device == "cpu":
        print_line("No CUDA device was found. All computations run on the CPU.")


def _time_step(device: str) -> dict[str, Any]:
    """Measure the time of one step of the default attack, in seconds."""
    import torch

    from residuum.attacks import Auto, estimate
    from residuum.io.modules import checkpoint_from_module
    from residuum.networks import Architecture

    torch.manual_seed(0)
    model = checkpoint_from_module(Architecture.parse(ARCH).build().double())
    attack = Auto(restarts=1, candidates=CANDIDATES, device=device)
    cost = estimate(model, None, attack, measured=MEASURED)
    return {"dtype": cost.dtype, "seconds": cost.step_seconds}


def _find_dataset(name: str) -> str:
    """Try to read a dataset completely, and return a text that says whether this works."""
    from residuum.datasets import load_dataset
    from residuum.errors import ResiduumError

    try:
        split = load_dataset(name, 20)
    except ResiduumError as problem:
        return str(problem)
    return f"found, samples of shape {'x'.join(map(str, split.train.shape))}"
