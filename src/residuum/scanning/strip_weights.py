"""Write the weights of a torch or safetensors file to a new file, exactly.

The new file holds the tensors of the state dict, including buffers. It is read back, compared with the
original bit by bit and scanned before it gets its final name.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from residuum.errors import CheckpointError, InputError, OutputError
from residuum.io.inert import Block, InertObject
from residuum.io.metadata import FORMAT_KEY, RULES
from residuum.io.release import Release, open_release
from residuum.io.release_weights import find_weights, flatten_blocks
from residuum.io.safetensors_files import sort_header
from residuum.io.state_dicts import UNSUPPORTED
from residuum.io.tree import walk
from residuum.records import write_atomic
from residuum.scanning.finding import STORED, Finding, printable
from residuum.scanning.findings import findings
from residuum.scanning.stripped import Stripped, removed_findings

# Keys of the metadata that the new file keeps, such as the file format, the architecture and the labels.
KEPT_METADATA = ("format", FORMAT_KEY, *RULES)


def strip_weights(
    release: Release, out: Path, *, drop: Iterable[str] = (), weights: str = ""
) -> Stripped:
    """Write only the weights of a torch or safetensors file to a new file.

    Args:
        release: The content of the file.
        out: The new file. A name that ends in ``.safetensors`` selects that format, any other name
            torch.save.
        drop: Names of tensors of the state dict to leave out.
        weights: Path of the state dict in the file, empty for the usual place.

    Returns:
        The size of the new file, the findings that are gone and the findings that remain.
    """
    _refuse_other_tensors(release)
    state_dict = find_weights(release, weights)
    for name in drop:
        state_dict = _without(state_dict, _find_name(flatten_blocks(state_dict), name))
    file_bytes = _encode(state_dict, release, out)
    unchecked_path = out.with_name(f".{out.name}.unchecked")
    try:
        new_release = open_release(write_atomic(unchecked_path, file_bytes))
        _compare(state_dict, new_release.content)
        remaining = [_advise(finding) for finding in findings(new_release)]
        unchecked_path.rename(out)
    finally:
        unchecked_path.unlink(missing_ok=True)
    return Stripped(
        file=str(release.path),
        out=str(out),
        tensors=len(flatten_blocks(state_dict)),
        bytes=len(file_bytes),
        dropped=removed_findings(findings(release), remaining),
        remaining=tuple(remaining),
    )


def _refuse_other_tensors(release: Release) -> None:
    """Raise an error for quantized, sparse and other tensors, which strip cannot copy exactly."""
    for place in walk(release.content):
        value = place.value
        if isinstance(value, InertObject) and value.name in UNSUPPORTED and not place.section:
            raise CheckpointError(
                f"strip can copy only dense tensors; the tensor {printable(place.path)!r} is "
                f"{UNSUPPORTED[value.name]}.",
                "Convert the tensor before saving, e.g. with .dequantize() or .to_dense(). Or save only "
                "the state dict yourself: torch.save(model.state_dict(), path).",
            )


def _advise(finding: Finding) -> Finding:
    """Return a finding about the stripped file, with advice that fits a tensor of the state dict."""
    if finding.kind != STORED:
        return finding
    remedy = (
        "Strip keeps every tensor of the state dict. If the network works without this tensor, run strip "
        f"again with --drop {finding.where}."
    )
    return finding.replace(remedy=remedy)


def _find_name(blocks: dict[str, Block], name: str) -> str:
    """Return the tensor that the user chose, by its name or by the path that a scan prints.

    Args:
        blocks: The tensors by path, as :func:`flatten_blocks` returns them.
        name: The text of the user.

    Returns:
        The path of the tensor.

    Raises:
        InputError: If there is no such tensor.
    """
    matching_paths = [
        path
        for path in blocks
        if f".{name.replace('/', '.')}".endswith(f".{path.replace('/', '.')}")
    ]
    if not matching_paths:
        raise InputError(
            "A tensor that you drop must be in the state dict of the file; the state dict has no tensor "
            f"{name!r}.",
            "Pass a place that `residuum scan` prints, or the name of a tensor, such as "
            f"{next(iter(blocks), '')!r}.",
        )
    return max(matching_paths, key=len)


def _without(weights: dict[str, Any], path: str) -> dict[str, Any]:
    """Return nested state dicts (tensors by name) without the tensor that the user removes."""
    if path in weights:
        return {name: value for name, value in weights.items() if name != path}
    return {
        name: _without(value, path.removeprefix(f"{name}/"))
        if isinstance(value, dict) and path.startswith(f"{name}/")
        else value
        for name, value in weights.items()
    }


def _encode(weights: dict[str, Any], release: Release, out: Path) -> bytes:
    """Return the bytes of the stripped file. In a torch file, tensors that share memory are stored once."""
    if out.suffix == ".safetensors":
        if any(isinstance(value, dict) for value in weights.values()):
            raise InputError(
                "A safetensors file can hold only one state dict; the original file contains several.",
                "Choose a file name for --out that ends in .pt.",
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
    """Raise an OutputError if the written weights are not exactly equal to the original weights."""
    written, original = flatten_blocks(after), flatten_blocks(before)
    are_equal = (_bits(original[name]) == _bits(block) for name, block in written.items())
    if {*written} != {*original} or not all(are_equal):
        raise OutputError(
            "The stripped weights must equal the weights in the original file exactly; some weights differ.",
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
