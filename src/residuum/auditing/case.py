"""Load the inputs of an audit (network, samples, attacker knowledge) and check that they fit each other.

An audit and a dry run both start from a :class:`Case`. The inputs are loaded in this order: samples, release
(the published files of the model), network, attacker knowledge, task. The samples are then converted to the
input shape and value scale of the network, and checked. A dry run collects all problems
(:class:`Obstacles`). An audit stops at the first problem.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from residuum.attacks.trees.forest import why_not as why_not_attacked
from residuum.auditing.controls import SampleSets, set_aside_repeats
from residuum.auditing.inputs import (
    as_knowledge,
    check_inputs,
    check_scales,
    infer_sample_shape,
    name_source_of_mean,
)
from residuum.auditing.questions import NOTHING_STORED
from residuum.auditing.request import AuditRequest
from residuum.auditing.stored_records import (
    ONLY_STORED,
    StoredRecords,
    find_records,
    wrap_tensors,
)
from residuum.auditing.token_models import (
    NO_ATTACK,
    TokenContent,
    is_token_model,
    load_token_content,
    set_aside_repeated_texts,
)
from residuum.datasets.columns import check_columns, fit_columns
from residuum.datasets.given import hash_path, locate_samples, read_train_and_holdout
from residuum.errors import DataError, InputError, ResiduumError
from residuum.evaluation.adapting import Fit, adapt_samples, measure_fit, resolve_task
from residuum.io.adapters import find_adapter_pairs
from residuum.io.attacker_knowledge import (
    build_knowledge,
    parse_shape,
    parse_value_range,
    read_column_ranges,
    read_knowledge,
)
from residuum.io.checkpoints import as_network
from residuum.io.estimators import read_estimator
from residuum.io.forests import NamedForest, read_forests
from residuum.io.linear_models import Wrapped, find_estimator, read_classes, read_linear_model
from residuum.io.loading import load_network, resolve_trained_and_base
from residuum.io.predictors import (
    Predictor,
    is_live_predictor,
    wrap_forest,
    wrap_live_model,
)
from residuum.io.release import Release, open_release, pickle_in_memory
from residuum.io.release_knowledge import add_stored_knowledge
from residuum.io.transformers_folders import find_transformers_folder, is_adapter_folder
from residuum.io.updates import ALONE, GRADIENT, Update, read_update, recognize_update
from residuum.networks.canonical import attacked_form
from residuum.networks.network import Network
from residuum.networks.probing import first_layer_inputs
from residuum.records import Dataset, Knowledge
from residuum.records.rundir import digest
from residuum.records.tokens import TokenDataset
from residuum.risk.attributes import find_sensitive_columns
from residuum.scanning.findings import STORED, findings
from residuum.surfaces.head import Head, extract_head
from residuum.surfaces.inspection import Inspection, inspect_network
from residuum.surfaces.surface import resolve_surface

T = TypeVar("T")
P = ParamSpec("P")
# Options about attacker knowledge whose values are texts that must be parsed. Others are Python values.
TEXT_FACTS = ("shape", "value_range", "mean", "label_balance")
FILE_FACTS = ("init", "mean_provenance")
MAX_SHOWN = 3  # largest number of findings of a scan that one sentence names
# Reasons why the samples did not train the known weights, by the kind of update (a gradient or weight
# difference).
WHY_NO_WEIGHTS = {
    ALONE: "the file holds an update, and the weights are not known",
    GRADIENT: "the file holds a gradient, and the samples did not train the base",
}
Model = Network | nn.Module | Mapping[str, Tensor] | str | Path | Release | Any


@dataclass(frozen=True)
class Sources:
    """Files and hashes of the inputs of an audit.

    Attributes:
        paths: Path of every input that was read from a file: checkpoint, data, holdout, base.
        hashes: SHA-256 of the files of checkpoint, data and holdout.
        digests: Hash of the content of every input that is not a file.
    """

    paths: Mapping[str, Path] = field(default_factory=dict)
    hashes: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Inputs:
    """The network of an audit as it was read, with its samples and the attacker's knowledge.

    Attributes:
        network: The network.
        knowledge: What the attacker knows.
        train: The training samples, as the network receives them.
        holdout: Samples that the network never saw.
    """

    network: Network
    knowledge: Knowledge
    train: Dataset | None
    holdout: Dataset | None


@dataclass(frozen=True)
class Case:
    """All inputs of an audit, loaded and checked.

    The release is the published files of the model.

    Attributes:
        network: The network that is audited, None if the release holds no network. If the first layers
            were frozen in training, ``network`` consists of the layers above the frozen layers (``head``).
        knowledge: What the attacker knows about ``network``.
        train: The training samples, as ``network`` receives them.
        holdout: Samples that the network never saw.
        release: The release that was read, None for a live model.
        stored: The records that the release stores, None if it stores none.
        forest: The forest in the release, None if the release holds no forest or a network.
        predictor: The model as a function from samples to predictions, None if there is a network, or if
            residuum cannot evaluate the model.
        full_inputs: The whole network with its samples, before the frozen layers were cut off. None if the
            release holds no network.
        head: The trained layers above the frozen layers, None if no layers were cut off.
        warnings: Contradictions between the inputs.
        sources: Files and hashes of the inputs.
        tokens: What was read of a token model, None for other models.
    """

    network: Network | None
    knowledge: Knowledge
    train: Dataset | None = None
    holdout: Dataset | None = None
    release: Release | None = None
    stored: StoredRecords | None = None
    forest: NamedForest | None = None
    predictor: Predictor | None = None
    full_inputs: Inputs | None = None
    head: Head | None = None
    warnings: tuple[str, ...] = ()
    sources: Sources = Sources()
    tokens: TokenContent | None = None

    @property
    def why_no_weights(self) -> str:
        """Why the samples did not train the weights of the network, "" if the weights are audited."""
        return WHY_NO_WEIGHTS.get(self.knowledge.update or "", "")

    @property
    def audited(self) -> Network:
        """The audited network, with its weights as they were read. The case must hold a network."""
        assert self.network is not None
        return self.network

    @property
    def why_not_tested(self) -> str:
        """Why the model cannot receive the samples, "" if it can. Only stored records were searched then."""
        notes_on_records = (
            () if self.stored is None or self.network is not None else self.stored.notes
        )
        return next((note for note in notes_on_records if note.startswith(ONLY_STORED)), "")

    @property
    def why_no_attack(self) -> str:
        """Why residuum has no attack on a model that is no network, "" if residuum has an attack."""
        if self.predictor is None:
            return ""
        if self.tokens is not None:
            return NO_ATTACK
        reason = "" if self.forest is None else why_not_attacked(self.forest.forest)
        if self.forest is not None and not reason:
            return ""
        no_attack_text = f"residuum has no attack on models of the class {self.predictor.name}"
        return f"{no_attack_text} ({reason})" if reason else no_attack_text

    @cached_property
    def attacked(self) -> Network:
        """The network that attacks work on.

        If the attacker knows neither the initial weights nor the optimizer state, the weights of each neuron
        are rescaled to a standard scale (canonical form). The attacked network computes the same function as
        the network in the file (``audited``). The KKT multipliers in a reconstruction are valid for the
        weights of the attacked network.
        """
        return attacked_form(self.audited, self.knowledge)

    @property
    def rescaling_notes(self) -> tuple[str, ...]:
        """One sentence for each change that was made to the network before the attacks."""
        return self.attacked.assumptions[len(self.audited.assumptions) :]

    @cached_property
    def balanced_sets(self) -> SampleSets | None:
        """Training and held-out samples on which the results of the attacks are tested.

        The tests need at least as many held-out samples as training samples. If there are fewer held-out
        samples, only a random subset of the training samples is tested.
        """
        all_sets = self.sample_sets
        if (
            all_sets is None
            or all_sets.holdout is None
            or len(all_sets.holdout) >= len(all_sets.train)
        ):
            return all_sets
        generator = torch.Generator().manual_seed(0)
        chosen_rows = (
            torch.randperm(len(all_sets.train), generator=generator)[: len(all_sets.holdout)]
            .sort()
            .values
        )
        note = (
            f"Attacks were compared with a random {len(chosen_rows)} of {len(all_sets.train)} training "
            "samples"
        )
        why_subset = "because there are no more held-out samples"
        return replace(
            all_sets,
            train=all_sets.train.take(chosen_rows),
            notes=(*all_sets.notes, f"{note}, {why_subset}"),
        )

    @cached_property
    def nothing_stored(self) -> str:
        """Sentences about a search for stored records that found no record."""
        sentences = [NOTHING_STORED]
        if self.train is not None:
            sentences = [f"None of the {len(self.train)} training samples is stored in the file."]
        if self.forest is not None:
            sentences.append("Its trees hold values of the training table, see the next question.")
        elif self.release is not None:
            # A stored vocabulary or list of categories reveals single values of records, but no complete
            # records.
            stored_values = [f.what for f in findings(self.release) if f.kind == STORED]
            if stored_values:
                finding_list = "; ".join(stored_values[:MAX_SHOWN])
                sentences.append(
                    f"A scan finds values of training records in the file: {finding_list}."
                )
        return " ".join(sentences)

    @cached_property
    def inspection(self) -> Inspection:
        """Facts about the network that were measured from its weights, without data."""
        return inspect_network(self.audited)

    @cached_property
    def fit(self) -> Fit | None:
        """How well the network fits the samples, None if there is no network or no training sample."""
        if self.network is None or self.why_no_weights:
            return None
        return measure_fit(self.audited, self.train, self.holdout, self.audited.task)

    @cached_property
    def sample_sets(self) -> SampleSets | None:
        """Training and held-out samples without repeated samples, None if there are no training samples."""
        if isinstance(self.train, TokenDataset):
            held_out = self.holdout if isinstance(self.holdout, TokenDataset) else None
            return set_aside_repeated_texts(self.train, held_out)
        return None if self.train is None else set_aside_repeats(self.train, self.holdout)


class Obstacles:
    """The problems that would stop an audit, collected for a dry run."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.exit_code = 0

    def attempt(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Call a function and collect its error.

        Args:
            work: The function.
            *args: Positional arguments of the function.
            **kwargs: Keyword arguments of the function.

        Returns:
            The result of the function, None if the function raised a ``ResiduumError``.
        """
        try:
            return work(*args, **kwargs)
        except ResiduumError as problem:
            if str(problem) not in self.messages:  # report each problem once
                self.messages.append(str(problem))
            self.exit_code = max(self.exit_code, problem.exit_code)
            return None


class StopAtFirst(Obstacles):
    """Raises the first problem of the inputs as an error. A dry run collects all problems instead."""

    def attempt(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Call a function without catching its errors.

        Args:
            work: The function.
            *args: Positional arguments of the function.
            **kwargs: Keyword arguments of the function.

        Returns:
            The result of the function.
        """
        return work(*args, **kwargs)


def load_case(
    model: Model,
    data: Any = None,
    holdout: Any = None,
    knowledge: Knowledge | Mapping[str, Any] | str | Path | None = None,
    request: AuditRequest | None = None,
    *,
    base: Any = None,
    adapter: Any = None,
    tokenizer: Any = None,
    trust_code: bool = False,
    obstacles: Obstacles | None = None,
) -> Case | None:
    """Load the inputs of an audit and check them against each other.

    An input that cannot be read or does not fit the others raises a ``ResiduumError``.

    Args:
        model: A file, a release, or a live model, see ``rs.audit``.
        data: Training samples.
        holdout: Samples that the network never saw.
        knowledge: What the attacker knows.
        request: Settings of the audit.
        base: File of the weights before fine-tuning. For an update, the network before the update.
        adapter: File of an adapter (LoRA). ``model`` is then the base network.
        tokenizer: Tokenizer of a token model.
        trust_code: Allow running the code that the setting ``model_code`` of ``request`` names.
        obstacles: Collects the problems in a dry run. By default the first problem is raised as an error.

    Returns:
        The case. If ``obstacles`` is passed and the network or the knowledge cannot be read, None.
    """
    request = request or AuditRequest()
    attempt = (obstacles or StopAtFirst()).attempt
    if is_adapter_folder(model) and find_transformers_folder(base) is not None:
        model, base, adapter = base, None, model
    if request.model_code is None and is_token_model(model, data):
        return attempt(_token_case, model, data, holdout, tokenizer, base, adapter)
    roles: dict[str, Any] = {"label": request.label, "drop": request.drop}
    train, contained = attempt(read_train_and_holdout, data, None, **roles) or (None, None)
    _, separate = attempt(read_train_and_holdout, None, holdout, **roles) or (None, None)
    held_out = contained if separate is None else separate
    train, held_out = fit_columns(train, held_out, first_layer_inputs(model))
    if isinstance(model, str | Path) and adapter is not None:
        model, base = resolve_trained_and_base(model, _text(base), _text(adapter))
    release = attempt(open_release, model) if isinstance(model, str | Path | Release) else None
    if release is None and isinstance(model, str | Path):
        return None
    sample_shape = _sample_shape(model, train, held_out, knowledge)
    base_file = base if isinstance(base, str | Path) else None
    reader = _Reader(release, request, sample_shape, _text(base_file), trust_code, train, held_out)
    if request.update_kind in ("auto", "none"):
        content = attempt(reader.read, model)
    else:
        content = attempt(reader.read_update, model, base)
    if content is not None and request.update_kind == "auto":
        content = attempt(reader.replace_update, content, base)
    if content is None:
        return None
    input_names = content.input_names(train)
    train, held_out = fit_columns(train, held_out, content.input_count, input_names)
    content = attempt(_check_table, content, train, held_out)
    if content is None:
        return None
    if content.network is None and content.predictor is None:
        train, held_out = fit_columns(train, held_out, content.input_count)
    paths_and_hashes = _sources(
        release, content, model, data, holdout, base_file, (train, held_out)
    )
    if (network := content.network) is None:
        return _case_without_network(
            content, release, knowledge, train, held_out, paths_and_hashes, attempt
        )
    stored_records = content.stored
    loaded_knowledge = attempt(
        # The update itself is attacked, so no base is subtracted from it.
        load_knowledge,
        knowledge,
        release,
        network,
        train,
        held_out,
        _text(base_file) if content.update is None else None,
    )
    if loaded_knowledge is None:
        return None
    attacker_knowledge = name_source_of_mean(loaded_knowledge, train)
    if content.update is not None:
        attacker_knowledge = content.update.add_to(attacker_knowledge)
    network = network.replace(task=resolve_task(network, request.task).replace("auto", ""))
    samples = attempt(adapt_samples, network, train, held_out, attacker_knowledge, request.task)
    train, held_out = samples or (train, held_out)
    attempt(check_inputs, network, train, held_out, request.task)
    full_inputs = Inputs(network, attacker_knowledge, train, held_out)
    case = Case(
        network,
        attacker_knowledge,
        train,
        held_out,
        release,
        stored_records,
        full_inputs=full_inputs,
        sources=paths_and_hashes,
    )
    head = None if content.update is not None else extract_head(network, attacker_knowledge)
    if head is not None:
        case = _behind_frozen_layers(case, head)
    attempt(_check_surface, request, attacker_knowledge)
    if train is not None:
        attempt(find_sensitive_columns, request.sensitive, train)
    warnings = attempt(check_scales, case.train, case.holdout, case.knowledge)
    return replace(case, warnings=warnings or ())


def _token_case(
    model: Any, data: Any, holdout: Any, tokenizer: Any, base: Any, adapter: Any
) -> Case:
    """Return the inputs of an audit of a token model (a network whose inputs are token ids)."""
    token_content = load_token_content(
        model,
        data,
        holdout,
        tokenizer,
        base=model if adapter is not None else base,
        adapter=adapter,
    )
    samples = (token_content.train, token_content.holdout)
    notes = tuple(note for texts in samples if texts is not None for note in texts.notes)
    return Case(
        None,
        Knowledge(),
        token_content.train,
        token_content.holdout,
        token_content.release,
        predictor=token_content.predictor,
        warnings=(*token_content.notes, *notes, *(token_content.findings or ())),
        sources=Sources(token_content.paths, token_content.hashes, token_content.digests),
        tokens=token_content,
    )


def _case_without_network(
    content: Content,
    release: Release | None,
    knowledge: Knowledge | Mapping[str, Any] | str | Path | None,
    train: Dataset | None,
    holdout: Dataset | None,
    sources: Sources,
    attempt: Callable[..., Any],
) -> Case:
    """Return the inputs of an audit of a model that is no network, such as a forest.

    If a forest is the last step of a pipeline, the forest was trained on scaled samples, so attacks recover
    scaled samples. Therefore the samples and the ranges that the attacker knows are scaled too.
    """
    attacker_knowledge = (
        as_knowledge(knowledge) if isinstance(knowledge, Knowledge) else Knowledge()
    )
    if isinstance(knowledge, str | Path):
        attacker_knowledge = attempt(read_knowledge, knowledge) or attacker_knowledge
    if isinstance(knowledge, Mapping) and knowledge.get("shape") is not None:
        attacker_knowledge = Knowledge(shape=shape_of(knowledge["shape"]))
    if content.forest is not None:
        named_facts = knowledge if isinstance(knowledge, Mapping) else None
        forest_knowledge = attempt(
            known_by_attacker, named_facts, attacker_knowledge, train, holdout
        )
        attacker_knowledge = forest_knowledge or attacker_knowledge
    case = Case(
        None,
        attacker_knowledge,
        train,
        holdout,
        release,
        content.stored,
        content.forest,
        content.predictor,
        warnings=content.warnings,
        sources=sources,
    )
    return attempt(_scale_and_check, case, content.scaler) or case


def _scale_and_check(case: Case, scaler: Wrapped | None) -> Case:
    """Apply the scalers of a forest's pipeline to the samples, and check that the model can predict them."""
    if scaler is not None and scaler.scalings:
        assert case.forest is not None
        train, holdout = (
            None if samples is None else scaler.scale(samples)
            for samples in (case.train, case.holdout)
        )
        knowledge = _scale_ranges(case.knowledge, scaler, case.forest.forest.columns)
        case = replace(case, train=train, holdout=holdout, knowledge=knowledge)
    if case.predictor is not None:
        for samples in (case.train, case.holdout):
            if samples is None:
                continue
            case.predictor.check_columns(samples)
            if case.predictor.model is not None:
                case.predictor.outputs(samples.take(torch.arange(min(len(samples), 2))))
    return case


def _scale_ranges(knowledge: Knowledge, scaler: Wrapped, columns: int) -> Knowledge:
    """Return the attacker's knowledge with column ranges scaled as the columns are in the pipeline."""
    column_ranges = knowledge.column_ranges
    if column_ranges is None and knowledge.value_range is not None:
        column_ranges = torch.tensor(knowledge.value_range).double()[:, None].expand(2, columns)
    if column_ranges is None:
        return knowledge
    scaled_ranges = scaler.scale(Dataset(column_ranges.double(), torch.zeros(2))).x
    source_of_ranges = knowledge.provenance.get("column_ranges", "user")
    provenance = {**knowledge.provenance, "column_ranges": source_of_ranges}
    provenance.pop("value_range", None)
    return knowledge.replace(column_ranges=scaled_ranges, value_range=None, provenance=provenance)


def known_by_attacker(
    named_facts: Mapping[str, Any] | None,
    knowledge: Knowledge,
    train: Dataset | None,
    holdout: Dataset | None,
) -> Knowledge:
    """Return what the attacker of a forest knows: the smallest and largest value of each column.

    Args:
        named_facts: Known facts by name, such as {"column_ranges": "train"}. None if the user passes a
            ``Knowledge`` instead.
        knowledge: The knowledge that is returned if ``named_facts`` is None. Otherwise the facts are added.
        train: Training samples, whose ranges are used if the fact "column_ranges" is "train".
        holdout: Held-out samples, whose ranges are used if the fact "column_ranges" is "holdout".

    Returns:
        The knowledge of the attacker.
    """
    if named_facts is None:
        return knowledge
    ranges, source = named_facts.get("column_ranges"), "user"
    if isinstance(ranges, str):
        ranges, source = read_column_ranges(ranges, train, holdout)
    elif ranges is not None:
        ranges = torch.as_tensor(ranges, dtype=torch.float64)
    value_range = named_facts.get("value_range")
    return knowledge.replace(
        value_range=None if value_range is None else parse_value_range(value_range),
        column_ranges=ranges,
        provenance={"column_ranges": source} if ranges is not None else {},
    )


def load_knowledge(
    knowledge: Knowledge | Mapping[str, Any] | str | Path | None,
    release: Release | None,
    network: Network,
    train: Dataset | None,
    holdout: Dataset | None,
    base: str | None,
) -> Knowledge:
    """Return what the attacker knows: the facts that the user passes, and the facts in the release.

    A fact that cannot be read or contradicts another fact raises an ``InputError``.

    Args:
        knowledge: What the attacker knows: a ``Knowledge``, a dictionary of facts by name, or the path of a
            saved knowledge file. A fact is a Python value, or text as on the command line.
        release: The release that was read, None for a live model.
        network: The network in the release.
        train: Training samples, whose mean is used if ``knowledge`` has the mean "train".
        holdout: Held-out samples, whose mean is used if ``knowledge`` has the mean "holdout".
        base: File of the weights before fine-tuning.

    Returns:
        The knowledge.
    """
    if isinstance(knowledge, str | Path):
        attacker_knowledge = read_knowledge(knowledge)
    elif isinstance(knowledge, Mapping) and release is not None and _has_text(knowledge):
        return build_knowledge(
            release, network, **knowledge, base=base, train=train, holdout=holdout
        )
    else:
        attacker_knowledge = as_knowledge(knowledge)
    if release is None:
        return attacker_knowledge
    if base is not None and attacker_knowledge.theta0 is None:
        initial_weights = build_knowledge(release, network, base=base).theta0
        attacker_knowledge = attacker_knowledge.replace(theta0=initial_weights)
    return add_stored_knowledge(release, network, attacker_knowledge)


def shape_of(shape: Any) -> tuple[int, ...] | None:
    """Return the shape of a sample as a tuple, from text such as "1,28,28" or from numbers."""
    return None if shape is None else parse_shape(shape)


def identity(case: Case, request: AuditRequest) -> dict[str, Any]:
    """Return what identifies an audit: version, settings, contents of the inputs, attacker knowledge.

    File paths are not included. A run directory refuses to continue an audit with another identity.

    Args:
        case: The inputs of the audit.
        request: Settings of the audit.

    Returns:
        The identity of the audit as a dictionary of plain values.
    """
    from importlib.metadata import version

    from residuum import plugins
    from residuum.records.knowledge import TENSORS

    plugin_versions = {plugin.name: plugin.version for plugin in plugins.load()}
    knowledge = case.knowledge if case.full_inputs is None else case.full_inputs.knowledge
    return {
        "version": version("residuum"),
        **({"plugins": plugin_versions} if plugin_versions else {}),
        **request.model_dump(),
        **{f"{name}_sha256": value for name, value in case.sources.hashes.items()},
        **{f"{name}_digest": value for name, value in case.sources.digests.items()},
        "knowledge": {
            name: str(getattr(knowledge, name))[:80]
            for name in knowledge.known_names
            if name not in TENSORS
        },
        "provenance": dict(knowledge.provenance),
        "knowledge_sha256": knowledge.digest,
    }


def check_hashes(case: Case, expected: Mapping[str, str]) -> None:
    """Raise an error if an input file differs from the file of the audit that wrote the configuration.

    Args:
        case: The inputs of the audit.
        expected: Expected SHA-256 of each file, by name of the input: "checkpoint", "data" or "holdout".

    Raises:
        InputError: If the hash of an input differs.
    """
    for name, value in expected.items():
        if case.sources.hashes.get(name, value) != value:
            raise InputError(
                f"The input {name} must be the same file as in the audit that wrote the configuration; its "
                "SHA-256 differs.",
                "Pass the original file, or remove the line of this input under [sha256] in the "
                "configuration.",
            )


def _check_surface(request: AuditRequest, knowledge: Knowledge) -> None:
    """Raise an ``InputError`` if the attack surface (part of the release to attack) is not available.

    An attack surface such as the weight update exists only if the attacker knows the initial weights.
    """
    if request.surface != "all":
        resolve_surface(request.surface, knowledge)


@dataclass(frozen=True)
class Content:
    """What a model consists of: a network, trees, predictions, stored records or an update.

    Attributes:
        network: The network, None if the model is no network.
        stored: The records that the release stores, None if it stores none.
        forest: The forest, None if the model has none. If a file holds a forest, it is not read as a network.
        predictor: The model as a function from samples to predictions, None for a network, or if residuum
            cannot evaluate the model.
        scaler: The forest with the scalers of its pipeline, None if the forest is a part of another model.
        warnings: Reasons why parts of a live model (an object in memory) could not be read.
        pickle_hash: SHA-256 of the pickle of a live model that predicts, "" for other models.
        update: The gradient or weight difference that the model is, None for other models.
    """

    network: Network | None = None
    stored: StoredRecords | None = None
    forest: NamedForest | None = None
    predictor: Predictor | None = None
    scaler: Wrapped | None = None
    warnings: tuple[str, ...] = ()
    pickle_hash: str = ""
    update: Update | None = None

    @property
    def input_count(self) -> int | None:
        """Number of values of a sample, None if it is unknown."""
        if self.network is not None:
            return self.network.architecture.inputs
        if self.predictor is not None:
            return self.predictor.columns
        if self.forest is not None:
            return self.forest.forest.columns
        return None if self.stored is None else self.stored.values_per_record

    def input_names(self, train: Dataset | None) -> tuple[str, ...]:
        """Return the names of the columns that a model in memory takes, () if they are unknown.

        A model without names of columns can take a single text, such as a pipeline with a
        ``TfidfVectorizer``. If the table of the training samples holds a single column of texts and no
        numbers, this is the text.
        """
        if self.predictor is None or self.predictor.model is None:
            return ()
        if self.predictor.column_names or self.predictor.columns is not None:
            return self.predictor.column_names
        table = None if train is None else train.table
        has_one_text = table is not None and not table.inputs and len(table.input_texts) == 1
        return table.input_texts if table is not None and has_one_text else ()


def _check_table(content: Content, train: Dataset | None, holdout: Dataset | None) -> Content:
    """Check that a model can receive the samples of a table.

    If the model cannot receive them, only the records that its release stores are searched for the samples.

    Args:
        content: What the model consists of.
        train: The training samples.
        holdout: The held-out samples.

    Returns:
        What the audit can test: ``content``, or its stored records alone.

    Raises:
        DataError: If the model cannot receive the samples, and the release stores no records.
    """
    if content.network is None and content.predictor is None and content.forest is None:
        return content
    try:
        check_columns(train, holdout, content.input_count)
    except DataError as problem:
        if content.stored is None:
            raise
        return Content(
            stored=replace(content.stored, notes=(f"{ONLY_STORED}. {problem}".rstrip("."),))
        )
    return content


@dataclass(frozen=True)
class _Reader:
    """Reads what a model consists of: a network, or trees and predictions, and stored records."""

    release: Release | None
    request: AuditRequest
    shape: tuple[int, ...] | None
    base: str | None
    trust_code: bool
    train: Dataset | None
    holdout: Dataset | None

    def read(self, model: Model) -> Content:
        """Return what a model consists of.

        A live model (an object in memory) that is no network is pickled in memory, and the pickle is read.
        A model without a readable network, stored records and predictions raises a ``ResiduumError``.
        """
        if self.release is not None:
            return self._read_release(self.release)
        if is_live_predictor(model):
            return self._read_live(model)
        network = as_network(model, self.request.arch, self.shape)
        tensors = model if isinstance(model, nn.Module | Mapping) else network.theta
        release = wrap_tensors(tensors)
        return Content(network, self._find_records_besides(network, release))

    def _find_records(self, release: Release) -> StoredRecords | None:
        return find_records(release, self.train, self.holdout)

    def _find_records_besides(self, network: Network, release: Release) -> StoredRecords | None:
        """Return the records that a model file stores in addition to the parameters of its network."""
        stored_records = self._find_records(release)
        return None if stored_records is None else stored_records.without(network)

    def read_update(self, source: Any, before: Any) -> Content:
        """Return the content of a model that is a gradient or a weight difference.

        Args:
            source: The update: a release or its path, or tensors by name.
            before: The network before the update, None if it is not known.
        """
        kind = self.request.update_kind
        base = None if before is None else self._read_base(before)
        update_source: Any = source if self.release is None else self.release
        update = read_update(update_source, base, kind, self.request.arch)
        stored_records = None
        if self.release is not None:
            stored_records = self._find_records_besides(update.network, self.release)
        return Content(update.network, stored_records, update=update)

    def replace_update(self, content: Content, before: Model) -> Content:
        """If a file read as weights holds a gradient or weight difference, return it as an update."""
        if self.release is None or content.network is None or content.network.live is not None:
            return content
        base = None
        if before is not None and not find_adapter_pairs(self.release.content):
            base = self._read_base(before).theta
        file_name = self.release.path.name
        reasons_for_update = recognize_update(content.network.theta, file_name, base)
        if not reasons_for_update:
            return content
        updated = self.read_update(self.release, before)
        assert updated.network is not None
        note = (
            f"{file_name!r} was recognized as a gradient or a weight difference: "
            f"{'; '.join(reasons_for_update)}. If it holds weights, pass --update-kind none"
        )
        network = updated.network
        return replace(updated, network=network.replace(assumptions=(*network.assumptions, note)))

    def _read_base(self, before: Model) -> Network:
        if not isinstance(before, str | Path | Release):
            return as_network(before, self.request.arch, self.shape)
        return load_network(
            before,
            arch=self.request.arch,
            model=self.request.model_code,
            trust_code=self.trust_code,
            shape=self.shape,
        )

    def _read_live(self, model: Any) -> Content:
        """Return the content of an object in memory: its trees, its stored records and its predictions."""
        predictor = wrap_live_model(model)
        try:
            release = pickle_in_memory(model)
            forest_content = _read_forest(release)
        except ResiduumError as problem:
            return Content(predictor=predictor, warnings=(problem.message,))
        stored_records = self._find_records(release)
        if forest_content is None:
            network = _read_fitted_network(release)
            if network is not None:
                return Content(
                    network, None if stored_records is None else stored_records.without(network)
                )
            return Content(stored=stored_records, predictor=predictor, pickle_hash=release.sha256)
        # Without a scaler, the forest is only a part of the model, so the whole model gives the predictions.
        if forest_content.scaler is None:
            forest_content = replace(forest_content, predictor=predictor)
        return replace(forest_content, stored=stored_records, pickle_hash=release.sha256)

    def _read_release(self, release: Release) -> Content:
        stored_records = self._find_records(release)
        if self.request.model_code is None:
            if (forest_content := _read_forest(release)) is not None:
                return replace(forest_content, stored=stored_records)
            if release.kind == "pickle" and (predictor := read_linear_model(release)) is not None:
                return Content(stored=stored_records, predictor=predictor)
        try:
            network = load_network(
                release,
                arch=self.request.arch,
                model=self.request.model_code,
                trust_code=self.trust_code,
                shape=self.shape,
                base=self.base,
            )
        except ResiduumError as problem:
            if stored_records is None:
                raise
            return Content(stored=replace(stored_records, notes=(problem.message,)))
        return Content(network, None if stored_records is None else stored_records.without(network))


def _read_forest(release: Release) -> Content | None:
    """Return the largest forest in a model file, with its predictor, None if the release holds no forest."""
    forests = read_forests(release)
    if not forests:
        return None
    largest_forest = forests[0]
    wrapped_estimator = find_estimator(release.content)
    if (
        wrapped_estimator is None
        or not wrapped_estimator.is_readable
        or wrapped_estimator.estimator.class_name != largest_forest.name
    ):
        return Content(
            forest=largest_forest, predictor=wrap_forest(largest_forest.name, largest_forest.forest)
        )
    classes = (
        read_classes(wrapped_estimator.estimator) if largest_forest.forest.is_classifier else ()
    )
    predictor = wrap_forest(largest_forest.name, largest_forest.forest, classes)
    return Content(forest=largest_forest, predictor=predictor, scaler=wrapped_estimator)


def _read_fitted_network(release: Release) -> Network | None:
    """Return the MLP of scikit-learn in a pickle. If the pickle holds no MLP, return None."""
    try:
        return read_estimator(release)
    except ResiduumError:
        return None


def _behind_frozen_layers(case: Case, head: Head) -> Case:
    """Return the inputs of an audit that attacks only the trained layers above frozen layers.

    The inputs of the trained layers are features, so the samples are replaced by the outputs of the frozen
    layers.
    """
    train, holdout = (
        None if samples is None else head.compute_features(samples)
        for samples in (case.train, case.holdout)
    )
    knowledge = head.translate_knowledge(case.knowledge)
    return replace(
        case, network=head.checkpoint, knowledge=knowledge, train=train, holdout=holdout, head=head
    )


def _has_text(knowledge: Mapping[str, Any]) -> bool:
    """Return True if a fact that the attacker knows is text from the command line, which must be parsed."""
    return any(isinstance(knowledge.get(name), str) for name in TEXT_FACTS) or any(
        name in knowledge for name in FILE_FACTS
    )


def _text(path: Any) -> str | None:
    return None if path is None else str(path)


def _sample_shape(
    model: Model,
    train: Dataset | None,
    holdout: Dataset | None,
    knowledge: Knowledge | Mapping[str, Any] | str | Path | None,
) -> tuple[int, ...] | None:
    """Return the shape of one sample, None if the shape is unknown.

    The shape is taken from the samples. If there are no samples, the attacker's knowledge may hold the shape.
    """
    samples = train if train is not None else holdout
    if (shape := infer_sample_shape(model, samples)) is not None:
        return shape
    if isinstance(knowledge, Mapping):
        return shape_of(knowledge.get("shape"))
    return knowledge.shape if isinstance(knowledge, Knowledge) else None


def _sources(
    release: Release | None,
    content: Content,
    model: Model,
    data: Any,
    holdout: Any,
    base: str | Path | None,
    samples: tuple[Dataset | None, Dataset | None],
) -> Sources:
    """Return the paths and hashes of the input files of an audit, and hashes of inputs in memory."""
    paths: dict[str, Path] = {}
    hashes: dict[str, str] = {}
    digests: dict[str, str] = {}
    if release is not None:
        paths["checkpoint"] = Path(model) if isinstance(model, str | Path) else release.path
        hashes["checkpoint"] = release.sha256
    elif (network := content.network) is not None:
        digests["checkpoint"] = digest(network.arch, *network.theta.values())
    elif content.predictor is not None:
        digests["checkpoint"] = content.pickle_hash or _digest_predictions(
            content.predictor, samples
        )
    if base is not None:
        paths["base"] = Path(base)
    sample_sources = {"data": data, "holdout": data if holdout is None else holdout}
    for (name, source), dataset in zip(sample_sources.items(), samples, strict=True):
        if dataset is None:
            continue
        if isinstance(source, str | Path):
            paths[name] = locate_samples(source, name)
            hashes[name] = hash_path(paths[name])
        else:
            digests[name] = digest(dataset.x, dataset.y)
    return Sources(paths, hashes, digests)


def _digest_predictions(
    predictor: Predictor, samples: tuple[Dataset | None, Dataset | None]
) -> str:
    """Return a hash of the predictions of a live model that cannot be pickled."""
    predictions = []
    with suppress(ResiduumError):
        predictions = [torch.from_numpy(predictor.outputs(s)) for s in samples if s is not None]
    return digest(predictor.name, *predictions)
