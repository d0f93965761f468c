"""A release without what need not be there: the weights, bit for bit, and nothing else.

Kept are the tensors of the network's state dict, buffers included. Optimiser state, averaged copies,
seeds, paths and every other value beside them are left out. What was written is read back, compared with
the original bit by bit and scanned, before it is put in its place.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from residuum.checkpoints.contents import Finding, findings, flat, weights_of
from residuum.checkpoints.inert import Block, refusal
from residuum.checkpoints.reading import FORMAT_KEY, RULES, sort_header
from residuum.checkpoints.releases import Release, look_into, open_release
from residuum.errors import InputError, OutputError
from residuum.records import Record, write_atomic

# What readers need: the kind of file, the architecture, labels.
KEPT_METADATA = ("format", FORMAT_KEY, *RULES)
MAX_BYTES = 16 << 30  # of a file: its tensors are in memory twice
LINES = {  # by the start of a finding: what to run before saving again
    "first moments": "del model._optimizer",
    "second moments": "del model._optimizer",
    "the start of": "model.random_state = None; del model._best_coefs, model._best_intercepts",
    "a loss curve": "model.loss_curve_ = []",
}


class PickleError(InputError):
    """A pickle is not rewritten, since that would mean to run it; lines: what its owner can run."""

    def __init__(self, path: Path, out: Path, found: list[Finding]) -> None:
        met = [line for one in found for start, line in LINES.items() if one.what.startswith(start)]
        with path.open("rb") as stream:
            head = stream.read(1 << 16)
        library, new = "joblib", repr(str(out))
        load, dump = f"joblib.load({str(path)!r})", f"joblib.dump(model, {new})"
        if head.startswith(b"\x80") and b"joblib" not in head:
            library, load = "pickle", f"pickle.load(open({str(path)!r}, 'rb'))"
            dump = f"pickle.dump(model, open({new}, 'wb'))"
        own = "  # runs what the file says: only a file of your own"
        self.lines = (f"import {library}", f"model = {load}{own}", *dict.fromkeys(met), dump)
        super().__init__(
            f"A pickle can only be changed by running it; {path.name!r} is left as it is.",
            "If it is your own, run: " + "; ".join(line.split("  #")[0] for line in self.lines),
        )


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
    release = look_into(path, MAX_BYTES)
    before = findings(release)
    if release.kind == "pickle":
        if release.unsafe:  # no advice to load it
            raise refusal(release.unsafe)
        raise PickleError(path, out, before)
    kept = weights_of(release)
    content = _written(kept, release, out)
    beside = out.with_name(f".{out.name}.unchecked")
    try:
        again = open_release(write_atomic(beside, content))
        _compare(kept, weights_of(again))
        left = findings(again)
        beside.rename(out)
    finally:
        beside.unlink(missing_ok=True)
    remaining = {(one.kind, one.what) for one in left}
    dropped = tuple(one for one in before if (one.kind, one.what) not in remaining)
    return Stripped(str(path), str(out), len(flat(kept)), len(content), dropped, tuple(left))


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
    ours, theirs = flat(after), flat(before)
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
