"""``python -m tests.goldens``: write every golden anew."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import tests.conftest  # noqa: F401  one thread, as in the suite
from tests.goldens import HERE, make, stored


def main() -> int:
    """Write what changed, remove what is no longer made, and name both."""
    with tempfile.TemporaryDirectory() as folder:
        goldens_now, before = make(Path(folder)), stored()
    for name in sorted({*goldens_now, *before}):
        if goldens_now.get(name) == before.get(name):
            continue
        path = HERE / name
        if name in goldens_now:
            path.parent.mkdir(exist_ok=True)
            path.write_text(goldens_now[name], encoding="utf-8")
        else:
            path.unlink()
        sys.stdout.write(f"{'written' if name in goldens_now else 'removed'}: {name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
