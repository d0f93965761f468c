"""The same as ``residuum reproduce`` for machines that have torch, numpy, scipy and safetensors alone."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from residuum.errors import ResiduumError
from residuum.reproduce.outcome import load, table
from residuum.reproduce.registry import FIGURES, reproduce
from residuum.reproduce.scales import SCALES


def main(arguments: list[str] | None = None) -> int:
    """Run the figures named, one after the other."""
    parser = argparse.ArgumentParser(prog="python -m residuum.reproduce")
    parser.add_argument("figures", nargs="*", metavar="PAPER:FIGURE")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--scale", choices=tuple(SCALES), default="small")
    parser.add_argument("--out", type=Path, default=Path("runs/reproduce"))
    parser.add_argument("--cache", type=Path, default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--root", default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-draw", action="store_true")
    parser.add_argument("--draw-only", action="store_true")
    options = parser.parse_args(arguments)
    if options.list:
        lines = [f"{name}  {figure.title}" for name, figure in FIGURES.items()]
        sys.stdout.write("\n".join(lines) + "\n")
    for name in options.figures:
        try:
            done = reproduce(
                name,
                options.out,
                scale=options.scale,
                device=options.device,
                root=options.root,
                cache=options.cache,
                seed=options.seed,
                compute=not options.draw_only,
                draw=not options.no_draw,
            )
        except ResiduumError as problem:
            sys.stderr.write(f"{name}: {problem}\n")
            return problem.exit_code
        sys.stdout.write(table(load(Path(done["folder"]))[0], f"{name}: {done['title']}"))
        brief = {key: done[key] for key in ("scale", "seconds", "cache_bytes")}
        sys.stdout.write(json.dumps(brief) + "\n\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
