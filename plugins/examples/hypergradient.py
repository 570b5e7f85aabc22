"""A learning rate that is learned while the model is: a callback that keeps its state in the checkpoints.

    python train.py plugins=[plugins/examples/hypergradient.py] schedule=constant \\
        +callbacks.extra.hypergradient.rate=0.02

metrics.csv has the rate that was taken in the column `lr`.
"""

from typing import Any

import pytorch_lightning as pl
import torch

from gptframe import UserError, register


@register("callback", "hypergradient")
class Hypergradient(pl.Callback):
    """Multiplies the scheduled rate by f, with f <- f * (1 + rate * cos(g, m)): g is this step's gradient, m the
    running mean of the earlier ones that Adam keeps. Steps that go on in one direction get longer, those that turn back
    shorter (Baydin et al., 2018, in its multiplicative form, with the cosine for the product).

    Args:
        rate: how far one step can move f, from 0 to below 1.
    """

    def __init__(self, rate: float = 0.02):
        if not 0 <= rate < 1:
            raise UserError(f"callbacks.extra.hypergradient.rate={rate} must be from 0 to below 1")
        self.rate, self.factor = rate, 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.factor = state["factor"]

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        found = [(p.grad, optimizer.state[p]) for group in optimizer.param_groups for p in group["params"]]
        pairs = [(g.flatten(), s["exp_avg"].flatten()) for g, s in found if g is not None and "exp_avg" in s]
        if any(s for _, s in found) and not pairs:
            raise UserError("callbacks.extra.hypergradient needs the running mean of Adam: use optimizer=adamw")
        if pairs:
            together, now, before = (
                float(sum(torch.dot(p[i].double(), p[j].double()) for p in pairs)) for i, j in ((0, 1), (0, 0), (1, 1))
            )
            if now * before > 0:
                self.factor *= 1 + self.rate * together / (now * before) ** 0.5
        for group in optimizer.param_groups:
            group["lr"] *= self.factor
