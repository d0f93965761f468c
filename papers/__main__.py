"""Reproduce a figure or table of a paper with ``python -m papers PAPER:FIGURE``.

Measured values are shown next to published ones. Without a name, the figures are listed. Computing
(``--no-draw``) needs torch, numpy, scipy, safetensors and kornia. Drawing (``--draw-only``, on any machine)
needs matplotlib and pillow.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from papers.figures import FIGURES, Made, performed
from papers.runs import SCALES, TABLE
from residuum.datasets import ROOT_VARIABLE
from residuum.errors import InputError, ResiduumError, require_known
from residuum.records.rundir import require_device

INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Compute and draw figures, and return the exit code."""
    parser = argparse.ArgumentParser("python -m papers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "figures", nargs="*", metavar="PAPER:FIGURE", help="figures; without any, list all figures"
    )
    parser.add_argument("--all", action="store_true", help="compute every figure")
    parser.add_argument("--scale", choices=tuple(SCALES), default="small", help="default: small")
    parser.add_argument("--out", type=Path, default=Path("runs/papers"))
    parser.add_argument(
        "--cache", type=Path, help="folder of victims and attacks; default: OUT/cache"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--root", default=os.environ.get(ROOT_VARIABLE), help="folder of MNIST and CIFAR"
    )
    parser.add_argument(
        "--seed", type=int, nargs="+", default=[0], help="seeds; 0 uses the samples of the papers"
    )
    parser.add_argument(
        "--workers", type=int, default=1, help="number of figures computed in parallel"
    )
    parser.add_argument("--no-draw", dest="draw", action="store_false", help="compute only")
    parser.add_argument("--draw-only", dest="compute", action="store_false", help="draw only")
    parser.add_argument("--json", action="store_true", help="print result.json")
    options = vars(parser.parse_args(arguments))
    names, everything, as_json, workers, seeds = (
        options.pop(key) for key in ("figures", "all", "json", "workers", "seed")
    )
    try:
        if everything and names:
            raise InputError(
                f"Pass either --all or names of figures; got both: {' '.join(names)}.",
                "Omit --all or the names.",
            )
        names = [*FIGURES] if everything else names
        # A machine that only draws need not have the device.
        check(names, options["device"] if options["compute"] else "cpu", workers)
    except InputError as problem:
        sys.stderr.write(f"python -m papers: {problem}\n")
        return problem.exit_code
    if not names:
        sys.stdout.write("".join(f"{name:26}{figure.title}\n" for name, figure in FIGURES.items()))
    options["visible"] = sys.stderr.isatty() and not as_json and workers == 1
    requests = [(name, {**options, "seed": seed}) for name in names for seed in seeds]
    results = performed(requests, workers)
    try:
        return show(results, as_json)
    except KeyboardInterrupt:
        with suppress(KeyboardInterrupt):
            results.throw(KeyboardInterrupt)  # stops workers that are still running
        sys.stderr.write("python -m papers: interrupted; the same command continues.\n")
        return INTERRUPTED


def show(results: Made, as_json: bool) -> int:
    """Print figures when they are complete, up to the first error.

    Args:
        results: Names of figures with their results.
        as_json: Whether to print JSON.

    Returns:
        The exit code.
    """
    for name, done in results:
        if isinstance(done, ResiduumError):
            sys.stderr.write(f"{name}: {done}\n")
            return done.exit_code
        text = json.dumps(done, indent=2) if as_json else Path(done["folder"], TABLE).read_text()
        size = f"{done['cache_bytes'] / 1e6:.1f} MB stored for the next run"
        last = f"{done['seconds']:.0f} s; {done['picture'] or done['folder']}; {size}\n"
        sys.stdout.write(text + "\n" + ("" if as_json else last))
        sys.stdout.flush()
    return 0


def check(names: list[str], device: str, workers: int) -> None:
    """Check all figures before the first one runs, because it may take hours.

    Args:
        names: Names of figures.
        device: Device of the computation.
        workers: Number of figures computed in parallel.

    Raises:
        InputError: If a figure cannot be computed.
    """
    for name in names:
        require_known(name, FIGURES, "No figure")
    if workers < 1:
        raise InputError(f"There must be at least one worker; got {workers}.", "Pass --workers 1.")
    require_device(device)


if __name__ == "__main__":
    sys.exit(main())
