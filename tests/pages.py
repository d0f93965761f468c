"""Audits for tests of the report: real digits as pictures, made-up attacks around them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits

from residuum.auditing.outcomes import AttackOutcome, Findings
from residuum.auditing.power import ControlSize, PositiveControls
from residuum.auditing.result import AuditResult, Evidence
from residuum.auditing.verdict import (
    EXIT_CODES,
    INCONCLUSIVE,
    LEAK,
    NO_LEAK_FOUND,
    Checks,
    Verdict,
    decide,
)
from residuum.conformal import count_above_tail
from residuum.evaluation.adapting import Fit
from residuum.networks.network import Network
from residuum.records import (
    Certificate,
    Knowledge,
    Reconstruction,
    Scores,
    Selection,
    Sums,
    Uniqueness,
)
from residuum.records.scores import MetricScore, SampleMatch, SampleScore
from residuum.risk.membership import LossSeparation, MembershipTest, holdout_needed, min_named
from residuum.surfaces.inspection import Inspection

OUTCOMES = tuple(EXIT_CODES)
HOSTILE = (
    "<script>document.title='pwned'</script>",
    "\"'><img src=x onerror=document.title='pwned'>",
    "cat\u202egnp.exe\u2066\u200f",
    "</style></script><!--",
    "{{ 7*7 }} ${7*7}",
    "שלום 123 مرحبا",
    "line\nbreak\x00\x1b[31m\ud800",
)
SUBSETS = 40


def ncc(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum() / np.sqrt((a**2).sum() * (b**2).sum()))


@cache
def digits(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    images, labels = load_digits(return_X_y=True)
    chosen = np.random.default_rng(seed).permutation(len(images))[:count]
    return images[chosen].reshape(-1, 1, 8, 8) / 16, labels[chosen]


def samples(count: int, shape: tuple[int, ...], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Digits where they fit, enlarged where they are smaller; random vectors otherwise."""
    rng = np.random.default_rng(seed)
    small, labels = digits(count, seed)
    if len(shape) != 3:
        return rng.normal(size=(count, *shape)), labels
    side = shape[-1]
    rows = np.arange(side) * 8 // side
    image = small[:, :, rows][:, :, :, rows].repeat(shape[0], 1)
    tint = rng.uniform(0.3, 1, size=(count, shape[0], 1, 1)) if shape[0] > 1 else 1.0
    return image * tint, labels


def audited(
    count: int = 60,
    shape: tuple[int, ...] = (1, 8, 8),
    outcome: str = LEAK,
    names: tuple[str, ...] = (),
    seed: int = 0,
    recovered_every: int = 3,
    members: int = 0,
    checks: Checks | None = None,
    **changes: Any,
) -> AuditResult:
    """Return an audit that reconstructed one of ``every`` few samples, or none without a leak.

    Args:
        count: Number of training samples.
        shape: Shape of a sample.
        outcome: The verdict. A leak is one by reconstruction.
        names: Hostile names, wherever text goes.
        seed: Seed of samples and candidates.
        every: One sample in so many is reconstructed.
        members: Number of samples that the membership test names.
        checks: What the audit checked.
        changes: Other fields of the result.
    """
    rng = np.random.default_rng(seed)
    x, labels = samples(count, shape, seed)
    got = (np.arange(count) % recovered_every == 0) & (outcome == LEAK)
    noise = np.where(got, 0.25, 2.2).reshape(-1, *[1] * len(shape))
    images_found = (x + noise * rng.normal(size=x.shape) * x.std()) if count else x
    scores = np.array([ncc(a, b) for a, b in zip(images_found, x, strict=True)])
    null = rng.normal(0.42, 0.1, size=SUBSETS * max(count, 1)).clip(-1, 0.98)
    threshold = float(np.quantile(null, 0.99))
    matched = np.flatnonzero(scores > threshold)
    recovered = len(matched)
    called = tuple(names[i % len(names)] if names else f"digit {labels[i]}" for i in range(count))
    around = _around(names)
    findings = reconstructed(count, matched.tolist() if outcome == LEAK else [])
    membership = member_test(count, members) if count else None
    checks = checks or Checks(positive_controls=controls() if outcome == NO_LEAK_FOUND else ())
    verdict = decide(findings, around["attacks"], checks, membership)
    assert verdict.outcome == outcome or not count
    reconstruction_made = reconstruction(images_found, scores, rng, names)
    fields: dict[str, Any] = {
        "verdict": verdict,
        "findings": findings,
        "checks": checks,
        "membership": membership,
        "displayed_attack": "binary-kkt",
        "reconstructions": (reconstruction_made,),
        "knowledge": _knowledge(shape, names),
        "inspection": _inspection(),
        **around,
    }
    if count:
        rows = tuple(
            _scored(i, images_found[i], x[i], float(scores[i]), threshold, rng)
            for i in range(count)
        )
        fields |= {
            "scores": Scores(count, count, True, "", "ncc", _metrics(threshold, recovered), rows),
            "evidence": Evidence(
                index=torch.from_numpy(np.argsort(-scores)),
                x=torch.from_numpy(x[np.argsort(-scores)]),
                values=torch.from_numpy(scores),
                null=torch.from_numpy(null),
                null_sets=SUBSETS,
                outputs=torch.from_numpy(rng.normal(0, 1.2, count)),
                output_name="network output",
                labels=called,
            ),
            "uniqueness": _unique(images_found, rng),
        }
    return bare(**fields | changes)


def reconstructed(count: int, rows: list[int]) -> Findings:
    """Return findings in which one attack recovers the samples in these rows as near-copies."""
    leaks = bool(rows)
    return Findings(
        n=count,
        recovered=len(rows),
        expected_by_chance=0.6,
        interval=(max(len(rows) - 6.0, 1.0 * leaks), float(len(rows))),
        p_value=0.002 if leaks else 0.41,
        metric="ncc",
        rule="ncc > 0.65",
        tests=1,
        survivors=("binary-kkt",) if leaks else (),
        samples=tuple(rows),
        grades={"near-copy": len(rows)} if leaks else {},
    )


def member_test(count: int, named: int = 0, holdout: int = 1000, seed: int = 3) -> MembershipTest:
    """Return a membership test that names the first samples, the surest first."""
    rng = np.random.default_rng(seed)
    statistic = torch.from_numpy(rng.normal(-6, 1.0, count))
    holdout_losses = torch.from_numpy(rng.normal(-6, 1.0, holdout))
    statistic[:named] = torch.linspace(25, 4, named, dtype=torch.float64)
    boundaries = torch.zeros(count, dtype=torch.long)
    boundaries[:named] = torch.linspace(12, 2, named).long()
    q = torch.full((count,), 0.9, dtype=torch.float64)
    q[:named] = torch.linspace(0.001, 0.04, named, dtype=torch.float64)
    return MembershipTest(
        records=count,
        rows=tuple(range(count)),
        holdout=holdout,
        holdout_needed=holdout_needed(count),
        layers=1,
        neurons=1000,
        statistic=statistic,
        holdout_statistic=holdout_losses,
        boundaries=boundaries,
        holdout_boundaries=torch.zeros(holdout, dtype=torch.long),
        p=q,
        q=q,
        above_tail=count_above_tail(statistic, holdout_losses),
        group_p=0.0001 if named else 0.3,
        named=torch.arange(named),
        is_finding=named >= min_named(count),
        reason="",
        decoy_p=q,
        decoy_named=torch.arange(named),
        loss=LossSeparation(0.55, 0.5, 0.6, 0.01, 0.4),
    )


def controls() -> tuple[PositiveControls, ...]:
    """Return positive controls: all of membership are detected, of reconstruction the smaller ones."""
    training = "trained by adam"
    return (
        PositiveControls("membership", (ControlSize(60, (31,) * 9 + (24,), 10, 1e-5),), training),
        PositiveControls(
            "reconstruction",
            (ControlSize(60, (0,), 0, 1e-5), ControlSize(30, (9, 14, 11), 3, 1e-5)),
            training,
        ),
    )


def members(count: int = 60, named: int = 40, **changes: Any) -> AuditResult:
    """Return an audit that names members and reconstructs nothing."""
    result = audited(count, outcome=NO_LEAK_FOUND, **changes)
    return with_membership(result, member_test(count, named))


def with_membership(result: AuditResult, test: MembershipTest) -> AuditResult:
    """Return the audit with this membership test, and the verdict that follows."""
    checks = result.checks.replace(positive_controls=())
    verdict = decide(result.findings, result.attacks, checks, test)
    return result.replace(membership=test, checks=checks, verdict=verdict)


def example(outcome: str) -> AuditResult:
    """Return an audit of digits as a person meets it, for pictures: samples, controls, fit and files."""
    fit = Fit("accuracy", 1.0, 0.874, 0.52)
    power = controls() if outcome == NO_LEAK_FOUND else ()
    checks = Checks(fit=fit, told_apart=0.001, positive_controls=power)
    result = audited(60, (1, 28, 28), outcome, seed=1, checks=checks)
    attacks = list(result.attacks)
    if outcome == LEAK:
        counts = {"recovered": result.verdict.recovered, "expected_by_chance": 0.6}
        attacks[0] = attacks[0].replace(adjusted=0.002, p_value=0.001, rule="ncc > 0.65", **counts)
    if outcome == INCONCLUSIVE:
        attacks[0] = attacks[0].replace(unfinished="each restart ran 609 of 3000 steps")
        checks = checks.replace(budget_needed=900.0)
    verdict = decide(result.findings, tuple(attacks), checks, result.membership)
    return result.replace(
        verdict=verdict,
        attacks=tuple(attacks),
        checks=checks,
        files={
            "checkpoint": "model.pt",
            "data": "train.npz",
            "holdout": "test.npz",
            "out": "runs/a",
        },
        subject="model.pt",
    )


def bare(**fields: Any) -> AuditResult:
    """An audit of nothing, but for what is given."""
    empty: dict[str, Any] = {
        "subject": "bare",
        "created": "2026-03-04T09:30:00+00:00",
        "verdict": Verdict(INCONCLUSIVE),
        "checkpoint": Network({}, "mlp:64-1000-1000-1"),
        "inspection": _inspection(),
        "knowledge": Knowledge(),
        "attacks": (),
        "reconstructions": (),
        "scores": None,
        "selected": None,
        "certificate": None,
        "certificate_of": "no samples",
        "uniqueness": None,
        "uniqueness_reason": "",
        "evidence": None,
        "batches": (),
        "seconds": {},
        "settings": {},
        "environment": {},
    }
    return AuditResult(**empty | fields)


def without_data(count: int = 24) -> AuditResult:
    """Candidates alone: no match, no control."""
    verdict = decide(None, (), why_not_compared="there are no training samples")
    changes = {"scores": None, "evidence": None, "findings": None, "membership": None}
    return audited(count, verdict=verdict, **changes)


def compared(
    values: list[float], null: list[float], threshold: float, sets: int, metric: str, higher: bool
) -> AuditResult:
    """An audit of these deciding scores, without candidates."""
    row = MetricScore(metric, "", higher, None, None, None, None, None, threshold_null99=threshold)
    scores = Scores(len(values), 0, True, "", metric, {metric: row}, ())
    return bare(
        scores=scores,
        evidence=Evidence(
            index=torch.zeros(0, dtype=torch.long),
            x=torch.zeros(0, 4),
            values=torch.tensor(values, dtype=torch.float64),
            null=torch.tensor(null, dtype=torch.float64),
            null_sets=sets,
        ),
        reconstructions=(reconstruction(np.zeros((0, 4)), np.zeros(0), np.random.default_rng(0)),),
    )


def reconstruction(
    images_found: np.ndarray,
    scores: np.ndarray,
    rng: np.random.Generator,
    names: tuple[str, ...] = (),
) -> Reconstruction:
    """Candidates of 8 restarts; the first layer's residual falls, the others' stay."""
    count, x = len(images_found), torch.from_numpy(images_found)
    labels, lam = torch.ones(count), torch.from_numpy(rng.gamma(1, size=count))
    confidence = np.clip(scores + rng.normal(0, 0.08, count), 0, 1)
    steps = np.arange(0, 20001, 100)
    decay = np.exp(-steps / 4000)
    noise = np.random.default_rng(5).lognormal(0, 0.2, size=(8, len(steps)))
    curves = [
        (0.004 + decay * 0.9 if k == 0 else 1 - 0.1 * k + 0 * decay) * noise for k in range(3)
    ]
    layers = names or ("layers.0.weight", "layers.1.weight", "layers.2.weight")
    return Reconstruction(
        attack="binary-kkt",
        x=x,
        labels=labels,
        lam=lam,
        run=torch.zeros(count, dtype=torch.long),
        steps=torch.from_numpy(steps),
        loss=torch.from_numpy(noise),
        layers=torch.from_numpy(np.stack(curves, -1) ** 2),
        layer_names=layers[:3],
        status=("finished",) * 8,
        knowledge=Knowledge(),
        selection=Selection(
            x,
            labels,
            lam,
            torch.from_numpy(rng.integers(1, 9, count)),
            torch.ones(count),
            torch.from_numpy(confidence),
            torch.zeros(count, 5),
            torch.arange(count),
        ),
    )


def _scored(
    i: int,
    images_found: np.ndarray,
    sample: np.ndarray,
    score: float,
    threshold: float,
    rng: np.random.Generator,
) -> SampleScore:
    values = {"ncc": score, "l2": float(np.linalg.norm(images_found - sample)), "ssim3": score**2}
    matches = {name: SampleMatch(value, i, None, value, i) for name, value in values.items()}
    margin, multiplier = float(rng.gamma(2)), float(rng.gamma(1))
    return SampleScore(i, 1.0, margin, multiplier, score > threshold, matches)


def _unique(images_found: np.ndarray, rng: np.random.Generator) -> Uniqueness:
    """Certificates of every second candidate."""
    index = torch.arange(0, len(images_found), 2)
    k, energy = len(index), rng.uniform(0.2, 1.2, -(-len(images_found) // 2)).clip(max=1)
    share = torch.from_numpy(energy)
    zeros, x = torch.zeros(k, dtype=torch.float64), torch.from_numpy(images_found)[index]
    free = rng.uniform(size=x.shape) * (1 - energy).reshape(-1, *[1] * (x.ndim - 1))
    return Uniqueness(
        task="binary",
        samples=len(images_found),
        share=0.1,
        box=True,
        margins=True,
        index=index,
        labels=zeros,
        lam=zeros,
        members=zeros,
        pinned=zeros == 0,
        kinks=zeros,
        determined_at_least=share - 0.02,
        determined_energy=share,
        full_at_least=share,
        full_energy=share,
        least=x,
        change=zeros,
        radius=zeros,
        radius_most=torch.from_numpy(rng.gamma(1, size=k)),
        low=0 * x,
        high=torch.from_numpy(free),
        size=zeros,
        sums=Sums(k, k, 0, 1.0, "first layer"),
        residual={"layers.0": 0.1},
        seconds=1.0,
    )


def _metrics(threshold: float, recovered: int) -> dict[str, MetricScore]:
    rows = (
        MetricScore(
            "ncc",
            "normalized cross-correlation, one-to-one",
            True,
            None,
            None,
            0.9,
            0.991,
            0.5,
            recovered,
            0.6,
            (1.0, 9.0),
            0.002,
            threshold,
        ),
        MetricScore(
            "ssim3",
            "structural similarity, mean added",
            True,
            0.4,
            19,
            0.9,
            0.98,
            0.5,
            17,
            0.5,
            None,
            0.002,
            0.41,
            2,
        ),
        MetricScore(
            "l2", "Euclidean distance", False, None, None, 0.5, 0.3, 1.0, 16, 0.6, None, 0.0005, 1.2
        ),
    )
    return {row.name: row for row in rows}


def _knowledge(shape: tuple[int, ...], names: tuple[str, ...]) -> Knowledge:
    mean = torch.zeros(int(np.prod(shape)))
    loss_name = names[2 % len(names)] if names else "logistic"
    return Knowledge(
        shape=shape, value_range=(0.0, 1.0), mean=mean, loss=loss_name, provenance={"mean": "train"}
    )


def _inspection() -> Inspection:
    return Inspection(
        arch="mlp:64-1000-1000-1",
        input_shape=(64,),
        inputs=64,
        outputs=1,
        layers=(),
        parameters=1_066_001,
        bytes=4_264_004,
        dtype="torch.float32",
        homogeneity_order=3.0,
        directions=12,
        directions_of="above the noise edge",
        ranks={},
        balance=0.01,
    )


def _certificate() -> Certificate:
    return Certificate(
        "binary",
        60,
        0.0312,
        0.0311,
        0.4,
        0.1,
        1.0,
        0.02,
        3.0,
        4,
        4,
        (),
        torch.ones(2),
        torch.arange(2),
        0.01,
        0.02,
        10.0,
        12.0,
        "near_kkt",
    )


def _around(names: tuple[str, ...]) -> dict[str, Any]:
    """Everything but the samples."""
    return {
        "subject": names[0] if names else "digits-mlp.safetensors",
        "attacks": (
            AttackOutcome(
                "binary-kkt",
                True,
                True,
                True,
                "homogeneous of order 3: training to zero loss leads to a KKT point",
                "weights",
                8,
                20000,
                480,
                residual=0.0041,
                seconds=41.2,
            ),
            AttackOutcome("first-layer-weights", False, True, True, "baseline", candidates=1000),
            AttackOutcome(
                "multiclass-kkt",
                True,
                False,
                False,
                "needs two or more outputs; this network has 1",
            ),
            AttackOutcome(
                "ntk", True, True, False, "needs the initial weights; pass them with --init"
            ),
        ),
        "certificate": _certificate(),
        "certificate_of": "training samples",
        "assumptions": (
            "The network was trained to zero training error without early stopping.",
            "Held-out samples come from the distribution of the training set.",
        ),
        "limitations": (
            "Only the attacks listed here were run, inside a budget of 10 minutes.",
            "A stronger prior on images could bring back more.",
        ),
        "settings": {
            "budget": "10min",
            "seed": 0,
            "attack": {"steps": 20000, "restarts": 8, "prior": None, "value_range": (0, 1)},
            "path": names[1] if names else "runs/a",
        },
        "environment": {
            "python": "3.11.9",
            "packages": {"torch": "2.13.0", "numpy": "2.4.6"},
            "device": "x86_64",
            "threads": 2,
        },
        "hashes": {
            "checkpoint": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
            "data": "60303ae22b998861bce3b28f33eec1be758a213c86c93c076dbe9f558c11c752",
        },
    }
