"""Published settings as data, one per run, exactly as released; and residuum's own.

Where a paper gives ranges only, the preset is their geometric middle and says so. Settings go by the
names that ``--set`` and the files have.
"""

from __future__ import annotations

from typing import Any

from residuum.settings import AttackConfig

_HAIM = AttackConfig.of(
    objective="binary-kkt",
    restarts=1,
    steps=50_000,
    optimiser="sgd",
    momentum=0.9,
    lr_decay=1.0,
    lr_lam=1e-4,
    lam_init=(0.0, 1.0),
    lam_scale="mean",
    normalise=False,
    layers="all",
    surrogate="sigmoid",
    anneal="none",
    constraint="penalty",
    dtype="float64",
    priors=(("haim2022-box", 1.0), ("multiplier-floor", 5.0)),
)
_LOO = AttackConfig.of(
    objective="ntk", gradients="theta", restarts=1, steps=80_000, optimiser="adam", lr_x=0.02,
    lr_lam=0.02, lr_decay=1.0, sigma=0.2, lam_init=(-0.5, 0.5), lam_scale="one", normalise=False,
    layers="all", surrogate="softplus", anneal="loo2024", constraint="penalty", dtype="float32",
    priors=(("loo2024-box", 0.1),),
)  # fmt: skip

PRESETS: dict[str, AttackConfig] = {
    # Adam on the first layer's residual over its norm, surrogate sharpened on the way. Chosen on
    # digits victims with data seeds 0 and 1.
    "residuum": AttackConfig(),
    # Haim et al. 2022, the four released runs.
    "haim2022-cifar-b9dfyspx": _HAIM.changed(
        sigma=8.857e-4, lr_x=0.5549, lam_min=0.4983, sharpness=19.14
    ),
    "haim2022-cifar-k60fvjdy": _HAIM.changed(
        sigma=4.474e-3, lr_x=0.3462, lam_min=0.4936, sharpness=21.68
    ),
    "haim2022-mnist-kcf9bhbi": _HAIM.changed(
        sigma=3.498e-2, lr_x=0.03052, lam_min=0.4471, sharpness=149.9
    ),
    "haim2022-mnist-rbijxft7": _HAIM.changed(
        sigma=1.742e-3, lr_x=0.2821, lam_min=0.4153, sharpness=19.21
    ),
    # Buzaglo et al. 2023: middle of the published ranges.
    "buzaglo2023-multiclass": _HAIM.changed(
        objective="multiclass-kkt",
        rivals="best",
        sigma=1.5e-4,
        lr_x=5.3e-4,
        lr_lam=0.68,
        sharpness=115.0,
    ),
    "buzaglo2023-regression": _HAIM.changed(
        objective="weight-decay",
        sigma=1.7e-2,
        lr_x=0.91,
        sharpness=98.0,
        lam_init=(0.0, 1.0),
        lam_distribution="normal",
        priors=(("haim2022-box", 1.0),),
    ),
    # Loo et al. 2024.
    "loo2024": _LOO,
    # Residuum's own for initial weights known: gradients at both ends, which doubles what the published
    # settings find. Best of twelve on MNIST n=200, data seed 5. The prior that images ask for came later,
    # on images for trying: of 40 of CIFAR above NCC 0.9 5 without it and 28 with it.
    "ntk": AttackConfig.of(
        objective="ntk",
        gradients="both",
        restarts=1,
        steps=20_000,
        surrogate="softplus",
        sharpness_from=10.0,
        sharpness=200.0,
        lr_x=0.04,
        lr_lam=0.02,
        lam_init=(-0.5, 0.5),
        layers="all",
        sigma=0.2,
    ),
    # Baselines.
    "model-inversion": AttackConfig.of(
        objective="model-inversion", restarts=1, steps=200, lr_x=0.01
    ),
    "first-layer-weights": AttackConfig.of(objective="first-layer-weights", restarts=1, steps=1),
}

# How the candidate set grows. Each is laid over a preset (``residuum attack --split NAME``).
GROWTH_PRESETS: dict[str, dict[str, Any]] = {
    "none": {"split": "none"},
    # Shen et al. 2026: every 20-40 thousand steps (the middle), eigenvalue below -0.1, at most half
    # of the candidates, eta at most 0.01 by line search.
    "paper": {
        "split": "curvature",
        "split_trigger": "period",
        "split_every": 30_000,
        "split_threshold": 0.1,
        "split_relative": False,
        "split_cap": 0.5,
        "split_eta": 0.01,
        "split_merge": False,
    },
    # When the loss stagnates, few at a time, threshold relative to the loss, steps as long as they
    # lower it. First guesses, tried on exact cubic networks with seeds 100-102 (in no test) only.
    "auto": {"split": "curvature"},
}
