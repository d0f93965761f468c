"""Why activation boundaries stop at training samples: the example of ``docs/attributes.md``."""

from __future__ import annotations

import pytest
import torch

# One neuron relu(x - t) with its activation boundary at t, and two training samples. The first sample pushes
# the boundary to the right while the neuron is active at it. The second sample pushes it back to the left.
X = torch.tensor([1.0, 2.0], dtype=torch.float64)
Y = torch.tensor([-2.0, 2.0], dtype=torch.float64)
RATE = 1e-3


def gradient(t: float) -> float:
    """Derivative of the squared loss in the position t of the boundary."""
    boundary = torch.tensor(t, dtype=torch.float64, requires_grad=True)
    loss = (torch.relu(X - boundary) - Y).square().sum()
    return float(torch.autograd.grad(loss, boundary)[0])


def test_the_gradient_changes_sign_when_the_boundary_crosses_the_sample() -> None:
    """The sum of the samples' gradients is zero for no boundary near the first sample."""
    for t in (0.5, 0.9, 1 - 1e-9):
        assert gradient(t) == pytest.approx(2 * (3 - t) * -1 + 2 * t)
        assert gradient(t) < -1.99
    for t in (1 + 1e-9, 1.1, 1.5):
        assert gradient(t) == pytest.approx(2 * t)
        assert gradient(t) > 1.99


@pytest.mark.parametrize("start", [0.3, 0.95, 1.05, 1.6])
def test_gradient_descent_moves_the_boundary_onto_the_sample_where_it_stays(start: float) -> None:
    t, positions = start, []
    for _ in range(1500):
        t -= RATE * gradient(t)
        positions.append(t)
    # A step has the length 2 * RATE near the sample, so the boundary stays within this distance.
    assert max(abs(position - 1) for position in positions[1000:]) <= 2.1 * RATE
    # The optimum of the smooth parts of the loss is far from the sample: 1.5 if the neuron is active at the
    # first sample, and 0 if it is not. So the boundary does not stop there.
    assert gradient(0.75) < 0 < gradient(1.25)


def test_a_smooth_neuron_has_no_reason_to_stop_at_the_sample() -> None:
    boundary = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    for _ in range(4000):
        loss = (torch.nn.functional.softplus(X - boundary, beta=3) - Y).square().sum()
        (slope,) = torch.autograd.grad(loss, boundary)
        boundary = (boundary - 1e-2 * slope).detach().requires_grad_()
    assert abs(float(slope)) < 1e-6
    assert abs(float(boundary) - 1) > 0.05
