"""The LightningModule: the loss of one optimiser step, its micro-batches, clipping and update.

One batch of the train loader is one optimiser step, so Lightning's counts of batches and of steps agree. Optimisation
is manual: `training_step` splits the batch in micro-batches and divides each summed loss by the number of targets of
the whole step, over all ranks. Padding and the split therefore change neither gradient nor loss.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from gptframe.errors import UserError
from gptframe.model import GPT, Context
from gptframe.model.context import check_name, scalars
from gptframe.registry import build
from gptframe.training.optimizer import param_groups, parts

IGNORED = -100


def step_seed(seed: int, step: int, rank: int) -> int:
    """The seed of everything random inside one step (dropout): a pure function, so nothing needs saving."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{step}:{rank}".encode()).digest()[:8], "little") >> 1


class GPTModule(pl.LightningModule):
    """Trains a `GPT`.

    Args:
        model: the model; only its forward is compiled, so that parameter names stay as they are.
        optimizer: the config section `{name, **options}`.
        schedule: multiplier of the learning rate as a function of the step, from 0.
        micro_batch_size: sequences in a forward pass.
        clip_norm: bound on the global norm of the gradient; None for none.
        seed: of dropout.
        compile: use torch.compile for the training loss.
        compile_mode: its mode; None for its default.
        metadata: plain containers to carry in every checkpoint under "gptframe".
    """

    def __init__(
        self,
        model: GPT,
        optimizer: Mapping[str, Any],
        schedule: Callable[[int], float],
        *,
        micro_batch_size: int,
        clip_norm: float | None = None,
        seed: int = 0,
        compile: bool = False,
        compile_mode: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ):
        super().__init__()
        self.automatic_optimization = False
        self.model = model
        self.optimizer_section, self.schedule = dict(optimizer), schedule
        self.micro_batch_size, self.clip_norm, self.seed = micro_batch_size, clip_norm, seed
        self.loss_sum: Callable[..., Tensor] = model.forward
        if compile:
            self.loss_sum = torch.compile(model.forward, mode=compile_mode)
        self.metadata = dict(metadata or {})

        # The last step, for whoever logs it. Tensors, so that nothing waits for a GPU before it must.
        self.last_loss: Tensor = torch.zeros(())
        self.last_norm: Tensor = torch.zeros(())
        self.last_objective: Tensor = torch.zeros(())  # the loss and what `ctx.add_loss` trains beside it
        self.last_extras: dict[str, Tensor] = {}
        self.noted: dict[str, float] = {}  # what callbacks have logged since the last row
        self.last_lr = 0.0
        self.tokens: Tensor | int = 0
        self.all_parameters: list[torch.nn.Parameter] = []  # a walk through the modules at every step shows
        self._checked = False
        self.bad_steps = 0  # consecutive steps whose loss or gradient is not finite

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_current_fx_name":  # Lightning writes it dozens of times a step, and Module looks for tensors first
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = build("optimizer", self.optimizer_section, param_groups(self.model))
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        # A fused optimiser would unscale fp16 gradients inside its step, after clipping. Lightning is to do it before.
        optimizer._step_supports_amp_scaling = False
        if self.device.type == "cpu":
            # Asks, at every step, whether a CUDA graph is being captured, and to that end for the driver's library:
            # where there is none, a search through the file system that takes longer than the update itself.
            for part in parts(optimizer):
                part._accelerator_graph_capture_health_check = lambda: None
        self.all_parameters = list(self.model.parameters())
        return optimizer

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        step = self.trainer.global_step
        seed = step_seed(self.seed, step, self.global_rank)
        if self.device.type == "cpu":  # torch.manual_seed also queues a call for every absent device, and keeps it
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        multiplier = self.schedule(step)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * multiplier

        n_targets = self._over_ranks((batch["targets"] != IGNORED).sum())
        # data-parallel strategies average gradients over ranks; the loss is a mean over the targets of all of them
        divisor = n_targets.clamp(min=1)
        weight = self.trainer.world_size / divisor
        micro_batches = split(batch, self.micro_batch_size)
        total = torch.zeros((), device=self.device)
        extras: dict[str, Tensor] = {}
        seen: dict[str, Tensor] = {}  # targets of the micro-batches that gave a metric
        trained: set[str] = set()
        for i, micro in enumerate(micro_batches):
            with contextlib.nullcontext() if i == len(micro_batches) - 1 else self._no_sync():
                ctx = Context(documents=micro.get("documents"), losses={}, metrics={})
                loss = self.loss_sum(micro["ids"], ctx, micro["targets"])
                total = total + loss.detach()
                found = scalars(ctx)
                if found:  # each micro-batch counts by its targets
                    own = (micro["targets"] != IGNORED).sum()
                    loss = loss + own * sum(found[name] for name in ctx.losses or ())
                    trained.update(ctx.losses or ())
                    for name, value in found.items():
                        extras[name] = extras.get(name, 0.0) + own * value.detach()
                        seen[name] = seen.get(name, 0) + own
                self.manual_backward(loss * weight)
        self.last_loss = self._over_ranks(total) / divisor
        for name, value in sorted(extras.items()):  # in one order on all ranks
            of = n_targets if name in trained else self._over_ranks(seen[name])
            extras[name] = self._over_ranks(value) / of.clamp(min=1)
        self.last_extras = extras
        self.last_objective = self.last_loss + sum(self.last_extras[name] for name in trained)
        self.tokens = self.tokens + n_targets
        optimizer.step()  # clips in on_before_optimizer_step, where fp16 gradients are already unscaled
        self.last_lr = optimizer.param_groups[0]["lr"]  # a callback may have set another one before the step
        optimizer.zero_grad(set_to_none=True)

    def _refuse_idle_parameters(self) -> None:
        idle = [name for name, p in self.model.named_parameters() if p.requires_grad and p.grad is None]
        if idle:
            more = f" and {len(idle) - 3} more" if len(idle) > 3 else ""
            raise UserError(
                f"no gradient reaches {', '.join(idle[:3])}{more}: use them in forward, remove them, or freeze them "
                f"with requires_grad_(False)"
            )

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._checked:
            self._refuse_idle_parameters()
            self._checked = True
        parameters = [p for p in self.all_parameters if p.grad is not None]
        self.last_norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        # An fp16 gradient overflows now and then while the scaler looks for its scale, and the scaler skips that step.
        objective = self.last_objective
        finite = objective.isfinite() if scaler is not None else (objective + self.last_norm).isfinite()
        if bool(finite):
            self.bad_steps = 0
            if self.clip_norm is not None:
                clip_grads_with_norm_(parameters, self.clip_norm, self.last_norm)
        else:
            self.bad_steps += 1
            if (
                scaler is None
            ):  # the weights must not take in what is not a number: a step without gradients does nothing
                optimizer.zero_grad(set_to_none=True)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int = 0) -> Tensor:
        """Summed loss and number of targets, a float64 tensor of two."""
        sums = torch.zeros(2, dtype=torch.float64, device="cpu" if self.device.type == "mps" else self.device)
        for micro in split(batch, self.micro_batch_size):
            sums[0] += self.model(micro["ids"], context(micro), micro["targets"]).double()
            sums[1] += (micro["targets"] != IGNORED).sum()
        return sums

    def weights_are_finite(self) -> bool:
        """Whether every parameter is a number. Asked before anything is saved."""
        norm = get_total_norm([p.detach() for p in self.model.parameters()], norm_type=float("inf"))
        return bool(norm.isfinite())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["gptframe"] = {**self.metadata, "step": self.trainer.global_step, "tokens": int(self.tokens)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.tokens = checkpoint.get("gptframe", {}).get("tokens", 0)

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Note a number for the column `aux/<name>` of the next row: for callbacks, in place of Lightning's own way to
        the loggers, which counts steps in another way and writes every 50 of them."""
        check_name("pl_module.log", name)
        if not isinstance(value, (Tensor, int, float)) or (isinstance(value, Tensor) and value.numel() != 1):
            raise UserError(f"pl_module.log got {type(value).__name__} as {name!r}: it takes a number")
        self.noted[name] = float(value)

    def _over_ranks(self, value: Tensor) -> Tensor:
        return self.trainer.strategy.reduce(value, reduce_op="sum") if self.trainer.world_size > 1 else value

    def _no_sync(self) -> contextlib.AbstractContextManager[Any]:
        no_sync = getattr(self.trainer.strategy.model, "no_sync", contextlib.nullcontext)
        return no_sync()


def split(batch: Mapping[str, Tensor], size: int) -> list[dict[str, Tensor]]:
    """The micro-batches of a batch: every [B, ...] tensor cut in rows of `size`; the last may be shorter."""
    parts = {key: value.split(size) for key, value in batch.items()}
    return [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]


def context(batch: Mapping[str, Tensor]) -> Context | None:
    return Context(documents=batch["documents"]) if "documents" in batch else None
