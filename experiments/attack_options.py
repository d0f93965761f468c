"""Make attacks and attacker knowledge that several experiments use."""

from __future__ import annotations

from typing import Any

from residuum.attacks import Attack, make_attack
from residuum.records import Dataset, Knowledge


def attack_with(name: str = "auto", preset: str = "residuum", **settings: Any) -> Attack:
    """Return an attack with a preset and with those of the settings that it has.

    Args:
        name: Name of the attack. "auto" stands for the attack of the preset.
        preset: Name of the preset.
        **settings: Settings of several attacks.

    Returns:
        The attack.
    """
    kind = type(make_attack(name, preset))
    return make_attack(name, preset, **kind.select_settings(settings))


def knowledge_with_mean(data: Dataset) -> Knowledge:
    """Return the knowledge of an attacker who knows count, range [0, 1] and mean of the samples."""
    knowledge = Knowledge(sample_count=len(data))
    return knowledge.replace(value_range=(0.0, 1.0), mean=data.mean, provenance={"mean": "train"})
