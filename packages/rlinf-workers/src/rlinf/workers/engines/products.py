"""Products with weight matrices in float32, by the library that is quickest at them here.

Torch hands them to MKL, which keeps to AVX2 on processors of other makers; oneDNN, which torch
carries too, does not, and is then about twice as fast. From two rows on, a row does not depend on
how many there are, to the last bit.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["project"]

MIN_WEIGHTS = 1 << 15
"""Smaller matrices are left to MKL: a call of oneDNN costs some microseconds more, and the first
one of a shape some hundred, to generate its code."""


def project(layer: Any, x: Tensor) -> Tensor:
    """`layer(x)` for x [N, K]; differentiable. `layer` may be any module."""
    if type(layer) is nn.Linear and _suits(layer.weight) and not _is_hooked(layer):
        return _Product.apply(x, layer.weight, layer.bias)  # type: ignore[no-untyped-call, no-any-return]
    projected: Tensor = layer(x)
    return projected


def _suits(weight: Tensor) -> bool:
    return (
        weight.numel() >= MIN_WEIGHTS
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and type(weight) in (Tensor, nn.Parameter)
        and _is_quicker()
        and not torch.is_autocast_enabled("cpu")
    )


def _is_hooked(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


@functools.cache
def _is_quicker() -> bool:
    """Whether there is an AVX-512 for one of them to make more of than the other."""
    usable = bool(torch.backends.mkldnn.enabled)
    return usable and "AVX512" in torch.backends.cpu.get_cpu_capability()


class _Product(torch.autograd.Function):
    """x W^T + b and its gradients, each of them one product. Not differentiable twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        return (
            _product(gradient, weight.t()) if for_x else None,
            _product(gradient.t(), x.t()) if for_weight else None,
            gradient.sum(0) if for_bias else None,
        )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [N, K] times weight [M, K] transposed; strides of any kind."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product
