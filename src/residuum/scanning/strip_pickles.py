"""Write a script that strips a pickle. The owner of the file runs the script. residuum runs no pickle.

The script loads the model, removes what predictions do not need, and saves the model to a new file. If
training records would remain in the new file, there is no script. Then the error says what consists of
records and why.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from residuum.errors import InputError
from residuum.io.inert import Block
from residuum.io.release import Release
from residuum.io.tree import walk
from residuum.scanning.finding import STORED, Finding, rank
from residuum.scanning.findings import findings
from residuum.scanning.forests import ADVICE
from residuum.scanning.stored_arrays import find_stored_arrays
from residuum.scanning.stored_rules import KEEP_NONE
from residuum.scanning.stripped import Stripped, removed_findings
from residuum.scanning.survey import survey_release
from residuum.scanning.unneeded_values import HELPERS, Removals, remove_unneeded

# For classes of scikit-learn that consist of training records, a class that stores none.
ALTERNATIVES = {
    r"(Nu)?SVC$": "Train LinearSVC, LogisticRegression or MLPClassifier",
    r"(Nu)?SVR$|KernelRidge$": "Train Ridge, LinearSVR or MLPRegressor",
    r"KNeighborsClassifier$|RadiusNeighborsClassifier$|Label(Propagation|Spreading)$": (
        "Train LogisticRegression or MLPClassifier"
    ),
    r"KNeighborsRegressor$|RadiusNeighborsRegressor$": "Train Ridge or MLPRegressor",
    r"GaussianProcessClassifier$": ("Train LogisticRegression"),
    r"GaussianProcessRegressor$": "Train BayesianRidge, which also predicts standard deviations",
    r"KernelDensity$": "Train GaussianMixture with few components",
    r"OneClassSVM$|LocalOutlierFactor$": "Train SGDOneClassSVM or EllipticEnvelope",
    r"KNNImputer$": "Use SimpleImputer or IterativeImputer",
    r"Nystroem$|KernelPCA$": "Use RBFSampler, whose features are random numbers",
    r"Isomap$|LocallyLinearEmbedding$": "Use PCA",
    r"DBSCAN$|OPTICS$|AffinityPropagation$|Birch$|MeanShift$|KMeans$": (
        "Use KMeans with many records in every cluster"
    ),
}
OTHER_ALTERNATIVE = "Train another kind of model, such as a linear model or an MLP"
# Classes that belong to an estimator: search trees, and classes with private names.
HELPER_CLASSES = re.compile(r"(KDTree|BallTree)(32|64)?$|\._\w*$")
BOOSTED = {"xgboost": "XGBoost", "lightgbm": "LightGBM", "catboost": "CatBoost"}


def script_for_pickle(release: Release, out: Path, drop: Iterable[str] = ()) -> Stripped:
    """Return the script that strips a pickle, a file of joblib or a file of skops.

    Args:
        release: The content of the file. The description of the model in memory is changed.
        out: The file that the script writes.
        drop: Paths of values to remove, as a scan prints them.

    Returns:
        The script, the findings that it removes and the findings that remain.

    Raises:
        InputError: If training records would remain in the new file, or if there is nothing to remove.
    """
    findings_before = findings(release)
    stored_arrays = find_stored_arrays(release, survey_release(release))
    paths_of_records = {
        array.finding.where for array in stored_arrays if array.finding.severity == "high"
    }
    removals = remove_unneeded(release.content, paths_of_records, [*drop])
    remaining = _findings_after(release, findings_before)
    severe = [finding for finding in remaining if finding.severity == "high"]
    if severe:
        _refuse(release, severe, removals)
    if not removals.statements:
        finding_names = ", ".join(dict.fromkeys(finding.what for finding in remaining))
        raise InputError(
            f"There is nothing to strip in {release.path.name!r}, because predictions need all of its values"
            + (f", also those that a scan finds ({finding_names})." if finding_names else "."),
            "Run `residuum scan` or `residuum audit` to see what these values reveal about the training "
            "data.",
        )
    return Stripped(
        file=str(release.path),
        out=str(out),
        tensors=0,
        bytes=0,
        dropped=removed_findings(findings_before, remaining),
        remaining=tuple(remaining),
        script=_write_script(release, out, removals.statements, remaining),
    )


def _findings_after(release: Release, findings_before: list[Finding]) -> list[Finding]:
    """Return what a scan finds in a stripped model, and earlier findings about records that remain in it.

    The labels of a clustering show which centers are single records. Without the labels, a scan cannot tell,
    but the records are still in the file.
    """
    findings_now = findings(release)
    remaining_paths = {
        place.path for place in walk(release.content) if isinstance(place.value, Block)
    }
    descriptions = {(finding.what, finding.where) for finding in findings_now}
    still_there = [
        finding
        for finding in findings_before
        if finding.kind == STORED
        and finding.where in remaining_paths
        and (finding.what, finding.where) not in descriptions
    ]
    return sorted([*findings_now, *still_there], key=rank)


def refuse_format(release: Release) -> NoReturn:
    """Raise the error for a file of a format that strip does not change.

    Args:
        release: The content of the file.

    Raises:
        InputError: Always. The error says what remains in the file and what to do.
    """
    quoted_name = repr(release.path.name)
    if library := BOOSTED.get(release.kind):
        raise InputError(
            f"The file {quoted_name} cannot be stripped: the trees of {library} split at values of training "
            "records, and predictions need these values.",
            "Before training, round the columns. Train trees with many records in every leaf. Run "
            "`residuum audit FILE --data TRAINING-DATA` to see which values the file reveals.",
        )
    if release.kind == "torchscript":
        raise InputError(
            f"strip cannot read TorchScript; {quoted_name} is a TorchScript file.",
            "Save the weights first: torch.save(torch.jit.load(path).state_dict(), new).",
        )
    severe = [finding for finding in findings(release) if finding.severity == "high"]
    contained_text = f" and contains {severe[0].what}" if severe else ""
    raise InputError(
        f"strip writes files of PyTorch and safetensors, and scripts for pickles; the file {quoted_name} has "
        f"the format {release.kind!r}{contained_text}.",
        "Strip the model before you export it to this format.",
    )


def _refuse(release: Release, severe: list[Finding], removals: Removals) -> NoReturn:
    """Raise the error for a model that cannot be stripped: the values that remain, and why."""
    contents: dict[str, list[str]] = {}  # what remains, by the first words of the sentence about it
    reasons: dict[str, None] = {}  # an ordered set of sentences, as a dict without values
    remedies: dict[str, None] = {}
    for finding in severe:
        owners = _along(finding.where, removals.owners)
        classes = [name.rpartition(".")[2] for name in owners if not HELPER_CLASSES.search(name)]
        class_name, advice = _find_alternative(classes)
        labels = _along(finding.where, removals.labels)
        subject = labels[0] if labels else f"the {class_name}" if class_name else "the file"
        if finding.remedy == ADVICE:
            reasons[
                f"{subject} determines training records by its thresholds and leaf values, which "
                "predictions need"
            ] = None
            remedies[
                "Train again with at least 5 records in every leaf (min_samples_leaf=5) and with fewer "
                "trees than records. Then run strip again."
            ] = None
        elif finding.kind == STORED and owners and owners[0].startswith("sklearn."):
            is_made_of_records = finding.remedy == KEEP_NONE
            verb = "consists of" if is_made_of_records else "needs values of"
            count_text = f" ({finding.count})" if finding.count else ""
            contents.setdefault(f"{subject} {verb}", []).append(f"{finding.what}{count_text}")
            advice = f"{advice}, and do not release this file."
            remedies[advice if is_made_of_records else finding.remedy] = None
        else:
            reasons[f"{finding.what} would remain at {finding.where}"] = None
            drop = f"add --drop {shlex.quote(finding.where)}"
            remedies[
                f"If predictions do not need this value, {drop}."
                if finding.kind == STORED
                else finding.remedy
            ] = None
    sentences = [
        f"{subject} consists of training records and cannot work without them: {', '.join(values)}"
        for beginning, values in contents.items()
    ]
    reason_sentences = " ".join(
        f"{reason[0].upper()}{reason[1:]}." for reason in [*sentences, *reasons]
    )
    raise InputError(
        f"The file {release.path.name!r} cannot be stripped. {reason_sentences}", " ".join(remedies)
    )


def _find_alternative(classes: list[str]) -> tuple[str, str]:
    """Return the class that stores training records, and which class to train instead.

    Args:
        classes: The classes of the objects around the records, the innermost first.
    """
    for class_name in reversed(classes):
        for regex, advice in ALTERNATIVES.items():
            if re.search(regex, class_name):
                return class_name, advice
    return next(iter(classes), ""), OTHER_ALTERNATIVE


def _along(path: str, texts: dict[str, str]) -> list[str]:
    """Return the texts stored for ``path`` and for the containers around it, the innermost first."""
    prefixes = [
        prefix
        for prefix in texts
        if path == prefix or not prefix or (path.startswith(prefix) and path[len(prefix)] in ".[")
    ]
    return [texts[prefix] for prefix in sorted(prefixes, key=len, reverse=True)]


def _write_script(
    release: Release, out: Path, statements: list[str], remaining: list[Finding]
) -> str:
    path = release.path
    code = "\n".join(statements)
    helpers = [text for name, text in HELPERS.items() if f"{name}(" in code]
    if release.kind == "skops":
        imports = ["import skops.io as sio"]
        load = [
            f"untrusted = sio.get_untrusted_types(file={str(path)!r})",
            'print("Types in the file that skops does not trust by default:", untrusted)',
            f"model = sio.load({str(path)!r}, trusted=untrusted)",
        ]
        save = [f"sio.dump(model, {str(out)!r})"]
    elif _is_joblib(path):
        imports = ["import joblib"]
        load = [f"model = joblib.load({str(path)!r})"]
        save = [f"joblib.dump(model, {str(out)!r})"]
    else:
        imports = ["import pickle"]
        load = [f"with open({str(path)!r}, 'rb') as stream:", "    model = pickle.load(stream)"]
        save = [f"with open({str(out)!r}, 'xb') as stream:", "    pickle.dump(model, stream)"]
    imports += ["import numpy as np"] if "np." in "".join(helpers) else []
    notes = [
        f"# Remains: {finding.what} (severity {finding.severity}) at {finding.where or 'the top level'}"
        for finding in remaining
    ]
    return "\n".join(
        [
            '"""Write a copy of a model without values that predictions do not need.',
            "",
            "residuum strip wrote this script. Loading the model runs code of the file, so run the script",
            "only if you trust the file. Then scan the new file.",
            '"""',
            "",
            "import os",
            *imports,
            *helpers,
            "",
            f"if os.path.exists({str(out)!r}):",
            '    raise SystemExit("The new file exists already. Choose another name.")',
            *load,
            "",
            *statements,
            "",
            *save,
            f"print('Wrote', {str(out)!r})",
            *notes,
            "",
        ]
    )


def _is_joblib(path: Path) -> bool:
    with path.open("rb") as stream:
        first_bytes = stream.read(1 << 16)
    return not first_bytes.startswith(b"\x80") or b"joblib" in first_bytes
