"""The rule by which images that came back are counted, the same for samples of others: that is chance."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from residuum.evaluation.matching import display, greedy, published_search, ssim_score

LEVELS = (0.7, 0.8, 0.9)
PUBLISHED = 0.4  # ssim3 above which a reconstruction is called good


def counted(x: Tensor, samples: Tensor, mean: Tensor | None, similarity: Tensor) -> dict[str, Any]:
    """Samples above fixed similarities, one-to-one; of color images also by the published rule.

    alike: (m, n) of candidates and samples. mean: of the training set, which displayed images have.
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


def held_out(counts: dict[str, Any]) -> dict[str, Any]:
    """The same figures under the names that those of held-out samples have."""
    return {f"{name} held out": value for name, value in counts.items()}
