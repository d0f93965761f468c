"""Strip a release: write a copy that holds only what users of the model need.

=======================  ==================================================================================
release                  what strip does
=======================  ==================================================================================
torch, safetensors       writes the state dict to a new file, bit for bit (:mod:`.strip_weights`)
pickle, joblib, skops    writes a script that the owner of the file runs (:mod:`.strip_pickles`)
anything else            refuses, and says what to do
=======================  ==================================================================================

If a model consists of its training records, it cannot be stripped. Then strip says which part and why.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from residuum.errors import OutputError, UnsafeFileError
from residuum.io.pickle_reader import describe_unsafe
from residuum.io.release import read_release
from residuum.scanning.strip_pickles import refuse_format, script_for_pickle
from residuum.scanning.strip_weights import strip_weights
from residuum.scanning.stripped import Stripped

MAX_BYTES = 16 << 30  # largest size of a file in bytes, because its tensors are in memory twice


def strip(
    path: str | Path, out: str | Path, *, drop: Iterable[str] = (), weights: str = ""
) -> Stripped:
    """Write a copy of a model without anything that users of the model do not need.

    A torch file that would run code can be stripped, because its tensors are read without loading it. A pickle
    is never loaded. For a pickle, the result holds a script that its owner can run, and no file is written.

    Args:
        path: The file to read.
        out: The new file, which must not exist. A name that ends in ``.safetensors`` selects
            that format, any other name torch.save.
        drop: Places of values that the new file does not get, as a scan prints them.
        weights: Place of the state dict in a torch or safetensors file, such as "ema". By default, the state
            dict that training code stores under one of its usual keys.

    Returns:
        The size of the new file, the findings that are gone and the findings that remain.

    Raises:
        OutputError: If ``out`` exists.
        UnsafeFileError: If the file is a pickle that would run code.
    """
    path, out = Path(path), Path(out)
    if out.exists() or out.is_symlink():
        message = f"strip writes a new file; {str(out)!r} exists already."
        raise OutputError(message, "Choose another --out.")
    release = read_release(path, MAX_BYTES)
    if release.kind in ("torch", "safetensors"):
        return strip_weights(release, out, drop=drop, weights=weights)
    if release.kind not in ("pickle", "skops"):
        raise refuse_format(release)
    # The script loads the file, which would run unsafe code.
    if release.unsafe:
        raise UnsafeFileError(*describe_unsafe(release.unsafe))
    return script_for_pickle(release, out, drop)
