"""What all metrics keep to: the range is declared, the worst image decides, nothing is resized, NaN is no score."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

import fidelity.metrics  # registers
from fidelity.errors import EvaluationError
from fidelity.records import to_json
from fidelity.registry import METRICS
from tests.metrics.samples import measure, noisy, picture

ALL = [name for name, _ in METRICS.items()]
DIFFERENCES = [name for name in ALL if name not in ("nonfinite_share", "clipped_share")]
PERFECT = {"rmse": 0, "max_abs": 0, "p999_abs": 0, "nonfinite_share": 0, "ssim": 1, "ms_ssim": 1, "lpips_alex": 0,
           "delta_e_mean": 0, "delta_e_p99": 0, "clipped_share": 0, "detail_loss": 0, "banding": 0, "luma_shift": 0,
           "saturation_shift": 0}  # fmt: skip
SIZE = {"height": 176, "width": 192}


def spoilt(name: str, image: torch.Tensor) -> torch.Tensor:
    """An image (3, H, W) much worse than the rest, in the way that this metric is about."""
    if name == "nonfinite_share":
        return torch.where(torch.arange(image.shape[-1]) == 5, float("nan"), image)
    if name == "banding":
        return (image * 127.5).round() / 127.5
    if name == "detail_loss":
        return torch.nn.functional.avg_pool2d(image, 5, 1, 2)
    return noisy(image, 0.3)


def test_the_contract_s_names_are_there():
    assert {"rmse", "psnr", "max_abs", "p999_abs", "nonfinite_share", "clipped_share", "ssim", "lpips_alex",
            "delta_e_mean", "delta_e_p99"} <= set(ALL)  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_range_is_a_required_argument(name):
    assert inspect.signature(METRICS.get(name).function).parameters["data_range"].default is inspect.Parameter.empty


@pytest.mark.parametrize("name", PERFECT)
def test_equal_samples_are_exact_and_perfect(name):
    golden = picture(**SIZE)
    result = measure(name, golden.clone(), golden)
    assert result.value == pytest.approx(PERFECT[name], abs=1e-6)
    assert result.exact


@pytest.mark.parametrize("name", ALL)
def test_worst_image_decides_and_is_named(name):
    golden = picture(3, **SIZE)
    candidate = golden.clone()
    candidate[1] = spoilt(name, golden[1])
    candidate[2] = noisy(golden[2], 0.01)
    result = measure(name, candidate, golden)
    assert result.where["image"] == 1
    assert not result.exact
    own = measure(name, candidate[1:2], golden[1:2])
    assert result.value == pytest.approx(own.value, rel=1e-4)


@pytest.mark.parametrize("name", ALL)
def test_range_zero_to_one_gives_the_same(name):
    golden = picture(**SIZE)
    candidate = noisy(golden)
    shifted = measure(name, (candidate + 1) / 2, (golden + 1) / 2, data_range=(0.0, 1.0))
    assert shifted.value == pytest.approx(measure(name, candidate, golden).value, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("name", DIFFERENCES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_image_makes_no_score(name, bad):
    golden = picture(**SIZE)
    candidate = noisy(golden)
    candidate[1, 2, 5, 7] = bad
    result = measure(name, candidate, golden)
    assert result.value is None
    assert "candidate is not finite: image 1" in result.reason
    assert result.per_image[0] is not None
    assert result.per_image[1] is None
    to_json(result)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_golden_that_is_not_finite_makes_no_score(name):
    golden = picture(**SIZE)
    candidate = golden.clone()
    golden[0, 0, 0, 0] = float("nan")
    result = measure(name, candidate, golden)
    assert result.value is None
    assert "golden is not finite: image 0" in result.reason


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x[:, :, :-1], "has shape"),
        (lambda x: x[:1], "has shape"),
        (lambda x: x.double(), "float64"),
        (lambda x: x.bfloat16(), "bfloat16"),
    ],
)
def test_what_cannot_be_compared_is_one_line(name, change, words):
    golden = picture()
    with pytest.raises(EvaluationError, match=words) as raised:
        measure(name, change(golden), golden)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("data_range", [(1.0, -1.0), (0.0, 0.0), (0.0, float("inf"))])
def test_a_range_that_is_none_is_refused(data_range):
    with pytest.raises(EvaluationError, match="data_range"):
        measure("rmse", picture(), picture(), data_range=data_range)


@pytest.mark.parametrize("name", ALL)
def test_a_video_is_as_bad_as_its_worst_frame(name):
    golden = torch.stack([picture(seed=seed, **SIZE) for seed in range(3)], dim=2)
    candidate = noisy(golden, 0.01)
    candidate[1, :, 2] = spoilt(name, golden[1, :, 2])
    result = measure(name, candidate, golden)
    assert (result.where["image"], result.where["frame"]) == (1, 2)
    frame = measure(name, candidate[1:, :, 2].contiguous(), golden[1:, :, 2].contiguous())
    assert result.value == pytest.approx(frame.value, rel=1e-4)
    to_json(result)


@pytest.mark.parametrize("name", ALL)
def test_measuring_changes_neither_sample(name):
    golden = picture(**SIZE)
    candidate = noisy(golden)
    before = candidate.clone(), golden.clone()
    measure(name, candidate, golden)
    assert torch.equal(candidate, before[0])
    assert torch.equal(golden, before[1])


@pytest.mark.parametrize("name", ALL)
def test_the_golden_s_memory_does_not_outlive_a_change(name):
    golden = picture(**SIZE)
    candidate = noisy(golden)
    measure(name, candidate, golden)
    candidate.copy_(noisy(golden, 0.2))
    golden.mul_(0.9)
    assert measure(name, candidate, golden).value == measure(name, candidate.clone(), golden.clone()).value


def test_memory_is_let_go_with_the_golden():
    from fidelity import signal

    golden = picture()
    measure("ssim", noisy(golden), golden)
    size = len(signal._MEMORY)
    del golden
    assert len(signal._MEMORY) < size


@pytest.mark.slow
def test_importing_the_metrics_imports_nothing_heavy():
    code = (
        "import sys, fidelity.metrics, fidelity.detectors;"
        "print(sorted({'torch', 'numpy', 'lpips', 'skimage', 'scipy', 'torchvision'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_fidelity_metrics_exports_its_modules():
    assert set(fidelity.metrics.__all__) == {"color", "numeric", "perceptual", "structural"}


def test_inference_tensors_and_gradients_are_measured_alike():
    golden = picture(**SIZE)
    candidate = noisy(golden)
    with torch.inference_mode():
        inferred = candidate.clone(), golden.clone()
    for name in ("rmse", "ssim", "lpips_alex", "delta_e_mean"):
        want = measure(name, candidate, golden).value
        assert measure(name, *inferred).value == pytest.approx(want)
        assert measure(name, candidate.clone().requires_grad_(), golden).value == pytest.approx(want)
        with torch.inference_mode():
            assert measure(name, candidate.clone(), golden).value == pytest.approx(want)
