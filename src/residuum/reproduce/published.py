"""Published values, in one place. Facts read from the papers and from what was released with them."""

from __future__ import annotations

from typing import Any

# Train loss, test accuracy, test loss; train accuracy is 100% but where a note says otherwise.
_TABLE1 = {
    "n=50": (1.5e-6, 0.72, 2.14),
    "n=100": (2.0e-6, 0.74, 2.41),
    "n=500": (4.0e-6, 0.78, 2.09),
    "n=1000": (5.5e-6, 0.79, 1.96),
    "100-100": (3.0e-7, 0.77, 2.72),
    "1000-500-100": (1.2e-7, 0.78, 3.14),
    "1000-500-100-50": (8.4e-7, 0.77, 2.57),
    "bias in all hidden layers": (4.3e-6, 0.77, 2.12),
}
_TABLE2 = {
    "standard init n=10": (8.3e-7, 0.71, 1.68),
    "standard init n=50": (1.5e-6, 0.74, 1.72),
    "SGD batch 50": (4.0e-6, 0.77, 2.21),
    "1e4 epochs CIFAR": (0.0039, 0.77, 1.22),
    "1e4 epochs MNIST": (0.014, 0.87, 0.55),
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "haim2022": {
        "circle_recovered": 20,
        "circle_model_inversion": 7,
        "cifar_above_0.4": 17,
        "cifar_best": 0.636,
        "cifar_top10": 0.536,
        "cifar_weights_above_0.4": 4,
        "cifar_weights_best": 0.611,
        "mnist_ncc_max": 0.943,
        "mnist_ncc_top30_median": 0.815,
        "mnist_test_accuracy": 0.880,
        "cifar_test_accuracy": 0.776,
        "table1": _TABLE1,
        "table2": _TABLE2,
    },
    "refael2025": {
        "radii": "the mean distance of the five best grows with the initial radius",
        "objective": "330 to 332 in all runs",
        "shift": {0.5: "vague", 5.0: "fails"},
    },
    "shen2026": {"top25_improved": "21 of 25"},
    "buzaglo2023": {},  # no counts: the paper shows images
    "loo2024": {"mnist_l2_below_2.5": 142, "cifar_median_l2": 5.2},
}
