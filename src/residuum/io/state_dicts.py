"""Find the state dict in the content of a file and convert it to clean tensors.

Clean tensors are dense, real and finite, and do not share memory. Prefixes that wrappers such as DataParallel
add to names are removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from residuum.errors import CheckpointError, UnsafeFileError
from residuum.io.inert import Block, InertObject
from residuum.io.pickle_files import EXPORT_ADVICE
from residuum.networks import (
    refuse_by_name,
)

UNSUPPORTED = {
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils._rebuild_qtensor": "a quantized tensor",
    "torch._utils._rebuild_meta_tensor_no_storage": "a tensor without data (meta device)",
    "torch._utils._rebuild_nested_tensor": "a nested tensor",
    "torch._utils._rebuild_tensor_v3": "a tensor of an unusual dtype",
    "torch._utils._rebuild_wrapper_subclass": "a tensor subclass",
    "torch._tensor._rebuild_from_type_v2": "a tensor subclass",
    **dict.fromkeys(("torch.qint8", "torch.quint8", "torch.qint32"), "a quantized tensor"),
    **dict.fromkeys(("torch.QInt8Storage", "torch.QUInt8Storage"), "a quantized tensor"),
    **dict.fromkeys(("torch.per_tensor_affine", "torch.per_channel_affine"), "a quantized tensor"),
}
WRAPPERS = ("state_dict", "model_state_dict", "model", "net", "network")
PREFIXES = ("module.", "_orig_mod.")  # prefixes that DataParallel and torch.compile add to names
DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
MAX_DEPTH = 8  # largest nesting depth of state dicts
MAX_NAME = 256  # largest length of a tensor name in characters
# Largest number of tensors of a network. To recognize an architecture, residuum compares pairs of tensors.
MAX_TENSORS = 1000
# Largest size of all tensors as a multiple of the file size. Tied weights share memory under a few names, but
# a hostile file can use the same numbers under thousands of names to exhaust memory.
MAX_SHARING = 4


def find_state(content: Any) -> dict[str, Tensor | Block]:
    """Return the state dict in the content of a file.

    The state dict is the content itself, or stored under a key such as "model" (``WRAPPERS``).

    Args:
        content: The content of a file, or an object in memory.

    Returns:
        The tensors by name.

    Raises:
        CheckpointError: If there is no dict of tensors.
    """
    for _ in range(MAX_DEPTH):
        if not isinstance(content, dict):
            break
        # We call dict.get and dict.items, because a subclass of dict can override these methods.
        wrapper_key = next((k for k in WRAPPERS if isinstance(dict.get(content, k), dict)), None)
        if wrapper_key is None:
            _refuse_unsupported(content)
            return {n: t for n, t in dict.items(content) if isinstance(t, Tensor | Block)}
        content = content[wrapper_key]
    description = f"a {type(content).__name__}"
    if isinstance(content, InertObject):
        description = f"an object of the class {content.name[:80]!r}, which residuum does not read"
    raise CheckpointError(
        f"A checkpoint must hold a dict of tensors; this checkpoint holds {description}.",
        EXPORT_ADVICE,
    )


def _refuse_unsupported(state: dict[Any, Any]) -> None:
    """Raise an error if a state dict holds tensors that are not dense tensors of real numbers."""
    for name, value in dict.items(state):
        if isinstance(value, InertObject) and value.name in UNSUPPORTED:
            raise CheckpointError(
                f"Weights must be dense tensors of real numbers; the tensor {str(name)[:80]!r} is "
                f"{UNSUPPORTED[value.name]}.",
                "Convert the tensor before saving, e.g. with .to_dense() or .dequantize().",
            )


def clean_state(
    state: Mapping[str, Tensor | Block], size: int | None = None
) -> tuple[dict[str, Tensor], dict[str, str], list[str]]:
    """Check a state dict and read its tensors.

    Args:
        state: Tensors in memory, or blocks of a file, by name.
        size: Size of the file in bytes, which limits the memory of its tensors. None for tensors in memory.

    Returns:
        Float tensors of one dtype by name, the file's name of each tensor, and notes about conversions.

    Raises:
        CheckpointError: If the tensors are not the weights of a network.
        UnsafeFileError: If the tensors claim more memory than the file holds.
    """
    if not state:
        raise CheckpointError(
            "A checkpoint must contain tensors at its top level, or under a name such as state_dict; this "
            "checkpoint contains no such tensors.",
            EXPORT_ADVICE,
        )
    for name in state:
        if not isinstance(name, str) or len(name) > MAX_NAME or not name.isprintable():
            raise CheckpointError(
                f"The name of a tensor may have at most {MAX_NAME} characters, all of them printable; "
                f"got the name {str(name)[:40]!r}.",
                EXPORT_ADVICE,
            )
    tensor_descriptions = {name: _describe_tensor(value) for name, value in state.items()}
    refuse_by_name(tensor_descriptions)
    for name, value in state.items():
        _check_value(name, value)
    if len(state) > MAX_TENSORS:
        raise CheckpointError(
            f"A network may have at most {MAX_TENSORS} tensors; this network has {len(state)} tensors.",
            "Save the weights of a single network.",
        )
    dtypes = {tensor.dtype for tensor in tensor_descriptions.values()}
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    conversion = f"weights converted to {dtype}".replace("torch.", "")
    converted_dtypes = sorted(str(kind).removeprefix("torch.") for kind in dtypes - {dtype})
    conversion_notes = [f"{kind} {conversion}" for kind in converted_dtypes]
    total_bytes = sum(tensor.numel() * dtype.itemsize for tensor in tensor_descriptions.values())
    if size is not None and total_bytes > MAX_SHARING * size:
        raise UnsafeFileError(
            f"All tensors of a file together may be at most {MAX_SHARING} times as large as the file; "
            f"the tensors of this file have {total_bytes} bytes, and the file has {size} bytes.",
            "Save full copies: {name: t.clone() for name, t in state.items()}.",
        )
    clean_names = strip_prefixes(list(state))
    tensors = {clean_names[name]: _copy_tensor(value, dtype) for name, value in state.items()}
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise CheckpointError(
                f"Weights must be finite; the tensor {name!r} has NaN or infinite entries.",
                "Use an earlier checkpoint, because the training diverged or the file is damaged.",
            )
    return tensors, {clean: name for name, clean in clean_names.items()}, conversion_notes


def _describe_tensor(value: Tensor | Block) -> Tensor:
    """Return a tensor. An array in a file becomes a tensor without data, of the same shape and dtype."""
    if isinstance(value, Tensor):
        return value
    dtype = getattr(torch, value.kind, None)
    if not isinstance(dtype, torch.dtype):
        # The array holds objects or texts. A later check raises an error for such an array.
        dtype = torch.uint8
    return torch.empty(value.shape, dtype=dtype, device="meta")


def _copy_tensor(value: Tensor | Block, dtype: torch.dtype) -> Tensor:
    """Return a copy of a tensor. Without copies, a change of one of two tied weights would change both."""
    if isinstance(value, Block):
        return value.tensor().to(dtype).contiguous()
    return value.detach().to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)


def _check_value(name: str, value: Tensor | Block) -> None:
    """Raise an error if a value is not a tensor of real numbers, or has no entries."""
    if isinstance(value, Tensor):
        _check_tensor(name, value)
    elif value.read is None or getattr(torch, value.kind, None) not in DTYPES:
        raise CheckpointError(
            f"Weights must be real floating-point tensors; the tensor {name!r} has the type "
            f"{value.kind or 'no array'}.",
            "Omit the tensor, or convert it with .float() before saving.",
        )
    elif value.numel == 0:
        raise CheckpointError(
            f"A weight tensor must have at least one entry; the tensor {name!r} is empty.",
            "Save the network again.",
        )


def _check_tensor(name: str, tensor: Tensor) -> None:
    """Raise an error if a tensor in memory is not dense, real and complete."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        raise CheckpointError(
            f"Weights must be dense tensors with data; the tensor {name!r} is sparse or has no data.",
            "Convert the tensor before saving, e.g. with .to_dense().",
        )
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.dtype not in DTYPES:
        raise CheckpointError(
            f"Weights must be real floating-point tensors; the tensor {name!r} has the type {tensor.dtype}.",
            "Omit the tensor, or convert it with .float() before saving.",
        )
    if tensor.numel() == 0:
        raise CheckpointError(
            f"A weight tensor must have at least one entry; the tensor {name!r} is empty.",
            "Save the network again.",
        )
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise UnsafeFileError(
            f"A tensor must have memory for all of its elements; the tensor {name!r} of shape "
            f"{list(tensor.shape)} has memory for only "
            f"{tensor.untyped_storage().nbytes() // tensor.element_size()} elements.",
            "Save a full copy with .clone().",
        )


def strip_prefixes(names: list[str]) -> dict[str, str]:
    """Return each tensor name without the prefixes in ``PREFIXES``, by the original name.

    A prefix is removed only if all names begin with this prefix.
    """
    clean_names = dict(zip(names, names, strict=True))
    while prefix := next(
        (
            p
            for p in PREFIXES
            if all(clean_name.startswith(p) for clean_name in clean_names.values())
        ),
        "",
    ):
        clean_names = {
            name: clean_name.removeprefix(prefix) for name, clean_name in clean_names.items()
        }
    return clean_names
