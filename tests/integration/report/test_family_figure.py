"""Pictures of an attack that grows."""

from __future__ import annotations

import pytest
import torch

from experiments.growth_pictures import Follow, story_figure
from residuum.attacks import attack
from residuum.report.figures import family_figure, trace_candidates
from tests.integration.attacks.test_growth import SMALL, released


def test_the_pictures_tell_what_happened():
    events = (
        {"step": 10, "run": 0, "kind": "split", "parent": 1, "children": [3, 2]},
        {"step": 20, "run": 0, "kind": "merge", "parent": 2, "children": [0]},
        {"step": 40, "run": 0, "kind": "prune", "parent": 3},
    )
    families = trace_candidates(events, 2)
    assert {number: (life.born, life.parent, life.died) for number, life in families.items()} == {
        0: (0, None, None),
        1: (0, None, 10),
        2: (10, 1, 20),
        3: (10, 1, 40),
    }
    assert families[1].children == (3, 2)
    grown, seen = SMALL.changed(surrogate="softplus"), Follow(torch.zeros(5))
    reconstruction = attack(released(), None, grown, watch=seen)
    assert family_figure(reconstruction)[:4] == b"\x89PNG"
    assert family_figure(attack(released(), None, SMALL.changed(split="none"))) is None
    assert seen.steps[-1] == 120
    assert seen.counts[-1] > seen.counts[0] == 4
    assert seen.distances[-1] == pytest.approx(float(seen.images[-1].norm()))
    assert story_figure({"splitting": seen})[:4] == b"\x89PNG"
