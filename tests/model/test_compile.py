"""Every preset and every option makes one graph for torch.compile, with everything on the device of the ids.

No GPU is needed: weights and ids are on "cuda" and have shapes alone. What Dynamo traces is the loss with its backward
pass of the chunks, as training calls it; an operation that PyTorch must leave the graph for is an error here.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gptframe import compose
from gptframe.config import Config, ModelConfig
from gptframe.model import GPT, Context
from gptframe.registry import build
from gptframe.training.optimizer import param_groups

SIZES = ("name", "d_model", "n_layers", "n_heads", "vocab_size", "context_length")
# Together they have every option of GROUPS that no preset has, and what else changes the graph.
MIXED = {
    "gated, grouped": "norm_placement=post norm=rmsnorm activation=geglu attention=gqa model.attention.qk_norm=head "
    "position=rope_half model.dropout=0.1",
    "parallel, one head of keys": "norm_placement=output activation=reglu attention=mqa model.attention.qk_norm=full "
    "position=rope_neox model.topology=parallel",
    "window and caps": "norm_placement=sandwich activation=relu attention=sliding model.attention.window=16 "
    "position=rope_llama3 model.attention.softcap=20 model.logit_softcap=30",
    "documents": "norm_placement=peri activation=squared_relu position=sinusoidal model.attention.bias=true",
    "documents with biased scores": "norm_placement=keel activation=silu position=alibi",
    "recomputed": "norm_placement=deepnorm activation=swiglu position=none",
    "all logits at once": "norm_placement=none activation=gelu_exact position=learned",
}
GROUPS = ("norm_placement", "norm", "activation", "attention", "position")


@functools.cache
def composed(overrides: str) -> ModelConfig:
    cfg = Config.from_dict(compose.compose_config([*overrides.split(), "model.n_layers=1"])).model
    return dataclasses.replace(cfg, vocab_size=cfg.vocab_size or 300)


def structures() -> dict[str, list[str]]:
    """The presets, those together that differ in sizes alone: their graphs are the same."""
    found: dict[str, list[str]] = {}
    for preset in compose.groups()["model"]:
        values: dict[str, Any] = dataclasses.asdict(composed(f"model={preset}"))
        key = repr({k: v for k, v in values.items() if k not in SIZES and k != "expansion"})
        found.setdefault(key, []).append(preset)
    return {presets[0]: presets for presets in found.values()}


def traced(cfg: ModelConfig, documents: bool = False, **trade: bool) -> tuple[Tensor, list[torch.fx.GraphModule]]:
    """The loss of a batch without values on "cuda", and the graphs that Dynamo made of it."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    with FakeTensorMode(), torch.device("cuda"):
        model = GPT(cfg)
        model.trade_memory(**trade)
        ids = torch.zeros(2, min(32, cfg.context_length), dtype=torch.long)
        ctx = Context(documents=ids if documents else None, losses={}, metrics={})
        loss = torch.compile(model.forward, fullgraph=True, backend=backend)(ids, ctx, ids)
    return loss, graphs


@pytest.mark.parametrize("preset", structures())
def test_presets_are_one_graph(preset):
    loss, graphs = traced(composed(f"model={preset}"))
    assert len(graphs) == 1
    assert (loss.device.type, loss.dtype, loss.shape, loss.requires_grad) == ("cuda", torch.float32, (), True)


@pytest.mark.parametrize("name", MIXED)
def test_options_are_one_graph(name):
    trade = {"recompute": name == "recomputed", "chunked_loss": name != "all logits at once"}
    loss, graphs = traced(composed(MIXED[name]), documents="documents" in name, **trade)
    assert len(graphs) == 1 and loss.device.type == "cuda"


def test_no_option_is_forgotten():
    assert sorted(p for presets in structures().values() for p in presets) == sorted(compose.groups()["model"])
    typed = {word for overrides in MIXED.values() for word in overrides.split()}
    for group in GROUPS:
        default = {"norm_placement": "pre", "norm": "layernorm", "activation": "gelu_tanh", "attention": "mha"}
        default["position"] = "rope"
        tried = {word.partition("=")[2] for word in typed if word.startswith(f"{group}=")} | {default[group]}
        assert tried == set(compose.groups()[group]), group


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
def test_an_optimisers_step_stays_on_the_gpu(name):
    with FakeTensorMode(), torch.device("cuda"):
        model = GPT(composed("model=mini"))
        optimizer = build("optimizer", {"name": name, "lr": 1e-3}, param_groups(model))
        for p in model.parameters():
            p.grad = torch.empty_like(p)
        optimizer.step()
        state = [v for own in optimizer.state.values() for v in own.values() if isinstance(v, Tensor)]
    assert state and all(v.device.type == "cuda" for v in state)
    if name == "adamw":
        assert all(group["fused"] for group in optimizer.param_groups)
