"""Find the state dict in what a file holds and turn it into clean tensors.

Clean tensors are dense, real, finite and own their memory. Names of wrappers are removed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from residuum.errors import CheckpointError, UnsafeFileError
from residuum.io.pickles import EXPORT
from residuum.networks import (
    refuse_by_name,
)

WRAPPERS = ("state_dict", "model_state_dict", "model", "net", "network")
PREFIXES = ("module.", "_orig_mod.")  # DataParallel, torch.compile
DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
MAX_DEPTH = 8  # of state dicts in each other
MAX_NAME = 256  # characters
MAX_TENSORS = 1000  # 500 layers; what recognises them looks at pairs
MAX_SHARING = 4  # tied weights appear under several names, a memory bomb under thousands


def find_state(content: Any) -> dict[str, Tensor]:
    """The state dict in a loaded object: itself, or under one of the names in ``WRAPPERS``."""
    for _ in range(MAX_DEPTH):
        if not isinstance(content, dict):
            break
        # By the class: a file can give the object an attribute named ``items``.
        wrapper = next((k for k in WRAPPERS if isinstance(dict.get(content, k), dict)), None)
        if wrapper is None:
            return {name: t for name, t in dict.items(content) if isinstance(t, Tensor)}
        content = content[wrapper]
    held = type(content).__name__
    raise CheckpointError(
        f"A checkpoint must hold a dict of tensors; this one holds a {held}.", EXPORT
    )


def clean_state(
    state: dict[str, Tensor], held: int | None = None
) -> tuple[dict[str, Tensor], dict[str, str], list[str]]:
    """Checked float tensors of one dtype, the file's name for each, and what was converted.

    held: bytes of the file, which bounds what its tensors may take together; None for tensors that
    are in memory already.
    """
    if not state:
        raise CheckpointError("A checkpoint must hold tensors; this one has none.", EXPORT)
    for name in state:
        if not isinstance(name, str) or len(name) > MAX_NAME or not name.isprintable():
            raise CheckpointError(
                f"Tensors need printable names of at most {MAX_NAME} characters; got "
                f"{str(name)[:40]!r}.",
                EXPORT,
            )
    refuse_by_name(state)
    for name, tensor in state.items():
        _check_tensor(name, tensor)
    if len(state) > MAX_TENSORS:
        raise CheckpointError(
            f"A network may have {MAX_TENSORS} tensors; this one has {len(state)}.",
            "Save the weights of one network alone.",
        )
    found = {t.dtype for t in state.values()}
    dtype = torch.float64 if torch.float64 in found else torch.float32
    to = f"weights converted to {dtype}".replace("torch.", "")
    others = sorted(str(other).removeprefix("torch.") for other in found - {dtype})
    notes = [f"{other} {to}" for other in others]
    total = sum(t.numel() * dtype.itemsize for t in state.values())
    if held is not None and total > MAX_SHARING * held:
        raise UnsafeFileError(
            f"Tensors may share memory {MAX_SHARING}-fold; these claim {total} of {held} bytes.",
            "Save full copies: {name: t.clone() for name, t in state.items()}.",
        )
    short = _strip_prefixes(list(state))
    # Copies: tied weights and memory maps would make one tensor's change another's.
    owned = {
        short[name]: t.detach().to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)
        for name, t in state.items()
    }
    for name, tensor in owned.items():
        if not torch.isfinite(tensor).all():
            raise CheckpointError(
                f"Weights must be finite; {name!r} has NaN or infinite entries.",
                "The training diverged or the file is damaged; use an earlier checkpoint.",
            )
    return owned, {ours: name for name, ours in short.items()}, notes


def _check_tensor(name: str, tensor: Tensor) -> None:
    """A tensor that attacks can use, and that holds what it claims: an expanded one would claim any size."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        raise CheckpointError(
            f"Weights must be dense tensors with data; {name!r} is not.",
            "Convert it before saving, e.g. with .to_dense().",
        )
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.dtype not in DTYPES:
        raise CheckpointError(
            f"Weights must be real floating-point tensors; {name!r} is {tensor.dtype}.",
            "Leave it out, or convert it with .float() before saving.",
        )
    if tensor.numel() == 0:
        raise CheckpointError(
            f"Weights need entries; {name!r} is empty.", "Save the network again."
        )
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise UnsafeFileError(
            f"A tensor must hold its elements; {name!r} of shape {list(tensor.shape)} has memory for "
            f"{tensor.untyped_storage().nbytes() // tensor.element_size()}.",
            "Save a full copy with .clone().",
        )


def _strip_prefixes(names: list[str]) -> dict[str, str]:
    """Each name without the prefixes that all of them share."""
    short = dict(zip(names, names, strict=True))
    while prefix := next((p for p in PREFIXES if all(s.startswith(p) for s in short.values())), ""):
        short = {name: s.removeprefix(prefix) for name, s in short.items()}
    return short
