"""Presets: settings of published attacks exactly as released, and settings that residuum recommends.

A preset names an attack and the settings that differ from the defaults of the attack. If a paper gives only
the ranges of settings, the preset has the geometric mean of each range.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

AUTO = "auto"  # the name "auto" stands for the attack that suits the network


@dataclass(frozen=True)
class Preset:
    """Published or recommended settings of an attack.

    Attributes:
        attack: Name of the attack, "auto" for the attack that suits the network.
        settings: Values of the settings that differ from the defaults of the attack.
    """

    attack: str = AUTO
    settings: dict[str, Any] = field(default_factory=dict)


_HAIM: dict[str, Any] = {
    "restarts": 1,
    "steps": 50_000,
    "optimizer": "sgd",
    "momentum": 0.9,
    "lr_decay": 1.0,
    "lr_lam": 1e-4,
    "lam_init": (0.0, 1.0),
    "lam_scale": "mean",
    "normalize": False,
    "layers": "all",
    "surrogate": "sigmoid",
    "anneal": "none",
    "constraint": "penalty",
    "dtype": "float64",
    "priors": (("haim2022-box", 1.0), ("multiplier-floor", 5.0)),
}


def _haim(sigma: float, lr_x: float, lam_min: float, sharpness: float) -> Preset:
    run_settings = {"sigma": sigma, "lr_x": lr_x, "lam_min": lam_min, "sharpness": sharpness}
    return Preset("binary-kkt", {**_HAIM, **run_settings})


PRESETS: dict[str, Preset] = {
    # The default settings, which were chosen on networks trained on images of digits.
    "residuum": Preset(),
    # Settings of the four runs that Haim et al. published in 2022.
    "haim2022-cifar-b9dfyspx": _haim(8.857e-4, 0.5549, 0.4983, 19.14),
    "haim2022-cifar-k60fvjdy": _haim(4.474e-3, 0.3462, 0.4936, 21.68),
    "haim2022-mnist-kcf9bhbi": _haim(3.498e-2, 0.03052, 0.4471, 149.9),
    "haim2022-mnist-rbijxft7": _haim(1.742e-3, 0.2821, 0.4153, 19.21),
    # Settings of Buzaglo et al. 2023: the geometric means of the published ranges.
    "buzaglo2023-multiclass": Preset(
        "multiclass-kkt",
        {
            **_HAIM,
            "rivals": "best",
            "sigma": 1.5e-4,
            "lr_x": 5.3e-4,
            "lr_lam": 0.68,
            "sharpness": 115.0,
        },
    ),
    "buzaglo2023-regression": Preset(
        "weight-decay",
        {
            **_HAIM,
            "sigma": 1.7e-2,
            "lr_x": 0.91,
            "sharpness": 98.0,
            "lam_distribution": "normal",
            "priors": (("haim2022-box", 1.0),),
        },
    ),
    # Settings of the code that Loo et al. published in 2024.
    "loo2024": Preset(
        "ntk",
        {
            "gradients": "theta",
            "restarts": 1,
            "steps": 80_000,
            "lr_x": 0.02,
            "lr_lam": 0.02,
            "lr_decay": 1.0,
            "sigma": 0.2,
            "lam_init": (-0.5, 0.5),
            "lam_scale": "one",
            "normalize": False,
            "layers": "all",
            "surrogate": "softplus",
            "anneal": "loo2024",
            "constraint": "penalty",
            "dtype": "float32",
            "priors": (("loo2024-box", 0.1),),
        },
    ),
    # Settings for attackers who know the initial weights. They were the best of twelve sets of settings on
    # 200 MNIST images, where they reconstruct twice as many images as the published settings.
    "ntk": Preset(
        "ntk",
        {
            "gradients": "both",
            "restarts": 1,
            "steps": 20_000,
            "surrogate": "softplus",
            "sharpness": 200.0,
            "lr_x": 0.04,
            "lr_lam": 0.02,
            "lam_init": (-0.5, 0.5),
            "layers": "all",
            "sigma": 0.2,
        },
    ),
    # Settings of Shen et al. 2026. Every 20,000 to 40,000 steps, the method splits at most half of the
    # candidates in two, if the curvature of the loss is below -0.1. The halves move by at most 0.01.
    "shen2026": Preset(
        AUTO,
        {
            "split": "curvature",
            "split_trigger": "period",
            "split_every": 30_000,
            "split_threshold": 0.1,
            "split_relative": False,
            "split_cap": 0.5,
            "split_eta": 0.01,
            "split_merge": False,
        },
    ),
}
