"""The kit's checks of attention backends catch a wrong value and a wrong gradient, and leave a sound backend alone."""

from __future__ import annotations

import pytest
from torch import Tensor

from gptframe.registry import register
from gptframe.testing import conformance
from gptframe.testing.backends import formula


def backend(change):
    """A factory of backends whose inputs are changed, then put into the formula."""

    class Changed:
        def __init__(self, cfg):
            pass

        def __call__(self, q: Tensor, k: Tensor, v: Tensor, window: int | None, documents: Tensor | None):
            return formula(*change(q, k, v, window, documents))

    return Changed


CHANGES = {
    "window": (lambda q, k, v, w, d: (q, k, v, None, d), "contract"),
    "documents": (lambda q, k, v, w, d: (q, k, v, w, None), "contract"),
    "scale": (lambda q, k, v, w, d: (1.1 * q, k, v, w, d), "contract"),
    "future": (lambda q, k, v, w, d: (q, k, v.roll(-1, 2), w, d), "contract"),
    "no_gradient": (lambda q, k, v, w, d: (q, k.detach() + 0 * k, v, w, d), "backend_gradients"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_faults_are_caught(name, monkeypatch, fresh_registry):
    change, check = CHANGES[name]
    changed = backend(change)
    monkeypatch.setattr(changed, "__reduce__", lambda self: (type(None), ()), raising=False)  # local, but pickled
    register("attention_backend", name)(changed)
    report = conformance("attention_backend", name)
    assert check in [failure.check for failure in report.failures], report
    assert check == "contract" or "gradient of k" in report.failures[0].what


def test_the_formula_itself_passes(fresh_registry):
    sound = backend(lambda *given: given)
    sound.__reduce__ = lambda self: (type(None), ())
    register("attention_backend", "sound")(sound)
    report = conformance("attention_backend", "sound")
    assert report.ok and report.passed["contract"].startswith("14 of 14"), report.failures
