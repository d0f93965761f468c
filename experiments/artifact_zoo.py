"""Artifacts as people release them, and whether residuum says the truth about each.

Run ``python -m experiments.artifact_zoo``. The modules of :mod:`experiments.zoo` make the artifacts.
Artifacts of transformers, peft, lightning, shap and umap are skipped if the library is missing.

``python -m experiments.artifact_zoo --cards FOLDER`` writes the cards for raters. A card has the description
of an artifact, a command and the answer. A rater sees nothing else of the project.
``experiments/results/artifact_zoo_ratings.json`` has the ratings.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from experiments import RESULTS
from experiments.common import Case, read_rows, run_cases
from experiments.zoo import ARTIFACTS, Check

# Every command ends within this time, so that a hanging command is seen as a failure.
MAX_SECONDS = 600


def register() -> None:
    """Import the modules that register the artifacts."""
    from experiments.zoo import folders, language, scikit_files, torch_files  # noqa: F401


def run_check(check: Check, folder: Path) -> tuple[int, str]:
    """Run the command of a check in the folder of its artifact.

    Args:
        check: The check.
        folder: Folder of the artifact.

    Returns:
        The exit code, and everything that the command printed.
    """
    source = Path(__file__).parents[1]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{source / 'src'}:{source}",
        "COLUMNS": "100",
        "OMP_NUM_THREADS": "1",
    }
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    functions = (
        f'residuum() {{ "{sys.executable}" -m residuum "$@"; }}\npython() {{ "{sys.executable}" -W'
        ' ignore "$@"; }\n'
    )
    try:
        done = subprocess.run(
            ["bash", "-c", functions + check.command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=MAX_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return -1, f"no answer within {MAX_SECONDS} seconds"
    return done.returncode, done.stdout.replace(str(folder), ".")


def measure(case: Case) -> Case:
    """Make an artifact, run its commands, and compare the answers with the truth."""
    register()
    artifact = ARTIFACTS[case["artifact"]]
    folder = Path(tempfile.mkdtemp(prefix="zoo-"))
    try:
        artifact.make(folder)
        answers = []
        for check in artifact.checks:
            shutil.rmtree(folder / "run", ignore_errors=True)
            exit_code, answer = run_check(check, folder)
            problems = check.problems(exit_code, answer)
            answers.append(
                {
                    "command": check.command,
                    "exit_code": exit_code,
                    "answer": answer,
                    "problems": problems,
                }
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {"answers": answers}


def summarize(rows: list[Case]) -> str:
    """Return how many answers are as expected, and the others."""
    answers = [(row["case"]["artifact"], answer) for row in rows for answer in row["answers"]]
    wrong = [(name, answer) for name, answer in answers if answer["problems"]]
    lines = [
        f"{len(rows)} artifacts, {len(answers)} answers, {len(answers) - len(wrong)} as expected"
    ]
    lines += [
        f"{name}: {answer['command']}: {'; '.join(answer['problems'])}" for name, answer in wrong
    ]
    return "\n".join(lines)


def write_cards(rows: list[Case], folder: Path) -> None:
    """Write one text file for each answer, without what was expected."""
    folder.mkdir(parents=True, exist_ok=True)
    for row in rows:
        artifact = ARTIFACTS[row["case"]["artifact"]]
        for number, answer in enumerate(row["answers"], 1):
            text = (
                f"ARTIFACT\n{artifact.description}\n\nCOMMAND\n{answer['command']}\n\nEXIT"
                f" CODE\n{answer['exit_code']}\n\nANSWER\n{answer['answer']}\n"
            )
            (folder / f"{artifact.name}-{number}.txt").write_text(text)


def main() -> None:
    register()
    parser = argparse.ArgumentParser(
        description="Ask residuum about artifacts as people release them."
    )
    parser.add_argument(
        "--only", nargs="*", default=None, metavar="NAME", help="names of artifacts"
    )
    parser.add_argument(
        "--cards", type=Path, default=None, metavar="FOLDER", help="write cards for raters and end"
    )
    options, _ = parser.parse_known_args()
    if options.cards is not None:
        write_cards(read_rows(RESULTS / "artifact_zoo.jsonl"), options.cards)
        return
    names = [
        name
        for name, artifact in ARTIFACTS.items()
        if (options.only is None or name in options.only)
        and (not artifact.library or importlib.util.find_spec(artifact.library))
    ]
    run_cases("artifact_zoo", [{"artifact": name} for name in names], measure, summarize, parser)


if __name__ == "__main__":
    main()
