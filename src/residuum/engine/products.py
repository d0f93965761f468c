"""Matrix products in the precision asked for.

half=True rounds both factors to bfloat16: on a GPU with bf16 matrix units the fastest mode, sums and
results in float32; on a CPU with bf16 instructions twice as fast as float32, where results are
rounded too, so that sums which cancel (``cancels``) stay in float32; on any other CPU the factors'
rounding alone, for comparison. Otherwise products are plain, in float32 as TF32 where
``matmul_precision`` says so.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def times(a: Tensor, weight: Tensor, half: bool = False) -> Tensor:
    """a (..., k) times a shared weight (k, n)."""
    if not half:
        return a @ weight
    a, weight = a.bfloat16(), weight.bfloat16()
    if not a.is_cuda:
        return (a @ weight).float() if cpu_has_bf16() else a.float() @ weight.float()
    flat = torch.mm(a.flatten(0, -2), weight, out_dtype=torch.float32)
    return flat.view(*a.shape[:-1], -1)


def accumulate(
    total: Tensor | None,
    a: Tensor,
    b: Tensor,
    beta: float = 1.0,
    alpha: float = 1.0,
    half: bool = False,
    cancels: bool = False,
) -> Tensor:
    """beta total + alpha a b for batches of matrices (R, m, k) and (R, k, n), in one product.

    cancels: total and product nearly cancel, so the product may not be rounded.
    """
    if total is None:
        total, beta = a.new_zeros(()), 0.0
    if not half or (cancels and not a.is_cuda):
        return torch.baddbmm(total, a, b, beta=beta, alpha=alpha)
    a, b = a.bfloat16(), b.bfloat16()
    if a.is_cuda:
        # The product comes out in float32; total never passes through bfloat16.
        product = torch.bmm(a, b, out_dtype=torch.float32)
    elif cpu_has_bf16():
        product = torch.bmm(a, b).float()
    else:
        return torch.baddbmm(total, a.float(), b.float(), beta=beta, alpha=alpha)
    return alpha * product if beta == 0 else torch.add(beta * total, product, alpha=alpha)


@lru_cache(maxsize=1)
def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 numbers itself; torch's own test, absent in old releases."""
    test = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return test is not None and bool(test())
