"""Transcribe one step of the published attack: eager autograd twice, ``item()`` at every step.

[H] Haim et al. 2022: forward ReLU, backward sigmoid(alpha z); sum of squared residuals over all tensors,
box and multiplier penalties; SGD with momentum 0.9.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from residuum.networks import MLP, SigmoidReLU


class PublishedAttack:
    """The attack of Haim et al. 2022, one step at a time."""

    def __init__(self, model: MLP, m: int, alpha: float = 150.0) -> None:
        weight = model.linears[0].weight
        self.model = model
        self.model.activation = SigmoidReLU(alpha)
        generator = torch.Generator().manual_seed(0)
        x = 1e-2 * torch.randn(m, weight.shape[1], generator=generator)
        self.x = x.to(weight).requires_grad_()
        self.lam = torch.rand(m, 1, generator=generator).to(weight).requires_grad_()
        self.y = torch.where(torch.arange(m) < m // 2, -1.0, 1.0)[:, None].to(weight)
        self.optimizer_x = torch.optim.SGD([self.x], lr=1e-2, momentum=0.9)
        self.optimizer_lam = torch.optim.SGD([self.lam], lr=1e-4, momentum=0.9)

    def step(self) -> float:
        """Take one step and return the loss."""
        loss = self.loss()
        self.optimizer_x.zero_grad()
        self.optimizer_lam.zero_grad()
        loss.backward()
        self.optimizer_x.step()
        self.optimizer_lam.step()
        return loss.item()

    def loss(self) -> Tensor:
        """Return the loss of the current candidates."""
        parameters: list[nn.Parameter] = list(self.model.parameters())
        values = self.model(self.x)
        inner = (self.lam / len(self.x) * self.y * values).sum()
        grads = torch.autograd.grad(inner, parameters, create_graph=True)
        total = sum((p.detach() - g).square().sum() for p, g in zip(parameters, grads, strict=True))
        box = (self.x.abs() - 1).clamp(min=0).square().sum()
        floor = 5 * (0.4 - self.lam).clamp(min=0).square().sum()
        return total + box + floor
