"""Compute the losses of token models: networks whose inputs are token ids.

A token model is a live ``nn.Module``, such as a classifier or a causal language model of Hugging Face, or any
module that begins with ``nn.Embedding``. Two kinds have a loss:

- A classifier returns one row of logits for each text. The loss is the cross-entropy of the label.
- A causal language model returns logits (n, length, vocabulary), and its logits at a position depend on the
  tokens up to this position. The loss of a text is the mean of -log p(next token) over its tokens.

Texts are run in batches of equal length, so that no padding is needed. The module is run in evaluation mode
and without gradients. Then every submodule is set back to the mode that it had.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from residuum.errors import InputError
from residuum.io.predictors import NEXT_TOKENS, NUMBERS, SHARES, Array, Predictor
from residuum.networks.probing import unwrap
from residuum.records import Dataset
from residuum.records.tokens import PADDING, TokenDataset

MAX_BATCH_TOKENS = (
    4096  # largest number of tokens of a batch, so that attention needs little memory
)
# Largest number of logits of a batch (256 MB in float32). A text of GPT-2 with 1024 tokens has 51 million.
MAX_BATCH_LOGITS = 64_000_000
PROBE_LENGTH = 8  # number of tokens of the test input that shows whether a module takes token ids
# Largest change of a logit of a causal model if a later token changes, relative to the largest logit. The
# change is not zero, because kernels round differently.
MAX_CAUSAL_CHANGE = 1e-3
NO_LOGITS = "it returns no logits"
MASKED = (
    "it predicts each token from the tokens before and after it, so it has no loss of a whole text"
)
CLASSES_OF_TOKENS = "it predicts a class for each token, and residuum compares classes of texts"
TOKENS_AS_TRAINED = (
    "Pass token ids of the model's own tokenizer, and no text that is longer than the model allows."
)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Run code with a module in evaluation mode and without gradients, then restore the module's modes.

    Args:
        model: The module.

    Yields:
        Nothing.
    """
    was_training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, is_training in was_training:
            module.training = is_training


def takes_tokens(model: Any, length: int | None = None) -> bool:
    """Return True if an object is a live module whose input is token ids.

    The module has an argument ``input_ids``, or it has an embedding and runs on integers but not on real
    numbers.

    Args:
        model: Any object.
        length: Number of tokens of a text, if it is known.

    Returns:
        Whether the object is a token model.
    """
    if not isinstance(model, nn.Module):
        return False
    model = unwrap(model)
    if "input_ids" in _arguments(model):
        return True
    if not any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in model.modules()):
        return False
    shape = (2, length or PROBE_LENGTH)
    return not _runs(model, torch.zeros(shape)) and _runs(model, torch.zeros(shape).long())


def wrap_token_model(model: nn.Module, texts: Dataset | None) -> Predictor:
    """Return the predictor of a token model.

    Args:
        model: The live module.
        texts: Texts that show what the model predicts, None if there are none.

    Returns:
        The predictor. If the model has no loss of a text, its ``why_no_loss`` says so.
    """
    runner = TokenRunner(unwrap(model))
    if not isinstance(texts, TokenDataset):
        return Predictor(runner.name, SHARES, runner.shares, runner.classes, model=model)
    ids = texts.x[int(texts.lengths.argmax())]
    logits = runner.logits(ids[ids != PADDING][None])
    why_no_loss, kind, function = "", SHARES, runner.shares
    if logits is None or logits.ndim not in (1, 2, 3):
        why_no_loss = NO_LOGITS
    elif logits.ndim == 3:
        kind, function = NEXT_TOKENS, runner.mean_losses
        why_no_loss = runner.why_not_causal(ids[ids != PADDING][None], logits)
    elif logits.ndim == 1 or logits.shape[1] == 1:
        is_binary = {*texts.y.unique().tolist()} <= {0, 1} and runner.config_value(
            "num_labels"
        ) is None
        kind, function = (SHARES, runner.share_of_one) if is_binary else (NUMBERS, runner.numbers)
    classes = runner.classes if kind == SHARES else ()
    return Predictor(runner.name, kind, function, classes, why_no_loss=why_no_loss, model=model)


@dataclass(frozen=True)
class TokenRunner:
    """Runs a token model on texts of equal length.

    Attributes:
        model: The live module.
    """

    model: nn.Module

    @property
    def name(self) -> str:
        """Class of the module."""
        return type(self.model).__name__

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes in the order of the logits, () if the module does not name its classes."""
        names = self.config_value("id2label")
        if not isinstance(names, Mapping):
            return ()
        ordered_names = tuple(str(names.get(i, names.get(str(i)))) for i in range(len(names)))
        are_defaults = all(name == f"LABEL_{i}" for i, name in enumerate(ordered_names))
        return () if are_defaults else ordered_names

    def config_value(self, name: str) -> Any:
        """Return a value of the configuration of the module, or None if there is no such value."""
        return getattr(getattr(self.model, "config", None), name, None)

    @cached_property
    def _input_device(self) -> torch.device:
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    def logits(self, ids: Tensor) -> Tensor | None:
        """Return the logits of texts of equal length, None if the module returns no logits.

        Args:
            ids: (n, length) token ids.

        Returns:
            (n, classes), (n,) or (n, length, vocabulary) logits on the device of the module.

        Raises:
            InputError: If the module raises an exception.
        """
        arguments = _arguments(self.model)
        ids = ids.to(self._input_device)
        keywords: dict[str, Any] = {"input_ids": ids} if "input_ids" in arguments else {}
        keywords |= (
            {"attention_mask": torch.ones_like(ids)} if "attention_mask" in arguments else {}
        )
        keywords |= {"use_cache": False} if "use_cache" in arguments else {}
        positional = () if "input_ids" in arguments else (ids,)
        try:
            with evaluation_mode(self.model):
                outputs = self.model(*positional, **keywords)
        except Exception as problem:
            raise InputError(
                "A language model must run on your texts without an error; calling the model "
                f"{self.name} raised {type(problem).__name__}: {' '.join(str(problem).split())[:200]}.",
                TOKENS_AS_TRAINED,
            ) from problem
        if isinstance(outputs, Mapping):
            outputs = outputs.get("logits")
        elif hasattr(outputs, "logits"):
            outputs = outputs.logits
        elif isinstance(outputs, tuple) and outputs:
            outputs = outputs[0]
        return outputs if isinstance(outputs, Tensor) and len(outputs) == len(ids) else None

    def why_not_causal(self, ids: Tensor, logits: Tensor) -> str:
        """Return why a model with logits for each token is no causal language model, "" if it is one.

        Args:
            ids: (1, length) token ids of a text.
            logits: (1, length, vocabulary) logits of this text.

        Returns:
            The reason.
        """
        if logits.shape[1] != ids.shape[1] or int(ids.max()) >= logits.shape[2]:
            return CLASSES_OF_TOKENS
        changed_ids = ids.clone()
        changed_ids[0, -1] = (ids[0, -1] + 1) % logits.shape[2]
        changed_logits = self.logits(changed_ids)
        assert changed_logits is not None
        change = (changed_logits - logits)[:, :-1].abs().max() if ids.shape[1] > 1 else 0.0
        return "" if float(change) <= MAX_CAUSAL_CHANGE * float(logits.abs().max()) else MASKED

    def shares(self, texts: Dataset) -> Array:
        """Return the probability of each class for each text, (n, classes)."""
        return self._run(texts, lambda ids, logits: logits.double().softmax(1))

    def share_of_one(self, texts: Dataset) -> Array:
        """Return the probability of class 1 for each text, (n, 1), of a model with a single logit."""
        return self._run(texts, lambda ids, logits: logits.double().reshape(-1, 1).sigmoid())

    def numbers(self, texts: Dataset) -> Array:
        """Return the number that the model predicts for each text, (n, 1)."""
        return self._run(texts, lambda ids, logits: logits.double().reshape(-1, 1))

    def mean_losses(self, texts: Dataset) -> Array:
        """Return the mean loss of the next token for each text, (n, 1).

        Args:
            texts: The texts.

        Returns:
            The losses.

        Raises:
            InputError: If a text has a single token.
        """
        assert isinstance(texts, TokenDataset)
        if int(texts.lengths.min()) < 2:
            raise InputError(
                "A text must have at least two tokens, so that a language model predicts one of them; "
                f"the text in row {texts.rows[int(texts.lengths.argmin())]} has only one token.",
                "Remove this text.",
            )
        return self._run(texts, _next_token_losses)

    def _run(self, texts: Dataset, function: Any) -> Array:
        """Run the model on all texts, and return the result of ``function(ids, logits)`` for each text."""
        assert isinstance(texts, TokenDataset)
        output_rows: list[Tensor | None] = [None] * len(texts)
        logits_per_token = 1
        for length in texts.lengths.unique().tolist():
            positions = (texts.lengths == length).nonzero().flatten()
            # Run one text first, to learn how many logits the model returns for a text of this length.
            batch_size = 1
            while len(positions):
                batch, positions = positions[:batch_size], positions[batch_size:]
                ids = texts.x[batch]
                ids = torch.stack([row[row != PADDING] for row in ids])
                logits = self.logits(ids)
                if logits is None:
                    raise InputError(
                        f"A language model must return logits for every text; the {self.name} returned "
                        f"no logits for a batch of {len(ids)} texts.",
                        TOKENS_AS_TRAINED,
                    )
                for row, position in zip(function(ids, logits.cpu()), batch.tolist(), strict=True):
                    output_rows[position] = row
                logits_per_token = max(1, logits[0].numel() // length)
                batch_size = max(
                    1, min(MAX_BATCH_TOKENS, MAX_BATCH_LOGITS // logits_per_token) // length
                )
        return np.asarray(torch.stack([row for row in output_rows if row is not None]).numpy())


def _next_token_losses(ids: Tensor, logits: Tensor) -> Tensor:
    """Return the mean of -log p(next token) of each text, (n, 1).

    Args:
        ids: (n, length) token ids.
        logits: (n, length, vocabulary) logits.

    Returns:
        The losses in float64.
    """
    losses = [
        F.cross_entropy(text_logits[:-1].float(), text_ids[1:], reduction="none").double().mean()
        for text_ids, text_logits in zip(ids, logits, strict=True)
    ]
    return torch.stack(losses)[:, None]


def _arguments(model: nn.Module) -> frozenset[str]:
    """Return the names of the arguments of the forward method of a module."""
    try:
        return frozenset(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):  # a compiled forward method may have no signature
        return frozenset()


def _runs(model: nn.Module, x: Tensor) -> bool:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        with evaluation_mode(model):
            model(x.to(device))
    except Exception:  # noqa: BLE001  any exception means that the module does not take this input
        return False
    return True
