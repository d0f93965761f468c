"""Run a script as a program: parse paths, turn errors into one line and an exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from residuum.errors import InputError, ResiduumError


def run_program(main: Callable[[], Any]) -> int:
    """Call ``main`` and return the exit code of the program. A wrong input is reported in one line."""
    try:
        return int(main() or 0)
    except ResiduumError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return problem.exit_code
    except OSError as problem:
        print(f"error: {problem}.", file=sys.stderr)
        return InputError.exit_code
    except KeyboardInterrupt:
        print("Interrupted. Finished results are stored.", file=sys.stderr)
        return 130


def parse_paths(doc: str | None, *names: str) -> list[Path]:
    """Return the paths on the command line. ``--help`` prints ``doc`` and the names of the paths."""
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=text)
    for name in names:
        parser.add_argument(name, type=Path)
    return [*vars(parser.parse_args()).values()]
