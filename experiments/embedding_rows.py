"""Does a scan name the rows of an embedding that training used?

    python -m experiments.embedding_rows        a minute on one core

200 of 5000 tokens occur at least five times each. A classifier of bags of ten tokens is trained for 300
steps with usual rates, and precision and recall are measured for every optimizer. "in" names the number
format of training, and "saved" that of both files. Results: ``experiments/results/embedding_rows.json``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from experiments import RESULTS
from experiments.programs import parse_paths
from residuum.records import write_json
from residuum.records.rundir import environment
from residuum.scanning.base_comparison import CURVE, EQUAL, FACTOR, find_touched_rows

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
TOKENS, SEEN, LEAST = 5000, 200, 5
SEEDS = (11, 12, 13)
# The rule that explains rows never seen, in float32.
OPTIMIZERS: dict[str, tuple[str, Optimizer]] = {
    "SGD": (EQUAL, lambda p: torch.optim.SGD(p, 0.1)),
    "SGD, momentum, decay 1e-4": (
        FACTOR,
        lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=1e-4),
    ),
    "Adam": (EQUAL, lambda p: torch.optim.Adam(p, 1e-3)),
    "AdamW, decay 1e-2": (FACTOR, lambda p: torch.optim.AdamW(p, 1e-3, weight_decay=1e-2)),
    "Adam, coupled L2 1e-2": (CURVE, lambda p: torch.optim.Adam(p, 1e-3, weight_decay=1e-2)),
    "Adam, coupled L2 1e-4": (CURVE, lambda p: torch.optim.Adam(p, 1e-3, weight_decay=1e-4)),
}


def train_table(
    optimizer: Optimizer,
    *,
    tokens: int = TOKENS,
    steps: int = 300,
    tied: bool = False,
    kind: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Tensor, Tensor, set[int]]:
    """Return an embedding before and after training, and the tokens that were used often enough."""
    torch.manual_seed(seed)
    table = nn.Embedding(tokens, 32).to(kind)
    head = nn.Linear(32, tokens if tied else 2, bias=False).to(kind)
    if tied:
        head.weight = table.weight
    base = table.weight.detach().clone()
    chance = torch.Generator().manual_seed(seed + 1)
    vocabulary = torch.randperm(tokens, generator=chance)[:SEEN]
    trained = optimizer(list({*table.parameters(), *head.parameters()}))
    used = torch.zeros(tokens)
    for _ in range(steps):
        text = vocabulary[torch.randint(SEEN, (16, 10), generator=chance)]
        used += torch.bincount(text.flatten(), minlength=tokens)
        outputs = head(table(text).mean(1)).float()
        trained.zero_grad()
        nn.functional.cross_entropy(outputs, text[:, 0] if tied else text[:, 0] % 2).backward()
        trained.step()
    return table.weight.detach(), base, {*(used >= LEAST).nonzero().flatten().tolist()}


def main() -> int:
    """Measure precision and recall for every optimizer and number format, and write their means."""
    torch.set_num_threads(1)  # with more threads the counts differ from run to run
    formats = {
        "in float32, saved in float32": (torch.float32, torch.float32),
        "in float32, saved in bfloat16": (torch.float32, torch.bfloat16),
        "in bfloat16, saved in bfloat16": (torch.bfloat16, torch.bfloat16),
    }
    results: dict[str, dict[str, dict[str, float | str]]] = {}
    for title, (kind, saved) in formats.items():
        for name, (_, optimizer) in OPTIMIZERS.items():
            precision, recall, rule = [], [], ""
            for seed in SEEDS:
                table, base, seen = train_table(optimizer, kind=kind, seed=seed)
                touched = find_touched_rows(table.to(saved), base.to(saved))
                right, rule = len(seen & {*touched.rows}), touched.rule
                precision.append(right / max(1, len(touched.rows)))
                recall.append(right / len(seen))
            figures = {"rule": rule, "precision": sum(precision) / 3, "recall": sum(recall) / 3}
            results.setdefault(title, {})[name] = figures
            print(f"{title}: {name}: {figures}", flush=True)
    tied = {
        name: find_touched_rows(*train_table(optimizer, tokens=1000, tied=True)[:2]).rule
        for name, (_, optimizer) in OPTIMIZERS.items()
    }
    print(f"tied head: {tied}")
    path = RESULTS / "embedding_rows.json"
    write_json(path, {"seeds": SEEDS, "found": results, "tied": tied, "environment": environment()})
    return 0


if __name__ == "__main__":
    parse_paths(__doc__)
    sys.exit(main())
