"""Names that a plug-in may not take."""

from __future__ import annotations

import pytest

from fidelity.errors import PluginError
from fidelity.records import DecodePlan
from fidelity.registry import AXES, OPTIMIZATIONS, FunctionOptimization, load_plugins
from fidelity.report.html import _settings
from tests.report import sample


@pytest.mark.parametrize("name", AXES)
def test_an_optimization_may_not_be_called_what_means_something_else(name):
    with pytest.raises(PluginError, match=f"{name!r} is a word of suites and reports already"):
        OPTIMIZATIONS.add(name, FunctionOptimization(name, "", 50, lambda: None))
    assert name not in OPTIMIZATIONS


def test_every_axis_of_a_report_is_reserved_or_registered():
    load_plugins()
    axes = _settings(sample.judged(check="repeat", plan=DecodePlan()))
    assert set(axes) <= {*AXES, *OPTIMIZATIONS}
