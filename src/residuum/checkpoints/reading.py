"""Checkpoints from files, state dicts and live networks, and back to files that anyone can read.

====================  ==================================================================
a file that begins    is read as
====================  ==================================================================
8 bytes, then ``{``   safetensors, header checked first
``PK\\x03\\x04``        torch.save's zip archive, claims checked first
``\\x80``              torch.save's legacy format, likewise
====================  ==================================================================

Beside the weights residuum writes plain strings that any safetensors reader can show; FORMAT_KEY marks
a file as ours. Files come from strangers, who may be hostile: every claim is checked before anything is
believed. Safetensors is 8 bytes length n (little endian), n bytes JSON {name: {dtype, shape,
data_offsets}}, then the tensors' bytes without gaps; every entry must agree with the size of the file before
the library maps a byte. Of files of ``torch.save`` the checks allocate nothing that the file does not hold:
members of the archive are stored, not compressed, and do not overlap; the pickle is run over inert values
(:mod:`.pickles`); each storage must be there in full. Only then is ``torch.load(weights_only=True)`` called.
What was loaded becomes a clean state dict: unwrapped, dense, real, finite, owned.

A file of weights has no ``forward``. Where no architecture string can say it, the code that defines the
network can, ``package.module:factory``; importing it runs it, so whoever asks must say that it is trusted.
"""

from __future__ import annotations

import copy
import functools
import importlib
import io
import json
import math
import os
import pickle
import re
import struct
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from residuum.checkpoints.pickles import (
    EXPORT,
    LEGACY_MAGIC,
    MAX_DIMENSIONS,
    MAX_PICKLE_BYTES,
    Machine,
)
from residuum.errors import ArchitectureError, CheckpointError, InputError, UnsafeFileError
from residuum.networks import (
    KINDS,
    Architecture,
    kind_of,
    match_architecture,
    recognise,
    refuse_by_name,
    same_function,
)
from residuum.networks.kinds import ASSUMED_RELU, ASSUMED_STRIDES
from residuum.networks.probing import as_rows, probe, unwrapped
from residuum.records import TASKS, Checkpoint, write_atomic
from residuum.records.inputs import MAX_GROWTH, is_size, open_zip
from residuum.records.rundir import sha256

DEFAULT_MAX_BYTES = 8 << 30  # of a file: what a machine with 16 GB can hold twice
RUN_FILE = "model.safetensors"
FORMAT_KEY, FORMAT = "residuum_format", "1"
# Of what a file says of itself: characters, texts and sizes that no network of ours comes near.
MAX_ARCHITECTURE, MAX_TEXT, MAX_TEXTS, MAX_SIZES = 256, 200, 10_000, 8
# Sentences out of a file's metadata end up in verdicts, so a reader must see whose sentences they are.
METADATA_SAYS = "The file's metadata says (not checked): "
MAX_STATEMENTS = 10
KEPT = "a {} is kept as given: its forward is run, not read, so that only what needs no structure applies"
NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
MAX_HEADER_BYTES = 4 << 20  # 40 000 tensors; as empty JSON lists it takes 90 MB
NUMBERS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NUMBERS |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64}
NUMBERS |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8}
NUMBERS |= {"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8}
NUMBERS |= {"BOOL": torch.bool}
AGAIN = "Copy or save the file again."
# What torch raises on damaged files.
UNREADABLE = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
ENDED = (EOFError, OSError, OverflowError, struct.error)
ZIP_MAGIC = b"PK\x03\x04"
PICKLE_MAGIC = b"\x80"
LEGACY_PROTOCOL = 1001
MEMBER = re.compile(r"(?P<archive>[^/\\\x00]+)/(?!.*\.\.)(?P<record>[\w./-]+)")
WRAPPERS = ("state_dict", "model_state_dict", "model", "net", "network")
PREFIXES = ("module.", "_orig_mod.")  # DataParallel, torch.compile
DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
MAX_DEPTH = 8  # of state dicts in each other
MAX_NAME = 256  # characters
MAX_TENSORS = 1000  # 500 layers; what recognises them looks at pairs
MAX_SHARING = 4  # tied weights appear under several names, a memory bomb under thousands


def load_checkpoint(
    path: str | Path,
    arch: str | None = None,
    *,
    input_shape: tuple[int, ...] | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Checkpoint:
    """Read the weights in a file, or in ``model.safetensors`` of a run directory.

    arch: architecture string; without it the file's own metadata decide, then the shapes of the
        tensors.
    input_shape: shape of one sample.
    max_bytes: larger files and claims are refused.
    Nothing in the file is ever executed.
    """
    try:
        content, metadata, size = _read(locate(path), max_bytes)
    except (UnsafeFileError, CheckpointError) as problem:
        from residuum.checkpoints.estimators import network_in  # upon this file

        try:
            network = network_in(locate(path))
        except UnsafeFileError as unsafe:
            raise (problem if isinstance(problem, UnsafeFileError) else unsafe) from problem
        if network is None:
            raise
        return (
            network if arch is None else _checkpoint(dict(network.theta), NOTHING_SAID, arch=arch)
        )
    return _checkpoint(content, decode_metadata(metadata), size, arch, input_shape)


def as_checkpoint(
    model: Checkpoint | nn.Module | Mapping[str, Any] | str | Path | Any,
    arch: str | None = None,
    shape: tuple[int, ...] | None = None,
) -> Checkpoint:
    """A checkpoint as it is, of a live network, of a state dict, of an estimator, or read from a file.

    shape: of one sample, for a live network that is kept as given and does not show it.
    """
    if isinstance(model, Checkpoint):
        return model
    if isinstance(model, nn.Module):
        return checkpoint_from_module(model, shape_if_kept=shape)
    if isinstance(model, str | Path):
        return load_checkpoint(model, arch)
    if isinstance(model, Mapping):
        return _checkpoint(dict(model), NOTHING_SAID, arch=arch)
    if hasattr(model, "coefs_") and hasattr(model, "intercepts_"):
        from residuum.checkpoints.estimators import network_of  # upon this file

        return network_of(model)
    raise CheckpointError(
        "A network is a Checkpoint, a module, its state_dict(), a fitted MLPClassifier or MLPRegressor "
        f"of scikit-learn or the path of a file; got {type(model).__name__}.",
        "Give model.state_dict().",
    )


def save_checkpoint(checkpoint: Checkpoint, path: str | Path) -> Path:
    """Write a checkpoint as safetensors, atomically; equal checkpoints give equal bytes."""
    tensors = {name: t.detach().cpu().clone().contiguous() for name, t in checkpoint.theta.items()}
    return write_atomic(path, sort_header(save(tensors, encode_metadata(checkpoint))))


def locate(path: str | Path) -> Path:
    """The file of weights: a file, or that of a directory of ``residuum train``."""
    path = Path(path)
    file = path / RUN_FILE if path.is_dir() else path
    if not file.is_file():
        what = f"holds no {RUN_FILE}" if path.is_dir() else "does not exist"
        what = "is not a regular file" if file.exists() else what
        raise CheckpointError(
            f"A checkpoint is a file or a run directory; {str(path)!r} {what}.", "Check the path."
        )
    return file


def weights_hash(path: str | Path) -> str:
    """What tells two checkpoints apart."""
    return sha256(locate(path))


def _read(path: Path, max_bytes: int) -> tuple[Any, dict[str, str], int]:
    """What the file holds, its metadata, its size in bytes."""
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > max_bytes:
                raise UnsafeFileError(
                    f"A checkpoint may have {max_bytes} bytes; {str(path)!r} has {size}.",
                    "Raise max_bytes for a large model.",
                )
            head = stream.read(16)
            if head[8:9] == b"{":  # the JSON object behind its length
                return *read_safetensors(path, stream, size, max_bytes), size
            if head.startswith(ZIP_MAGIC):
                return read_zip(stream, size), {}, size
            if head.startswith(PICKLE_MAGIC):
                return read_legacy(stream, size, max_bytes), {}, size
    except OSError as problem:
        reason = problem.strerror or type(problem).__name__
        raise CheckpointError(
            f"A checkpoint must be readable; {str(path)!r} is not ({reason}).", "Check the file."
        ) from problem
    what = "is neither" if size else "is empty"
    if path.suffix == ".onnx":
        what = "is an ONNX graph"
    raise CheckpointError(
        f"A checkpoint is a safetensors file or one of torch.save; {str(path)!r} {what}.",
        "Save the weights with torch.save(model.state_dict(), path), or as safetensors: "
        "safetensors.numpy.save_file({name: array, ...}, path).",
    )


def _checkpoint(
    content: Any,
    known: Checkpoint,
    size: int | None = None,
    arch: str | None = None,
    input_shape: tuple[int, ...] | None = None,
) -> Checkpoint:
    """``content``: what a file held, of ``size`` bytes, or a dict that is in memory (None).

    known: what the file says of itself.
    """
    state, source, notes = clean_state(find_state(content), size)
    network, names, guesses = _identify(state, arch, known)
    shape = known.input_shape if input_shape is None else input_shape
    return known.replace(
        theta={ours: state[theirs] for ours, theirs in names.items()},
        arch=str(network),
        input_shape=fitting_shape(network, shape),
        assumptions=(*guesses, *notes),
        source_names={ours: source[theirs] for ours, theirs in names.items()},
    )


def _identify(
    state: dict[str, Tensor], arch: str | None, known: Checkpoint
) -> tuple[Architecture, dict[str, str], list[str]]:
    """The network, for each of its parameters (in its order) the name in ``state``, the guesses."""
    text = arch if arch is not None else known.arch
    try:
        with torch.device("meta"):  # a claimed architecture must not allocate its size
            said = Architecture.parse(text) if text else None
            network, names = (said, match_architecture(state, said)) if said else recognise(state)
            order = list(network.build().state_dict())
    except (RuntimeError, ValueError, OverflowError, TypeError) as problem:
        raise ArchitectureError(
            f"An architecture must be one that can be built; got {text[:80]!r}.",
            "Example: --arch mlp:784-1000-1000-1.",
        ) from problem
    notes = known.assumptions if known.arch else KINDS[network.kind].assumed(network)
    guesses = [note for note in notes if note != ASSUMED_RELU or "activation=" not in text]
    return network, {name: names[name] for name in order}, guesses


def sort_header(content: bytes) -> bytes:
    """The same file with its header's keys sorted: the library orders metadata at random."""
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(
        json.loads(content[8:start]), sort_keys=True, separators=(",", ":"), ensure_ascii=False
    ).encode()
    header += b" " * (-len(header) % 8)  # tensors stay aligned
    return len(header).to_bytes(8, "little") + header + content[start:]


def encode_metadata(checkpoint: Checkpoint) -> dict[str, str]:
    """Metadata of a safetensors file; ``format`` is what other libraries look for."""
    metadata = {"format": "pt", FORMAT_KEY: FORMAT, "architecture": checkpoint.arch}
    metadata |= {key: json.dumps(getattr(checkpoint, key)) for key in ("input_shape", "labels")}
    statements = [text.removeprefix(METADATA_SAYS) for text in checkpoint.assumptions]
    metadata |= {"assumptions": json.dumps(statements)}
    metadata |= {"task": checkpoint.task}
    decode_metadata(metadata)  # never write what cannot be read back
    return metadata


def decode_metadata(metadata: dict[str, str]) -> Checkpoint:
    """What a file says of itself, without weights, or which value is not what it must be."""
    if FORMAT_KEY not in metadata:
        return NOTHING_SAID
    if metadata[FORMAT_KEY] != FORMAT:
        raise CheckpointError(
            f"This version reads checkpoint format {FORMAT}; got {metadata[FORMAT_KEY][:20]!r}.",
            "Upgrade residuum.",
        )
    found: dict[str, Any] = {key: metadata.get(key, "") for key in RULES}
    for key, (most, allowed, rule) in RULES.items():
        if key not in ("architecture", "task"):
            found[key] = _list(found[key])
        value = found[key]
        if value is None or len(value) > most or not allowed(value):
            raise CheckpointError(
                f"The checkpoint's {key!r} must be {rule}; got {metadata.get(key, '')[:40]!r}.",
                "Save it again with save_checkpoint, or its tensors without metadata.",
            )
    found["assumptions"] = _attributed(found["assumptions"])
    return Checkpoint({}, found.pop("architecture"), **found)


def _attributed(statements: tuple[str, ...]) -> tuple[str, ...]:
    """Mark sentences of a file as its own, except those that residuum itself words, and keep ten."""
    texts = [
        text if text in (ASSUMED_RELU, ASSUMED_STRIDES) else f"{METADATA_SAYS}{text}"
        for text in statements[:MAX_STATEMENTS]
    ]
    if (dropped := len(statements) - MAX_STATEMENTS) > 0:
        texts.append(
            f"{METADATA_SAYS}{dropped} more sentences, which are left out (at most "
            f"{MAX_STATEMENTS} are shown)"
        )
    return tuple(texts)


def _list(text: str) -> tuple[Any, ...] | None:
    """What a JSON list holds, nothing for no text; None for anything else."""
    try:
        found = json.loads(text or "[]")
    except (ValueError, RecursionError):
        return None
    return tuple(found) if isinstance(found, list) else None


def _are_sizes(values: tuple[Any, ...]) -> bool:
    return all(type(n) is int and 0 < n < 2**31 for n in values)


def _are_texts(values: tuple[Any, ...]) -> bool:
    return all(isinstance(v, str) and len(v) <= MAX_TEXT and v.isprintable() for v in values)


NOTHING_SAID = Checkpoint({}, "")
TEXTS = (MAX_TEXTS, _are_texts, f"up to {MAX_TEXTS} printable texts of up to {MAX_TEXT} characters")
RULES: dict[str, tuple[int, Callable[[Any], bool], str]] = {  # longest, what it holds, in words
    "architecture": (MAX_ARCHITECTURE, bool, f"a text of 1 to {MAX_ARCHITECTURE} characters"),
    "input_shape": (MAX_SIZES, _are_sizes, f"up to {MAX_SIZES} positive whole numbers"),
    "labels": TEXTS,
    "task": (MAX_TEXT, ("", *TASKS).__contains__, f"one of {', '.join(TASKS)}, or empty"),
    "assumptions": TEXTS,
}


def build_model(checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> nn.Module:
    """The network of a checkpoint with its weights, in evaluation mode.

    dtype: the checkpoint's own when None. The parameters are copies; no random number is drawn.
    """
    model, kept = copy.deepcopy(checkpoint.module), checkpoint.module is not None
    if model is None:
        with torch.device("meta"):
            model = Architecture.parse(checkpoint.arch).build()
    theta = {name: t.to(dtype or t.dtype, copy=True) for name, t in checkpoint.theta.items()}
    own = dict(model.named_parameters()) if kept else model.state_dict()
    if {name: t.shape for name, t in own.items()} != {name: t.shape for name, t in theta.items()}:
        raise ArchitectureError(
            f"The weights must fit {checkpoint.arch}; they are "
            f"{', '.join(f'{name} {list(t.shape)}' for name, t in list(theta.items())[:6])}.",
            "Read the file with load_checkpoint, which matches the names.",
        )
    if kept:
        model.to(next(iter(theta.values())).dtype)  # buffers too
        theta = {**model.state_dict(), **theta}
    model.load_state_dict(theta, strict=True, assign=not kept)
    return model.eval()


def checkpoint_from_module(
    model: nn.Module,
    *,
    input_shape: tuple[int, ...] = (),
    labels: tuple[str, ...] = (),
    task: str = "",
    shape_if_kept: tuple[int, ...] | None = None,
) -> Checkpoint:
    """A checkpoint of a live network, its weights copied to the CPU.

    A network of a class in ``KINDS``, and any that computes what one of them does, becomes what its
    string describes. Any other module is kept as given and runs in evaluation mode; the shape of one
    sample must be said unless its first layer is Linear and takes the input as it is.
    """
    model, shown = unwrapped(model), tuple(input_shape or shape_if_kept or ())
    try:
        found = _describe(model, shown)
    except (ArchitectureError, CheckpointError):  # no string describes these biases or shapes
        found = None
    if found is None:
        kept = _keep(model, shown)
        return kept.replace(labels=tuple(labels), task=task)
    arch, state = found
    theta, _, notes = clean_state(state)
    own_names = {id(t): name for name, t in model.state_dict(keep_vars=True).items()}
    source = {name: own_names[id(t)] for name, t in state.items()}
    shape = fitting_shape(arch, input_shape)
    return Checkpoint(theta, str(arch), shape, tuple(labels), task, tuple(notes), source)


def fitting_shape(arch: Architecture, shape: tuple[int, ...]) -> tuple[int, ...]:
    """``shape`` of one sample, known to fit; () becomes the image shape of a convnet."""
    shape = tuple(shape) or arch.image_shape or ()
    if shape and (min(shape) < 1 or math.prod(shape) != arch.inputs):
        raise ArchitectureError(
            f"An input of {arch} has {arch.inputs} values; got the shape {shape}.",
            "Correct the input shape, or leave it out.",
        )
    return shape


def _describe(
    model: nn.Module, shape: tuple[int, ...]
) -> tuple[Architecture, dict[str, Tensor]] | None:
    """The architecture, and the live parameters under its names in its order; None without any."""
    kind = kind_of(model)
    arch = None if kind is None else kind.describe(model)
    if arch is not None:
        return arch, model.state_dict(keep_vars=True)
    return same_function(model, shape)


def _keep(model: nn.Module, shape: tuple[int, ...]) -> Checkpoint:
    """A network of any class, which takes samples of ``shape``, or of its first Linear layer."""
    name = type(model).__name__
    theta = {n: p.detach() for n, p in model.named_parameters()}
    if not any(p.ndim > 1 for p in theta.values()):
        raise ArchitectureError(
            f"A network needs a layer with weights; this {name} has none.", "Check the module."
        )
    if bad := [n for n, p in theta.items() if not (p.is_floating_point() and p.isfinite().all())]:
        raise CheckpointError(
            f"Weights must be finite real numbers; {bad[0]!r} of this {name} are not.",
            "Use a network whose training did not diverge.",
        )
    double = any(p.dtype == torch.float64 for p in theta.values())
    model = copy.deepcopy(model).cpu().to(torch.float64 if double else torch.float32).eval()
    first = next(part for part in model.modules() if list(part.parameters(recurse=False)))
    if not shape and isinstance(first, nn.Linear):
        shape = (first.in_features,)
    if not shape:
        raise ArchitectureError(
            f"The shape of one sample must be said for a network that is kept as given; this {name} does "
            "not show it.",
            "Grant it: Knowledge(shape=(3, 32, 32)), or give the data.",
        )
    try:
        found = probe(model, shape)
    except ArchitectureError:
        flat = (math.prod(shape),)  # images may be given to a network that takes them laid flat
        if shape == flat or not isinstance(first, nn.Linear) or (first.in_features,) != flat:
            raise
        shape, found = flat, probe(model, flat)
    model.register_forward_pre_hook(functools.partial(_as_samples, shape))
    if found.flat:
        model.register_forward_hook(as_rows)
    arch = Architecture("module", (found.outputs,), shape, {"class": name[:80]})
    theta = {n: p.detach().clone() for n, p in model.named_parameters()}
    notes, names = (KEPT.format(name[:40]), *found.notes), {n: n for n in theta}
    return Checkpoint(theta, str(arch), shape, assumptions=notes, source_names=names, module=model)


def _as_samples(shape: tuple[int, ...], _: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """Before the forward of a kept network: flat samples get their shape."""
    x, *others = inputs
    return (x.reshape(len(x), *shape), *others)


def load_with_code(
    path: str | Path, factory: str, shape: tuple[int, ...] | None, *, trusted: bool
) -> Checkpoint:
    """The weights in a file, in the network that ``factory`` makes.

    factory: ``package.module:name`` of a class or function that needs no arguments, or of a
        network, found as Python finds modules, from the working folder first.
    shape: of one sample.
    """
    network = made(factory, trusted=trusted)
    network.load_state_dict(_fitting(path, network))
    return checkpoint_from_module(network, shape_if_kept=shape)


def start_of(path: str | Path, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Initial weights of a network that is kept as given, from a file of its state dict."""
    assert checkpoint.module is not None
    network = copy.deepcopy(checkpoint.module)
    network.load_state_dict(_fitting(path, network))
    return {name: p.detach().cpu() for name, p in network.named_parameters()}


def made(factory: str, *, trusted: bool) -> nn.Module:
    """What the factory makes."""
    if not NAME.fullmatch(factory):
        raise InputError(
            f"--model names code as package.module:factory; got {factory[:80]!r}.",
            "Example: --model mynet.models:build --trust-code.",
        )
    if not trusted:
        raise UnsafeFileError(
            f"--model imports and runs the code of {factory!r}, and nobody said that it is trusted.",
            "Read it, then add --trust-code.",
        )
    place, _, name = factory.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(place)
        for part in name.split("."):
            found = getattr(found, part)
        network = found if isinstance(found, nn.Module) else found()
    except Exception as problem:  # code of somebody's own may raise anything
        raise InputError(
            f"--model {factory} must make a network; it says: {type(problem).__name__}: "
            f"{(str(problem) or 'nothing').splitlines()[0][:200]}",
            "Name a function that needs no arguments and returns the network.",
        ) from problem
    finally:
        sys.path.remove(str(Path.cwd()))
    if not isinstance(network, nn.Module):
        raise InputError(
            f"--model {factory} must make a torch.nn.Module; it made a {type(network).__name__}.",
            "Return the network itself.",
        )
    return network


def _fitting(path: str | Path, network: nn.Module) -> dict[str, Tensor]:
    """The file's tensors under the network's names, buffers too, or what does not fit."""
    state = find_state(_read(locate(path), DEFAULT_MAX_BYTES)[0])
    short = _strip_prefixes(list(state))
    own = {short[name]: t for name, t in state.items()}
    wanted = network.state_dict()
    missing, beyond = sorted(wanted.keys() - own.keys()), sorted(own.keys() - wanted.keys())
    both = sorted(wanted.keys() & own.keys())
    other = [name for name in both if own[name].shape != wanted[name].shape]
    faults = {"lack": missing, "hold besides": beyond, "have another shape of": other}
    for what, names in faults.items():
        if names:
            raise CheckpointError(
                f"The weights must be those of the network that --model makes; they {what} "
                f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''}.",
                "Name the factory with the settings that the network was trained with.",
            )
    return own


def read_safetensors(
    path: Path, stream: BinaryIO, size: int, max_bytes: int
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of the file of ``size`` bytes at ``path``, open as ``stream``."""
    header, metadata, _ = checked_header(stream, size, max_bytes)
    try:
        with safe_open(str(path), framework="pt", device="cpu") as archive:
            return {name: archive.get_tensor(name) for name in header}, metadata
    except (SafetensorError, RuntimeError, ValueError, TypeError, OSError) as problem:
        _damaged(f"the library could not read it: {type(problem).__name__}", problem)


def checked_header(
    stream: BinaryIO, size: int, max_bytes: int
) -> tuple[dict[str, Any], dict[str, str], int]:
    """Entries by tensor, known to fill the file, the metadata, and where the tensors' bytes begin."""
    header, start = _parse(stream, size)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _damaged("its metadata are not strings")
    end = 0
    for begin, over, claimed, name in sorted(_span(*item) for item in header.items()):
        if begin != end or claimed != over - begin:
            raise UnsafeFileError(
                f"A tensor must fill the bytes its header gives it; {name[:80]!r} claims {claimed} "
                f"bytes and has {max(over - begin, 0)} from {begin} (free from {end}).",
                AGAIN,
            )
        end = over
    _bound(end, max_bytes)
    if start + end != size:
        _damaged(f"its header describes {start + end} bytes and it has {size}")
    return header, metadata, start


def _parse(stream: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """The header, its names known to be distinct, and where the tensors' bytes begin."""
    stream.seek(0)
    length = int.from_bytes(stream.read(8), "little")
    if 8 + length > size:
        _damaged(f"it has {size} bytes and its header claims {length}")
    if length > MAX_HEADER_BYTES:
        raise UnsafeFileError(
            f"A safetensors header may have {MAX_HEADER_BYTES} bytes; this one has {length}.",
            "Save fewer tensors and less metadata.",
        )
    try:
        header = json.loads(stream.read(length), object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as problem:
        _damaged(f"its header is not JSON: {type(problem).__name__}", problem)
    if not isinstance(header, dict):
        _damaged("its header is not a JSON object")
    return header, 8 + length


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _span(name: str, entry: Any) -> tuple[int, int, int, str]:
    """Where a tensor's bytes begin and end, how many its shape claims, and its name."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end]}:
            sizes = len(shape) <= MAX_DIMENSIONS and all(map(is_size, (*shape, begin, end)))
            if dtype in NUMBERS and sizes:
                return begin, end, math.prod(shape) * NUMBERS[dtype].itemsize, name
    _damaged(f"tensor {name[:80]!r} has no known dtype, shape or pair of offsets")


def _bound(claimed: int, max_bytes: int) -> None:
    if claimed > max_bytes:
        raise UnsafeFileError(
            f"Weights may take {max_bytes} bytes; this file claims {claimed}.",
            "Raise max_bytes for a large model.",
        )


def _damaged(why: str, cause: BaseException | None = None) -> NoReturn:
    raise CheckpointError(f"A safetensors file must be complete; {why}.", AGAIN) from cause


def read_zip(stream: BinaryIO, size: int) -> Any:
    """The object in a zipped torch file of ``size`` bytes.

    Three readings: members against their checksums, which torch leaves out; the pickle by a machine
    that knows a few words, to learn every storage it claims; torch itself with weights_only, once all
    claims are met.
    """
    try:
        with open_zip(stream) as archive:
            records = _check_members(archive, size)
            if "data.pkl" not in records or records["data.pkl"].file_size > MAX_PICKLE_BYTES:
                raise CheckpointError(
                    f"A torch archive needs a data.pkl of at most {MAX_PICKLE_BYTES} bytes; "
                    f"this archive holds {sorted(records)[:5]}.",
                    EXPORT,
                )
            if damaged := archive.testzip():  # torch does not look
                raise CheckpointError(
                    f"The members of an archive must fit their checksums; {damaged!r} does not.",
                    "Copy or save the file again, not under torch's set_crc32_options(False).",
                )
            content = archive.read(records["data.pkl"])
    except (zipfile.BadZipFile, RuntimeError, EOFError, ValueError, struct.error) as problem:
        raise CheckpointError(
            f"The file must be a complete zip archive; it is damaged ({problem}).", AGAIN
        ) from problem
    machine = Machine(len(content))
    machine.run(io.BytesIO(content))
    for storage in machine.storages.values():
        record = records.get(f"data/{storage.key}")
        held = record.file_size if record else 0
        if storage.nbytes != held:
            raise UnsafeFileError(
                f"A storage must be in the file in full; {storage.key[:80]!r} claims "
                f"{storage.nbytes} bytes and {held} are there.",
                AGAIN,
            )
    stream.seek(0)
    return _load(stream)


def read_legacy(stream: BinaryIO, size: int, max_bytes: int) -> Any:
    """The object in a torch file of the time before zip: five pickles, then the storages.

    The storages follow in the order of the last pickle, each with its length before it; all must be
    there in full before torch is let at the file.
    """
    stream.seek(0)
    head = io.BytesIO(stream.read(MAX_PICKLE_BYTES))
    machine = Machine(min(size, MAX_PICKLE_BYTES))
    if machine.run(head) != LEGACY_MAGIC or machine.run(head) != LEGACY_PROTOCOL:
        raise CheckpointError("A pickle must come from torch.save; this one does not.", EXPORT)
    machine.run(head)  # what the writing machine was like
    machine.run(head)
    keys = machine.run(head)
    listed = isinstance(keys, list) and all(isinstance(key, str) for key in keys)
    if not listed or sorted(keys) != sorted(machine.storages):
        raise CheckpointError("The file must list the storages it refers to; it does not.", AGAIN)
    _bound(sum(storage.nbytes for storage in machine.storages.values()), max_bytes)
    stream.seek(head.tell())
    for key in keys:
        storage = machine.storages[key]
        numel = int.from_bytes(stream.read(8), "little")
        if numel != storage.numel or stream.tell() + storage.nbytes > size:
            said = f"Storage {key!r} must hold {storage.nbytes} bytes; the file ends before."
            raise CheckpointError(said, AGAIN)
        stream.seek(storage.nbytes, io.SEEK_CUR)
    stream.seek(0)
    return _load(io.BytesIO(stream.read()))  # torch would first parse an open file as a tar


def _check_members(archive: zipfile.ZipFile, size: int) -> dict[str, zipfile.ZipInfo]:
    """Members by record name; refuses compression, overlaps and names that two readers differ on."""
    members = archive.infolist()
    refuse_other_archives([member.filename for member in members])
    if any(member.filename.endswith("/constants.pkl") for member in members):
        raise CheckpointError(
            "A checkpoint holds weights; this is a TorchScript program.",
            "If you trust it, save its weights alone: "
            "torch.save(torch.jit.load(path).state_dict(), 'weights.pt').",
        )
    total = sum(member.file_size for member in members)
    is_packed = any(m.compress_type != zipfile.ZIP_STORED for m in members)
    if total > size or is_packed:
        is_bomb = total > MAX_GROWTH * size or not is_packed  # unpacked members must not overlap
        raise (UnsafeFileError if is_bomb else CheckpointError)(
            f"A torch archive stores its members uncompressed and apart; this one of {size} bytes "
            f"claims to unpack to {total}.",
            "Write it with torch.save.",
        )
    names = [MEMBER.fullmatch(member.filename) for member in members]
    folders = {match["archive"] for match in names if match}
    distinct = {member.filename.casefold() for member in members}
    if None in names or len(folders) != 1 or len(distinct) != len(members):
        rule = "A torch archive has one folder of distinct plain names"
        raise UnsafeFileError(f"{rule}; this one has duplicate or odd names.", EXPORT)
    return {match["record"]: m for match, m in zip(names, members, strict=True) if match}


def refuse_other_archives(names: list[str]) -> None:
    """Refuse zip archives that other libraries write, each with what to do.

    Raises:
        CheckpointError: if the archive is not one of ``torch.save`` or TorchScript.
    """
    if any(name.endswith("/data.pkl") for name in names):
        return
    first = ", ".join(name[:40] for name in sorted(names)[:4])
    what, remedy = f"a zip archive with {first or 'nothing in it'}", EXPORT
    if names and all(name.endswith(".npy") for name in names):
        what = f"an archive of arrays (.npz, with {first})"
        remedy = (
            "Pass samples with --data. Save weights as safetensors: "
            "safetensors.numpy.save_file(dict(numpy.load(path)), 'model.safetensors')."
        )
    elif "model.weights.h5" in names:
        what = "a Keras model (.keras)"
        remedy = (
            "Save its weights as safetensors: safetensors.numpy.save_file({w.path: w.numpy() for w in "
            "model.weights}, 'model.safetensors')."
        )
    elif "schema.json" in names:
        what = "an archive of skops"
        remedy = "If you trust it, load it with skops.io.load and save it with joblib.dump."
    raise CheckpointError(f"residuum reads zip archives of torch.save; this is {what}.", remedy)


def _load(stream: BinaryIO) -> Any:
    """torch's own reader with weights_only, after the file was checked; its many errors become two of
    ours.
    """
    try:
        return torch.load(stream, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as problem:
        rule = "A checkpoint must load with weights_only=True; torch refused this one."
        raise CheckpointError(rule, EXPORT) from problem
    except (*UNREADABLE, *ENDED) as problem:
        said = f"torch must be able to read the file; it could not ({type(problem).__name__})."
        raise CheckpointError(said, AGAIN) from problem


def find_state(content: Any) -> dict[str, Tensor]:
    """The state dict in a loaded object: itself, or under one of the names in ``WRAPPERS``."""
    for _ in range(MAX_DEPTH):
        if not isinstance(content, dict):
            break
        # By the class: a file can give the object an attribute named ``items``.
        wrapper = next((k for k in WRAPPERS if isinstance(dict.get(content, k), dict)), None)
        if wrapper is None:
            return {name: t for name, t in dict.items(content) if isinstance(t, Tensor)}
        content = content[wrapper]
    held = type(content).__name__
    raise CheckpointError(
        f"A checkpoint must hold a dict of tensors; this one holds a {held}.", EXPORT
    )


def clean_state(
    state: dict[str, Tensor], held: int | None = None
) -> tuple[dict[str, Tensor], dict[str, str], list[str]]:
    """Checked float tensors of one dtype, the file's name for each, and what was converted.

    held: bytes of the file, which bounds what its tensors may take together; None for tensors that
    are in memory already.
    """
    if not state:
        raise CheckpointError("A checkpoint must hold tensors; this one has none.", EXPORT)
    for name in state:
        if not isinstance(name, str) or len(name) > MAX_NAME or not name.isprintable():
            raise CheckpointError(
                f"Tensors need printable names of at most {MAX_NAME} characters; got "
                f"{str(name)[:40]!r}.",
                EXPORT,
            )
    refuse_by_name(state)
    for name, tensor in state.items():
        _check_tensor(name, tensor)
    if len(state) > MAX_TENSORS:
        raise CheckpointError(
            f"A network may have {MAX_TENSORS} tensors; this one has {len(state)}.",
            "Save the weights of one network alone.",
        )
    found = {t.dtype for t in state.values()}
    dtype = torch.float64 if torch.float64 in found else torch.float32
    to = f"weights converted to {dtype}".replace("torch.", "")
    others = sorted(str(other).removeprefix("torch.") for other in found - {dtype})
    notes = [f"{other} {to}" for other in others]
    total = sum(t.numel() * dtype.itemsize for t in state.values())
    if held is not None and total > MAX_SHARING * held:
        raise UnsafeFileError(
            f"Tensors may share memory {MAX_SHARING}-fold; these claim {total} of {held} bytes.",
            "Save full copies: {name: t.clone() for name, t in state.items()}.",
        )
    short = _strip_prefixes(list(state))
    # Copies: tied weights and memory maps would make one tensor's change another's.
    owned = {
        short[name]: t.detach().to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)
        for name, t in state.items()
    }
    for name, tensor in owned.items():
        if not torch.isfinite(tensor).all():
            raise CheckpointError(
                f"Weights must be finite; {name!r} has NaN or infinite entries.",
                "The training diverged or the file is damaged; use an earlier checkpoint.",
            )
    return owned, {ours: name for name, ours in short.items()}, notes


def _check_tensor(name: str, tensor: Tensor) -> None:
    """A tensor that attacks can use, and that holds what it claims: an expanded one would claim any size."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        raise CheckpointError(
            f"Weights must be dense tensors with data; {name!r} is not.",
            "Convert it before saving, e.g. with .to_dense().",
        )
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.dtype not in DTYPES:
        raise CheckpointError(
            f"Weights must be real floating-point tensors; {name!r} is {tensor.dtype}.",
            "Leave it out, or convert it with .float() before saving.",
        )
    if tensor.numel() == 0:
        raise CheckpointError(
            f"Weights need entries; {name!r} is empty.", "Save the network again."
        )
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise UnsafeFileError(
            f"A tensor must hold its elements; {name!r} of shape {list(tensor.shape)} has memory for "
            f"{tensor.untyped_storage().nbytes() // tensor.element_size()}.",
            "Save a full copy with .clone().",
        )


def _strip_prefixes(names: list[str]) -> dict[str, str]:
    """Each name without the prefixes that all of them share."""
    short = dict(zip(names, names, strict=True))
    while prefix := next((p for p in PREFIXES if all(s.startswith(p) for s in short.values())), ""):
        short = {name: s.removeprefix(prefix) for name, s in short.items()}
    return short
