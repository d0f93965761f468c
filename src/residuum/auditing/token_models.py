"""Audit a token model: a network whose inputs are token ids, such as BERT or GPT-2.

No attack of residuum reconstructs texts from attention. So an audit of a token model has these stages:

- stored records: are training texts stored in a file of the folder (:mod:`.stored_texts`)?
- membership: are the losses of training texts smaller than those of held-out texts (:mod:`.losses`)? If a
  base is given, do moved rows of the embedding name the training texts (:mod:`residuum.risk.moved_rows`)?
- negative controls: can a classifier distinguish training from held-out texts by their words, without the
  network? A membership finding needs an adjusted p-value of 0.1%.

Losses never show a leak by themselves. Moved rows show a leak of the grade "membership" if the exact test
rejects and single texts can be named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from residuum.auditing.controls import (
    DIFFERENT_KINDS,
    ENERGY_LEVEL,
    MAX_AUC,
    NOT_CLASSIFIED,
    SHIFTED,
    STRICT_LEVEL,
    STRICTER,
    Controls,
    SampleSets,
    compare_distributions,
    describe_repeats,
)
from residuum.auditing.losses import compare_predicted_losses
from residuum.auditing.stored_texts import search_folder
from residuum.datasets.given import hash_path, locate_samples
from residuum.datasets.tokens import read_train_and_holdout_texts
from residuum.errors import CheckpointError, InputError
from residuum.evaluation.matching import MIN_HOLDOUT
from residuum.io.adapters import WRAPPER_PREFIX, compute_update, find_adapter_pairs
from residuum.io.folders import list_folder
from residuum.io.inert import Block
from residuum.io.predictors import Predictor
from residuum.io.release import Release, open_release
from residuum.io.release_weights import find_weights, flatten_blocks
from residuum.io.token_models import takes_tokens, wrap_token_model
from residuum.io.transformers_folders import (
    MAX_LENGTH,
    TextModel,
    find_transformers_folder,
    list_weight_files,
    load_text_folder,
)
from residuum.networks.probing import unwrap
from residuum.records import Dataset
from residuum.records.rundir import digest, sha256
from residuum.records.tokens import TokenDataset
from residuum.risk.moved_rows import compare_moved_rows, find_members, name_words
from residuum.scanning.base_comparison import TouchedRows, find_touched_rows
from residuum.scanning.findings import SEVERITIES
from residuum.scanning.scan import scan

if TYPE_CHECKING:
    from residuum.auditing.run import Audit

NO_ATTACK = (
    "residuum has no attack on token models, because no attack reconstructs texts from attention"
)
WITHOUT_BASE = (
    "without the weights before fine-tuning (--base) no test names single texts, so only losses are "
    "compared"
)
NO_SAMPLES = "there are no training samples to compare with"
NO_FOLDER = "a live model has no files to search"
NOT_SEARCHED = "Not tested: there is no folder or no text to search for."
MAX_FEATURES = 2000  # number of frequent tokens that the classifier of the negative control counts
MAX_FINDINGS = 8  # largest number of scan findings that an audit lists
SECONDS_BETWEEN_MESSAGES = 5.0  # time between two messages about the progress


@dataclass(frozen=True)
class TokenContent:
    """The inputs of an audit of a token model (a network whose inputs are token ids).

    Attributes:
        predictor: The model as a function from texts to losses.
        train: The training texts.
        holdout: The held-out texts.
        paths: Paths of the inputs that were read from files.
        hashes: SHA-256 of model, data and holdout, if these are files.
        digests: Hash of the content of every input that is not a file.
        release: The file of the weights, None for a live model.
        table: Name of the token embedding, "" if there is no base to compare with.
        touched: The rows of the embedding that training moved, None without a base.
        tokenizer: The tokenizer, None without one.
        notes: Remarks for the reader.
        findings: What a scan of the folder finds, one sentence per finding. None for a live model.
    """

    predictor: Predictor
    train: TokenDataset | None
    holdout: TokenDataset | None
    paths: Mapping[str, Path]
    hashes: Mapping[str, str]
    digests: Mapping[str, str]
    release: Release | None = None
    table: str = ""
    touched: TouchedRows | None = None
    tokenizer: Callable[..., Any] | None = None
    notes: tuple[str, ...] = ()
    findings: tuple[str, ...] | None = None

    @property
    def why_not_searched(self) -> str:
        """Why the audit cannot say whether the model's folder stores training texts."""
        if self.findings is None:
            return NOT_SEARCHED
        finding_count = len(self.findings)
        if not finding_count:
            return f"{NOT_SEARCHED} A scan of the folder has no finding."
        finding_text = f"{finding_count} finding{'' if finding_count == 1 else 's'}"
        return f"{NOT_SEARCHED} A scan of the folder has {finding_text}, listed as warnings."


def is_token_model(model: Any, data: Any = None) -> bool:
    """Return True if an audit treats a model as a token model.

    Args:
        model: A live module, or the path of a folder of transformers or of the weights in such a folder.
        data: The training samples, which may show the length of a text.

    Returns:
        Whether the model reads token ids.
    """
    if find_transformers_folder(model) is not None:
        return True
    first_samples = (
        data[0] if isinstance(data, tuple) and len(data) == 2 else getattr(data, "x", data)
    )
    shape = tuple(getattr(first_samples, "shape", ()))
    return takes_tokens(model, shape[1] if len(shape) == 2 else None)


def load_token_content(
    model: Any,
    data: Any,
    holdout: Any,
    tokenizer: Any,
    *,
    base: Any = None,
    adapter: str | Path | None = None,
) -> TokenContent:
    """Load a token model, its texts, and the rows of its embedding that moved.

    Args:
        model: A live module, or the path of a folder of transformers.
        data: Training texts.
        holdout: Held-out texts.
        tokenizer: The tokenizer, or the folder of a tokenizer. By default the one in the folder of the model.
        base: Folder or file of the weights before fine-tuning.
        adapter: Folder of an adapter (LoRA) that was trained on ``model``.

    Returns:
        What was read.
    """
    folder = find_transformers_folder(model)
    paths: dict[str, Path] = {}
    hashes: dict[str, str] = {}
    digests: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    module, release, max_length = model, None, MAX_LENGTH
    if folder is not None:
        text_model = load_text_folder(folder)
        module, notes, max_length = text_model.module, text_model.notes, text_model.max_length
        tokenizer = text_model.tokenizer if tokenizer is None else tokenizer
        release = open_release(list_weight_files(folder)[0])
        paths["checkpoint"], hashes["checkpoint"] = folder, _hash_folder(folder)
    if isinstance(tokenizer, str | Path):
        paths["tokenizer"] = Path(tokenizer)
    tokenizer = _load_tokenizer(tokenizer)
    if folder is None:
        max_length = _length_limit(module, tokenizer)
    if adapter is not None and isinstance(module, nn.Module):
        add_adapter(module, adapter)
        paths["adapter"] = Path(adapter)
        notes = (*notes, "the adapter was added to its base")
    train, held_out = read_train_and_holdout_texts(data, holdout, tokenizer, max_length)
    if isinstance(module, nn.Module):
        predictor = wrap_token_model(module, train if train is not None else held_out)
    else:
        assert folder is not None
        predictor = _without_losses(text_model)
    if folder is None:
        digests["checkpoint"] = digest(predictor.name, *unwrap(module).state_dict().values())
    for name, source, texts in (("data", data, train), ("holdout", holdout, held_out)):
        if isinstance(source, str | Path):
            paths[name] = locate_samples(source, name)
            hashes[name] = hash_path(paths[name])
        elif texts is not None:
            digests[name] = digest(texts.x, texts.y)
    table, touched = "", None
    if base is not None:
        if isinstance(base, str | Path):
            paths["base"] = Path(base)
        table, touched = _find_moved_rows(module, release, base)
    return TokenContent(
        predictor,
        train,
        held_out,
        paths,
        hashes,
        digests,
        release,
        table,
        touched,
        tokenizer,
        notes,
        None if folder is None else list_findings(folder),
    )


def _hash_folder(folder: Path) -> str:
    """Return a hash of the names and contents of all files in a folder. Links are not followed."""
    all_files = list_folder(folder).files
    return digest([[file.relative_to(folder).as_posix(), sha256(file)] for file in all_files])


def _without_losses(text_model: TextModel) -> Predictor:
    """Return a model without predictions, for an architecture whose loss residuum cannot compute."""

    def refuse(_: Dataset) -> Any:
        raise InputError(
            "residuum can compute losses of texts only for a text classifier or a causal language model; "
            f"the architecture of this model is {text_model.name or 'unknown'}.",
            "Load the model yourself and pass rs.audit(model, data=..., tokenizer=...).",
        )

    name = text_model.name or "model"
    why_no_loss = f"a {name} is neither a classifier of texts nor a causal language model"
    return Predictor(name, "class shares", refuse, why_no_loss=why_no_loss)


def _load_tokenizer(tokenizer: Any) -> Callable[..., Any] | None:
    """Return a tokenizer that is passed as such, or load it from its folder."""
    if not isinstance(tokenizer, str | Path):
        function: Callable[..., Any] | None = tokenizer
        return function
    from residuum.io.transformers_folders import load_tokenizer

    return load_tokenizer(Path(tokenizer))


def _length_limit(module: Any, tokenizer: Any) -> int:
    """Return the largest number of tokens of a text that a live model allows."""
    config = getattr(unwrap(module), "config", None)
    limits = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions")]
    limits += [getattr(tokenizer, "model_max_length", None)]
    valid_limits = [limit for limit in limits if isinstance(limit, int) and 1 < limit <= MAX_LENGTH]
    return min(valid_limits, default=MAX_LENGTH)


def add_adapter(module: nn.Module, adapter: str | Path) -> None:
    """Add the adapter (LoRA) of a folder to a module that was loaded for this audit.

    Args:
        module: The base of the adapter. It is changed in place.
        adapter: The folder or file of the adapter.

    Raises:
        CheckpointError: If the adapter does not fit the module.
    """
    path = Path(adapter)
    release = open_release(path / "adapter_model.safetensors" if path.is_dir() else path)
    state = module.state_dict()
    names = {WRAPPER_PREFIX.sub("", name): name for name in state}
    matrix_pairs = find_adapter_pairs(release.content)
    updates = {
        f"{WRAPPER_PREFIX.sub('', name)}.weight": compute_update(a, b, release.config)
        for name, (a, b) in matrix_pairs.items()
    }
    whole_tensors = {
        _without_wrappers(name): block.tensor()
        for name, block in flatten_blocks(find_weights(release)).items()
        if ".lora_" not in name
    }
    for name, update_values in {**updates, **whole_tensors}.items():
        target = None if name not in names else state[names[name]]
        # The class Conv1D of GPT-2 stores its weights transposed, as (inputs, outputs).
        if name in updates and release.config.get("fan_in_fan_out") is True:
            update_values = update_values.T
        if target is None or update_values.shape != target.shape:
            raise CheckpointError(
                f"An adapter must fit its base network; the base network has no layer {name[:80]!r} of the "
                f"shape {list(update_values.shape)}.",
                "Pass the base that adapter_config.json names.",
            )
        weights_before = target.double() if name in updates else 0.0
        target.copy_((weights_before + update_values.double()).to(target))


def _without_wrappers(name: str) -> str:
    """Return the name of an adapter's tensor without the prefixes that the library PEFT adds."""
    return (
        WRAPPER_PREFIX.sub("", name)
        .replace(".modules_to_save.default", "")
        .replace(".modules_to_save", "")
    )


def _find_moved_rows(
    module: Any, release: Release | None, base: Any
) -> tuple[str, TouchedRows | None]:
    """Return the name of the token embedding, and its rows that differ from the weights before training."""
    if isinstance(module, nn.Module):
        name, table = find_embedding(module)
        candidates = {name: table}
    else:
        assert release is not None
        candidates = {
            name: block.tensor()
            for name, block in flatten_blocks(find_weights(release)).items()
            if "word_embeddings" in name or name.endswith(("wte.weight", "embed_tokens.weight"))
        }
    for name, table in candidates.items():
        base_table = _find_base_table(base, name, tuple(table.shape))
        if base_table is not None:
            return name, find_touched_rows(table.detach().cpu(), base_table.cpu())
    raise CheckpointError(
        "The base (the weights before fine-tuning) must hold the token embedding of the model, with the "
        "same name and shape. The base that you passed does not.",
        "Pass the folder or file of the weights that training started from.",
    )


def find_embedding(module: nn.Module) -> tuple[str, Tensor]:
    """Return the name and the weights of the embedding of tokens.

    Args:
        module: A token model.

    Returns:
        The name of the weights in the state dict, and the weights.

    Raises:
        CheckpointError: If the module has no embedding.
    """
    module = unwrap(module)
    get_embedding = getattr(module, "get_input_embeddings", None)
    embedding = get_embedding() if callable(get_embedding) else None
    for name, submodule in module.named_modules():
        is_embedding = (
            submodule is embedding
            if embedding is not None
            else isinstance(submodule, nn.Embedding | nn.EmbeddingBag)
        )
        if is_embedding and isinstance(getattr(submodule, "weight", None), Tensor):
            return f"{name}.weight" if name else "weight", submodule.weight.detach()
    raise CheckpointError(
        "To compare a model with its base, the model must have a token embedding; this model has none.",
        "Omit --base.",
    )


def _find_base_table(base: Any, name: str, shape: tuple[int, ...]) -> Tensor | None:
    """Return the embedding of the base (weights before training) with this shape and a matching name."""
    short_name = WRAPPER_PREFIX.sub("", name)
    for base_name, table in _base_tensors(base):
        short_base_name = WRAPPER_PREFIX.sub("", base_name)
        is_same = short_name.endswith(short_base_name) or short_base_name.endswith(short_name)
        if is_same and tuple(table.shape) == shape:
            return table.tensor() if isinstance(table, Block) else table
    return None


def _base_tensors(base: Any) -> list[tuple[str, Any]]:
    """Return the tensors of a base (weights before training) by name, from a module, state dict or file."""
    if isinstance(base, nn.Module):
        return list(base.state_dict().items())
    if isinstance(base, Mapping):
        return list(base.items())
    path = Path(base)
    files = list_weight_files(path) if path.is_dir() else [path]
    return [
        item for file in files for item in flatten_blocks(find_weights(open_release(file))).items()
    ]


def list_findings(folder: Path) -> tuple[str, ...]:
    """Return what a scan finds in a folder, one sentence per finding, the most severe first.

    The reasons of the findings are left out, because they can name words of the training texts. A report
    without samples must not hold such words.
    """
    findings = sorted(scan(folder).findings, key=lambda finding: SEVERITIES.index(finding.severity))
    return tuple(
        f"the folder holds {finding.what} ({finding.severity}, at {finding.where}). {finding.remedy}"
        for finding in findings[:MAX_FINDINGS]
    )


def set_aside_repeated_texts(train: TokenDataset, holdout: TokenDataset | None) -> SampleSets:
    """Keep each different text once, and set aside training texts that are also held-out texts.

    Args:
        train: The training texts.
        holdout: The held-out texts, None if there are none.

    Returns:
        The texts that remain.
    """
    train = train.take(_first_rows(train))
    if holdout is None:
        return SampleSets(train, None)
    holdout = holdout.take(_first_rows(holdout))
    texts_of = [{tuple(row) for row in texts.x.tolist()} for texts in (train, holdout)]
    in_holdout = torch.tensor([tuple(row) in texts_of[1] for row in train.x.tolist()])
    in_train = torch.tensor([tuple(row) in texts_of[0] for row in holdout.x.tolist()])
    return describe_repeats(train, holdout, in_holdout, in_train)


def _first_rows(texts: Dataset) -> Tensor:
    """Return the index of the first copy of each different text in a list with repeated texts."""
    positions: dict[tuple[int, ...], int] = {}
    for i, row in enumerate(texts.x.tolist()):
        positions.setdefault(tuple(row), i)
    return torch.tensor(list(positions.values()))


def find_stored_texts(audit: Audit) -> Audit:
    """Return the audit with the result of a search for the texts in the files of the folder."""
    sets, tokens = audit.case.sample_sets, audit.case.tokens
    assert sets is not None
    assert tokens is not None
    search_outcome = search_folder(tokens.paths["checkpoint"], sets.train, sets.holdout)
    return replace(audit, stored_records=search_outcome, are_texts_searched=bool(sets.train.texts))


def skip_without_folder(audit: Audit) -> str:
    """Return the reason to skip the search for texts if there is no folder or no text, "" otherwise."""
    tokens = audit.case.tokens
    assert tokens is not None
    if tokens.train is None:
        return NO_SAMPLES
    return "" if "checkpoint" in tokens.paths else NO_FOLDER


def test_membership(audit: Audit) -> Audit:
    """Return the audit with the test of losses and, if a base is given, the test of moved rows."""
    case = audit.case
    tokens = case.tokens
    assert tokens is not None
    sets, held_out = case.sample_sets, None
    train = None if sets is None else sets.train
    if sets is not None and isinstance(train, TokenDataset):
        held_out = sets.holdout if isinstance(sets.holdout, TokenDataset) else None
        audit = compare_predicted_losses(
            audit, train, held_out, _make_progress(audit), WITHOUT_BASE
        )
    if tokens.touched is None:
        return audit
    words = name_words(tokens.touched.rows, tokens.tokenizer)
    train_texts = train if isinstance(train, TokenDataset) else None
    evidence = compare_moved_rows(
        tokens.table, tokens.touched, train_texts, held_out, words, audit.request.seed
    )
    audit.listener.message(evidence.line)
    if train_texts is None or audit.membership is None:
        return replace(audit, moved_rows=evidence)
    membership = find_members(
        tokens.touched, train_texts, held_out, evidence, audit.membership.loss
    )
    return replace(audit, moved_rows=evidence, membership=membership)


def _make_progress(audit: Audit) -> Callable[[int, int], None]:
    """Return a function that sends a message about the progress of losses every few seconds."""
    last_time = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last_time
        if time.monotonic() - last_time >= SECONDS_BETWEEN_MESSAGES:
            last_time = time.monotonic()
            audit.listener.message(f"computed the losses of {done} of {total} texts")

    return report


def run_negative_controls(audit: Audit) -> Audit:
    """Return the audit with a negative control: can words alone tell training texts from held-out texts?"""
    sets = audit.case.sample_sets
    assert sets is not None
    train, holdout = sets.train, sets.holdout
    if (
        not isinstance(train, TokenDataset)
        or not isinstance(holdout, TokenDataset)
        or len(holdout) < MIN_HOLDOUT
    ):
        return replace(audit, negative_controls=Controls(repeats=sets.repeats, notes=sets.notes))
    token_frequencies = count_tokens(train, holdout)
    rng = np.random.default_rng((audit.request.seed, 5))
    auc, energy = compare_distributions(
        Dataset(token_frequencies[: len(train)], train.y),
        Dataset(token_frequencies[len(train) :], holdout.y),
        rng,
        audit.deadline,
    )
    failures = [sets.failure] if sets.failure else []
    notes = [*sets.notes, STRICTER.format(level=STRICT_LEVEL)]
    if auc is None:
        failures.append(NOT_CLASSIFIED)
    elif auc.value >= MAX_AUC and auc.is_significant:
        failures.append(DIFFERENT_KINDS.format(auc=auc.value))
    if energy is not None and energy <= ENERGY_LEVEL:
        notes.append(SHIFTED.format(p=energy))
    controls = Controls(
        (),
        sets.repeats,
        None if auc is None else auc.value,
        energy,
        STRICT_LEVEL,
        tuple(failures),
        tuple(notes),
    )
    return replace(audit, negative_controls=controls)


def count_tokens(train: TokenDataset, holdout: TokenDataset) -> Tensor:
    """Return how often the most frequent tokens occur in each text, as rows of norm 1.

    Args:
        train: The training texts.
        holdout: The held-out texts.

    Returns:
        (n + N, tokens) square roots of the counts. A square root keeps frequent words from dominating.
    """
    ids = torch.cat([train.x, holdout.x])
    tokens, positions = ids.clamp(min=0).unique(return_inverse=True)
    token_counts = torch.zeros(len(ids), len(tokens), dtype=torch.float64)
    token_counts.scatter_add_(1, positions, (ids >= 0).double())
    frequent = token_counts.count_nonzero(0).argsort(descending=True, stable=True)[:MAX_FEATURES]
    frequent_roots = token_counts[:, frequent].sqrt()
    return frequent_roots / frequent_roots.norm(dim=1, keepdim=True).clamp(min=1.0)
