"""A pickle may call known constructors only. Every other call is found, however it is written."""

from __future__ import annotations

import argparse
import io
import pickle
import pkgutil
import struct
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
import torch
from sklearn.neural_network import MLPClassifier
from sklearn.utils import all_estimators

import residuum as rs
from residuum.cli.main import main
from residuum.errors import UnsafeFileError
from residuum.io.pickle_names import FOREIGN, HARMLESS, KNOWN, UNLISTED, classify_name
from residuum.io.release import open_release, read_release
from tests import estimators, foreign
from tests.program import Capture

CALLABLES = (
    "atexit.register", "ast.parse", "bz2.open", "cgi.parse", "compileall.compile_dir",
    "concurrent.futures.ThreadPoolExecutor", "contextlib.ExitStack", "csv.writer", "dbm.open",
    "distutils.spawn.spawn", "fileinput.input", "functools.partial", "gc.get_objects",
    "glob.glob", "gzip.open", "inspect.getsource", "linecache.getlines", "lzma.open",
    "mailcap.findmatch", "mmap.mmap", "modulefinder.ModuleFinder", "netrc.netrc",
    "operator.call", "pkgutil.resolve_name", "platform.popen", "plistlib.load",
    "py_compile.compile", "sched.scheduler", "select.select", "signal.raise_signal",
    "tarfile.open", "tempfile.mkdtemp", "test.support.script_helper.assert_python_ok",
    "tkinter.Tcl", "turtle.write_docstringdict", "types.MethodType", "unittest.mock._importer",
    "uuid._get_command_stdout", "weakref.finalize", "wsgiref.simple_server.make_server",
    "xmlrpc.client.ServerProxy", "zipfile.ZipFile", "zipimport.zipimporter", "builtins.map",
    "builtins.type", "builtins.vars", "builtins.memoryview", "numpy.load", "numpy.fromfile",
    "numpy.memmap", "numpy.lib.npyio.DataSource", "numpy.distutils.exec_command.exec_command",
    "pandas.read_pickle", "pandas.eval", "pandas.core.computation.eval.eval",
    "pandas.io.pickle.read_pickle", "scipy.io.loadmat", "scipy._lib._util.rng_integers",
    "sklearn.datasets.fetch_openml", "sklearn.svm.SVC", "sklearn.base.clone",
    "sklearn.utils._testing.check_skip_network", "torch.jit.load",
    "torch.package.PackageImporter", "torch.fx.graph_module.reduce_graph_module",
    "torch.utils.cpp_extension.load_inline", "torch.distributed.rpc.rpc_sync",
    "torch.nn.modules.linear.Linear", "torch.Tensor", "joblib.load", "joblib.memory.Memory",
    "PIL.Image.open", "matplotlib.pyplot.figure", "dill._dill._create_function",
    "cloudpickle.cloudpickle._make_function", "yaml.unsafe_load", "keras.models.load_model",
    "mypackage.Config", "__main__.run",
)  # fmt: skip


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def name(dotted: str) -> bytes:
    module, _, attribute = dotted.rpartition(".")
    return f"c{module}\n{attribute}\n".encode()


def dotted(module: str, attribute: str) -> bytes:
    """A name that leads through the attributes of a module."""
    return text(module) + text(attribute) + b"\x93"


def frame_pickle(body: bytes) -> bytes:
    return b"\x80\x04" + body + b"."


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + b"(" + b"".join(arguments) + b"tR"


def archive(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as members:
        members.writestr("a/data.pkl", content)
        members.writestr("a/version", "3\n")
    return buffer.getvalue()


@pytest.mark.parametrize("function", CALLABLES)
def test_a_call_of_any_other_function_ends_in_exit_code_4(
    tmp_path: Path, function: str, capsys: Capture
) -> None:
    content = frame_pickle(b"}" + text("weights") + call(name(function), text("x")) + b"s")
    (tmp_path / "m.pkl").write_bytes(content)
    (tmp_path / "m.pt").write_bytes(archive(content))
    for file in ("m.pkl", "m.pt"):
        assert main(["scan", str(tmp_path / file), "--fail-on", "none"]) == 4
        assert f"loading this file would call {function}" in " ".join(
            capsys.readouterr().out.split()
        )
        assert main(["attack", str(tmp_path / file), "--dry-run"]) == 4
        assert "would call" in capsys.readouterr().err


class Calls:
    """An object that calls a function as soon as it is loaded."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, ("x",)


@pytest.mark.parametrize("function", ["tempfile.mkdtemp", "pandas.eval", "tests.foreign.touch"])
def test_a_working_network_with_such_an_attribute_is_refused(
    tmp_path: Path, function: str, capsys: Capture
) -> None:
    model = estimators.fitted()["adam"]
    assert isinstance(model, MLPClassifier)
    model.note_ = Calls(pkgutil.resolve_name(function))
    (tmp_path / "m.pkl").write_bytes(pickle.dumps(model))
    joblib.dump(model, tmp_path / "m.joblib")
    for file in ("m.pkl", "m.joblib"):
        assert main(["scan", str(tmp_path / file)]) == 4
        assert main(["attack", str(tmp_path / file), "--dry-run"]) == 4
        with pytest.raises(UnsafeFileError, match=function):
            open_release(tmp_path / file)
    capsys.readouterr()
    del model.note_
    (tmp_path / "m.pkl").write_bytes(pickle.dumps(model))
    assert main(["attack", str(tmp_path / "m.pkl"), "--dry-run"]) == 0


# Ways to a call that name it otherwise. Each one leaves its mark when it is loaded.


def legacy_torch(content: bytes) -> bytes:
    headers = (0x1950A86A20F9469CFC6C, 1001, {})
    return (
        b"".join(pickle.dumps(header, 2) for header in headers)
        + frame_pickle(content)
        + pickle.dumps([], 2)
    )


def joblib_array(hidden: bytes) -> bytes:
    """An array of bytes, which ``joblib.load`` reads as numbers and ``pickle.load`` as instructions."""
    attributes = {"shape": (len(hidden),), "dtype": np.dtype("u1"), "order": "C"}
    state = pickle.dumps(attributes, 2)[2:-1]
    return name("joblib.numpy_pickle.NumpyArrayWrapper") + b")\x81" + state + b"b" + hidden


TOUCH = name("tests.foreign.touch")
SCIPY = (
    "import pathlib\npathlib.Path({!r}).touch()\ndef _parse_args(self): pass\n_parse_args_stats = "
)
SCIPY += "_parse_args_rvs = _parse_args\n"
WAYS: dict[str, Callable[[str], bytes]] = {
    "a command as the state of a base class": lambda mark: call(
        name("copyreg._reconstructor"), *2 * [name("tests.foreign.Touching")], text(mark)
    ),
    "the constructor of a random generator": lambda mark: call(
        name("numpy.random._pickle.__generator_ctor"), text(mark), TOUCH
    ),
    "a dotted name": lambda mark: call(dotted(__name__, "foreign.touch"), text(mark)),
    "an attribute of a module": lambda mark: call(
        call(name("builtins.getattr"), name(f"{__name__}.foreign"), text("touch")), text(mark)
    ),
    "a state that is set twice": lambda mark: (
        name("argparse.Namespace") + b")\x81}" + text("__setstate__") + TOUCH + b"sb" + text(mark) + b"b"
    ),
    "an attribute named append": lambda mark: (
        name("argparse.Namespace") + b")\x81}" + text("append") + TOUCH + b"sb" + text(mark) + b"a"
    ),
    "an attribute of an ordered dict": lambda mark: (
        name("collections.OrderedDict") + b")R}" + text("__setstate__") + TOUCH + b"sb" + text(mark) + b"b"
    ),
    "a change of a class": lambda mark: (
        name("tests.foreign.Items") + b"N}" + text("__setstate__") + name("tests.foreign.toucher")
        + b"s\x86b0" + name("tests.foreign.Items") + b")\x81" + text(mark) + b"b"
    ),
    "an iterator": lambda mark: call(
        name("builtins.list"), name("builtins.map") + b"(" + TOUCH + b"(" + text(mark) + b"tt\x81"
    ),
    "a text that scipy runs": lambda mark: (
        name("scipy.stats._continuous_distns.norm_gen") + b")\x81}"
        + text("_parse_arg_template") + text(SCIPY.format(mark)) + b"sb"
    ),
    "a file of torch inside": lambda mark: call(
        name("torch.storage._load_from_bytes"),
        pickle.dumps(legacy_torch(call(TOUCH, text(mark))), 4)[2:-1].lstrip(b"\x95")[8:],
    ),
    "numbers of an array": lambda mark: joblib_array(call(TOUCH, text(mark)) + b"."),
    "a tensor rebuilt from its type": lambda mark: call(
        name("torch._tensor._rebuild_from_type_v2"), TOUCH, name("torch.Tensor"), text(mark) + b"\x85", b"N"
    ),
    "an old instruction": lambda mark: b"(" + text(mark) + b"itests.foreign\ntouch\n",
    "another old instruction": lambda mark: b"(" + TOUCH + text(mark) + b"o",
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_hidden_calls_are_found(tmp_path: Path, way: str, capsys: Capture) -> None:
    mark = tmp_path / "called"
    content = frame_pickle(WAYS[way](str(mark)))
    (tmp_path / "m.pkl").write_bytes(content)
    assert main(["scan", str(tmp_path / "m.pkl")]) == 4, capsys.readouterr().out
    assert not mark.exists()
    with pytest.raises(UnsafeFileError):
        open_release(tmp_path / "m.pkl")
    code = f"import pickle; pickle.load(open({str(tmp_path / 'm.pkl')!r}, 'rb'))"
    subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert mark.exists(), "loading it would have shown that the test is right"


LOADER = name("torch.utils.data.dataloader.DataLoader") + b")\x81"
UNUSUAL = {
    "use os.abort": b"}" + text("hook") + name("os.abort") + b"s",
    "call subprocess.Popen": name("subprocess.Popen") + b")\x81",
    "call numpy.memmap": name("numpy.memmap") + b"(" + text("file") + b"t\x81",
    "call builtins.list with": call(name("builtins.list"), LOADER),
    "call builtins.dict with": call(name("builtins.dict"), b"](" + LOADER + b"e"),
    "call builtins.bytearray": call(name("builtins.bytearray"), b"J\xff\xff\xff\x7f"),
    "call _codecs.encode with": call(name("_codecs.encode"), text("a"), text("zip")),
    "call builtins.getattr": call(
        name("builtins.getattr"), name("tests.foreign.Config") + b")\x81", text("path")
    ),
    "call torch.load": call(name("torch.storage._load_from_bytes"), b"C\x02PK"),
}


@pytest.mark.parametrize("deed", UNUSUAL)
def test_unusual_uses_of_known_names_are_found(tmp_path: Path, deed: str) -> None:
    (tmp_path / "m.pkl").write_bytes(frame_pickle(UNUSUAL[deed]))
    assert any(findings.startswith(deed) for findings in read_release(tmp_path / "m.pkl").unsafe)


def test_strip_never_advises_to_load_a_file_that_runs_code(tmp_path: Path, capsys: Capture) -> None:
    out = ["--out", str(tmp_path / "clean.pt")]
    (tmp_path / "m.pkl").write_bytes(pickle.dumps([1.0, Calls(foreign.touch)]))
    assert main(["strip", str(tmp_path / "m.pkl"), *out]) == 4
    captured = capsys.readouterr()
    assert "pickle.load" not in captured.out + captured.err
    assert "joblib.load" not in captured.out + captured.err
    weights = torch.nn.Linear(4, 1).state_dict()
    torch.save({"model": weights, "note": Calls(foreign.touch)}, tmp_path / "m.pt")
    assert main(["strip", str(tmp_path / "m.pt"), *out]) == 0
    assert "loading this file would call tests.foreign.touch" in capsys.readouterr().out
    clean = torch.load(tmp_path / "clean.pt", weights_only=True)
    assert all(torch.equal(clean[key], tensor) for key, tensor in weights.items())


@pytest.mark.parametrize("opcode", [b"\x82\x01", b"\x83\x01\x00", b"Pid\n"])
def test_what_lies_outside_of_the_file_is_not_read(
    tmp_path: Path, opcode: bytes, capsys: Capture
) -> None:
    (tmp_path / "m.pkl").write_bytes(frame_pickle(opcode))
    assert main(["scan", str(tmp_path / "m.pkl")]) == 2
    assert "outside of the file" in capsys.readouterr().err


# What passes


def test_classes_of_a_project_are_reported_and_pass(tmp_path: Path, capsys: Capture) -> None:
    items = foreign.Items([1, 2])
    for protocol in range(6):
        (tmp_path / "m.pkl").write_bytes(pickle.dumps([foreign.Config("a"), items], protocol))
        assert main(["scan", str(tmp_path / "m.pkl")]) == 0
        output = " ".join(capsys.readouterr().out.split())
        assert "imports tests.foreign.Config, tests.foreign.Items and runs" in output
        assert main(["scan", str(tmp_path / "m.pkl"), "--fail-on", "classes"]) == 1
        capsys.readouterr()


def fitted(cls: type) -> Any:
    """An estimator fitted to what it takes, None if nothing here fits it."""
    x = np.abs(np.random.default_rng(0).normal(size=(30, 4)))
    y = (x[:, 0] > 0.6).astype(int)
    inner = estimators.LogisticRegression()
    for arguments in ((), (inner,), ([("a", inner)],)):
        for fit_arguments in (
            (x, y),
            (x,),
            (x, np.c_[y, 1 - y]),
            (y,),
            (["a b", "c d"] * 15, y),
            (x[:, 0], y),
        ):
            try:
                return cls(*arguments).fit(*fit_arguments)
            except Exception:  # noqa: BLE001 - it takes something else
                continue
    return None


def test_every_estimator_of_scikit_learn_scans_without_code(tmp_path: Path) -> None:
    count = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for title, cls in all_estimators():
            if (model := fitted(cls)) is not None:
                count += 1
                for protocol in (2, 4):
                    path = tmp_path / f"{title}-{protocol}.pkl"
                    path.write_bytes(pickle.dumps(model, protocol))
                joblib.dump(model, tmp_path / f"{title}.joblib")
    scan = rs.scan(tmp_path)
    assert count > 150
    assert len(scan.files) == 3 * count
    assert not scan.unread
    assert [f.what for f in scan.findings if f.kind in ("code", "classes")] == []


def test_networks_optimizers_and_tensors_scan_without_code(tmp_path: Path) -> None:
    layers = [torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.LSTM(4, 4)]
    model = torch.nn.Sequential(*layers, torch.nn.TransformerEncoderLayer(4, 2))
    optimizer = torch.optim.AdamW(model[0].parameters())
    model[0](torch.ones(2, 4)).sum().backward()
    optimizer.step()
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    values = {
        "state": {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        "whole": [model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)],
        "tensors": [quantized, torch.eye(2).to_sparse(), torch.nn.Buffer(torch.ones(2))],
        "arguments": argparse.Namespace(device=torch.device("cpu"), path=Path("a/b")),
    }
    for title, value in values.items():
        for zipped in (True, False):
            torch.save(value, tmp_path / "m.pt", _use_new_zipfile_serialization=zipped)
            release = read_release(tmp_path / "m.pt")
            assert (release.unsafe, release.foreign) == ((), ()), title
        for protocol in (2, 4, 5):
            (tmp_path / "m.pkl").write_bytes(pickle.dumps(value, protocol))
            release = read_release(tmp_path / "m.pkl")
            assert (release.unsafe, release.foreign) == ((), ()), title


def test_tensors_in_a_plain_pickle_are_read(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    (tmp_path / "m.pkl").write_bytes(pickle.dumps({"w": tensor, "v": tensor.T.double()}))
    content = read_release(tmp_path / "m.pkl").content
    assert torch.equal(content["w"].tensor(), tensor)
    assert torch.equal(content["v"].tensor(), tensor.T.double())


@pytest.mark.parametrize(
    ("module", "attribute", "kind"),
    [
        ("numpy", "dtype", HARMLESS),
        ("sklearn.svm._classes", "SVC", KNOWN),
        ("sklearn.base", "warnings.sys", UNLISTED),
        ("sklearn.externals.array_api_extra", "x", UNLISTED),
        ("torch.utils.data.datapipes.datapipe", "_IterDataPipeSerializationWrapper", UNLISTED),
        ("mypackage.models", "Net", FOREIGN),
        ("mypackage.models", "Net.Config", FOREIGN),
        ("__main__", "Net", FOREIGN),
    ],
)
def test_names_are_judged(module: str, attribute: str, kind: str) -> None:
    assert classify_name(module, attribute) == kind
