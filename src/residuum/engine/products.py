"""Matrix products in the precision asked for.

half=True rounds both factors to bfloat16 and keeps sums and results in float32: on a GPU with bf16
matrix units the fastest mode; elsewhere the same rounding, for comparison. Otherwise products are
plain, in float32 as TF32 where ``matmul_precision`` says so.
"""

from __future__ import annotations

import torch
from torch import Tensor


def times(a: Tensor, weight: Tensor, half: bool = False) -> Tensor:
    """a (..., k) times a shared weight (k, n)."""
    if not half:
        return a @ weight
    a, weight = a.bfloat16(), weight.bfloat16()
    if not a.is_cuda:
        return a.float() @ weight.float()
    flat = torch.mm(a.flatten(0, -2), weight, out_dtype=torch.float32)
    return flat.view(*a.shape[:-1], -1)


def accumulate(
    total: Tensor | None,
    a: Tensor,
    b: Tensor,
    beta: float = 1.0,
    alpha: float = 1.0,
    half: bool = False,
) -> Tensor:
    """beta total + alpha a b for batches of matrices (R, m, k) and (R, k, n), in one product."""
    if total is None:
        total, beta = a.new_zeros(()), 0.0
    if not half:
        return torch.baddbmm(total, a, b, beta=beta, alpha=alpha)
    a, b = a.bfloat16(), b.bfloat16()
    if not a.is_cuda:
        return torch.baddbmm(total, a.float(), b.float(), beta=beta, alpha=alpha)
    # The product comes out in float32; total never passes through bfloat16.
    product = torch.bmm(a, b, out_dtype=torch.float32)
    return alpha * product if beta == 0 else torch.add(beta * total, product, alpha=alpha)
