"""A network: its weights, its module, and properties that are computed only once."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn

from residuum.errors import ArchitectureError, InputError
from residuum.networks.kinds import MLP, Architecture, dense_chain
from residuum.networks.probing import homogeneity_order, probe_inputs
from residuum.records import Knowledge, Record
from residuum.records.base import UNSAVED


@dataclass(frozen=True, eq=False)
class Network(Record):
    """A network that was read from a file or module: its weights, and properties that follow from them.

    The architecture string is parsed only once, and the module is built only once. A copy made with
    :meth:`replace` keeps the parsed architecture.

    Args:
        theta: Weights by parameter name.
        arch: Architecture string such as ``mlp:784-1000-1000-1``, or a parsed :class:`Architecture`.
        input_shape: Shape of one sample, () if it is not known.
        labels: Class names by output.
        task: "binary", "multiclass" or "regression" if the file states the task, else "".
        assumptions: Sentences about what had to be guessed when the file was read.
        source_names: For each parameter of the network, the name of its tensor in the file or module from
            which the network was read.
        live: The module itself, if no architecture string describes it. A module is code, so it is never
            saved.
    """

    theta: dict[str, Tensor]
    arch: str
    input_shape: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    task: str = ""
    assumptions: tuple[str, ...] = ()
    source_names: dict[str, str] = field(default_factory=dict)
    live: nn.Module | None = field(default=None, metadata=UNSAVED)

    def __post_init__(self) -> None:
        if isinstance(self.arch, Architecture):
            self.__dict__["architecture"] = self.arch
            self.__dict__["arch"] = str(self.arch)

    def replace(self, **changes: Any) -> Self:
        """Return a copy of the network with some fields changed."""
        if "architecture" in self.__dict__:
            changes.setdefault("arch", self.architecture)
        network = super().replace(**changes)
        if "_skeleton" in self.__dict__ and network.arch == self.arch:
            network.__dict__["_skeleton"] = self._skeleton
        return network

    @cached_property
    def architecture(self) -> Architecture:
        """The architecture that was parsed from the architecture string."""
        return Architecture.parse(self.arch)

    @cached_property
    def module(self) -> nn.Module:
        """The module with the weights, in evaluation mode. Do not change this shared module."""
        return self._load(torch.float64 if self._is_double else None)

    @cached_property
    def double_module(self) -> nn.Module:
        """The module in float64 and in evaluation mode. Do not change this shared module."""
        return self.module if self._is_double else self._load(torch.float64)

    def copy_module(self, dtype: torch.dtype | None = None) -> nn.Module:
        """Return a copy of the module, which may be changed. If ``dtype`` is None, the dtype is kept."""
        module = copy.deepcopy(self.double_module if dtype == torch.float64 else self.module)
        return module if dtype is None else module.to(dtype)

    def check_weights(self) -> None:
        """Check that the weights fit the architecture, or raise ``ArchitectureError``."""
        self.module  # noqa: B018  building the module checks the weights

    @cached_property
    def chain(self) -> MLP | None:
        """The module if it consists of dense layers one after the other, else None."""
        return dense_chain(self.module)

    @property
    def outputs(self) -> int:
        """Number of outputs of the network."""
        return self.architecture.outputs

    @property
    def inferred_task(self) -> str:
        """Task of the network: "regression" if the file states so, else "binary" or "multiclass"."""
        if self.task == "regression":
            return "regression"
        return "binary" if self.outputs == 1 else "multiclass"

    @cached_property
    @torch.no_grad()
    def homogeneity_order(self) -> float | None:
        """Measured number L for which weights times c give outputs times c^L, None if there is no such L."""
        random_inputs = probe_inputs(self.architecture.inputs)
        if self.live is not None and math.prod(self.input_shape) == random_inputs.shape[1]:
            # The forward method of a live module may need inputs that are not flattened.
            random_inputs = random_inputs.reshape(len(random_inputs), *self.input_shape)
        return homogeneity_order(self.double_module, random_inputs)

    def sample_shape(self, knowledge: Knowledge) -> tuple[int, ...]:
        """Return the shape of one sample, from the attacker's knowledge or else from the network.

        Args:
            knowledge: What the attacker knows.

        Returns:
            The shape without the batch dimension.

        Raises:
            InputError: If the attacker's knowledge does not fit the number of inputs.
        """
        architecture = self.architecture
        inputs = architecture.inputs
        shape = tuple(knowledge.shape or self.input_shape or architecture.image_shape or (inputs,))
        if math.prod(shape) != inputs:
            raise InputError(
                f"A sample must have {inputs} values, because the network has as many inputs; a sample of "
                f"shape {shape} has {math.prod(shape)}.",
                "Correct the option --shape, the shape of one sample.",
            )
        mean = knowledge.mean
        if mean is not None and mean.numel() not in (1, inputs):
            raise InputError(
                f"The 'mean' of the samples must be one number or have {inputs} values; got {mean.numel()}.",
                "Pass the mean image of the data.",
            )
        last_column = max((columns.last for columns in knowledge.typed_columns), default=0)
        if last_column >= inputs:
            raise InputError(
                f"The option --columns must refer to the columns 0 to {inputs - 1} of a sample; got column "
                f"{last_column}.",
                "Correct --columns.",
            )
        return shape

    @cached_property
    def _skeleton(self) -> nn.Module:
        """The module without values: its parameters have only shapes (PyTorch's meta device)."""
        with torch.device("meta"):
            return self.architecture.build()

    @property
    def _is_double(self) -> bool:
        return any(tensor.dtype == torch.float64 for tensor in self.theta.values())

    def _load(self, dtype: torch.dtype | None) -> nn.Module:
        """Return a module with the weights of the network, and convert the weights to ``dtype``.

        If an architecture string describes the module, weights that already have this dtype are not copied:
        they share memory with ``theta``.

        Args:
            dtype: Number format of the weights, or None to keep their number formats.

        Returns:
            The module in evaluation mode.

        Raises:
            ArchitectureError: If the weights do not fit the architecture.
        """
        module = copy.deepcopy(self._skeleton if self.live is None else self.live)
        converted_weights = {
            name: t.detach().to(dtype or t.dtype) for name, t in self.theta.items()
        }
        expected_tensors = (
            dict(module.named_parameters()) if self.live is not None else module.state_dict()
        )
        shapes = {name: t.shape for name, t in converted_weights.items()}
        if {name: t.shape for name, t in expected_tensors.items()} != shapes:
            raise ArchitectureError(
                f"The names and shapes of the weights must fit the architecture {self.arch}; got "
                f"{', '.join(f'{name} {list(shape)}' for name, shape in list(shapes.items())[:6])}.",
                "Read the file with residuum.load_checkpoint, which renames the tensors.",
            )
        if self.live is None:
            module.load_state_dict(converted_weights, strict=True, assign=True)
        else:
            module.to(
                next(iter(converted_weights.values())).dtype
            )  # buffers get the dtype of the weights
            module.load_state_dict({**module.state_dict(), **converted_weights}, strict=True)
        return module.eval()


def first_layer(theta: Mapping[str, Tensor]) -> Tensor:
    """Return the weight of the first layer: the first parameter with two or more dimensions."""
    return next(t for t in theta.values() if t.ndim >= 2)
