"""Write only the weights of a release, bit for bit.

The new file holds the tensors of the network's state dict, including buffers. Optimizer state, averaged
copies, seeds, paths and all other values are dropped. The new file is read back, compared with the original
bit by bit and scanned before it gets its final name.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from residuum.errors import InputError, OutputError, UnsafeFileError
from residuum.io.estimators import NETWORKS
from residuum.io.forest_files import READABLE
from residuum.io.inert import Block, InertObject
from residuum.io.metadata import FORMAT_KEY, RULES
from residuum.io.pickle_reader import describe_unsafe
from residuum.io.release import Release, open_release, read_release
from residuum.io.release_weights import find_weights, flatten_blocks
from residuum.io.safetensors_files import sort_header
from residuum.records import Record, write_atomic
from residuum.scanning.findings import FRAMES, STORED, Finding, findings

# Keys of the metadata that the new file keeps, such as the file format, the architecture and the labels.
KEPT_METADATA = ("format", FORMAT_KEY, *RULES)
MAX_BYTES = 16 << 30  # largest size of a file in bytes, because its tensors are in memory twice
# Attributes in which early stopping stores copies of the weights.
BEST_WEIGHTS = ("_best_coefs", "_best_intercepts")
MAX_DEPTH = 12  # largest nesting depth of estimators that are searched for values to remove


class PickleError(InputError):
    """Raised for a pickle, which ``residuum strip`` cannot change without running code of the pickle.

    Attributes:
        lines: Python code with which the owner can strip the file, empty if nothing can be removed.
    """

    def __init__(
        self, path: Path, out: Path, release: Release, findings_before: list[Finding]
    ) -> None:
        statements = tuple(_changes(release.content, "model"))
        self.lines: tuple[str, ...] = ()
        message = f"A pickle can only be changed by running it; {path.name!r} was not changed."
        # Statements that change trees take several lines, which do not fit into a message.
        if any("\n" in statement for statement in statements):
            self.lines = (*_loading(path), *statements, _saving(path, out))
            super().__init__(
                f"{message} Its trees determine training records by their thresholds and leaf values, which "
                "predictions need, so removing seeds, counts and impurities does not help.",
                "Train again with at least 5 records in every leaf and with fewer trees than records. Then "
                "run the script that residuum strip prints, which removes seeds, counts and impurities.",
            )
        elif statements:
            self.lines = (*_loading(path), *statements, _saving(path, out))
            code = "; ".join(line.split("  #")[0] for line in self.lines)
            super().__init__(message, f"If you trust this file, run: {code}")
        elif any(finding.kind == STORED for finding in findings_before):
            super().__init__(
                f"{path.name!r} cannot be stripped, because this kind of model consists of its training "
                "records.",
                "Train another kind of model, and do not release this file.",
            )
        else:
            super().__init__(
                f"There is nothing to strip in {path.name!r}.",
                "Release it as it is, or run residuum scan to see its findings.",
            )


def _changes(value: Any, expression: str, depth: int = 0) -> Iterator[str]:
    """Yield Python statements that remove from a model what predictions do not need.

    Args:
        value: A value in the release.
        expression: Python code for this value, such as ``model.steps[1][1]``.
        depth: Number of containers around the value.

    Yields:
        One statement for each value to remove.
    """
    if depth > MAX_DEPTH:
        return
    if isinstance(value, InertObject) and value.class_name in NETWORKS:
        attributes = value.attributes
        if "_optimizer" in attributes:
            yield f"del {expression}._optimizer"
        yield from (f"del {expression}.{name}" for name in BEST_WEIGHTS if name in attributes)
        if attributes.get("random_state") is not None:
            yield f"{expression}.random_state = None"
        if attributes.get("loss_curve_"):
            yield f"{expression}.loss_curve_ = []"
    elif isinstance(value, InertObject) and value.class_name in READABLE:
        yield _script_for_trees(expression, isinstance(value.attributes.get("estimators_"), list))
    elif isinstance(value, InertObject):
        for name, attribute in value.attributes.items():
            if name.isidentifier():
                yield from _changes(attribute, f"{expression}.{name}", depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, str | int):
                is_data = isinstance(item, Block) or (
                    isinstance(item, InertObject) and bool(FRAMES.match(item.name))
                )
                if is_data and _holds_records(str(key), item):
                    yield f"del {expression}[{key!r}]"
                else:
                    yield from _changes(item, f"{expression}[{key!r}]", depth + 1)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _changes(item, f"{expression}[{i}]", depth + 1)


def _script_for_trees(expression: str, is_ensemble: bool) -> str:
    """Return a script that removes from trees what predictions do not need.

    Args:
        expression: Python code for the forest or the tree.
        is_ensemble: Whether the trees are in ``estimators_``.

    Returns:
        Python statements on several lines.
    """
    trees = f"[*{expression}.estimators_, {expression}]" if is_ensemble else f"[{expression}]"
    return "\n".join(
        [
            f"for estimator in {trees}:",
            "    estimator.random_state = None",
            "    if hasattr(estimator, 'tree_'):",
            "        state = estimator.tree_.__getstate__()",
            "        inner = state['nodes']['left_child'] != -1",
            "        for name in ('impurity', 'n_node_samples', 'weighted_n_node_samples'):",
            "            state['nodes'][name] = 0",
            "        state['values'][inner] = 0",
            "        estimator.tree_.__setstate__(state)",
        ]
    )


def _holds_records(name: str, value: Any) -> bool:
    """Return True if a scan reports that a value with this name stores training records."""
    release = Release(Path(), "pickle", {name: value})
    return any(finding.kind == STORED for finding in findings(release))


def _is_joblib(path: Path) -> bool:
    with path.open("rb") as stream:
        first_bytes = stream.read(1 << 16)
    return not first_bytes.startswith(b"\x80") or b"joblib" in first_bytes


def _loading(path: Path) -> tuple[str, str]:
    """Return two Python statements that load a pickle, with a comment that warns the reader."""
    warning = "  # runs code in the file: load only a file that you trust"
    if _is_joblib(path):
        return "import joblib", f"model = joblib.load({str(path)!r}){warning}"
    return "import pickle", f"model = pickle.load(open({str(path)!r}, 'rb')){warning}"


def _saving(path: Path, out: Path) -> str:
    if _is_joblib(path):
        return f"joblib.dump(model, {str(out)!r})"
    return f"pickle.dump(model, open({str(out)!r}, 'wb'))"


@dataclass(frozen=True, eq=False)
class Stripped(Record):
    """The result of stripping a file.

    Attributes:
        file: The original file.
        out: The new file.
        tensors: Number of tensors in the new file.
        bytes: Size of the new file.
        dropped: Findings of the original file that the new file does not have.
        remaining: Findings that the new file still has.
    """

    file: str
    out: str
    tensors: int
    bytes: int
    dropped: tuple[Finding, ...]
    remaining: tuple[Finding, ...]


def strip(path: str | Path, out: str | Path) -> Stripped:
    """Write only the weights of a torch or safetensors file to a new file.

    A torch file that would run code can be stripped, because its tensors are read without loading it.

    Args:
        path: The file to read.
        out: The new file, which must not exist. A name that ends in ``.safetensors`` selects
            that format, any other name torch.save.

    Returns:
        The size of the new file, the findings that are gone and the findings that remain.

    Raises:
        OutputError: If ``out`` exists.
        UnsafeFileError: If the file is a plain pickle that would run code.
        PickleError: If the file is any other plain pickle.
    """
    path, out = Path(path), Path(out)
    if out.exists() or out.is_symlink():
        message = f"strip writes a new file; {str(out)!r} exists already."
        raise OutputError(message, "Choose another --out.")
    release = read_release(path, MAX_BYTES)
    original_findings = findings(release)
    if release.kind == "pickle":
        # The remedy of PickleError loads the file, which would run unsafe code.
        if release.unsafe:
            raise UnsafeFileError(*describe_unsafe(release.unsafe))
        raise PickleError(path, out, release, original_findings)
    state_dict = find_weights(release)
    content = _encode(state_dict, release, out)
    unchecked_path = out.with_name(f".{out.name}.unchecked")
    try:
        new_release = open_release(write_atomic(unchecked_path, content))
        _compare(state_dict, find_weights(new_release))
        remaining = findings(new_release)
        unchecked_path.rename(out)
    finally:
        unchecked_path.unlink(missing_ok=True)
    remaining_kinds = {(finding.kind, finding.what) for finding in remaining}
    dropped = tuple(
        finding
        for finding in original_findings
        if (finding.kind, finding.what) not in remaining_kinds
    )
    return Stripped(
        file=str(path),
        out=str(out),
        tensors=len(flatten_blocks(state_dict)),
        bytes=len(content),
        dropped=dropped,
        remaining=tuple(remaining),
    )


def _encode(weights: dict[str, Any], release: Release, out: Path) -> bytes:
    """Return the bytes of the new file. In a torch file, tensors that shared memory still share memory."""
    if out.suffix == ".safetensors":
        if any(isinstance(value, dict) for value in weights.values()):
            raise InputError(
                "A safetensors file holds one state dict; this release holds several.",
                "Choose an --out that ends in .pt.",
            )
        metadata = {k: v for k, v in release.metadata.items() if k in KEPT_METADATA}
        tensors = {name: block.tensor().contiguous() for name, block in weights.items()}
        return sort_header(save(tensors, metadata or {"format": "pt"}))
    buffer = io.BytesIO()
    shared: dict[str, Tensor] = {}

    def tensor(block: Block) -> Tensor:
        if not block.name:
            return block.tensor()
        view_name = f"{block.name} {block.shape}"
        return shared.setdefault(view_name, block.tensor())

    def tensors_of(tree: dict[str, Any]) -> dict[str, Any]:
        return {k: tensor(v) if isinstance(v, Block) else tensors_of(v) for k, v in tree.items()}

    torch.save(tensors_of(weights), buffer)
    return buffer.getvalue()


def _compare(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raise an OutputError if two state dicts are not equal bit by bit."""
    written, original = flatten_blocks(after), flatten_blocks(before)
    are_equal = (_bits(original[name]) == _bits(block) for name, block in written.items())
    if {*written} != {*original} or not all(are_equal):
        raise OutputError(
            "The stripped weights must equal those of the file bit for bit; they differ.",
            "No file was written. Save the weights with torch.save(model.state_dict(), path).",
        )


def _bits(block: Block) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    block_tensor = block.tensor().contiguous()
    tensor_bytes = (
        block_tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        if block_tensor.numel()
        else b""
    )
    return block_tensor.dtype, tuple(block_tensor.shape), tensor_bytes
