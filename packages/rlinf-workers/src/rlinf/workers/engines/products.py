"""Products with weight matrices in float32, by the library that is quickest at them here.

Torch hands them to MKL, which keeps to AVX2 on processors of other makers. OneDNN, which torch
carries too, does not: where AVX-512 has units of its own it is about twice as fast, and where two
of AVX2 take turns for it only its calls cost more. From two rows on, a row of its products does not
depend on how many there are, to the last bit.
"""

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["has_idle_units", "product", "project"]

CPUS = Path("/proc/cpuinfo")
ZEN_5 = 26
"""The first family of AMD whose AVX-512 is not done in two halves."""

MIN_WEIGHTS = 1 << 15
"""Smaller matrices are left to MKL: a call of oneDNN costs some microseconds more, and the first
one of a shape some hundred, to generate its code."""


def project(layer: Any, x: Tensor) -> Tensor:
    """`layer(x)` for x [N, K]; differentiable. `layer` may be any module."""
    if type(layer) is nn.Linear and _suits(layer.weight) and not _is_hooked(layer):
        return product(x, layer.weight, layer.bias)
    projected: Tensor = layer(x)
    return projected


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [N, K] W^T + b by oneDNN, for float32 on the CPU; W is [M, K]. Differentiable once."""
    return _Product.apply(x, weight, bias)  # type: ignore[no-untyped-call, no-any-return]


def has_idle_units(cpus: str) -> bool:
    """Whether MKL leaves wide units unused on this processor, as Linux describes it in `cpus`."""
    facts = dict(
        line.split(":", 1) for line in cpus.partition("\n\n")[0].splitlines() if ":" in line
    )
    fact = {name.strip(): value.strip() for name, value in facts.items()}
    is_amd = fact.get("vendor_id") == "AuthenticAMD"
    return is_amd and int(fact.get("cpu family", 0)) >= ZEN_5


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
    usable = bool(torch.backends.mkldnn.enabled) and CPUS.exists()
    return usable and has_idle_units(CPUS.read_text())


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
