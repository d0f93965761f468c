"""Strip a release: write a copy that holds only what users of the model need.

=======================  ==================================================================================
release                  what strip does
=======================  ==================================================================================
torch, safetensors       writes the state dict to a new file, bit for bit (:mod:`.strip_weights`)
pickle, joblib, skops    writes a script that the owner of the file runs (:mod:`.strip_pickles`)
a folder                 writes a new folder with the weights and their description (:mod:`.strip_folders`)
anything else            refuses, and says what to do
=======================  ==================================================================================

If a model consists of its training records, it cannot be stripped. Then strip says which part and why.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from residuum.errors import InputError, OutputError, UnsafeFileError
from residuum.io.pickle_reader import describe_unsafe
from residuum.io.release import read_release
from residuum.scanning.strip_folders import strip_folder
from residuum.scanning.strip_pickles import refuse_format, script_for_pickle
from residuum.scanning.strip_weights import strip_weights
from residuum.scanning.stripped import Stripped

MAX_BYTES = 16 << 30  # largest size of a file in bytes, because its tensors are in memory twice


def strip(
    path: str | Path,
    out: str | Path,
    *,
    drop: Iterable[str] = (),
    weights: str = "",
    keep: Iterable[str] = (),
) -> Stripped:
    """Write a copy of a model without anything that users of the model do not need.

    A torch file that would run code can be stripped, because its tensors are read without loading it. No
    pickle is loaded. For a pickle, the result holds a script that its owner can run, and no file is written.

    Args:
        path: The file or folder to read.
        out: The new file or folder, which must not exist. A file name that ends in ``.safetensors`` selects
            that format, any other name torch.save.
        drop: Places of values that the new file does not get, as a scan prints them.
        weights: Place of the state dict in a torch or safetensors file, such as "ema". By default, the state
            dict that training code stores under one of its usual keys.
        keep: Names of files of a folder that are copied unchanged, although strip would leave them out.

    Returns:
        The size of the new file, the findings that are gone and the findings that remain.

    Raises:
        InputError: If the release cannot be stripped, or an option does not fit it.
        OutputError: If ``out`` exists.
        UnsafeFileError: If the file is a pickle that would run code.
    """
    path, out = Path(path), Path(out)
    if out.exists() or out.is_symlink():
        message = f"strip writes a new file; {str(out)!r} exists already."
        raise OutputError(message, "Choose another --out.")
    drop, keep = [*drop], [*keep]
    if path.is_dir():
        if drop or weights:
            raise InputError(
                f"The options drop and weights need a single file; {str(path)!r} is a folder.",
                "Pass the path of a file in the folder.",
            )
        return strip_folder(path, out, keep=keep)
    if keep:
        raise InputError(
            f"The option keep copies files of a folder unchanged, so it needs a folder; {str(path)!r} is "
            "a file.",
            "Omit the option.",
        )
    release = read_release(path, MAX_BYTES)
    if release.kind in ("torch", "safetensors"):
        return strip_weights(release, out, drop=drop, weights=weights)
    if weights:
        raise InputError(
            f"The option weights needs a file of torch.save or safetensors; the file {path.name!r} has "
            f"the format {release.kind!r}.",
            "Omit the option.",
        )
    if release.kind not in ("pickle", "skops"):
        refuse_format(release)
    # The script loads the file, which would run unsafe code.
    if release.unsafe:
        raise UnsafeFileError(*describe_unsafe(release.unsafe))
    return script_for_pickle(release, out, drop)
