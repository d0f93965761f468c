"""``residuum doctor``: what is installed, what it runs on, how fast, and which data are found.

Examples:

residuum doctor

residuum doctor --json
"""

from __future__ import annotations

from typing import Any

from residuum.cli.options import Voice
from residuum.cli.output import number, print_line, print_table

EXTRAS = {"cluster": "ray", "dp": "opacus", "onnx": "onnx"}
NAMED = ("mnist", "cifar10")
ARCH, CANDIDATES, MEASURED = "mlp:784-1000-1000-1", 100, 1.0


def command(voice: Voice) -> None:
    """Show versions, device, extras, data found, and the time of one attack step."""
    found = examine()
    voice.answer(found, lambda: show(found))


def examine() -> dict[str, Any]:
    """Everything the command shows."""
    from importlib.util import find_spec

    import torch

    from residuum.records.rundir import environment

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        **environment(device),
        "accelerator": device == "cuda",
        "extras": {name: find_spec(package) is not None for name, package in EXTRAS.items()},
        "data": {name: _data(name) for name in ("digits", *NAMED)},
        "step": _step(device),
    }


def show(found: dict[str, Any]) -> None:
    """The examination as a person reads it."""
    rows = [("python", found["python"]), *found["packages"].items()]
    print_table("versions", ("what", "version"), rows)
    step = found["step"]
    rows = [
        ("device", f"{found['device']}, {found['cpus']} CPUs, {found['threads']} threads"),
        (
            "one step",
            f"{number(1e3 * step['seconds'], 3)} ms: {step['arch']}, "
            f"{step['candidates']} candidates, {step['dtype']}",
        ),
        *((f"data {name}", state) for name, state in found["data"].items()),
        *(
            (f"extra {name}", "installed" if there else f'in a clone: pip install ".[{name}]"')
            for name, there in found["extras"].items()
        ),
    ]
    print_table("this machine", ("what", "state"), rows)
    if not found["accelerator"]:
        print_line("no CUDA device was found; everything runs on the CPU")


def _step(device: str) -> dict[str, Any]:
    """One step of the default attack on the network of the published experiments."""
    import torch

    from residuum.attacks import AttackConfig, estimate
    from residuum.io.modules import checkpoint_from_module
    from residuum.networks import Architecture

    torch.manual_seed(0)
    model = checkpoint_from_module(Architecture.parse(ARCH).build().double())
    config = AttackConfig(restarts=1, candidates=CANDIDATES, device=device)
    found = estimate(model, None, config, measured=MEASURED)
    return {
        "arch": ARCH,
        "candidates": CANDIDATES,
        "dtype": found.dtype,
        "seconds": found.step_seconds,
        "flops_per_second": found.flops_per_second,
    }


def _data(name: str) -> str:
    """Where a named dataset stands: read in full, since a file of the right name may be broken."""
    from residuum.datasets import load_dataset
    from residuum.errors import ResiduumError

    try:
        split = load_dataset(name, 20)
    except ResiduumError as problem:
        return str(problem)
    return f"found, samples of shape {'x'.join(map(str, split.train.shape))}"
