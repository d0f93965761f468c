"""The settings of an audit are declared once, and what repeats them agrees."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_type_hints

import pytest
import tomli_w

import residuum as rs
from residuum.auditing.config import AuditConfig
from residuum.auditing.request import AuditOptions, AuditRequest
from residuum.errors import InputError
from residuum.evaluation.null import SUBSETS

STRICT = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir"]


def test_the_options_for_editors_have_the_fields_of_the_request() -> None:
    assert AuditOptions.__annotations__.keys() == AuditRequest.model_fields.keys()
    assert not AuditOptions.__required_keys__


def test_defaults_that_are_repeated_agree() -> None:
    assert AuditRequest().subsets == SUBSETS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budgte": "1min"}, "Did you mean 'budget'"),
        ({"budget": "soon"}, "A time budget must be a duration"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"subsets": 10}, "subsets must be at least 200"),
        ({"preset": "none"}, "No preset 'none'"),
        ({"recipe": "rate=fast"}, "must be a number"),
        ({"task": "ranking"}, "task must be one of auto, binary"),
        ({"surface": "all of it"}, "surface must be one of all, weights"),
        ({"effort": "slow"}, "effort must be one of quick, standard, thorough"),
        ({"fail_on": "leak"}, "fail_on must be one of verbatim, near-copy"),
        ({"batches": []}, "'batches'"),
        ({"vouch": True}, "'vouch'"),
        ({"twin": False}, "'twin'"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        AuditRequest(**options)
    with pytest.raises(InputError, match=message):
        rs.audit("missing.pt", **options)


def test_every_setting_survives_toml() -> None:
    values = {
        "sensitive": ["income", "3"],
        "effort": "thorough",
        "budget": "2min",
        "fail_on": "near-copy",
        "positive_controls": False,
        "preset": "loo2024",
        "attacks": ["unmix"],
        "steps": 7,
        "seed": 5,
        "subsets": 500,
        "device": "cuda",
        "task": "regression",
        "arch": "mlp:4-3-1",
        "model_code": "net:make",
        "baselines": False,
        "recipe": "epochs=3",
        "surface": "change",
        "update_kind": "gradient",
        "label": "diagnosis",
        "drop": ["note"],
    }
    assert values.keys() == AuditRequest.model_fields.keys()
    defaults = AuditRequest().model_dump()
    assert all(values[name] != defaults[name] for name in values), "every value is a change"
    read = AuditConfig(**tomllib.loads(tomli_w.dumps(values)))
    request = AuditRequest(**values)
    assert AuditRequest(**read.options()).model_dump(mode="json") == request.model_dump(mode="json")


def test_a_type_checker_reports_a_misspelled_keyword(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    call = (
        'import residuum as rs\n\nresult = rs.audit("m.pt", {}="2min")\nprint(result.exit_code)\n'
    )
    right.write_text(call.format("budget"))
    wrong.write_text(call.format("bugdet"))
    check = [*STRICT, str(tmp_path / "cache")]
    done = subprocess.run([*check, str(right)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    done = subprocess.run([*check, str(wrong)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert 'Unexpected keyword argument "bugdet" for "audit"' in done.stdout


def test_public_names_have_types() -> None:
    """``rs.audit`` has a signature for editors, not ``Any`` from the lazy import."""
    assert get_type_hints(rs.audit)["return"] is rs.AuditResult
    assert (Path(rs.__file__).parent / "py.typed").is_file()
