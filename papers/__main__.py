"""``python -m papers PAPER:FIGURE``: a figure or table of a paper again, measured beside published values.

Without a name: the list of them. Needs torch, numpy, scipy, safetensors and kornia to compute
(``--no-draw``), matplotlib and pillow to draw (``--draw-only``, later and elsewhere).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from papers import buzaglo2023, drawing, haim2022, loo2024, refael2025, shen2026, uniqueness
from papers.runs import PICTURE, SCALES, TABLE, Context, load, save
from residuum.datasets import ROOT_VARIABLE
from residuum.errors import ResiduumError, require_known
from residuum.records import make_directory, write_atomic
from residuum.records.rundir import environment, one_thread

PAPERS = (haim2022, refael2025, shen2026, buzaglo2023, loo2024, uniqueness)
FIGURES = {
    f"{paper.__name__.rpartition('.')[2]}:{name}": paper.FIGURES[name]
    for paper in PAPERS
    for name in sorted(paper.FIGURES, key=lambda name: (len(name), name))  # fig2 before fig10
}


def reproduce(
    name: str,
    out: str | Path,
    scale: str = "small",
    *,
    cache: str | Path | None = None,
    compute: bool = True,
    draw: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Compute (or load), draw, and return what result.json holds.

    out: a folder for all figures, each in one of its own below it; cache: where victims and attacks
    are kept, by default ``cache`` in that folder; options: device, root, seed, visible of Context.
    """
    require_known(name, FIGURES, "No figure")
    figure, folder = FIGURES[name], make_directory(Path(out) / name.replace(":", "-"))
    context = Context(SCALES[scale], make_directory(cache or Path(out) / "cache"), **options)
    write_atomic(Path(out) / ".gitignore", "*\n")
    if compute:
        start, alone = time.monotonic(), scale != "paper" and context.device == "cpu"
        with one_thread() if alone else nullcontext():
            outcome = figure.compute(context)
        if scale != "paper" and outcome.column("published"):
            less = "smaller networks and other data than the published values are of"
            outcome.notes.append(f"scale {scale}: {less}")
        head = {"id": name, "title": figure.title, "scale": scale, "seed": context.seed}
        head |= {"device": context.device, "seconds": time.monotonic() - start}
        save(outcome, folder, {**head, "environment": environment(context.device)})
    outcome, summary = load(folder)
    picture = None
    if draw and figure.draw is not None:
        picture = str(write_atomic(folder / PICTURE, drawing.picture(figure.draw, outcome)))
    kept = sum(file.stat().st_size for file in context.cache.rglob("*") if file.is_file())
    return {**summary, "folder": str(folder), "picture": picture, "cache_bytes": kept}


def main(arguments: list[str] | None = None) -> int:
    """Run the figures named, one after the other."""
    parser = argparse.ArgumentParser("python -m papers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("figures", nargs="*", metavar="PAPER:FIGURE", help="none: list them all")
    parser.add_argument("--scale", choices=tuple(SCALES), default="small", help="default: small")
    parser.add_argument("--out", type=Path, default=Path("runs/papers"))
    parser.add_argument("--cache", type=Path, help="of victims and attacks; by default OUT/cache")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--root", default=os.environ.get(ROOT_VARIABLE), help="of MNIST and CIFAR")
    parser.add_argument("--seed", type=int, default=0, help="0: the first samples, as the papers")
    parser.add_argument("--no-draw", dest="draw", action="store_false", help="draw later")
    parser.add_argument("--draw-only", dest="compute", action="store_false")
    parser.add_argument("--json", action="store_true", help="print result.json")
    options = vars(parser.parse_args(arguments))
    names, as_json = options.pop("figures"), options.pop("json")
    if not names:
        sys.stdout.write("".join(f"{name:26}{figure.title}\n" for name, figure in FIGURES.items()))
    for name in names:
        try:
            done = reproduce(name, visible=sys.stderr.isatty() and not as_json, **options)
        except ResiduumError as problem:
            sys.stderr.write(f"{name}: {problem}\n")
            return problem.exit_code
        text = json.dumps(done, indent=2) if as_json else Path(done["folder"], TABLE).read_text()
        size = f"{done['cache_bytes'] / 1e6:.1f} MB kept for the next run"
        last = f"{done['seconds']:.0f} s; {done['picture'] or done['folder']}; {size}\n"
        sys.stdout.write(text + "\n" + ("" if as_json else last))
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
