"""Build the result of an audit, an ``AuditResult``, from the outputs of all its stages (steps)."""

from __future__ import annotations

import math
import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from residuum import plugins
from residuum.attacks import every_attack
from residuum.auditing.applicability import (
    MEASURED,
    NOT_TRIED,
    TRIED,
    Applies,
    describe_network,
    list_attacks,
    list_other_checks,
)
from residuum.auditing.case import Case
from residuum.auditing.losses import why_not_compared
from residuum.auditing.result import SUITE, AuditResult
from residuum.auditing.stages import NO_NETWORK, NO_SAMPLES, certificates_or_reason
from residuum.auditing.stored_records import NAME
from residuum.auditing.verdict import assumptions, limitations
from residuum.networks.network import Network
from residuum.records import Dataset, Knowledge, Reconstruction, Selection
from residuum.records.rundir import environment
from residuum.surfaces.inspection import Inspection
from residuum.trees.forest import Forest

if TYPE_CHECKING:
    from residuum.auditing.run import Audit

MOVED = "layers that moved"  # name of a row in the table of ``describe_network``
IS_NO_NETWORK = "the model is no network"
PURPOSE_OF_LOSSES = "whether training samples have smaller losses than held-out samples"
# Largest number of records stored in the model file that the report receives. A page shows fewer.
MAX_RECORDS = 300


def assemble_result(audit: Audit) -> AuditResult:
    """Return the result of an audit whose stages (steps) have run, with its verdict."""
    if audit.case.network is not None:
        return _assemble_for_network(audit)
    if audit.case.predictor is None:
        return _assemble_for_records(audit)
    return _assemble_for_predictor(audit)


def describe_case(case: Case) -> tuple[Applies, ...]:
    """Return the measured properties of the network as rows of the audit's table, one for each property.

    If the first layers were frozen in training, only the layers above them are audited. The row "layers that
    moved" (layers whose weights changed in training) still counts all layers of the network in the file.
    """
    rows_of_audited_network = describe_network(
        case.audited, case.inspection, case.knowledge, case.fit
    )
    if case.head is None or case.full_inputs is None:
        return rows_of_audited_network
    rows_of_full_network = describe_network(
        case.full_inputs.network, case.inspection, case.full_inputs.knowledge, case.fit
    )
    return tuple(
        full if row.what == MOVED else row
        for row, full in zip(rows_of_audited_network, rows_of_full_network, strict=True)
    )


def _assemble_for_network(audit: Audit) -> AuditResult:
    case, request, checks, scores = audit.case, audit.request, audit.checks, audit.scores
    assert case.full_inputs is not None
    network, results = case.audited, audit.attacks
    certificates = certificates_or_reason(audit)
    frozen_layer_notes = () if case.head is None else (case.head.note,)
    findings = None if scores is None else scores.findings
    verdict = audit.verdict((*frozen_layer_notes, *network.assumptions))
    attacks = every_attack()
    attack_assumptions = [
        attacks[row.name].assumes for row in audit.outcomes if row.ran and row.name in attacks
    ]
    scores_of_strongest_attack = None if scores is None else scores.scores
    subset_count = request.subsets
    if scores_of_strongest_attack is not None and scores_of_strongest_attack.subsets:
        subset_count = scores_of_strongest_attack.subsets
    settings = {**_settings(audit), "subsets": subset_count, "arch": case.full_inputs.network.arch}
    return AuditResult(
        subject=_subject(audit, network.arch),
        created=_now(),
        verdict=verdict,
        checkpoint=network,
        inspection=case.inspection,
        knowledge=case.full_inputs.knowledge,
        attacks=audit.outcomes,
        reconstructions=results.reconstructions,
        batches=results.batches,
        seconds=dict(audit.seconds),
        findings=findings,
        displayed_attack="" if scores is None else scores.displayed_attack,
        scores=scores_of_strongest_attack,
        selected=None if scores is None else scores.selected,
        evidence=None if scores is None else scores.evidence,
        certificate=certificates.certificate,
        certificate_of=certificates.certificate_of,
        uniqueness=certificates.uniqueness,
        uniqueness_reason=certificates.uniqueness_reason,
        settings=settings,
        environment=environment(request.device),
        hashes=dict(case.sources.hashes),
        assumptions=(
            *assumptions(network, case.inspection),
            *dict.fromkeys(filter(None, attack_assumptions)),
        ),
        limitations=limitations(verdict, scores_of_strongest_attack, case.knowledge),
        suite=SUITE,
        suite_attacks=tuple(attacks),
        controls=audit.negative_controls,
        checks=checks,
        membership=audit.membership,
        attributes=audit.attributes,
        exposure=audit.exposure,
        applies=(
            *describe_case(case),
            *list_attacks(audit.outcomes),
            *list_other_checks(
                membership=_why_no_membership(audit),
                attributes=audit.skipped.get("attributes", ""),
                exposure="" if audit.exposure else audit.skipped["exposure"],
                certificate="" if certificates.certificate else certificates.certificate_of,
                uniqueness=certificates.uniqueness_reason,
            ),
        ),
        warnings=(
            *_notes_of_samples(audit),
            *frozen_layer_notes,
            *_fit_notes(audit),
            *case.warnings,
            *_failed_plugins(audit),
        ),
        notes=(
            *case.rescaling_notes,
            *audit.negative_controls.notes,
            *dict.fromkeys(_notes(audit)),
        ),
        files=_files(audit),
    )


def _assemble_for_records(audit: Audit) -> AuditResult:
    """Return the result of an audit of a file with data records and without a model that can be evaluated."""
    case, row = audit.case, audit.stored_records
    assert case.stored is not None
    assert row is not None
    verdict = audit.verdict()
    records = [array.records for array in case.stored.arrays if array.records is not None]
    record_shape = _record_shape(records[0].shape[1], case.knowledge, case.train) if records else ()
    model_name = case.stored.model or "records"
    return AuditResult(
        subject=_subject(audit, model_name),
        created=_now(),
        verdict=verdict,
        checkpoint=Network({}, model_name, input_shape=record_shape),
        inspection=_empty_inspection(model_name, record_shape),
        knowledge=case.knowledge,
        attacks=(row,),
        reconstructions=(_as_reconstruction(records[0], record_shape, case.knowledge),)
        if records
        else (),
        certificate_of=NO_NETWORK,
        uniqueness_reason=NO_NETWORK,
        settings={**_settings(audit), "file": _release_path(case)},
        environment=environment(audit.request.device),
        hashes=dict(case.sources.hashes),
        limitations=limitations(verdict, None, case.knowledge)[:1],
        applies=list_attacks((row,)),
        suite=SUITE,
        warnings=case.train.notes if case.train is not None else (),
        notes=(*case.stored.notes, case.stored.remedy),
        files=_files(audit),
    )


def _assemble_for_predictor(audit: Audit) -> AuditResult:
    """Return the result of an audit of a forest, or of any other model that is no network."""
    case, scores, table = audit.case, audit.scores, audit.table
    assert case.predictor is not None
    verdict = audit.verdict()
    model_name, columns = case.predictor.name, case.predictor.columns
    sample_shape = (columns,) if columns else () if case.train is None else case.train.shape
    stored_record_remedies = () if case.stored is None else (case.stored.remedy,)
    scores_of_strongest_attack = None if scores is None else scores.scores
    return AuditResult(
        subject=_subject(audit, model_name),
        created=_now(),
        verdict=verdict,
        checkpoint=Network({}, model_name, input_shape=sample_shape),
        inspection=_empty_inspection(model_name, sample_shape, IS_NO_NETWORK),
        knowledge=case.knowledge,
        attacks=audit.outcomes,
        reconstructions=audit.attacks.reconstructions,
        certificate_of=IS_NO_NETWORK,
        uniqueness_reason=IS_NO_NETWORK,
        settings={**_settings(audit), "file": _release_path(case)},
        environment=environment(audit.request.device),
        hashes=dict(case.sources.hashes),
        seconds=dict(audit.seconds),
        findings=None if scores is None else scores.findings,
        displayed_attack="" if scores is None else scores.displayed_attack,
        scores=scores_of_strongest_attack,
        evidence=None if scores is None else scores.evidence,
        limitations=limitations(
            verdict, scores_of_strongest_attack, case.knowledge, is_network=False
        ),
        controls=audit.negative_controls,
        checks=audit.checks,
        membership=audit.membership,
        moved_rows=audit.moved_rows,
        table=table,
        targets=audit.targets,
        applies=(
            *describe_predictor(case),
            *list_attacks(audit.outcomes),
            describe_losses(case),
        ),
        suite=SUITE,
        warnings=tuple(dict.fromkeys((*case.warnings, *(case.train.notes if case.train else ())))),
        notes=(
            *audit.negative_controls.notes,
            *(() if scores_of_strongest_attack is None else scores_of_strongest_attack.notes),
            *(() if table is None else (*table.lines, *table.notes)),
            *stored_record_remedies,
            *(() if audit.moved_rows is None else (audit.moved_rows.line,)),
        ),
        files=_files(audit),
    )


def describe_predictor(case: Case) -> tuple[Applies, ...]:
    """Return the properties of a model that is not a network as rows of the audit's table."""
    assert case.predictor is not None
    source = (
        "the live model" if case.predictor.model is not None else "the file, without running it"
    )
    if case.tokens is not None and case.release is not None:
        source = "the folder, with transformers and without code from the folder"
    model_text = (
        f"{case.predictor.name}, which predicts {case.predictor.kind}, evaluated from {source}"
    )
    model_rows = (Applies("model", MEASURED, model_text),)
    if case.forest is None:
        return model_rows
    return (*model_rows, Applies("trees", MEASURED, describe_forest(case.forest.forest)))


def describe_losses(case: Case, status: str = TRIED) -> Applies:
    """Return the row of the table that says whether the losses of the model are compared.

    Losses of training samples are compared with losses of held-out samples. The model is no network.

    Args:
        case: The inputs of the audit.
        status: Text in the status column if the losses are compared.

    Returns:
        The row, with the reason why the losses are compared or not.
    """
    assert case.predictor is not None
    reason = NO_SAMPLES
    if case.train is not None:
        reason = why_not_compared(case.predictor, case.train, case.holdout)
    return Applies("losses", NOT_TRIED if reason else status, reason or PURPOSE_OF_LOSSES)


def describe_forest(forest: Forest) -> str:
    """Return the numbers of trees and leaves of a forest, and what the forest predicts, in one sentence."""
    leaf_count = len(forest.structure.leaf_tree)
    prediction_text = "classes" if forest.is_classifier else "numbers"
    has_seeds = all(tree.seed is not None for tree in forest.trees)
    seed_text = "with the seeds of their bootstrap samples" if has_seeds else "without seeds"
    return f"{len(forest.trees)} trees with {leaf_count} leaves, which predict {prediction_text}, {seed_text}"


def _release_path(case: Case) -> str:
    return "" if case.release is None else str(case.release.path.resolve())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _subject(audit: Audit, name: str) -> str:
    """Return the name of the audited model for the result of the audit.

    If the audit has a run directory and read a checkpoint file, return the name of this file. Otherwise
    return ``name``, a description of the model.
    """
    checkpoint_path = audit.case.sources.paths.get("checkpoint")
    return (
        checkpoint_path.name
        if checkpoint_path is not None and audit.store.path is not None
        else name
    )


def _settings(audit: Audit) -> dict[str, Any]:
    plugin_versions = {plugin.name: plugin.version for plugin in plugins.load()}
    return {**audit.request.published(), "plugins": plugin_versions}


def _files(audit: Audit) -> dict[str, str]:
    """Return the paths of all input files and of the run directory, as the user passed the paths.

    Bytes of a path that are not valid UTF-8 are replaced. If the audit has no run directory, return {}.
    """
    paths = dict(audit.case.sources.paths)
    if audit.store.path is None:
        return {}
    paths["out"] = audit.store.path
    return {name: os.fsencode(path).decode("utf-8", "replace") for name, path in paths.items()}


def _notes_of_samples(audit: Audit) -> tuple[str, ...]:
    inputs = audit.case.full_inputs
    return () if inputs is None or inputs.train is None else inputs.train.notes


def _fit_notes(audit: Audit) -> tuple[str, ...]:
    return () if audit.case.fit is None else audit.case.fit.notes


def _failed_plugins(audit: Audit) -> tuple[str, ...]:
    failed_names = ", ".join(audit.attacks.failed)
    return (f"Plug-ins that failed and have no result: {failed_names}.",) if failed_names else ()


def _notes(audit: Audit) -> list[str]:
    notes = [note for result in audit.attacks.reconstructions for note in result.notes]
    if audit.scores is not None and audit.scores.scores is not None:
        notes += audit.scores.scores.notes
    return notes


def _why_no_membership(audit: Audit) -> str:
    """Return why the audit did not test membership, "" if the audit tested membership."""
    if audit.membership is None:
        return audit.skipped["membership"]
    return audit.membership.reason


def _empty_inspection(name: str, shape: tuple[int, ...], reason: str = NO_NETWORK) -> Inspection:
    return Inspection(
        arch=name,
        input_shape=shape,
        inputs=0,
        outputs=0,
        layers=(),
        parameters=0,
        bytes=0,
        dtype="",
        homogeneity_order=None,
        directions=None,
        directions_of=reason,
        ranks={},
        balance=None,
    )


def _record_shape(width: int, knowledge: Knowledge, train: Dataset | None) -> tuple[int, ...]:
    """Return the shape of one stored record, which the file stores as a row of ``width`` values.

    The shape is the sample shape that the attacker knows, or the shape of the training samples, if this shape
    has ``width`` values. Otherwise the shape is ``(width,)``.
    """
    candidate_shapes = (knowledge.shape, None if train is None else train.shape)
    return next((tuple(s) for s in candidate_shapes if s and math.prod(s) == width), (width,))


def _as_reconstruction(
    records: Tensor, shape: tuple[int, ...], knowledge: Knowledge
) -> Reconstruction:
    """Convert the first stored records to a ``Reconstruction``, so that the report can show them."""
    shaped_records = records[:MAX_RECORDS].double().reshape(-1, *shape)
    ones, index = (
        torch.ones(len(shaped_records), dtype=shaped_records.dtype),
        torch.arange(len(shaped_records)),
    )
    support, labels = index.new_ones(len(shaped_records)), torch.zeros_like(ones)
    selection = Selection(
        shaped_records,
        labels,
        ones,
        support,
        support,
        ones,
        torch.zeros(len(shaped_records), 5),
        index,
    )
    return Reconstruction.from_candidates(
        NAME, shaped_records, labels, ones, knowledge, selection=selection
    )
