"""A mixture of experts: a sublayer that adds a loss to the training and logs a metric.

    python train.py plugins=[plugins/examples/moe.py] 'model.block=[attention,moe]'
    python train.py plugins=[plugins/examples/moe.py] 'model.block=[attention,moe]' +model.moe.experts=8

metrics.csv gets the columns `aux/balance` (the loss) and `aux/busiest` (the metric).
"""

import torch
from torch import Tensor, nn

from gptframe import UserError, register
from gptframe.model.mlp import MLP


@register("sublayer", "moe")
class MoE(nn.Module):
    """sum over the chosen experts e of p_e MLP_e(x), with p the renormalised probabilities of a linear router
    (Shazeer et al., 2017; top-k as in Mixtral, Jiang et al., 2024).

    Each expert computes the tokens that chose it, and none is dropped. Under torch.compile, which would have to stop at
    sizes that it cannot know, each computes all tokens: the same numbers at the cost of all experts.

    Args:
        experts: how many MLPs, each as wide as the model's expansion says.
        top_k: how many of them each token takes.
        balance: coefficient of experts * sum over e of (share of the choices) * (mean probability), which is least
            where all are equally busy (Fedus et al., Switch Transformer, 2021).
    """

    incremental = True

    def __init__(self, cfg, layer: int, experts: int = 4, top_k: int = 2, balance: float = 0.01):
        super().__init__()
        if not 1 <= top_k <= experts:
            raise UserError(f"model.moe.top_k={top_k} must be from 1 to model.moe.experts={experts}")
        self.top_k, self.balance = top_k, balance
        self.router = nn.Linear(cfg.d_model, experts, bias=False)
        self.experts = nn.ModuleList(MLP(cfg, layer, bias=False) for _ in range(experts))

    def forward(self, x: Tensor, ctx) -> Tensor:
        tokens = x.flatten(0, 1)  # [N, D]
        logits = self.router(tokens)
        probabilities = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(dim=-1)  # [N, E]
        best, chosen = probabilities.topk(self.top_k, dim=-1)
        shares = torch.zeros_like(probabilities).scatter(1, chosen, best / best.sum(dim=-1, keepdim=True))
        y = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            rows = slice(None)
            if not (torch.compiler.is_compiling() or x.is_meta):
                rows = (chosen == e).any(dim=-1).nonzero()[:, 0]
            part = shares[rows, e, None] * expert(tokens[rows], ctx)
            y = y + part.to(y.dtype) if isinstance(rows, slice) else y.index_add(0, rows, part.to(y.dtype))
        load = torch.zeros_like(probabilities).scatter(1, chosen, 1.0).mean(dim=0) / self.top_k  # [E], sums to 1
        ctx.add_loss("balance", self.balance * len(self.experts) * (load * probabilities.mean(dim=0)).sum())
        ctx.log("busiest", load.max() * len(self.experts))  # 1 where all experts are equally busy
        return y.view_as(x)
