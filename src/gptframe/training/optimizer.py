"""Optimisers, and the rule that says which parameter belongs to which group.

    role       parameters                                                     decay    muon
    matrix     weights of nn.Linear, the output head apart                    yes      orthogonalised
    decayed    an untied head; any other parameter with two or more axes      yes      AdamW
    plain      embeddings, positions, norms, biases, anything with one axis   no       AdamW

A tied head is the token embedding, and counts once, as embedding: plain. Decay is decoupled (Loshchilov and Hutter,
2019): each step multiplies a parameter by 1 - lr * weight_decay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gptframe.errors import UserError
from gptframe.model.position import Position
from gptframe.registry import register
from gptframe.training.narrow_state import evaluated, stored_as

ROLES = ("matrix", "decayed", "plain")
DECAYED = ("matrix", "decayed")


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Every trainable parameter in exactly one group `{"params", "param_names", "role"}`; empty groups are left out.

    Raises:
        UserError: all of them are frozen.
        AssertionError: a parameter is in no group or in two. It cannot happen by configuration.
    """
    groups: dict[str, dict[str, Any]] = {r: {"params": [], "param_names": [], "role": r} for r in ROLES}
    owners: dict[Tensor, tuple[str, nn.Module]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            seen = owners.get(parameter)
            # a tensor shared by two modules is an embedding if either of them is one
            if seen is None or (isinstance(module, nn.Embedding) and not isinstance(seen[1], nn.Embedding)):
                owners[parameter] = (f"{prefix}.{name}" if prefix else name, module)
    for parameter, (name, module) in owners.items():
        if parameter.requires_grad:
            group = groups[_role(module, parameter)]
            group["params"].append(parameter)
            group["param_names"].append(name)
    placed = [p for group in groups.values() for p in group["params"]]
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert len(placed) == len(set(placed)) == len(trainable) and set(placed) == set(trainable)
    if not placed:
        raise UserError("nothing is left to train: every parameter is frozen, as by one of model.transforms")
    return [group for group in groups.values() if group["params"]]


def _role(module: nn.Module, parameter: Tensor) -> str:
    if parameter.ndim < 2 or isinstance(module, (nn.Embedding, Position)):
        return "plain"
    if isinstance(module, nn.Linear) and parameter.ndim == 2 and getattr(module, "role", "matrix") != "head":
        return "matrix"
    return "decayed"


def _check(lr: float, weight_decay: float, betas: list[float] | None = None, **at_least_zero: float) -> None:
    for key, value in {"lr": lr, "weight_decay": weight_decay, **at_least_zero}.items():
        if not value >= 0:
            raise UserError(f"optimizer.{key}={value} must be at least 0")
    if betas is not None and not (len(betas) == 2 and all(0 <= b < 1 for b in betas)):
        raise UserError(f"optimizer.betas={betas} must be two numbers from 0 to below 1, as in [0.9,0.95]")


def _with_decay(groups: list[dict[str, Any]], weight_decay: float) -> list[dict[str, Any]]:
    return [{**group, "weight_decay": weight_decay if group["role"] in DECAYED else 0.0} for group in groups]


def _with_rates(
    groups: list[dict[str, Any]], lr: float, embedding_lr: float | None, head_lr: float | None
) -> list[dict[str, Any]]:
    """The groups with the learning rates of their AdamW part; the plain one in two where its tables have their own."""
    rated = []
    for group in groups:
        if group["role"] == "decayed":
            rated.append({**group, "lr": lr if head_lr is None else head_lr})
        elif group["role"] == "plain" and embedding_lr is not None:
            named = list(zip(group["params"], group["param_names"], strict=True))
            for rate, part in (
                (embedding_lr, [pair for pair in named if pair[0].ndim >= 2]),
                (lr, [pair for pair in named if pair[0].ndim < 2]),
            ):
                if part:
                    params, names = (list(column) for column in zip(*part, strict=True))
                    rated.append({**group, "params": params, "param_names": names, "lr": rate})
        else:
            rated.append(group)
    return rated


def _can_fuse(groups: list[dict[str, Any]]) -> bool:
    parameters = [p for group in groups for p in group["params"]]
    return all(p.device.type in ("cuda", "cpu", "mps", "xpu") and p.is_floating_point() for p in parameters)


def parts(optimizer: Any) -> Iterator[Any]:
    """An optimiser and those that work inside it."""
    yield optimizer
    for inner in getattr(optimizer, "inner", {}).values():
        yield from parts(inner)


@register("optimizer", "adamw")
def adamw(
    groups: list[dict],
    lr: float,
    betas: list[float] | None = None,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    fused: bool | None = None,
    state_dtype: str = "float32",
) -> Optimizer:
    """AdamW (Loshchilov and Hutter, 2019).

    Args:
        betas: [0.9, 0.95] if not given.
        fused: one kernel for the whole update; null for wherever PyTorch has it.
        state_dtype: of both moments; `bfloat16` halves their memory (see `NarrowState`).
    """
    betas = [0.9, 0.95] if betas is None else betas
    _check(lr, weight_decay, betas, eps=eps)
    fused = _can_fuse(groups) if fused is None else fused
    # foreach where not fused: the fastest of the rest
    options: dict[str, Any] = {"fused": True} if fused else {"foreach": True}
    groups = _with_decay(groups, weight_decay)
    return stored_as(state_dtype, torch.optim.AdamW(groups, lr=lr, betas=(betas[0], betas[1]), eps=eps, **options))


class Lion(Optimizer):
    """u = sign(b1 m + (1 - b1) g); p <- p - lr (u + weight_decay p); m <- b2 m + (1 - b2) g (Chen et al., 2023)."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluated(closure)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                if "momentum" not in self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
            grads = [p.grad for p in params]
            momenta = [self.state[p]["momentum"] for p in params]
            beta1, beta2 = group["betas"]
            updates = torch._foreach_lerp(momenta, grads, 1 - beta1)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, updates, alpha=-group["lr"])
            torch._foreach_lerp_(momenta, grads, 1 - beta2)
        return loss


@register("optimizer", "lion")
def lion(
    groups: list[dict],
    lr: float,
    betas: list[float] | None = None,
    weight_decay: float = 1.0,
    state_dtype: str = "float32",
) -> Optimizer:
    """Lion (Chen et al., 2023). Its step has magnitude lr everywhere, so lr is 3 to 10 times below AdamW's and the
    decay as much above.

    Args:
        betas: [0.9, 0.99] if not given.
        state_dtype: of the momentum; `bfloat16` halves its memory (see `NarrowState`).
    """
    betas = [0.9, 0.99] if betas is None else betas
    _check(lr, weight_decay, betas)
    return stored_as(state_dtype, Lion(_with_decay(groups, weight_decay), lr, (betas[0], betas[1]), weight_decay))


class MuonAdamW(Optimizer):
    """torch.optim.Muon for groups of role `matrix` and AdamW for the rest, as one optimiser, so that a step is one
    step for whoever counts them, and the state is saved as one."""

    def __init__(self, muon_groups: list[dict], adamw_groups: list[dict], muon: dict[str, Any], adamw: dict[str, Any]):
        self.inner: dict[str, Optimizer] = {}
        if muon_groups:
            self.inner["matrix"] = torch.optim.Muon(muon_groups, **muon)
        if adamw_groups:
            self.inner["rest"] = torch.optim.AdamW(adamw_groups, **adamw)
        super().__init__([group for inner in self.inner.values() for group in inner.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluated(closure)
        for which, inner in self.inner.items():
            # load_state_dict replaces both containers: hand over the ones of the moment
            inner.param_groups = [g for g in self.param_groups if (g["role"] == "matrix") == (which == "matrix")]
            inner.state = self.state
            if inner.param_groups:
                inner.step()
        return loss


@register("optimizer", "muon")
def muon(
    groups: list[dict],
    lr: float,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    adjust_lr: str = "match_rms_adamw",
    weight_decay: float = 0.1,
    adamw_lr: float | None = None,
    embedding_lr: float | None = None,
    head_lr: float | None = None,
    betas: list[float] | None = None,
    eps: float = 1e-8,
    state_dtype: str = "float32",
) -> Optimizer:
    """Muon (Jordan et al., 2024) for the matrices, AdamW for embeddings, head, norms and biases.

    The update of a matrix [A, B] is orthogonalised, then scaled by lr times

        match_rms_adamw       0.2 sqrt(max(A, B)): the RMS of an AdamW step, so AdamW's lr and decay carry over
                              (Liu et al., 2025)
        original              sqrt(max(1, A / B)), with an lr of about 0.02
        spectral_unclamped    sqrt(A / B)

    Args:
        adamw_lr: of the AdamW part; null for `lr`, which is right with match_rms_adamw only.
        embedding_lr: of token embeddings, tables of positions and other plain parameters with two or more axes; null
            for adamw_lr. A row of a table gets a gradient only where its token occurs, and can take longer steps.
        head_lr: of the group `decayed`, which is the untied head; null for adamw_lr.
        betas: of the AdamW part, [0.9, 0.95] if not given.
        state_dtype: of the momentum and of AdamW's moments; `bfloat16` halves their memory (see `NarrowState`).
    """
    if not hasattr(torch.optim, "Muon"):
        raise UserError(f"optimizer=muon needs torch.optim.Muon, which PyTorch {torch.__version__} lacks")
    betas = [0.9, 0.95] if betas is None else betas
    adamw_lr = lr if adamw_lr is None else adamw_lr
    given = {k: v for k, v in (("embedding_lr", embedding_lr), ("head_lr", head_lr)) if v is not None}
    _check(lr, weight_decay, betas, momentum=momentum, adamw_lr=adamw_lr, eps=eps, **given)
    adjustments = ("match_rms_adamw", "original", "spectral_unclamped")
    if adjust_lr not in adjustments:
        raise UserError(f"optimizer.adjust_lr={adjust_lr!r} is not one of {', '.join(adjustments)}")
    if ns_steps < 1:
        raise UserError(f"optimizer.ns_steps={ns_steps} must be at least 1")
    if head_lr is not None and not any(g["role"] == "decayed" for g in groups):
        raise UserError(
            f"optimizer.head_lr={head_lr} has no effect: the head is tied, and learns as the embedding does; type "
            f"optimizer.head_lr=null, or model.tie_head=false"
        )
    groups = _with_rates(_with_decay(groups, weight_decay), adamw_lr, embedding_lr, head_lr)
    matrices = [g for g in groups if g["role"] == "matrix"]
    rest = [g for g in groups if g["role"] != "matrix"]
    both = MuonAdamW(
        matrices,
        rest,
        {"lr": lr, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr},
        {"lr": adamw_lr, "betas": (betas[0], betas[1]), "eps": eps, "fused": _can_fuse(rest)},
    )
    return stored_as(state_dtype, both)
