"""Products by oneDNN against torch's own, in value and gradient."""

import pytest
import torch
from torch import nn

from rlinf.workers.engines.products import MIN_WEIGHTS, has_idle_units, product, project

torch.set_num_threads(1)  # several threads on busy cores wait for each other most of the time

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)


def layer(inputs=160, outputs=256, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(inputs, outputs, **options)


def gradients(run, module, x):
    x = x.clone().requires_grad_()
    module.zero_grad()
    (run(x) * torch.randn(len(x), 256, generator=torch.manual_seed(2))).sum().backward()
    return [x.grad, *(parameter.grad.clone() for parameter in module.parameters())]


def by_onednn(module):
    return lambda x: product(x, module.weight, module.bias)


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_and_its_gradients_are_torchs_own(bias):
    module = layer(bias=bias)
    assert module.weight.numel() >= MIN_WEIGHTS
    x = torch.randn(37, 160, generator=torch.manual_seed(1))
    assert torch.allclose(by_onednn(module)(x), module(x), atol=1e-5)
    ours = gradients(by_onednn(module), module, x)
    theirs = gradients(module, module, x)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, atol=1e-4)


@needs_onednn
def test_a_row_does_not_depend_on_the_others():
    module, x = layer(), torch.randn(300, 160, generator=torch.manual_seed(1))
    whole = by_onednn(module)(x)
    for rows in (2, 7, 16, 33, 128):
        assert torch.equal(by_onednn(module)(x[:rows]), whole[:rows])


@needs_onednn
def test_frozen_weights_get_no_gradient():
    module = layer().requires_grad_(False)
    x = torch.randn(5, 160, requires_grad=True)
    by_onednn(module)(x).sum().backward()
    assert module.weight.grad is None
    assert torch.allclose(x.grad, module.weight.sum(0).expand(5, -1), atol=1e-5)


@needs_onednn
@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows_are_no_exception(rows):
    assert by_onednn(layer())(torch.zeros(rows, 160)).shape == (rows, 256)


@pytest.mark.parametrize(
    ("vendor", "family", "idle"),
    [("AuthenticAMD", 26, True), ("AuthenticAMD", 25, False), ("GenuineIntel", 6, False)],
)
def test_whose_units_mkl_leaves_idle(vendor, family, idle):
    processor = f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nflags\t\t: fpu\n\n"
    assert has_idle_units(2 * processor) is idle


def test_an_unknown_processor_is_left_to_torch():
    assert not has_idle_units("") and not has_idle_units("CPU implementer\t: 0x41\n")


def test_what_is_not_a_plain_float32_layer_is_called():
    x = torch.randn(3, 160)
    half = layer().bfloat16()
    assert torch.equal(project(half, x.bfloat16()), half(x.bfloat16()))
    wrapped = nn.Sequential(layer())
    assert torch.equal(project(wrapped, x), wrapped(x))
    hooked = layer()
    hooked.register_forward_hook(lambda module, given, output: output * 0)
    assert project(hooked, x).abs().max() == 0
    with torch.autocast("cpu", torch.bfloat16):
        assert project(layer(), x).dtype == torch.bfloat16
