"""Tables of ``docs/forests.md``: what forests and boosted trees reveal, and what protects them.

Each setting has several fits. A cell has the smallest and the largest figure of the fits, or one figure if
they are equal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from statistics import mean

from experiments import RESULTS
from experiments.boosting_targets import LIBRARIES, TREES
from experiments.boosting_targets import TABLES as BOOSTING_TABLES
from experiments.common import read_rows
from experiments.forest_classifiers import SETTINGS as CLASSIFIERS
from experiments.forest_defenses import DEFENSES
from experiments.forest_level import KINDS, PARTS
from experiments.forest_scaling import SIZES
from experiments.forest_tables import SETTINGS as REGRESSORS
from experiments.pages.tables import Figures, grid, once, table

SIZE = re.compile(r",? \d{3,}( x \d+)?$")  # the size at the end of a name, which another column has
FRESH = "fresh: "
NAMES = {
    FRESH: "",
    "bare, ": "leaf values only, ",
    "friedman3": "Friedman\N{NON-BREAKING HYPHEN}3",
    "-area": ", area as target",
    "-alcohol": ", alcohol as target",
    "housing": "synthetic houses",
    "swiss-roll": "swiss roll",
    "all 442": "all rows",
    "friedman1": "Friedman\N{NON-BREAKING HYPHEN}1",
    "friedman2": "Friedman\N{NON-BREAKING HYPHEN}2",
    "RandomForestRegressor": "regression forest",
    "ExtraTreesRegressor": "extra trees, regression",
    "RandomForestClassifier": "classification forest",
    "cancer": "breast cancer",
    "breast breast": "breast",
}


def rows_of(name: str, **case: object) -> list[Figures]:
    """Return the results of an experiment whose case has these entries, by seed."""
    rows = read_rows(RESULTS / f"{name}.jsonl")
    matches = [row for row in rows if case.items() <= row["case"].items()]
    return sorted(matches, key=lambda row: int(row["case"]["seed"]))


def spread(values: Iterable[float | None], form: str) -> str:
    """Return the smallest and the largest value, one value if they look equal, or a dash for none."""
    present = [value for value in values if value is not None]
    if not present:
        return "-"
    low, high = format(min(present), form), format(max(present), form)
    if low == high:
        return low
    return f"{low.removesuffix('%') if high.endswith('%') else low}\N{EN DASH}{high}"


def column(rows: list[Figures], key: str, form: str = "d") -> str:
    """Return the spread of a figure over the fits that have it."""
    return spread((row.get(key) for row in rows), form)


def count_of(rows: list[Figures], key: str, total: str) -> str:
    """Return the spread of a count, and of how many."""
    return f"{column(rows, key)} of {column(rows, total)}"


def title(name: str) -> str:
    """Return the name of a setting as a reader knows it."""
    for key, text in NAMES.items():
        name = name.replace(key, text)
    return SIZE.sub("", name)


# Regression forests.


def regressors(kind: str) -> str:
    """Return the table of those settings of regression forests that the page shows together."""
    lines = []
    for name in REGRESSORS:
        fits = rows_of("forest_tables", setting=name)
        if not fits or kind_of(name) != kind:
            continue
        has_control = any(fit["held_out"] for fit in fits)
        wrong = column(fits, "false_exact")
        if any(fit["likely"] for fit in fits):
            wrong = f"{column(fits, 'false_likely')} likely" + (
                f", {wrong} exact" if wrong != "0" else ""
            )
        lines.append(
            [
                title(name),
                f"{column(fits, 'records')} x {column(fits, 'columns')}",
                column(fits, "targets"),
                column(fits, "rows"),
                column(fits, "cells", ".1%"),
                column(fits, "near_cells", ".1%"),
                f"{wrong} / {column(fits, 'missed_intervals')}",
                count_of(fits, "held_out_rows", "held_out") if has_control else "-",
                column(fits, "held_out_cells", ".1%") if has_control else "-",
                column(fits, "cpu_seconds", ".1f"),
            ]
        )
    head = "training table | size | right targets | exact rows | exact cells | cells within 5%"
    control = "held-out rows matched | held-out cells matched"
    return grid(f"{head} | wrong cells / intervals | {control} | seconds", lines)


def kind_of(name: str) -> str:
    """Return the table of the page in which a setting is listed."""
    setting = REGRESSORS[name]
    if name.startswith(FRESH):
        return "fresh"
    if "without" in setting:
        return "fields removed"
    return "settings" if {*setting} - {"table", "n", "bar"} else "default"


@table
def forest_tables() -> str:
    """List default forests whose file is complete."""
    return regressors("default")


@table
def forest_fields_removed() -> str:
    """List default forests whose file lacks fields."""
    return regressors("fields removed")


@table
def forest_settings() -> str:
    """List forests with other settings or other tables."""
    return regressors("settings")


@table
def forest_fresh() -> str:
    """List tables that were chosen after the algorithm was final."""
    return regressors("fresh")


# Defenses.


@table
def forest_defenses() -> str:
    """List changes of a forest, and what an attacker who knows of the change recovers."""
    lines: list[list[str]] = []
    everything = rows_of("forest_defenses")
    for name, (_, change) in DEFENSES.items():
        fits = rows_of("forest_defenses", defense=name)
        if not fits:
            continue
        has_rows = "noise" not in change  # the attack on noisy leaves estimates targets alone
        has_targets = change != "noise, no seeds"  # and needs the seeds for this
        lines.append(
            [
                name.replace("600 trees, seeds removed", "600 trees, fields removed"),
                column(fits, "targets") if has_targets else "-",
                column(fits, "near_targets") if has_targets else "-",
                column(fits, "cells", ".1%") if has_rows else "-",
                column(fits, "near_cells", ".1%") if has_rows else "-",
                column(fits, "r2", ".2f"),
            ]
        )
    if everything:
        targets = mean(row["guessed_near_targets"] for row in everything)
        cells = mean(row["guessed_near_cells"] for row in everything)
        lines.append(["*expected by chance*", "0", f"{targets:.0f}", "0.0%", f"{cells:.1%}", ""])
    head = "change | exact targets, of 500 | targets within 2%, of 500 | exact cells"
    return grid(f"{head} | cells within 5% | R2 on held-out rows", lines)


# Classification forests.


@table
def forest_labels() -> str:
    """List the labels that are recovered from classification forests."""
    lines = []
    for name, setting in CLASSIFIERS.items():
        if fits := rows_of("forest_classifiers", setting=name):
            labels = count_of(fits, "labels", "records")
            wrong, seconds = column(fits, "wrong_labels"), column(fits, "label_seconds", ".1f")
            lines.append(
                [plain(name), setting["n"], setting.get("trees", 100), labels, wrong, seconds]
            )
    return grid("training table | records | trees | right labels | wrong labels | seconds", lines)


@table
def forest_classifiers() -> str:
    """Compare the estimated rows of classification forests with guesses."""
    lines = []
    for name, setting in CLASSIFIERS.items():
        fits = [fit for fit in rows_of("forest_classifiers", setting=name) if "walk_error" in fit]
        if not fits:
            continue
        sources = ("walk", "class_median", "class_draw", "column_draw")
        errors = [column(fits, f"{source}_error", ".3f") for source in sources]
        near_shares = [column(fits, f"{source}_near", ".0%") for source in sources]
        nearest = column(fits, "nearest_holdout", ".3f")
        lines.append(
            [
                plain(name),
                setting.get("trees", 100),
                *errors,
                nearest,
                *near_shares[:2],
                near_shares[3],
            ]
        )
    head = "training table | trees | error: attack | class median | class draw | column draw"
    return grid(
        f"{head} | nearest held-out row | within 5%: attack | class median | column draw", lines
    )


def plain(name: str) -> str:
    """Return the data set of a setting, without the sizes that other columns have."""
    return name.partition(",")[0].rstrip("0123456789 ")


# Boosting.


def boosted(
    trees: Iterable[int], cells: Callable[[list[Figures]], list[str]]
) -> list[list[object]]:
    """Return a line for each number of trees, table and library."""
    lines: list[list[object]] = []
    for number in trees:
        for source in BOOSTING_TABLES:
            for library in LIBRARIES:
                fits = rows_of("boosting_targets", library=library, table=source, trees=number)
                if fits:
                    name = f"{title(source.partition(',')[0])}, {column(fits, 'records')} rows"
                    lines.append([name, library, number, *cells(fits)])
    return lines


def control(fits: list[Figures], key: str, held_out: str) -> str:
    """Return a figure with that of held-out rows in parentheses, a dash for a table without held-out rows."""
    if not any(fit["held_out"] for fit in fits):
        return "-"
    return f"{column(fits, key)} ({column(fits, held_out)})"


@table
def boosting_targets() -> str:
    """List the targets that an attacker who knows rows computes from boosted trees."""

    def cells(fits: list[Figures]) -> list[str]:
        predictions = (
            column(fits, "predictions_right"),
            column(fits, "prediction_correlation", ".3f"),
        )
        return [
            column(fits, "targets"),
            column(fits, "false_targets"),
            *predictions,
            count_of(fits, "targets_90", "known_90"),
            control(fits, "targets_mixed", "held_out_determined_mixed"),
            column(fits, "targets_held_out"),
        ]

    head = (
        "table | library | trees | all rows known | wrong | predictions alone | their correlation"
    )
    return grid(
        f"{head} | 90% of rows known | mixed with held-out rows | held-out rows only",
        once(boosted(TREES, cells)),
        text_columns=2,
    )


@table
def boosting_values() -> str:
    """List the values of the training table that boosted trees store."""

    def cells(fits: list[Figures]) -> list[str]:
        return [
            column(fits, "thresholds"),
            column(fits, "data_values"),
            control(fits, "data_values_same_size", "data_values_held_out"),
            column(fits, "neighbors"),
            column(fits, "bin_values"),
            spread((fit["right_sums"] / fit["first_leaves"] for fit in fits), ".0%"),
            f"{column(fits, 'right_ranges')} of 10",
        ]

    head = "table | library | thresholds | data values | of 100 training rows (held-out rows)"
    lines = [[*line[:2], *line[3:]] for line in boosted(TREES[:1], cells)]
    return grid(
        f"{head} | midpoints of neighbors | values from bin edges | right leaf sums | ranges",
        once(lines),
        text_columns=2,
    )


# Size and level.


@table
def forest_scaling() -> str:
    """List time and memory of the attack by the number of records, and the growth of the time."""
    lines, seconds = [], {}
    for n in SIZES:
        if fits := rows_of("forest_scaling", n=n):
            seconds[n] = mean(fit["cpu_seconds"] for fit in fits)
            lines.append(
                [
                    f"{n:,}",
                    column(fits, "targets", ","),
                    column(fits, "rows", ","),
                    column(fits, "cells", ".2%"),
                    column(fits, "false_exact"),
                    column(fits, "cpu_seconds", ".1f"),
                    column(fits, "gib", ".2f"),
                ]
            )
    text = grid(
        "records | right targets | exact rows | exact cells | wrong cells | seconds | GiB", lines
    )
    if {SIZES[0], SIZES[-1]} <= {*seconds}:
        growth = math.log(seconds[SIZES[-1]] / seconds[SIZES[0]]) / math.log(SIZES[-1] / SIZES[0])
        text += f"\n\nThe time grows as n^{growth:.1f}."
    return text


@table
def forest_level() -> str:
    """List how many audits report a leak of a table that the forest never saw, and of its own table."""
    lines, totals = [], [[0, 0] for _ in PARTS]
    for number, (source, n, kind, settings) in enumerate(KINDS):
        cells = []
        for group, total in zip(PARTS, totals, strict=True):
            codes = [row["exit_code"] for row in rows_of("forest_level", part=group, kind=number)]
            total[0] += codes.count(1)
            total[1] += len(codes)
            cells.append(f"{codes.count(1)} of {len(codes)}")
        options = ", ".join(f"`{key}={value}`" for key, value in settings.items()) or "default"
        lines.append([f"{title(source)}, {n} rows", title(kind).lower(), options, *cells])
    if any(count for _, count in totals):
        lines.append(["all", "", "", *(f"{leaks} of {count}" for leaks, count in totals)])
    head = "table | model | settings | leaks: table never seen | leaks: own table"
    return grid(head, lines, text_columns=3)
