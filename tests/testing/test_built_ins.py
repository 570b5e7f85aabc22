"""No built-in and no example plugin is accused by the conformance kit."""

from __future__ import annotations

from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from gptframe import plugins, registry
from gptframe.errors import UserError
from gptframe.model.head import Head
from gptframe.testing import conformance

pytest_plugins = ["gptframe.testing.pytest_plugin"]

EXAMPLES = sorted((Path(__file__).parents[2] / "plugins" / "examples").glob("*.py"))
# What they read has to be given: a file, a data set, a download.
OUTSIDE = {"tokenizer/hf_file", "tokenizer/none", "tokenizer/segments", "tokenizer/tiktoken"}
OUTSIDE |= {"corpus/bin", "corpus/hf", "corpus/text"}
BUILT_IN = [
    f"{kind}/{name}"
    for kind in registry.KINDS
    if kind != "norm_placement"  # rows of a table, without behaviour
    for name in registry.names(kind)
    if registry.entry(kind, name).module.startswith("gptframe.") and f"{kind}/{name}" not in OUTSIDE
]


@pytest.mark.parametrize("part", BUILT_IN)
def test_built_in(part):
    report = conformance(*part.split("/"))
    assert report.ok, "\n".join(f"{f}\n{f.trace}" for f in report.failures)
    assert report.passed


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_example(file):
    plugins.load([str(file)])
    parts = [key.split("/") for key, origin in registry.origins().items() if origin.startswith(f"{file}:")]
    assert parts
    for kind, name in parts:
        report = conformance(kind, name)
        assert report.ok, "\n".join(f"{f}\n{f.trace}" for f in report.failures)


OTHERS = [
    ("attention", {"n_kv_heads": 2, "window": 3, "qk_norm": "head", "softcap": 5.0, "bias": True}),
    ("attention", {"n_kv_heads": 1, "qk_norm": "full"}),
    ("mlp", {"bias": False}),
]


@pytest.mark.parametrize("name,options", OTHERS)
def test_built_in_with_other_options(name, options):
    report = conformance("sublayer", name, options)
    assert report.ok, "\n".join(f"{f}\n{f.trace}" for f in report.failures)


def test_what_needs_a_file_says_so():
    with pytest.raises(UserError, match="data.path is missing"):
        conformance("corpus", "text")


def test_a_head_with_a_matrix_of_its_own_is_not_accused():
    @registry.register("head", "with_a_matrix")
    class WithAMatrix(Head):
        def __init__(self, cfg):
            super().__init__(cfg)
            self.mix = nn.Linear(cfg.d_model, cfg.d_model)

        def forward(self, x, weight):
            return super().forward(self.mix(x), weight)

        def loss(self, x, weight, targets, ctx):
            return super().loss(self.mix(x), weight, targets, ctx)

    conformance("head", "with_a_matrix").raise_failures()


def test_the_fixture(conformance, tmp_path):
    file = tmp_path / "for_the_fixture.py"
    file.write_text(
        "from torch import nn\nfrom gptframe import register\n\n\n"
        '@register("norm", "of_the_fixture")\nclass N(nn.Module):\n    def __init__(self, dim: int):\n'
        "        super().__init__()\n\n    def forward(self, x):\n        return x - x.mean(dim=0)\n"
    )
    with pytest.raises(AssertionError, match="batch: the output of sequence 1"):
        conformance("norm", "of_the_fixture", plugin=file)
    assert conformance("norm", "rmsnorm", {"affine": False}, only=["future"]).passed == {
        "future": "each of 16 positions"
    }


def _zero(step: int, total_steps: int):
    return None


def _restless(step: int, total_steps: int, _calls=[0]):  # noqa: B006 - the fault itself
    _calls[0] += 1
    return float(_calls[0])


def _huge(role, shape, cfg):
    return float("inf")


def _deaf(groups):
    """An optimiser that reads its rate once."""

    class Deaf(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group["lr"] = 0.5
            return super().step(closure)

    return Deaf(groups, lr=0.5)


def _none(groups):
    return None


def _decays_all(groups, lr: float):
    return torch.optim.AdamW([{**group, "weight_decay": 0.5} for group in groups], lr=lr)


def _half(groups, lr: float):
    return torch.optim.AdamW(groups[:1], lr=lr)


class _Letters:
    vocab_size = 10

    def __init__(self, source):
        pass

    def encode(self, text):
        return [ord(c) % 64 for c in text]

    def decode(self, ids):
        return ""


class _Once:
    def __init__(self):
        self.texts = iter(["a", "b"])

    def documents(self, split):
        return self.texts

    def fingerprint(self):
        return "once"


class _MeanLoss(Head):
    def loss(self, x, weight, targets, ctx):
        return super().loss(x, weight, targets, ctx) / targets.numel()


class _MixesTokens(Head):
    def forward(self, x, weight):
        return super().forward(x - x.mean(dim=-2, keepdim=True), weight)


class _Unused(Head):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.extra = nn.Linear(cfg.d_model, cfg.d_model)


class _Forgets(pl.Callback):
    """Lowers the rate from step to step, and begins anew after a resume."""

    def __init__(self):
        self.factor = 1.0

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.factor *= 0.5
        for group in optimizer.param_groups:
            group["lr"] *= self.factor


class _Breaks(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        raise ValueError("broken")


FAULTS = [
    ("head", _MeanLoss, "cross_entropy", "and forward's logits a cross-entropy of"),
    ("head", _MixesTokens, "each_token", "change with the stream at token"),
    ("head", _Unused, "head_gradients", "no gradient reaches extra.weight"),
    ("callback", _Forgets, "checkpointed", "resumed after 3 of 6 steps"),
    ("callback", _Breaks, "contract", "in a training of 6 steps it raised ValueError: broken"),
    ("schedule", _zero, "contract", "the multiplier is NoneType"),
    ("schedule", _restless, "pure", "asked again"),
    ("optimizer", _none, "contract", "NoneType is no torch.optim.Optimizer"),
    ("init", _huge, "contract", "the standard deviation is inf"),
    ("optimizer", _deaf, "learning_rate", "with lr 0 in every group"),
    ("optimizer", _decays_all, "decay", "moves where its gradient is 0"),
    ("optimizer", _half, "contract", "is in none of its groups"),
    ("tokenizer", _Letters, "contract", "with vocab_size=10"),
    ("corpus", _Once, "contract", "the documents differ from call to call"),
]


@pytest.mark.parametrize("kind,value,check,message", FAULTS, ids=lambda v: getattr(v, "__name__", None))
def test_faults_of_the_other_kinds(kind, value, check, message):
    registry.register(kind, "planted")(value)
    (failure,) = conformance(kind, "planted", only=[check]).failures
    assert message in failure.what
