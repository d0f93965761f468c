"""``residuum defend``: train the same network with and without each defense, and attack all of them.

Examples:
residuum defend --list

residuum defend --data digits --n 100 --defenses shift-rewrite:5,noise:0.5 --out runs/d

residuum defend --data mine.npz --arch mlp:784-100-100-1 --value-range 0,1 --defenses dp:8 --out runs/m
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from residuum.cli import options
from residuum.cli.options import options_from, with_options
from residuum.cli.output import print_json, print_line, print_table, trial_progress
from residuum.errors import InputError
from residuum.settings import DefenseRequest

if TYPE_CHECKING:
    from residuum.defenses import Outcome


app = options.command_app("defend", __doc__)


@app.default
@with_options(
    settings=options_from(
        DefenseRequest,
        changes={
            "arch": Annotated[str, Parameter(metavar="ARCH")],
            "value_range": Annotated[str, Parameter(metavar="LOW,HIGH", group=options.ATTACKER)],
        },
    )
)
def _command(
    *,
    data: Annotated[
        str | None,
        Parameter(
            help="Training samples: the name of a dataset, an .npz file or a folder.",
            metavar="DATA",
            completer=lambda _: options.DATASETS,
        ),
    ] = None,
    defenses: Annotated[
        str | None,
        Parameter(
            help="Defenses to test, with their strengths, separated by commas, such as noise:0.5,sgd:10. "
            "The option --list prints all defenses.",
            metavar="NAME:STRENGTH,...",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        Parameter(
            help="Folder for the results. Defenses whose results are already in this folder do not run "
            "again."
        ),
    ] = None,
    settings: dict[str, Any] | None = None,
    listing: Annotated[
        bool, Parameter(name="--list", help="Print the names of all defenses and stop.")
    ] = False,
    output: options.Output = options.OUTPUT,
) -> None:
    """Train a network on your data with and without defenses, and compare the recovered samples."""
    if listing:
        _list(output.json)
        return
    if data is None or defenses is None or out is None:
        required = {"--data": data, "--defenses": defenses, "--out": out}
        missing = ", ".join(name for name, value in required.items() if value is None)
        raise InputError(
            f"The command residuum defend needs the options {missing}.",
            "Example: residuum defend --data digits --n 100 --defenses noise:0.5 --out runs/d.",
        )
    from residuum.io.attacker_knowledge import parse_value_range
    from residuum.verbs.defending import defend

    settings = settings or {}
    if "value_range" in settings:
        settings["value_range"] = parse_value_range(settings["value_range"])
    defense_request = options.make_from_options(DefenseRequest, settings)
    options.check_device(defense_request.device)
    defense_texts = [text.strip() for text in defenses.split(",") if text.strip()]
    with trial_progress(output.visible) as watch:
        outcomes = defend(data, defense_texts, out=out, watch=watch, **settings)
    output.print_result(json.loads((out / "result.json").read_text()), lambda: _show(outcomes, out))


def _show(outcomes: list[Outcome], out: Path) -> None:
    from residuum.report import defenses as report

    table_rows = report.make_rows(outcomes)
    for title, columns in (
        (
            f"samples recovered of {outcomes[0].n}, before and after each defense",
            (0, 1, 2, 3, 4, 5),
        ),
        ("what each defense leaves to attackers, and what it costs", (0, 6, 7, 8, 9, 10)),
    ):
        headers = [report.HEADER[k] for k in columns]
        print_table(title, headers, [[row[k] for k in columns] for row in table_rows])
    for text in report.make_notes(outcomes):
        print_line(text)
    print_line(report.LIMIT)
    print_line(f"report: {out / 'report.html'}")


def _list(as_json: bool) -> None:
    from residuum.defenses import DEFENSES

    defenses = [
        {
            "name": name,
            "strength": defense.unit,
            "identity": f"{defense.off:g}",
            "changes": defense.changes,
            "secret": defense.secret,
            "adaptive": defense.adaptive,
            "available": defense.is_available,
            "install": defense.install,
        }
        for name, defense in DEFENSES.items()
    ]
    if as_json:
        print_json({"defenses": defenses})
        return
    fields = ("name", "strength", "changes", "secret")
    table_rows = [
        (*(str(row[k]) for k in fields), "yes" if row["available"] else "no") for row in defenses
    ]
    columns = ("name", "strength", "changes", "kept secret by the owner", "installed")
    print_table("defenses", columns, table_rows)
    for row in defenses:
        if not row["available"]:
            print_line(f"{row['name']} is not installed. Install it with: {row['install']}")
