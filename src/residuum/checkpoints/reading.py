"""Checkpoints from files, state dicts and live networks, and back to files that anyone can read.

====================  ==================================================================
a file that begins    is read as
====================  ==================================================================
8 bytes, then ``{``   safetensors, header checked first (:mod:`.safe`)
``PK\\x03\\x04``        torch.save's zip archive, claims checked first
``\\x80``              torch.save's legacy format, likewise
====================  ==================================================================

Beside the weights residuum writes plain strings that any safetensors reader can show; FORMAT_KEY marks
a file as ours. Files come from strangers: every value is checked again.

A file of weights has no ``forward``. Where no architecture string can say it, the code that defines the
network can, ``package.module:factory``; importing it runs it, so whoever asks must say that it is trusted.
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from residuum.checkpoints import safe
from residuum.errors import ArchitectureError, CheckpointError, InputError, UnsafeFileError
from residuum.networks import (
    KINDS,
    Architecture,
    kind_of,
    match_architecture,
    recognise,
    same_function,
)
from residuum.networks.kinds import ASSUMED_RELU
from residuum.networks.probing import as_rows, probe, unwrapped
from residuum.records import TASKS, Checkpoint, write_atomic
from residuum.records.rundir import sha256

DEFAULT_MAX_BYTES = 8 << 30  # of a file: what a machine with 16 GB can hold twice
RUN_FILE = "model.safetensors"
FORMAT_KEY, FORMAT = "residuum_format", "1"
# Of what a file says of itself: characters, texts and sizes that no network of ours comes near.
MAX_ARCHITECTURE, MAX_TEXT, MAX_TEXTS, MAX_DIMENSIONS = 256, 200, 10_000, 8
KEPT = "a {} is kept as given: its forward is run, not read, so that only what needs no structure applies"
NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


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
    except (UnsafeFileError, CheckpointError):
        from residuum.checkpoints.estimators import network_in  # upon this file

        if (found := network_in(locate(path))) is None:
            raise
        return found if arch is None else _checkpoint(dict(found.theta), NOTHING_SAID, arch=arch)
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
                return *safe.read_safetensors(path, stream, size, max_bytes), size
            if head.startswith(safe.ZIP_MAGIC):
                return safe.read_zip(stream, size), {}, size
            if head.startswith(safe.PICKLE_MAGIC):
                return safe.read_legacy(stream, size, max_bytes), {}, size
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
        "Save the PyTorch network's weights with torch.save(model.state_dict(), path).",
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
    state, source, notes = safe.clean_state(safe.find_state(content), size)
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
    lists = ("input_shape", "labels", "assumptions")
    metadata = {"format": "pt", FORMAT_KEY: FORMAT, "architecture": checkpoint.arch}
    metadata |= {key: json.dumps(getattr(checkpoint, key)) for key in lists}
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
    return Checkpoint({}, found.pop("architecture"), **found)


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
    "input_shape": (MAX_DIMENSIONS, _are_sizes, f"up to {MAX_DIMENSIONS} positive whole numbers"),
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
    theta, _, notes = safe.clean_state(state)
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
    state = safe.find_state(_read(locate(path), DEFAULT_MAX_BYTES)[0])
    short = safe._strip_prefixes(list(state))
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
