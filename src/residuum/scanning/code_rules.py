"""Find the code that loading a pickle would run, and classes of other packages that the pickle names."""

from __future__ import annotations

from collections.abc import Iterator

from residuum.io.release import Release
from residuum.scanning.finding import CLASSES, CODE, Finding

# The place in findings about code. Other findings name the path of a value in the file.
PROGRAM = "the pickle"
# Largest number of unsafe calls for which a scan reports one finding each. A hostile file may make any number
# of calls.
MAX_NAMED = 20


def find_code(release: Release) -> Iterator[Finding]:
    """Find the code that loading a pickle would run, and classes of other packages that the pickle names."""
    for action in release.unsafe[:MAX_NAMED]:
        reason = (
            "loading a pickle runs the functions that it calls; this function is not known to be "
            "harmless"
        )
        remedy = "Do not load this file. Ask its author for the weights as safetensors."
        if release.kind == "torch":
            remedy = (
                "Do not load this file. residuum strip FILE --out CLEAN writes only its weights."
            )
        yield Finding(CODE, "high", f"loading this file would {action}", PROGRAM, reason, remedy)
    actions = set(release.unsafe)
    if names := [name for name in release.foreign if f"call {name}" not in actions]:
        omitted_note = f" and {len(names) - 5} more" if len(names) > 5 else ""
        reason = (
            f"loading this file imports {', '.join(names[:5])}{omitted_note} and runs the code of these "
            "packages"
        )
        remedy = "Load this file only with packages that you trust, or release only the weights."
        finding_title = "classes and functions of other packages"
        yield Finding(CLASSES, "low", finding_title, PROGRAM, reason, remedy, count=len(names))
