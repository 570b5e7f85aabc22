"""Records every named intermediate of a forward pass, from outside, without changing what the model computes.

    with trace(model) as t:
        model(ids)
    t["blocks.1.attention.pattern"]                      # [B, heads, T, T]

`print(t.help())` lists the names of a trace with their meaning, `t.names("*.pattern")` those that match. A fused
attention kernel keeps its scores to itself; they are computed a second time, beside it, from the queries, keys and mask
that went in.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptframe.errors import UserError, nearest
from gptframe.model.attention import Attention
from gptframe.model.block import ParallelBlock, Sublayer, sublayers
from gptframe.model.context import Context
from gptframe.model.gpt import GPT
from gptframe.model.mlp import MLP

# Last part of a name -> (axes, meaning). B sequences, T tokens, S keys, D d_model, A heads, d head_dim, H MLP width.
GLOSSARY: dict[str, tuple[str, str]] = {
    "ids": ("B T", "token ids"),
    "token_embedding": ("B T D", "the row of the embedding table of each token"),
    "position": ("B T D", "what the position adds"),
    "embedding_norm": ("B T D", "the normalised embedding"),
    "stream_before": ("B T D", "the residual stream as it comes in"),
    "pre": ("B T D", "the stream after the norm before the core"),
    "q": ("B A T d", "queries"),
    "k": ("B K T d", "keys"),
    "v": ("B K S d", "values"),
    "q_norm": ("B A T d", "normalised queries"),
    "k_norm": ("B K T d", "normalised keys"),
    "q_rotated": ("B A T d", "queries, rotated by their positions"),
    "k_rotated": ("B K T d", "keys, rotated by their positions"),
    "scores": ("B A T S", "q k^T / sqrt(d)"),
    "scores_capped": ("B A T S", "the soft-capped scores"),
    "score_bias": ("A T S", "what the position adds to the scores"),
    "mask": ("T S", "which keys a query may look at"),
    "pattern": ("B A T S", "softmax of the scores over the keys that may be looked at"),
    "heads": ("B A T d", "what each head has mixed: pattern v"),
    "up": ("B T H", "the MLP before its activation"),
    "gate": ("B T H", "the gate before its activation"),
    "activation": ("B T H", "the MLP after its activation"),
    "core": ("B T D", "what the core returns, before the norm on it"),
    "out": ("B T D", "the normalised delta"),
    "delta": ("B T D", "what is added to the stream"),
    "sum": ("B T D", "stream and delta, before the norm on them"),
    "stream_after": ("B T D", "the residual stream as it goes out"),
    "final_norm": ("B T D", "the normalised stream after the last block"),
    "logits": ("B T V", "scores of each possible next token"),
    "probabilities": ("B T V", "softmax of the logits"),
}


class UnknownName(UserError, KeyError):
    """A name that a trace does not hold."""

    def __str__(self) -> str:
        return str(self.args[0])


class Trace(Mapping[str, Tensor]):
    """The intermediates of the last forward pass by name, in the order in which they came about.

    Values are detached copies: nothing that happens later changes them, and they hold no gradients.
    """

    def __init__(self, model: GPT) -> None:
        self.model = model
        self._values: dict[str, Tensor] = {}
        self._aliases: dict[str, str] = {}
        self._stream: tuple[str, Tensor] | None = None  # the last state recorded: its name and the tensor itself

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._values:
            raise UnknownName(self._unknown(name))
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Trace({len(self)} values; .help() lists them)"

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)

    def _unknown(self, name: str) -> str:
        if not self._values:
            return "the trace is empty: call the model inside `with trace(model) as t:`"
        parent, _, last = str(name).rpartition(".")
        siblings = [n.rpartition(".")[2] for n in self if n.rpartition(".")[0] == parent]
        hint = nearest(name, self) or (f"There are {', '.join(siblings)}. " if siblings else "")
        meaning = f" ({GLOSSARY[last][1]})" if last in GLOSSARY else ""
        return f"this trace has no {name!r}{meaning}. {hint}t.names() lists all"

    def names(self, pattern: str = "*") -> list[str]:
        """The names that match a shell pattern, as in `blocks.*.attention.pattern`."""
        return [name for name in self if fnmatch.fnmatchcase(name, pattern)]

    def alias_of(self, name: str) -> str | None:
        """The earlier name under which the same tensor stands, or None."""
        return self._aliases.get(name)

    def meaning(self, name: str) -> str:
        """What the value of that name is, in a few words."""
        last = name.rpartition(".")[2]
        found = GLOSSARY.get(last)
        return found[1] if found else f"the output of the module {last!r}"

    def axes(self, name: str) -> str:
        """The axes of the value of that name, as in `B T D`."""
        last = name.rpartition(".")[2]
        found = GLOSSARY.get(last)
        axes = found[0].split() if found else []
        if last == "mask" and self[name].ndim == 4:
            axes = ["B", "1", "T", "S"]
        return " ".join(axes) if len(axes) == self[name].ndim else " ".join("?" * self[name].ndim)

    def help(self) -> str:
        """Every name with its shape and meaning."""
        width = max(map(len, self), default=0)
        return "\n".join(f"{n:<{width}}  {str(list(v.shape)):<18} {self.meaning(n)}" for n, v in self.items())

    def stream(self) -> dict[str, Tensor]:
        """The residual stream through depth: as it enters the blocks, then after each sublayer (parallel: block)."""
        found: dict[str, Tensor] = {}
        for name in self:
            block = name.count(".") == 2
            if not found and name.endswith(".stream_before"):
                found["embedding"] = self[name]
            if name.endswith(".stream_after") and (not block or self._parallel(name)):
                found[name.removesuffix(".stream_after")] = self[name]
        return found

    def _parallel(self, name: str) -> bool:
        return isinstance(self.model.blocks[int(name.split(".")[1])], ParallelBlock)

    def _record(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            self._values[name] = value.detach().clone()

    def _alias(self, name: str, of: str) -> None:
        if of in self._values:
            self._values[name] = self._values[of]
            self._aliases[name] = of

    def _record_stream(self, name: str, value: Any) -> None:
        """Record a state of the residual stream, or the earlier name of it where nothing has changed it since."""
        seen = self._stream
        if seen is not None and value is seen[1] and torch.equal(value, self._values[seen[0]]):
            self._alias(name, seen[0])
            return
        self._record(name, value)
        self._stream = (name, value)

    def _clear(self) -> None:
        self._values.clear()
        self._aliases.clear()
        self._stream = None


@contextmanager
def trace(model: GPT) -> Iterator[Trace]:
    """Record every forward pass of `model` inside the block; the trace holds the last one.

    The model computes what it computes without: its own kernels, in its own order, so that the logits are equal to the
    last bit. A compiled model runs uncompiled inside.
    """
    if not isinstance(model, GPT):
        raise TypeError(f"trace wants a GPT, not {type(model).__name__}")
    found = Trace(model)
    with ExitStack() as stack:
        _watch_model(found, model, stack)
        for layer, block in enumerate(model.blocks):
            _watch_block(found, f"blocks.{layer}", block, stack)
        try:
            yield found
        finally:
            found._stream = None


def _replace(owner: nn.Module, name: str, function: Any, stack: ExitStack) -> None:
    """Shadow a method of one instance until the stack unwinds."""
    before = owner.__dict__.get(name, _ABSENT)
    owner.__dict__[name] = function
    if before is _ABSENT:
        stack.callback(owner.__dict__.pop, name)
    else:
        stack.callback(owner.__dict__.__setitem__, name, before)


_ABSENT = object()


def _output(
    found: Trace, name: str, module: nn.Module, stack: ExitStack, shape: Callable[[Tensor], Tensor] | None = None
):
    """Record the output of a module, unless it is an identity: a seat that is not taken has no value of its own."""
    if not isinstance(module, nn.Identity):

        def record(_: nn.Module, __: Any, value: Any) -> None:
            found._record(name, shape(value) if shape and isinstance(value, Tensor) else value)

        stack.callback(module.register_forward_hook(record).remove)


def _watch_model(found: Trace, model: GPT, stack: ExitStack) -> None:
    def start(_: nn.Module, args: tuple[Any, ...]) -> None:
        found._clear()
        found._record("ids", args[0])

    def embedded(_: nn.Module, __: Any, value: Tensor) -> None:
        found._record("token_embedding", value * model.cfg.embedding_scale)

    def positioned(_: nn.Module, args: tuple[Any, ...], value: Tensor) -> None:
        if value is not args[0]:
            found._record("position", value - args[0])

    def finish(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], value: Tensor) -> None:
        if kwargs.get("targets", args[2] if len(args) > 2 else None) is not None:
            with torch.no_grad():  # the loss was asked for, and the logits of the whole batch never existed
                value = model.read_out(final[0].to(model.head_weight.dtype))
        found._record("logits", value)
        found._values["probabilities"] = torch.softmax(found["logits"], dim=-1, dtype=_at_least_float32(value))

    final: list[Tensor] = [torch.empty(0)]

    def keep(_: nn.Module, __: Any, value: Tensor) -> None:
        final[0] = value.detach()

    _replace(model, "_compiled_call_impl", None, stack)
    stack.callback(model.token_embedding.register_forward_pre_hook(start).remove)
    stack.callback(model.token_embedding.register_forward_hook(embedded).remove)
    stack.callback(model.position.register_forward_hook(positioned).remove)
    _output(found, "embedding_norm", model.embedding_norm, stack)
    stack.callback(model.final_norm.register_forward_hook(keep).remove)
    _output(found, "final_norm", model.final_norm, stack)
    stack.callback(model.register_forward_hook(finish, with_kwargs=True).remove)


def _watch_block(found: Trace, prefix: str, block: nn.Module, stack: ExitStack) -> None:
    def before(_: nn.Module, args: tuple[Any, ...]) -> None:
        found._record_stream(f"{prefix}.stream_before", args[0])

    def after(_: nn.Module, __: Any, value: Tensor) -> None:
        found._record_stream(f"{prefix}.stream_after", value)

    stack.callback(block.register_forward_pre_hook(before).remove)
    for label, sublayer in sublayers(block):
        _watch_sublayer(found, f"{prefix}.{label}", sublayer, stack)
    stack.callback(block.register_forward_hook(after).remove)


def _watch_sublayer(found: Trace, prefix: str, sublayer: Sublayer, stack: ExitStack) -> None:
    original = sublayer.delta
    has_out = not isinstance(sublayer.out, nn.Identity)

    def delta(x: Tensor, ctx: Context) -> Tensor:
        found._record_stream(f"{prefix}.stream_before", x)
        value = original(x, ctx)
        if has_out and (isinstance(sublayer.dropout, nn.Identity) or not sublayer.training):
            found._alias(f"{prefix}.delta", f"{prefix}.out")
        else:
            found._record(f"{prefix}.delta", value)
        return value

    def summed(_: nn.Module, args: tuple[Any, ...]) -> None:
        found._record(f"{prefix}.sum", args[0])

    def after(_: nn.Module, __: Any, value: Tensor) -> None:
        found._record_stream(f"{prefix}.stream_after", value)

    _replace(sublayer, "delta", delta, stack)
    _output(found, f"{prefix}.pre", sublayer.pre, stack)
    _watch_core(found, prefix, sublayer.core, stack)
    if has_out:
        _output(found, f"{prefix}.core", sublayer.core, stack)
    _output(found, f"{prefix}.out", sublayer.out, stack)
    if not isinstance(sublayer.post, nn.Identity):
        stack.callback(sublayer.post.register_forward_pre_hook(summed).remove)
    stack.callback(sublayer.register_forward_hook(after).remove)


def _watch_core(found: Trace, prefix: str, core: nn.Module, stack: ExitStack) -> None:
    if isinstance(core, Attention):
        _watch_attention(found, prefix, core, stack)
    elif isinstance(core, MLP):
        _watch_mlp(found, prefix, core, stack)
    else:  # a plugin's: its modules by their own names
        for name, module in core.named_modules():
            if name:
                _output(found, f"{prefix}.{name}", module, stack)


def _watch_mlp(found: Trace, prefix: str, core: MLP, stack: ExitStack) -> None:
    inputs = core.inputs

    def projected(x: Tensor) -> Sequence[Tensor]:
        values = inputs(x)
        for name, value in zip(("up", "gate"), values, strict=False):
            found._record(f"{prefix}.{name}", value)
        return values

    _replace(core, "inputs", projected, stack)
    _output(found, f"{prefix}.activation", core.activation, stack)
    if core.fused:
        original = core.activation.forward_with_bias

        def forward_with_bias(x: Tensor, bias: Tensor) -> Tensor:
            found._record(f"{prefix}.up", x + bias)
            value = original(x, bias)
            found._record(f"{prefix}.activation", value)
            return value

        _replace(core.activation, "forward_with_bias", forward_with_bias, stack)

    def beside(_: nn.Module, args: tuple[Any, ...], __: Any) -> None:
        """What a kernel for the whole MLP keeps to itself is computed a second time."""
        if f"{prefix}.activation" in found._values:
            return
        with torch.no_grad():
            inputs = [F.linear(args[0], core.up.weight, core.up.bias)]
            found._record(f"{prefix}.up", inputs[0])
            if core.gate is not None:
                inputs.append(F.linear(args[0], core.gate.weight, core.gate.bias))
                found._record(f"{prefix}.gate", inputs[1])
            found._record(f"{prefix}.activation", core.activation.forward(*inputs))

    stack.callback(core.register_forward_hook(beside).remove)


def _watch_attention(found: Trace, prefix: str, core: Attention, stack: ExitStack) -> None:
    def by_head(value: Tensor) -> Tensor:
        return value.unflatten(-1, (-1, core.head_dim)).transpose(1, 2)

    for name in ("q_norm", "k_norm"):
        _output(found, f"{prefix}.{name}", getattr(core, name), stack, by_head if core.norm_full else None)

    qkv, rotate, attend = core.qkv, core.position.rotate, core.attend

    def projected(x: Tensor) -> Sequence[Tensor]:
        values = qkv(x)
        for name, value in zip(("q", "k", "v"), values, strict=True):
            found._record(f"{prefix}.{name}", by_head(value))
        return values

    def rotated(q: Tensor, k: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        new_q, new_k = rotate(q, k, ctx)
        if new_q is not q:
            found._record(f"{prefix}.q_rotated", new_q)
            found._record(f"{prefix}.k_rotated", new_k)
        return new_q, new_k

    def attended(q: Tensor, k: Tensor, v: Tensor, ctx: Context, k_positions: Tensor) -> Tensor:
        value = attend(q, k, v, ctx, k_positions)
        for name, part in attention_pattern(core, q, k, ctx, k_positions).items():
            found._record(f"{prefix}.{name}", part)
        found._record(f"{prefix}.heads", value)
        return value

    _replace(core, "qkv", projected, stack)
    _replace(core.position, "rotate", rotated, stack)
    _replace(core, "attend", attended, stack)


@torch.no_grad()
def attention_pattern(core: Attention, q: Tensor, k: Tensor, ctx: Context, k_positions: Tensor) -> dict[str, Tensor]:
    """`scores`, `scores_capped`, `score_bias`, `mask` and `pattern` of rotated q[B,A,T,d] and k[B,K,S,d], in float32
    or better, whatever kernel has computed the heads."""
    with torch.autocast(q.device.type, enabled=False):
        dtype = _at_least_float32(q)
        q, k = q.to(dtype), k.to(dtype).repeat_interleave(core.n_heads // core.n_kv_heads, dim=1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(core.head_dim)
        found = {"scores": scores}
        if core.softcap is not None:
            scores = found["scores_capped"] = core.softcap * torch.tanh(scores / core.softcap)
        bias = core.position.score_bias(ctx.positions, k_positions)
        if bias is not None:
            found["score_bias"] = bias.to(dtype)
            scores = scores + found["score_bias"]
        found["mask"] = core.mask(ctx, k_positions)
        found["pattern"] = torch.softmax(scores.masked_fill(~found["mask"], -math.inf), dim=-1)
    return found


def _at_least_float32(value: Tensor) -> torch.dtype:
    return torch.promote_types(value.dtype, torch.float32)


@torch.no_grad()
def logit_lens(found: Trace) -> dict[str, Tensor]:
    """The logits [B,T,V] that the head would give at each place of the stream, if the model ended there
    (nostalgebraist, "interpreting GPT: the logit lens", 2020): final norm and head, applied early."""
    model, dtype = found.model, found.model.head_weight.dtype
    return {place: model.read_out(model.final_norm(x.to(dtype))) for place, x in found.stream().items()}
