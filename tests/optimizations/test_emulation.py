"""Emulated fp16: fp16 between operators, fp32 inside, and nothing else changed."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fidelity import registry
from fidelity.optimizations import emulation
from fidelity.records import DecodePlan
from tests.optimizations.small import decode, latents

G = torch.Generator()


def half(*shape, scale=1.0, seed=0):
    return (torch.randn(*shape, generator=G.manual_seed(seed)) * scale).half()


def rounded(function, *tensors):
    """The function in fp32 of fp16 operands, its result rounded once."""
    return function(*(tensor.float() if tensor.is_floating_point() else tensor for tensor in tensors)).half()


X, W, B = half(2, 8, 6, 7), half(8, 8, 3, 3, seed=1), half(8, seed=2)
ONE_OPERATOR = {
    "conv": (lambda x, w, b: F.conv2d(x, w, b, padding=1), X, W, B),
    "group_norm": (lambda x, w, b: F.group_norm(x, 4, w, b), X, B, B),
    "silu": (F.silu, X),
    "softmax": (lambda x: F.softmax(x, -1), X),
    "linear": (lambda x, w: F.linear(x, w), half(5, 8), half(4, 8, seed=3)),
    "matmul": (lambda x, y: x @ y, half(3, 5, 8), half(3, 8, 4, seed=3)),
    "attention": (F.scaled_dot_product_attention, half(1, 1, 9, 8), half(1, 1, 9, 8, seed=3), half(1, 1, 9, 8, seed=4)),
    "add": (torch.add, X, half(2, 8, 6, 7, seed=3)),
    "times a number": (lambda x: x * 0.3, X),
    "mean": (lambda x: x.mean((2, 3)), X),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), X),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"), X),
    "pad": (lambda x: F.pad(x, (0, 1, 2, 0)), X),
    "reflect": (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), X),
    "cat": (lambda x: torch.cat([x, x], 1), X),
    "clamp": (lambda x: x.clamp(-0.1, 0.1), X),
}


@pytest.mark.parametrize("name", ONE_OPERATOR)
def test_one_operator_is_its_fp32_result_rounded(name):
    function, *operands = ONE_OPERATOR[name]
    with torch.no_grad(), emulation.half():
        found = function(*operands)
    assert found.dtype is torch.float16
    assert torch.equal(found, rounded(function, *operands))


def test_overflow_becomes_infinity():
    with emulation.half():
        product = torch.full((3,), 300.0).half() * torch.full((3,), 300.0).half()
        total = torch.full((4,), 6e4).half().sum()
    assert product.tolist() == [float("inf")] * 3
    assert total.item() == float("inf")


def test_accumulation_is_fp32_inside_one_operator():
    ones = torch.ones(1, 4096).half()
    with emulation.half():
        assert (ones @ torch.ones(4096, 1).half()).item() == 4096  # fp16 accumulation stalls at 2048


def test_views_are_views_and_writes_go_through():
    x = half(2, 8)
    before = x.clone()
    with emulation.half():
        row = x[0]
        assert row.data_ptr() == x.data_ptr()
        same = row.mul_(2)
        assert same.data_ptr() == x.data_ptr()
        x[1, :4] = 7
        x[:, 5] = x[:, 5] * 0.1 + x[:, 6] * 0.9
    assert torch.equal(x[0, :5], before[0, :5] * 2)
    assert x[1, :4].tolist() == [7] * 4
    assert torch.equal(x[1, 5], ((before[1, 5] * 0.1).half() + (before[1, 6] * 0.9).half()).half())


def test_out_argument_and_tuples_of_results():
    x, out = half(4, 6), torch.empty(4, 6).half()
    with emulation.half():
        returned = torch.mul(x, 3.0, out=out)
        values, indices = x.max(1)
        parts = x.split(2)
    assert returned is out
    assert torch.equal(out, rounded(lambda t: t * 3.0, x))
    assert torch.equal(values, x.float().max(1).values.half())
    assert indices.dtype is torch.int64
    assert parts[1].data_ptr() == x[2:].data_ptr()


def test_dtypes_that_the_caller_asks_for_are_given():
    x = half(4, 6)
    with emulation.half():
        assert x.float().dtype is torch.float32
        assert x.sum(dtype=torch.float32).dtype is torch.float32
        assert torch.equal(x.float().sum(dtype=torch.float16), x.float().sum().half())
        assert F.softmax(x, -1, dtype=torch.float32).dtype is torch.float32
        assert (x + torch.ones(4, 6)).dtype is torch.float32  # type promotion
        assert (x + torch.tensor(1.0)).dtype is torch.float16  # a 0-dim tensor does not promote
        assert (x > 0).dtype is torch.bool
        assert x.argmax().dtype is torch.int64
        assert torch.zeros(2, dtype=torch.float16).dtype is torch.float16


@pytest.mark.parametrize("function", [
    lambda: F.conv2d(X, W.float(), padding=1), lambda: half(2, 3) @ torch.ones(3, 2),
    lambda: F.linear(torch.ones(2, 8), half(4, 8)),
])  # fmt: skip
def test_mixed_dtypes_are_refused_as_natively(function):
    with emulation.half(), pytest.raises(RuntimeError, match="dtype"):
        function()


def test_other_dtypes_and_the_world_outside_are_untouched():
    with emulation.half():
        assert torch.equal(F.silu(X.float()), F.silu(X.float()))
        assert F.silu(X.bfloat16()).dtype is torch.bfloat16
    native = half(64, 64, scale=30.0)
    assert torch.equal((native @ native).float(), (native @ native).float())


def test_fp32_copies_are_gone_with_their_operator():
    """No reference cycle keeps them: it would take the garbage collector to free them, hundreds of MiB later."""
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dtype is torch.float32:
                seen.append(weakref.ref(result))
            return result

    gc.collect()
    gc.disable()
    try:
        with torch.no_grad(), Watch(), emulation.half():  # the outer mode sees what the emulation itself computes
            F.conv2d(X, W, B)
            F.group_norm(X, 4, B, B)
            X.clone().mul_(2)
        assert len(seen) >= 6
        assert [reference for reference in seen if reference() is not None] == []
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_error_level_is_that_of_true_half(seed):
    """On the trained model: what an untrained one does to 192 pixels varies by a tenth between any two kernels."""
    model = registry.MODELS.get("reference-kl")
    z = latents(1, 8, 8, seed=seed)
    emulated = decode(model.load(), DecodePlan(dtype="fp16"), z, model=model)[0].float()
    with torch.no_grad():
        exact = model.load().decode(z).sample
        native = model.load().half().decode(z.half()).sample.float()

    def rms(difference):
        return difference.pow(2).mean().sqrt().item()

    assert rms(emulated - exact) == pytest.approx(rms(native - exact), rel=0.05)
    assert rms(emulated - native) < rms(native - exact)
