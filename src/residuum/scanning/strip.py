"""A release without what need not be there: the weights, bit for bit, and nothing else.

Kept are the tensors of the network's state dict, buffers included. Optimizer state, averaged copies,
seeds, paths and every other value beside them are left out. What was written is read back, compared with
the original bit by bit and scanned, before it is put in its place.
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

from residuum.errors import InputError, OutputError
from residuum.io.estimators import NETWORKS
from residuum.io.inert import Block, InertObject
from residuum.io.metadata import FORMAT_KEY, RULES
from residuum.io.pickle_reader import make_unsafe_error
from residuum.io.release import Release, open_release, read_release
from residuum.io.release_weights import find_weights, flatten_blocks
from residuum.io.safetensors_files import sort_header
from residuum.records import Record, write_atomic
from residuum.scanning.findings import FRAMES, STORED, Finding, findings

# What readers need: the kind of file, the architecture, labels.
KEPT_METADATA = ("format", FORMAT_KEY, *RULES)
MAX_BYTES = 16 << 30  # of a file: its tensors are in memory twice
BEST_WEIGHTS = ("_best_coefs", "_best_intercepts")  # copies that early stopping keeps
MAX_NESTED = 12  # estimators inside of each other


class PickleError(InputError):
    """A pickle is not rewritten, because that would mean to run it.

    lines: Python code that the owner of the file can run instead, () if nothing can be left out.
    """

    def __init__(self, path: Path, out: Path, release: Release, found: list[Finding]) -> None:
        changes = tuple(_changes(release.content, "model"))
        self.lines: tuple[str, ...] = ()
        rule = f"A pickle can only be changed by running it; {path.name!r} is left as it is."
        if changes:
            self.lines = (*_loading(path), *changes, _saving(path, out))
            code = "; ".join(line.split("  #")[0] for line in self.lines)
            super().__init__(rule, f"If it is your own, run: {code}")
        elif any(one.kind == STORED for one in found):
            super().__init__(
                f"{path.name!r} cannot be stripped, because this kind of model is made of its training "
                "records.",
                "Train another kind of model, and do not release this file.",
            )
        else:
            super().__init__(
                f"There is nothing to strip in {path.name!r}.",
                "Release it as it is, or see what residuum scan says about it.",
            )


def _changes(value: Any, expression: str, depth: int = 0) -> Iterator[str]:
    """Yield Python statements that remove what predictions do not need.

    Args:
        value: A part of the release.
        expression: Python code that names this part, such as ``model.steps[1][1]``.
        depth: How many containers it lies in.
    """
    if depth > MAX_NESTED:
        return
    if isinstance(value, InertObject) and value.class_name in NETWORKS:
        parts = value.attributes
        if "_optimizer" in parts:
            yield f"del {expression}._optimizer"
        yield from (f"del {expression}.{name}" for name in BEST_WEIGHTS if name in parts)
        if parts.get("random_state") is not None:
            yield f"{expression}.random_state = None"
        if parts.get("loss_curve_"):
            yield f"{expression}.loss_curve_ = []"
    elif isinstance(value, InertObject):
        for name, part in value.attributes.items():
            if name.isidentifier():
                yield from _changes(part, f"{expression}.{name}", depth + 1)
    elif isinstance(value, dict):
        for key, part in value.items():
            if isinstance(key, str | int):
                is_data = isinstance(part, Block) or (
                    isinstance(part, InertObject) and bool(FRAMES.match(part.name))
                )
                if is_data and _holds_records(str(key), part):
                    yield f"del {expression}[{key!r}]"
                else:
                    yield from _changes(part, f"{expression}[{key!r}]", depth + 1)
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            yield from _changes(part, f"{expression}[{i}]", depth + 1)


def _holds_records(name: str, value: Any) -> bool:
    """Return True if a scan of ``value`` under this name finds stored records."""
    inside = Release(Path(), "pickle", {name: value})
    return any(one.kind == STORED for one in findings(inside))


def _is_joblib(path: Path) -> bool:
    with path.open("rb") as stream:
        head = stream.read(1 << 16)
    return not head.startswith(b"\x80") or b"joblib" in head


def _loading(path: Path) -> tuple[str, str]:
    """Return the statements that load a pickle, with a warning for whoever runs them."""
    warning = "  # runs what the file says: only a file of your own"
    if _is_joblib(path):
        return "import joblib", f"model = joblib.load({str(path)!r}){warning}"
    return "import pickle", f"model = pickle.load(open({str(path)!r}, 'rb')){warning}"


def _saving(path: Path, out: Path) -> str:
    if _is_joblib(path):
        return f"joblib.dump(model, {str(out)!r})"
    return f"pickle.dump(model, open({str(out)!r}, 'wb'))"


@dataclass(frozen=True, eq=False)
class Stripped(Record):
    """What was kept (tensors, bytes), what was left out, and what is still to be said of the result."""

    file: str
    out: str
    tensors: int
    bytes: int
    dropped: tuple[Finding, ...]
    left: tuple[Finding, ...]


def strip(path: str | Path, out: str | Path) -> Stripped:
    """Write the weights of a torch or safetensors file alone to ``out``, which must not exist.

    A file of torch that would run code can be stripped: its tensors are read without loading it.

    Args:
        path: file to read.
        out: new file. ``.safetensors`` is written as such, anything else with torch.save.

    Returns:
        What was kept and what was left out.

    Raises:
        OutputError: if ``out`` exists.
        UnsafeFileError: if the file is a plain pickle that would run code.
        PickleError: if the file is any other plain pickle.
    """
    path, out = Path(path), Path(out)
    if out.exists() or out.is_symlink():
        rule = f"A stripped file is a new one; {str(out)!r} is there already."
        raise OutputError(rule, "Choose another --out.")
    release = read_release(path, MAX_BYTES)
    before = findings(release)
    if release.kind == "pickle":
        if release.unsafe:  # no advice to load it
            raise make_unsafe_error(release.unsafe)
        raise PickleError(path, out, release, before)
    kept = find_weights(release)
    content = _written(kept, release, out)
    beside = out.with_name(f".{out.name}.unchecked")
    try:
        again = open_release(write_atomic(beside, content))
        _compare(kept, find_weights(again))
        left = findings(again)
        beside.rename(out)
    finally:
        beside.unlink(missing_ok=True)
    remaining = {(one.kind, one.what) for one in left}
    dropped = tuple(one for one in before if (one.kind, one.what) not in remaining)
    return Stripped(
        str(path), str(out), len(flatten_blocks(kept)), len(content), dropped, tuple(left)
    )


def _written(kept: dict[str, Any], release: Release, out: Path) -> bytes:
    """The new file; tensors that share memory share it in a torch file and are copied in the other."""
    if out.suffix == ".safetensors":
        if any(isinstance(value, dict) for value in kept.values()):
            raise InputError(
                "A safetensors file holds one state dict; this release holds several.",
                "Choose an --out that ends in .pt.",
            )
        metadata = {k: v for k, v in release.metadata.items() if k in KEPT_METADATA}
        tensors = {name: block.tensor().contiguous() for name, block in kept.items()}
        return sort_header(save(tensors, metadata or {"format": "pt"}))
    buffer = io.BytesIO()
    shared: dict[str, Tensor] = {}

    def tensor(block: Block) -> Tensor:
        if not block.name:
            return block.tensor()
        key = f"{block.name} {block.shape}"
        return shared.setdefault(key, block.tensor())

    def plain(part: dict[str, Any]) -> dict[str, Any]:
        return {k: tensor(v) if isinstance(v, Block) else plain(v) for k, v in part.items()}

    torch.save(plain(kept), buffer)
    return buffer.getvalue()


def _compare(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Bit by bit."""
    ours, theirs = flatten_blocks(after), flatten_blocks(before)
    alike = (_bits(theirs[name]) == _bits(block) for name, block in ours.items())
    if {*ours} != {*theirs} or not all(alike):
        raise OutputError(
            "The stripped weights must be those of the file, bit for bit; they are not.",
            "Nothing was kept. Save the weights with torch.save(model.state_dict(), path).",
        )


def _bits(block: Block) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    tensor = block.tensor().contiguous()
    raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return tensor.dtype, tuple(tensor.shape), raw
