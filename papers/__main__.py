"""``python -m papers PAPER:FIGURE``: a figure or table of a paper again, measured beside published values.

Without a name: the list of them. Needs torch, numpy, scipy, safetensors and kornia to compute
(``--no-draw``), matplotlib and pillow to draw (``--draw-only``, later and elsewhere).
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
    """Run the figures named, one after the other."""
    parser = argparse.ArgumentParser("python -m papers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("figures", nargs="*", metavar="PAPER:FIGURE", help="none: list them all")
    parser.add_argument("--all", action="store_true", help="compute every figure")
    parser.add_argument("--scale", choices=tuple(SCALES), default="small", help="default: small")
    parser.add_argument("--out", type=Path, default=Path("runs/papers"))
    parser.add_argument("--cache", type=Path, help="of victims and attacks; by default OUT/cache")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--root", default=os.environ.get(ROOT_VARIABLE), help="of MNIST and CIFAR")
    parser.add_argument(
        "--seed", type=int, nargs="+", default=[0], help="one or more; 0: the papers' samples"
    )
    parser.add_argument("--workers", type=int, default=1, help="figures side by side")
    parser.add_argument("--no-draw", dest="draw", action="store_false", help="draw later")
    parser.add_argument("--draw-only", dest="compute", action="store_false")
    parser.add_argument("--json", action="store_true", help="print result.json")
    options = vars(parser.parse_args(arguments))
    names, everything, as_json, workers, seeds = (
        options.pop(key) for key in ("figures", "all", "json", "workers", "seed")
    )
    try:
        if everything and names:
            raise InputError(
                f"--all computes every figure; got names as well: {' '.join(names)}.",
                "Leave out --all or the names.",
            )
        names = [*FIGURES] if everything else names
        # A machine that draws what another computed need not have its device.
        check(names, options["device"] if options["compute"] else "cpu", workers)
    except InputError as problem:
        sys.stderr.write(f"python -m papers: {problem}\n")
        return problem.exit_code
    if not names:
        sys.stdout.write("".join(f"{name:26}{figure.title}\n" for name, figure in FIGURES.items()))
    options["visible"] = sys.stderr.isatty() and not as_json and workers == 1
    asked = [(name, {**options, "seed": seed}) for name in names for seed in seeds]
    made = performed(asked, workers)
    try:
        return show(made, as_json)
    except KeyboardInterrupt:
        with suppress(KeyboardInterrupt):
            made.throw(KeyboardInterrupt)  # pressed between two figures: workers are still at it
        sys.stderr.write("python -m papers: interrupted; the same command goes on from here.\n")
        return INTERRUPTED


def show(made: Made, as_json: bool) -> int:
    """Print figures as they end, up to the first that was refused."""
    for name, done in made:
        if isinstance(done, ResiduumError):
            sys.stderr.write(f"{name}: {done}\n")
            return done.exit_code
        text = json.dumps(done, indent=2) if as_json else Path(done["folder"], TABLE).read_text()
        size = f"{done['cache_bytes'] / 1e6:.1f} MB kept for the next run"
        last = f"{done['seconds']:.0f} s; {done['picture'] or done['folder']}; {size}\n"
        sys.stdout.write(text + "\n" + ("" if as_json else last))
        sys.stdout.flush()
    return 0


def check(names: list[str], device: str, workers: int) -> None:
    """Refuse what cannot be run before anything is: the first of many figures may take hours."""
    for name in names:
        require_known(name, FIGURES, "No figure")
    if workers < 1:
        raise InputError(f"There must be at least one worker; got {workers}.", "Use --workers 1.")
    require_device(device)


if __name__ == "__main__":
    sys.exit(main())
