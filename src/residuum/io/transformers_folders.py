"""Load a token model from a folder of transformers, such as ``save_pretrained`` writes.

This needs the extra ``text``. Code from the folder is never run, and weights are read only from safetensors.
The configuration is checked before the model is built: it must not ask for custom code, and the model that it
describes must have the weights that the files hold. Otherwise a small file could exhaust the memory.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from residuum.errors import CheckpointError, MissingExtraError, UnsafeFileError
from residuum.io.folders import is_inner_file
from residuum.io.release import ADAPTER_CONFIG

CONFIG, TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# Names of files of weights in a folder of transformers.
SAFETENSORS, PICKLED = (
    re.compile(r"model(-[\w-]+)?\.safetensors"),
    re.compile(r"pytorch_model.*\.bin"),
)
MAX_CONFIG_BYTES = 16 << 20  # largest configuration or index of shards
# Largest numbers in a configuration, by a word in their name, so that building the model takes seconds. A
# model has a module for each layer and expert, and a name for each label.
MAX_COUNTS = {
    "layer": 1000,
    "expert": 1000,
    "block": 1000,
    "head": 1000,
    "stage": 1000,
    "label": 100_000,
}
MAX_NUMBER = 10**10  # largest number in config.json that no other limit concerns
# Largest number of values of weights that the configuration describes and the files lack, such as a new head.
MAX_MISSING_VALUES = 16_000_000
DEFAULT_LENGTH = 512  # texts are cut after this number of tokens if the model states no limit
MAX_LENGTH = 4096  # longer texts are cut, so that attention needs little memory
# The class of transformers that loads an architecture, by the end of its name.
LOADERS = {
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
}
WHAT_ELSE = "Without transformers, residuum scan reports what the folder stores."
NO_CUSTOM_CODE = (
    "Residuum does not run code from a folder, not even with --trust-code. Load the model yourself if you "
    "trust it, and pass it: rs.audit(model, data=..., tokenizer=tokenizer)."
)


@dataclass(frozen=True)
class TextModel:
    """A token model of a folder.

    Attributes:
        module: The model, None if residuum has no loss for its architecture.
        name: Class of the model, such as "BertForSequenceClassification".
        tokenizer: The tokenizer, None if the folder holds none that can be read.
        max_length: Texts are cut after this number of tokens.
        weights: The file of the weights, or the index of the shards.
        notes: Remarks for the reader.
    """

    module: nn.Module | None
    name: str
    tokenizer: Callable[..., Any] | None
    max_length: int
    weights: Path
    notes: tuple[str, ...] = ()


def find_transformers_folder(path: Any) -> Path | None:
    """Return the folder of transformers that a path names, None if it names none.

    Args:
        path: A folder with ``config.json``, or a file of weights in such a folder.

    Returns:
        The folder.
    """
    if not isinstance(path, str | Path):
        return None
    folder = Path(path).expanduser()
    is_weights = (
        folder.name == INDEX or PICKLED.fullmatch(folder.name) or SAFETENSORS.fullmatch(folder.name)
    )
    if is_weights and folder.is_file():
        folder = folder.parent
    config = _read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    # Only models of tokens have a vocabulary. Models of images have a configuration, too.
    is_transformers = {"model_type", "architectures", "vocab_size"} <= config.keys()
    return folder if is_transformers else None


def is_adapter_folder(path: Any) -> bool:
    """Return True if a path names a folder with an adapter of PEFT and without a whole model."""
    if not isinstance(path, str | Path):
        return False
    folder = Path(path).expanduser()
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / CONFIG).is_file()


def load_text_folder(folder: Path) -> TextModel:
    """Load the model and the tokenizer of a folder. No code from the folder is run.

    Args:
        folder: A folder with ``config.json`` and weights as safetensors.

    Returns:
        The model.

    Raises:
        CheckpointError: If the folder holds an adapter as well.
    """
    config = _read_json(folder / CONFIG)
    _check_configuration(folder)
    if (folder / ADAPTER_CONFIG).is_file():
        raise CheckpointError(
            "The folder of a full model must not also contain an adapter (LoRA); the folder "
            f"{folder.name!r} contains {ADAPTER_CONFIG}.",
            "Move the adapter to a folder of its own, and pass this folder with --adapter.",
        )
    weights = list_weight_files(folder)[0]
    architectures = config.get("architectures")
    name = str(architectures[0])[:80] if isinstance(architectures, list) and architectures else ""
    loader = next((LOADERS[end] for end in LOADERS if name.endswith(end)), "")
    transformers = _import_transformers()
    with _quiet(transformers):
        tokenizer, notes = _load_tokenizer(transformers, folder)
        module = _load_module(transformers, folder, loader) if loader else None
    return TextModel(module, name, tokenizer, _length_limit(config, tokenizer), weights, notes)


def _read_json(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file, {} if it is no JSON object."""
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise UnsafeFileError(
            f"A configuration file may have at most {MAX_CONFIG_BYTES} bytes; the file {file.name!r} has "
            "more.",
            "Check the file.",
        )
    try:
        content = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError, OSError):
        return {}
    return content if isinstance(content, dict) else {}


def list_weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of the weights of a folder.

    Args:
        folder: A folder of transformers.

    Returns:
        The files.

    Raises:
        CheckpointError: If the folder holds no such file.
    """
    if (folder / WEIGHTS).is_file():
        return [_refuse_link(folder / WEIGHTS)]
    weight_map = _read_json(folder / INDEX).get("weight_map") if (folder / INDEX).is_file() else {}
    names = sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, dict) else []
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise CheckpointError(
                f"All weight files of a model must be regular files in its folder; {name[:80]!r} is not.",
                "Check the index, which lists the weight files.",
            )
    if not names:
        has_pickle = any(folder.glob("pytorch_model*.bin"))
        raise CheckpointError(
            f"The folder of a model must contain the weights as {WEIGHTS}; the folder {folder.name!r} "
            f"contains {'only pytorch_model.bin, a pickle' if has_pickle else 'none'}.",
            "If you trust the pickle, load the model and write it again: "
            "model.save_pretrained(folder, safe_serialization=True)."
            if has_pickle
            else "Check the path.",
        )
    return [_refuse_link(folder / name) for name in names]


def _refuse_link(file: Path) -> Path:
    """Return a weight file of a folder. Raise an error if the file is a link to another folder."""
    if not is_inner_file(file):
        raise CheckpointError(
            f"The weights of a model must be regular files in its folder; the file {file.name!r} is a link.",
            "Copy the file into the folder.",
        )
    return file


def load_tokenizer(folder: Path) -> Callable[..., Any]:
    """Load the tokenizer of a folder. No code from the folder is run.

    Args:
        folder: A folder with the files of a tokenizer.

    Returns:
        The tokenizer.

    Raises:
        CheckpointError: If the folder holds no tokenizer that can be read.
    """
    transformers = _import_transformers()
    _check_configuration(folder)
    with _quiet(transformers):
        tokenizer, notes = _load_tokenizer(transformers, folder)
    if tokenizer is None:
        raise CheckpointError(
            f"The path {str(folder)!r} must be a folder with a tokenizer; {notes[0]}.",
            "Check the path.",
        )
    return tokenizer


def _import_transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise MissingExtraError(
            "Loading a model folder of Hugging Face needs the Python package transformers, which is not "
            "installed.",
            f'In a clone of residuum, run pip install ".[text]". {WHAT_ELSE}',
        ) from None


def _check_configuration(folder: Path) -> None:
    """Refuse a folder whose configuration names code of its own, or asks for much memory or time."""
    if (folder / CONFIG).is_file():
        _check_numbers(_read_json(folder / CONFIG))
        implementations = [
            value
            for name, value in _read_json(folder / CONFIG).items()
            if "attn_implementation" in name and "/" in str(value)
        ]
        if implementations:
            raise UnsafeFileError(
                f"The folder of a model may not need code from other repositories; the file {CONFIG} "
                f"names {implementations[0]!r}.",
                NO_CUSTOM_CODE,
            )
    for name in (CONFIG, TOKENIZER_CONFIG):
        if (folder / name).is_file() and "auto_map" in _read_json(folder / name):
            raise UnsafeFileError(
                "The folder of a model may not need Python code of its own; the entry 'auto_map' in the "
                f"file {name} names such code.",
                NO_CUSTOM_CODE,
            )


def _load_tokenizer(
    transformers: Any, folder: Path
) -> tuple[Callable[..., Any] | None, tuple[str, ...]]:
    """Return the tokenizer of a folder, or None with the reason."""
    try:
        tokenizer: Callable[..., Any] = transformers.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as problem:  # noqa: BLE001  a damaged tokenizer may raise anything
        reason = f"{type(problem).__name__}: {' '.join(str(problem).split())[:120]}"
        return None, (f"the folder holds no tokenizer that can be read ({reason})",)
    return tokenizer, ()


def _load_module(transformers: Any, folder: Path, loader: str) -> nn.Module:
    """Load a model with its class in the library transformers, after checking its configuration."""
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    # A configuration can name another implementation of attention, whose code would be downloaded.
    options_of_model = {**options, "attn_implementation": "eager"}
    try:
        config = transformers.AutoConfig.from_pretrained(str(folder), **options)
        _check_numbers(config.to_dict())
        with torch.device("meta"):
            described = getattr(transformers, loader).from_config(
                config, trust_remote_code=False, attn_implementation="eager"
            )
        _check_weights(described, _stored_shapes(folder))
        module, loading = getattr(transformers, loader).from_pretrained(
            str(folder), use_safetensors=True, output_loading_info=True, **options_of_model
        )
    except (UnsafeFileError, CheckpointError):
        raise
    except Exception as problem:
        raise CheckpointError(
            "The library transformers must be able to load the folder of the model; loading the folder "
            f"{folder.name!r} raised {type(problem).__name__}: {' '.join(str(problem).split())[:200]}.",
            "Check that config.json and the weight files are from the same model.",
        ) from problem
    if missing := sorted(map(str, loading["missing_keys"])):
        raise CheckpointError(
            f"The folder of a model must contain all of its weights; in the folder {folder.name!r}, "
            f"{len(missing)} tensors are missing, such as {missing[0][:80]!r}.",
            "Save the whole model with model.save_pretrained(folder).",
        )
    loaded: nn.Module = module.eval()
    return loaded


def _check_numbers(config: Mapping[str, Any]) -> None:
    """Check that a configuration describes a model that can be built in seconds and in little memory."""
    for name, value in _numbers(config, depth=0):
        limit = next((MAX_COUNTS[word] for word in MAX_COUNTS if word in name.lower()), MAX_NUMBER)
        if value > limit:
            raise UnsafeFileError(
                f"In the configuration of a model, the value of {name[:40]} may be at most {limit:g}; in "
                f"this file it is {value:g}.",
                "Check the source of this folder, because a normal model has smaller values.",
            )


def _numbers(config: Mapping[str, Any], depth: int) -> Iterator[tuple[str, float]]:
    for name, value in config.items():
        if isinstance(value, Mapping) and depth < 4:
            yield from _numbers(value, depth + 1)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield str(name), value


def _stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights in the files of a folder, by name. Only headers are read."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in list_weight_files(folder):
        try:
            with safe_open(str(file), framework="pt") as archive:
                shapes |= {
                    key: tuple(archive.get_slice(key).get_shape())
                    for key in archive.keys()  # noqa: SIM118
                }
        except (SafetensorError, OSError) as problem:
            raise CheckpointError(
                f"The file {file.name!r} must be a safetensors file; reading the file failed "
                f"({str(problem)[:120]}).",
                "Check the file.",
            ) from problem
    return shapes


def _check_weights(described: nn.Module, stored: Mapping[str, tuple[int, ...]]) -> None:
    """Check that the weights of a model that was built without memory are in the files."""
    stored_values = sum(math.prod(shape) for shape in stored.values())
    described_values = sum(p.numel() for p in described.parameters()) + sum(
        b.numel() for b in described.buffers()
    )
    if described_values > stored_values + MAX_MISSING_VALUES:
        raise UnsafeFileError(
            "The configuration of a model must fit its weight files; the configuration describes "
            f"{described_values} weights, and the files contain {stored_values} weights.",
            "Check that config.json and the weight files are from the same model.",
        )


def _length_limit(config: Mapping[str, Any], tokenizer: Any) -> int:
    """Return the largest number of tokens of a text that the model allows."""
    limits = [config.get("max_position_embeddings"), config.get("n_positions")]
    limits += [getattr(tokenizer, "model_max_length", None)]
    valid_limits = [limit for limit in limits if isinstance(limit, int) and 1 < limit <= 10**6]
    return min(min(valid_limits, default=DEFAULT_LENGTH), MAX_LENGTH)


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Silence messages and progress bars of the library transformers, and restore its settings afterwards."""
    logging = transformers.utils.logging
    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()
