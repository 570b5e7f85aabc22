"""Shows what a run will cost."""

from __future__ import annotations

from typing import Any

from gptframe.inspect.cost import CHINCHILLA, Memory, Plan
from gptframe.inspect.machine import available_memory
from gptframe.inspect.show import Lines, duration, short, show, size


def report(plan: Plan) -> None:
    """Print FLOPs, memory and the planned run."""
    show(_flops(plan), _memory(plan), _run(plan))


def _heading(plan: Plan) -> str:
    device, model = plan.device, plan.config.model
    where = f"{plan.world} x {device.accelerator}" if plan.world > 1 else device.accelerator
    batches = "micro-batch" if device.accumulation == 1 else "micro-batches"
    return (
        f"{model.name} on {where}, {device.precision}: {device.accumulation} {batches} of "
        f"{device.micro_batch_size} x {model.context_length} tokens a step"
        + (f"  ({plan.assumed})" if plan.assumed else "")
    )


def _flops(plan: Plan) -> Any:
    found = plan.flops
    causal, full = found.forward
    caption = (
        "causal: the pairs of tokens that the mask leaves; full: all pairs, as a kernel that masks afterwards computes"
    )
    columns = ("FLOPs a token", ">forward", ">backward", ">share", ">full attention", "~")
    lines = Lines(*columns, heading=_heading(plan), note=caption)
    lines.fold(-1)
    for part in found.parts:
        share = f"{part.causal / causal:.1%}"
        other = short(part.full) if part.full != part.causal else ""
        lines.add_row(part.name, short(part.causal), short(2 * part.causal), share, other, part.note)
    lines.add_section()
    lines.add_row("[bold]all, causal[/]", f"[bold]{short(causal)}[/]", short(2 * causal), "", short(full), "")
    six = 6 * (found.parameters - found.embeddings)
    lines.add_row(
        "forward + backward", "", f"[bold]{short(3 * causal)}[/]", "", short(9 * full / 3),
        f"6 x {short(found.parameters - found.embeddings)} parameters that multiply = {short(six)}",
    )  # fmt: skip
    return lines


def _memory(plan: Plan) -> Any:
    memory = plan.memory
    lines = Lines("memory on each device", ">bytes", "~")
    lines.fold(-1)
    names = {
        "fp32": "float32",
        "fp64": "float64",
        "bf16": "float32, products in bf16",
        "fp16": "float32, products in fp16",
    }
    n = plan.flops.parameters
    lines.add_row("weights", size(memory.weights), f"{n:,} parameters, {names[plan.device.precision]}")
    lines.add_row("gradients", size(memory.gradients), "")
    narrow = plan.config.optimizer.get("state_dtype", "float32") != "float32"
    note = f"what it remembers in {plan.config.optimizer['state_dtype']}" if narrow else ""
    lines.add_row(f"optimiser ({plan.config.optimizer['name']})", size(memory.optimizer), note)
    lines.add_row("activations", size(memory.activations), "kept from forward to backward, one micro-batch")
    if memory.communication:
        lines.add_row("DDP buckets", size(memory.communication), "gradients on their way")
    lines.add_section()
    lines.add_row("[bold]peak[/]", f"[bold]{size(memory.peak)}[/]", f"in the {memory.when}{_against(plan, memory)}")
    on = plan.config.trainer.recompute
    passes = "no second forward pass" if on else "one more forward pass a step"
    lines.add_row(
        f"recompute={str(not on).lower()}",
        size(plan.otherwise.peak),
        f"activations {size(plan.otherwise.activations)}; {passes}",
    )
    return lines


def _against(plan: Plan, memory: Memory) -> str:
    if plan.device.accelerator != "cpu" or plan.assumed:
        return ""
    free = available_memory()
    if free is None:
        return ""
    words = f"; Python and PyTorch take about 0.6 GiB more; {size(free)} available here"
    return words + (" [red](not enough)[/]" if memory.peak + 0.6 * 2**30 > free else "")


def _run(plan: Plan) -> Any:
    trainer, found = plan.config.trainer, plan.flops
    lines = Lines("the planned run", ">", "~")
    lines.fold(-1)
    batch = trainer.global_batch_size * plan.config.model.context_length
    lines.add_row("tokens", short(plan.tokens), f"{trainer.max_steps:,} steps of {batch:,} tokens")
    causal, full = found.training
    lines.add_row("FLOPs", short(plan.tokens * causal), f"causal; {short(plan.tokens * full)} with full attention")
    ratio = plan.tokens / found.parameters
    needed = CHINCHILLA * found.parameters
    lines.add_row(
        "tokens a parameter", f"{ratio:.3g}",
        f"{CHINCHILLA:.0f}, as Chinchilla advises, are {short(needed)} tokens or {needed / batch:,.0f} steps",
    )  # fmt: skip
    if plan.throughput and plan.seconds is not None:
        rate = plan.throughput
        lines.add_row("tokens a second", short(rate), plan.throughput_from)
        lines.add_row("[bold]time[/]", f"[bold]{duration(plan.seconds)}[/]", f"{short(rate * causal)}FLOP/s sustained")
    else:
        lines.add_row("time", "", "--measure times a few steps here; --throughput N takes N tokens a second")
    kept = trainer.keep_checkpoints + 1
    lines.add_row(
        "a checkpoint", size(plan.checkpoint_bytes),
        f"weights and optimiser; up to {kept} at a time on disk: {size(kept * plan.checkpoint_bytes)}",
    )  # fmt: skip
    return lines


def to_dict(plan: Plan) -> dict[str, Any]:
    """Plain containers, for `--json`."""
    causal, full = plan.flops.forward
    return {
        "model": plan.config.model.name,
        "device": plan.device.accelerator,
        "devices": plan.world,
        "assumed": plan.assumed,
        "precision": plan.device.precision,
        "micro_batch_size": plan.device.micro_batch_size,
        "accumulation": plan.device.accumulation,
        "parameters": plan.flops.parameters,
        "flops_per_token": {
            "parts": {
                p.name: {
                    "forward_causal": p.causal,
                    "forward_full": p.full,
                    "backward_causal": 2 * p.causal,
                    "note": p.note,
                }
                for p in plan.flops.parts
            },
            "forward_causal": causal,
            "forward_full": full,
            "backward_causal": 2 * causal,
            "backward_full": 2 * full,
        },
        "memory": {
            **vars(plan.memory),
            "recompute": plan.config.trainer.recompute,
            "peak_otherwise": plan.otherwise.peak,
        },
        "run": {
            "tokens": plan.tokens,
            "flops_causal": plan.tokens * 3 * causal,
            "flops_full": plan.tokens * 3 * full,
            "tokens_per_parameter": plan.tokens / plan.flops.parameters,
            "chinchilla_tokens": CHINCHILLA * plan.flops.parameters,
            "tokens_per_second": plan.throughput,
            "seconds": plan.seconds,
            "checkpoint_bytes": plan.checkpoint_bytes,
        },
    }
