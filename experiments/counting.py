"""Count reconstructed images by one rule, which also counts held-out images to give the chance level."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from residuum.evaluation.matching import display, greedy, published_search, ssim_score

LEVELS = (0.7, 0.8, 0.9)
PUBLISHED = 0.4  # ssim3 above which a reconstruction is called good


def count_matches(
    x: Tensor, samples: Tensor, mean: Tensor | None, similarity: Tensor
) -> dict[str, Any]:
    """Count samples above fixed similarities, one-to-one, and color images by the published rule too.

    Args:
        x: Candidates.
        samples: Samples that are searched among the candidates.
        mean: Mean of the training set, which is added to images before the published rule.
        similarity: (m, n) similarity of candidates and samples.

    Returns:
        Counts by level.
    """
    value = greedy(similarity.cpu().double().numpy()).value
    counts: dict[str, Any] = {f"{level}": int((value > level).sum()) for level in LEVELS}
    if samples.ndim == 4 and samples.shape[1] == 3 and mean is not None:
        mean = mean.to(x.device).float()
        nearest = published_search(x, samples).argmax(0)
        scores = ssim_score(display(x[nearest], mean), samples + mean, 3)
        counts["ssim3"] = int((scores > PUBLISHED).sum())
        counts["top10"] = round(float(scores.topk(min(10, len(samples))).values.mean()), 4)
    return counts


def name_held_out(counts: dict[str, Any]) -> dict[str, Any]:
    """Return figures under the names of figures of held-out samples."""
    return {f"{name} held out": value for name, value in counts.items()}
