"""A head of your own: in training it predicts the tokens after the next one too.

    python train.py plugins=[plugins/examples/multi_token.py] model.head.name=multi_token
    python train.py plugins=[plugins/examples/multi_token.py] model.head.name=multi_token +model.head.ahead=3

train_loss and val_loss stay those of the next token; metrics.csv gets `aux/ahead_1` and so on.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from gptframe import UserError, register
from gptframe.model.head import Head
from gptframe.model.loss import IGNORED, head_cross_entropy


@register("head", "multi_token")
class MultiTokenHead(Head):
    """Multi-token prediction (Gloeckle et al., 2024): from x + W_k norm(x), the token k further on, through the same
    output matrix. Generation takes the next token alone.

    Args:
        ahead: how many tokens after the next one.
        weight: of each of their losses, a token, beside the 1 of the next token's.
    """

    def __init__(self, cfg, ahead: int = 1, weight: float = 0.3):
        super().__init__(cfg)
        if not 1 <= ahead < cfg.context_length:
            raise UserError(f"model.head.ahead={ahead} must be from 1 to below model.context_length")
        self.weight = weight
        self.steps = nn.ModuleList(nn.Linear(cfg.d_model, cfg.d_model, bias=False) for _ in range(ahead))

    def loss(self, x: Tensor, weight: Tensor, targets: Tensor, ctx) -> Tensor:
        if self.training:
            for k, step in enumerate(self.steps, start=1):
                here = x[:, :-k]
                later = targets[:, k:]
                if ctx.documents is not None:  # the target of a token is of its own document; k further on may not be
                    later = later.masked_fill(ctx.documents[:, k:] != ctx.documents[:, :-k], IGNORED)
                seen = here + step(F.rms_norm(here, here.shape[-1:], eps=1e-5)).to(here.dtype)
                total = head_cross_entropy(seen, weight, later, self.softcap, self.backend)
                ctx.add_loss(f"ahead_{k}", self.weight * total / (later != IGNORED).sum().clamp(min=1))
        return super().loss(x, weight, targets, ctx)
