"""The faults that tools/mutants.py puts into the code: that they are faults, and which."""

from __future__ import annotations

import ast

import pytest

from tools import mutations
from tools.mutants import ROOT, TABLE, covering, reviewed_mutant
from tools.mutations import PACKAGE, mutants_of

SOURCE = '''
"""A docstring with 1 and True."""
LIMIT: int = 3

def least(values: list[int], best=True):
    assert values, 1
    if not values:
        raise ValueError(f"{1 + 1} values")
    total = 0
    total += sum(values[1:])
    return sorted(values, key=abs)[0] if best and total < 3 else total / 2
'''
FAULTS = """
3: 3 -> 4 | 3: 3 -> 6 | 5: True -> False | 7: not values -> values | 7: not values -> True
7: not values -> False | 8: raise ValueError(f'{1 + 1} values') -> pass | 9: 0 -> 1 | 9: 0 -> -1
10: total += sum(values[1:]) -> pass | 10: total += sum(values[1:]) -> total -= sum(values[1:])
10: sum -> mean | 10: 1: -> 1:-1 | 10: 1 -> 2 | 11: best and total < 3 -> best or total < 3
11: sorted(values, key=abs)[0] if best and total < 3 else total / 2 -> sorted(values, key=abs)[0]
11: sorted(values, key=abs)[0] if best and total < 3 else total / 2 -> total / 2
11: total < 3 -> total <= 3 | 11: total < 3 -> total >= 3 | 11: 3 -> 4 | 11: 3 -> 6
11: sorted(values, key=abs) -> sorted(values) | 11: total / 2 -> total * 2 | 11: 2 -> 3 | 11: 2 -> 4
11: sorted(values, key=abs) -> sorted(values, key=abs, reverse=True)
11: 0 -> 1  (2. of its kind) | 11: 0 -> -1  (2. of its kind)
"""


def test_all_rules_apply_and_none_to_messages(tmp_path, monkeypatch):
    monkeypatch.setattr(mutations, "PACKAGE", tmp_path)
    (tmp_path / "least.py").write_text(SOURCE)
    mutants = [
        f"{mutant.line}: {mutant.before} -> {mutant.after}" for mutant in mutants_of("least.py")
    ]
    assert sorted(mutants) == sorted(FAULTS.strip().replace("\n", " | ").split(" | "))


@pytest.mark.parametrize("file", ["evaluation/matching.py", "stationarity.py"])
def test_every_mutant_is_a_program_of_its_own(file):
    source = (PACKAGE / file).read_text(encoding="utf-8")
    mutants = mutants_of(file)
    programs = {ast.dump(ast.parse(mutant.mutated())) for mutant in mutants}
    assert len(programs) == len({mutant.key for mutant in mutants}) == len(mutants) > 20
    assert ast.dump(ast.parse(source)) not in programs


@pytest.mark.parametrize("row", TABLE["review"], ids=lambda row: row["what"])
def test_every_reviewed_mutant_finds_its_text(row):
    """Code that moves takes its mutants along: the benchmark itself is run too seldom to notice."""
    mutant = reviewed_mutant(**row)
    source = ast.parse((PACKAGE / mutant.file).read_bytes())
    assert ast.dump(ast.parse(mutant.mutated())) != ast.dump(source)
    assert all((ROOT / name).is_file() for name in covering(mutant.file))


def test_a_mutant_whose_text_has_gone_is_refused():
    with pytest.raises(SystemExit, match=r"mend mutants\.toml"):
        reviewed_mutant("gone", "stationarity.py", "no such text", "pass")


def test_the_table_names_what_there_is():
    for prefix, tests in TABLE["covering"].items():
        assert (PACKAGE / prefix).exists(), prefix
        assert all((ROOT / "tests" / f"{name}.py").is_file() for name in tests), prefix
    files = {key.split(", ")[0] for key in TABLE["reasons"]}
    assert set(TABLE["reasons"]) <= {mutant.key for file in files for mutant in mutants_of(file)}
