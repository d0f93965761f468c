"""Is a reconstruction unique? Nine experiments, each with its control beside it.

Run as ``python -m benchmarks.uniqueness [NAME ...] --root DATA --device cuda --out DIR --scale paper``;
DATA holds mnist.npz and cifar10.npz. Every experiment writes uniqueness-NAME.json. The pictures are
drawn from those files afterwards: ``python -m benchmarks.uniqueness draw --out DIR``.

=========  =======================================================================================
sphere     initial radius against the mean distance of the five best; how much lies outside row(W1)
objective  what the published objective of the sphere attack is made of
shift      CIFAR shifted by rewriting biases and by training again; single samples against mixtures
unshifted  the first case of shift alone: repeats of a sample inside a restart
length     training length against recovered samples, KKT residual and budgets
spectrum   data with smaller and larger lowest singular values
flat       MNIST with all but its main directions made smaller, down to a proper subspace
convnet    merge and split on trained convnets
partial    attacks that know a share of the neurons, or the first layer alone
=========  =======================================================================================
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.uniqueness_common import SCALES
from benchmarks.uniqueness_objective import objective
from benchmarks.uniqueness_published import shift, sphere, unshifted
from benchmarks.uniqueness_victims import convnet, flat, length, partial, spectrum
from residuum.records.environment import environment

EXPERIMENTS = {
    "sphere": sphere,
    "objective": objective,
    "shift": shift,
    "unshifted": unshifted,
    "length": length,
    "spectrum": spectrum,
    "flat": flat,
    "convnet": convnet,
    "partial": partial,
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join([*EXPERIMENTS, "draw"]))
    parser.add_argument("--root", default="", help="folder of mnist.npz and cifar10.npz")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scale", choices=SCALES, default="tiny")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--figures", type=Path, default=None, help="draw: where pictures go")
    options = parser.parse_args(arguments)
    names = options.names or list(EXPERIMENTS)
    if unknown := [name for name in names if name not in (*EXPERIMENTS, "draw")]:
        parser.error(f"no experiment {unknown[0]!r}; known: {', '.join(EXPERIMENTS)}, draw")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in names:
        if name == "draw":
            from benchmarks.uniqueness_figures import draw_all

            draw_all(options.out, options.figures or options.out)
            continue
        start = time.time()
        scale = SCALES[options.scale]
        result = {
            "experiment": name,
            "scale": options.scale,
            "settings": asdict(scale),
            **EXPERIMENTS[name](scale, options.root, options.device),
            "seconds": round(time.time() - start, 1),
            "environment": environment(options.device),
        }
        path = options.out / f"uniqueness-{name}.json"
        path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
        print(f"{name}: {len(result['rows'])} rows, {result['seconds']} s", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(min(8, torch.get_num_threads()))
    main()
