"""How often is a leak reported for samples that a network never saw? ``python -m experiments.verdict_level``.

30 networks are attacked once each. Then eight sets of samples that the network never saw are audited as if
they were its training set, with all tests. The bar: at most 6 of 240 end in exit code 1.

Two further parts audit sets of another composition than the held-out samples (60% zeros and ones instead of
20%), and sets of eight samples. The bar: at most 2% end in exit code 1.

The candidates of the attacks are kept in ``experiments/results/level_candidates``, so that a new test can be
added without new attacks. The seeds were drawn after this file was committed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments import RESULTS
from experiments.common import Case, run_cases

CANDIDATES = RESULTS / "level_candidates"
SETS = 8
NETWORKS: tuple[Case, ...] = tuple(
    {"data": data, "n": n, "holdout": holdout, "model": model, "epochs": epochs, "seed": 9800 + i}
    for i, (data, n, holdout, model, epochs) in enumerate(
        [
            *[("digits", 60, 500, "mlp", 200)] * 6,
            *[("digits", 60, 500, "mlp", 20)] * 4,
            *[("digits", 30, 500, "mlp-256-128", 200)] * 4,
            *[("cancer", 30, 300, "mlp", 200)] * 6,
            *[("mnist", 60, 500, "mlp", 200)] * 6,
            *[("mnist", 60, 500, "cnn", 50)] * 4,
        ]
    )
)


def cases() -> list[Case]:
    rows = [{"part": "exchangeable", **network} for network in NETWORKS]
    digits = [network for network in NETWORKS if network["data"] == "digits"]
    rows += [{"part": "zeros and ones", **network} for network in digits[:12]]
    return rows + [{"part": "eight samples", **network} for network in digits[:12]]


def measure(case: Case) -> Case:
    import torch

    from experiments.ordinary import draw, trained
    from residuum.auditing.case import load_case
    from residuum.auditing.plan import Deadline
    from residuum.auditing.request import AuditRequest
    from residuum.auditing.run import Audit
    from residuum.auditing.schedule import run_attacks

    torch.set_num_threads(1)
    data = draw(case["data"], case["n"], case["holdout"], case["seed"])
    model = trained(case, data)
    request = AuditRequest(seed=case["seed"], baselines=False)
    opened = load_case(model, data["members"], data["holdout"], None, request)
    assert opened is not None
    state = Audit(opened, request, Deadline.for_request(request))
    stored = CANDIDATES / f"{case['seed']}.safetensors"
    attacks = load_attacks(stored)
    if attacks is None:
        attacks = shortened(run_attacks(state).attacks)
        attacks.save(stored)
    rng = np.random.default_rng([case["seed"], 41])
    sets = []
    for number in range(SETS):
        members, holdout = never_seen(data, case, rng)
        audited = load_case(model, members, holdout, None, request)
        assert audited is not None
        sets.append(
            audit_set(Audit(audited, request, Deadline.for_request(request)), attacks, number)
        )
    return {"sets": sets, "leaks": sum(row["exit_code"] == 1 for row in sets)}


def shortened(attacks: Any) -> Any:
    """Return the outputs of the attacks with candidates in half precision and without their history."""
    halved = (
        reconstruction.replace(x=reconstruction.x.half(), selection=None)
        for reconstruction in attacks.reconstructions
    )
    return attacks.replace(reconstructions=tuple(halved), baselines=())


def load_attacks(path: Path) -> Any:
    """Return the stored outputs of the attacks, None if there are none."""
    from residuum.auditing.schedule import AttackResults

    path.parent.mkdir(parents=True, exist_ok=True)
    return AttackResults.load_or_none(path)


def never_seen(data: Any, case: Case, rng: np.random.Generator) -> tuple[Any, Any]:
    """Return a set that the network never saw, and held-out samples, both without its training samples."""
    import torch

    subsets = (data["holdout"], data["others"])
    x, y = (torch.cat([subset[i] for subset in subsets]) for i in (0, 1))
    order = torch.from_numpy(rng.permutation(len(x)))
    n = 8 if case["part"] == "eight samples" else case["n"]
    if case["part"] == "zeros and ones":
        low = y[order] < 2
        many, few = order[low][: round(0.6 * n)], order[~low][: n - round(0.6 * n)]
        remaining = torch.cat([order[low][len(many) :], order[~low][len(few) :]])
        chosen, order = (
            torch.cat([many, few]),
            remaining[torch.from_numpy(rng.permutation(len(remaining)))],
        )
    else:
        chosen, order = order[:n], order[n:]
    held_out = order[: case["holdout"]]
    return (x[chosen], y[chosen]), (x[held_out], y[held_out])


def audit_set(state: Any, attacks: Any, number: int) -> Case:
    """Run all stages that can show a leak on one set."""
    from residuum.auditing import stages

    state = replace(state, request=state.request.changed(seed=number))
    state = stages.test_membership(state)
    state = replace(state, attacks=attacks)
    state = stages.score_reconstructions(stages.run_negative_controls(state))
    verdict = state.verdict()
    return {
        "exit_code": verdict.exit_code,
        "grades": verdict.grades,
        "p_value": verdict.p_value,
        "group_p": state.membership.group_p,
        "named": len(state.membership.named),
        "level": state.negative_controls.level,
        "failures": len(state.checks.failures),
    }


def summarize(rows: list[Case]) -> str:
    lines = []
    for name, bar in (("exchangeable", 6 / 240), ("zeros and ones", 0.02), ("eight samples", 0.02)):
        group = [row for row in rows if row["case"]["part"] == name]
        sets = [audited for row in group for audited in row["sets"]]
        leaks = sum(audited["exit_code"] == 1 for audited in sets)
        caught = sum(audited["failures"] > 0 for audited in sets)
        lines.append(
            f"{name:16} {leaks} of {len(sets)} end in exit code 1 (bar {bar * len(sets):.3g}); a negative "
            f"control fails in {caught}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run_cases("verdict_level", cases(), measure, summarize)
