"""What the uniqueness certificate says of one card of the report."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from residuum.auditing.result import AuditResult
from residuum.report.page import DETERMINED, FREE, PARTLY
from residuum.similarity import cosine

SAME = 0.9  # cosine above which a certified candidate stands for another one
# Shares of an image's energy: pairs keep it where the bound says so, and lose it where one does.
FIXED, LOOSE = 0.9, 0.5


def certified(result: AuditResult, x: Tensor) -> dict[str, Any]:
    """Fields of ``Item`` from the nearest certified candidate; none where no such one is near."""
    unique = result.uniqueness
    if unique is None or not len(unique):
        return {}
    candidates = result.reconstructions[0].x[unique.index]
    near = cosine(x[None].double(), candidates.double())[0]
    i = int(near.argmax())
    if float(near[i]) < SAME:
        return {}
    energy, least = float(unique.determined_energy[i]), float(unique.determined_at_least[i])
    radius = float(unique.radius[i])
    low, high = result.knowledge.value_range or (0.0, 1.0)
    known: dict[str, Any] = {
        "determined_energy": energy,
        "determined_at_least": least,
        "radius": radius if math.isfinite(radius) else None,
        "certificate": DETERMINED if least >= FIXED else PARTLY if energy >= LOOSE else FREE,
        "ambiguity": (unique.pixels[i].double() / (high - low)).clamp(0, 1).numpy(),
    }
    if not math.isfinite(radius):
        known["notes"] = ("an equally good pair lies at any distance",)
    return known
