"""Parts with one fault each, and the sound ones that they derive from. The kit must catch every fault.

`@planted(kind, check)` enters a class with the check that is meant to catch it; the docstring says what is wrong.
"""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from gptframe.model.attention import Attention
from gptframe.model.block import Block, Sublayer, sublayers
from gptframe.model.init import with_role
from gptframe.model.norm import RMSNorm
from gptframe.model.position import LearnedPosition, Position, RoPE

SOUND: list[tuple[str, type]] = []
FAULTS: list[tuple[str, str, type]] = []


def sound(kind: str):
    def enter(cls):
        SOUND.append((kind, cls))
        return cls

    return enter


def planted(kind: str, check: str):
    def enter(cls):
        assert cls.__doc__, cls
        FAULTS.append((kind, check, cls))
        return cls

    return enter


# Sublayers.


@sound("sublayer")
class Mixer(nn.Module):
    """Attention of one head on the stream itself."""

    def __init__(self, cfg, layer: int):
        super().__init__()
        self.score = nn.Linear(cfg.d_model, cfg.d_model)
        self.value = with_role(nn.Linear(cfg.d_model, cfg.d_model), "residual")
        self.dropout = nn.Dropout(cfg.dropout)

    def ahead(self, x):
        return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)

    def hidden(self, x, ctx):
        if ctx.documents is None:
            return self.ahead(x)
        return self.ahead(x) | (ctx.documents[:, :, None] != ctx.documents[:, None, :])

    def pattern(self, x, ctx):
        scores = self.score(x) @ x.transpose(1, 2) / x.shape[-1] ** 0.5
        return scores.masked_fill(self.hidden(x, ctx), -math.inf).softmax(-1)

    def forward(self, x, ctx):
        return self.dropout(self.value(self.pattern(x, ctx) @ x))


@sound("sublayer")
class Pointwise(nn.Module):
    """A matrix with a gain, which looks at one token alone."""

    incremental = True

    def __init__(self, cfg, layer: int):
        super().__init__()
        self.dim = cfg.d_model
        self.matrix = nn.Linear(cfg.d_model, cfg.d_model, bias=False)
        self.gain = nn.Parameter(torch.ones(cfg.d_model))

    def forward(self, x, ctx):
        return self.matrix(x) * self.gain


@planted("sublayer", "future")
class FutureByOne(Mixer):
    """The mask begins one diagonal too high."""

    def ahead(self, x):
        return super().ahead(x).triu(2)


@planted("sublayer", "future")
class FutureAtTheLastPosition(Mixer):
    """The last token is seen by all."""

    def ahead(self, x):
        ahead = super().ahead(x).clone()
        ahead[:, -1] = False
        return ahead


@planted("sublayer", "future")
class FutureOfAWholeContext(Mixer):
    """The mask is forgotten where the sequence fills the context."""

    def __init__(self, cfg, layer: int):
        super().__init__(cfg, layer)
        self.context = cfg.context_length

    def ahead(self, x):
        return super().ahead(x) & (x.shape[1] < self.context)


@planted("sublayer", "future")
class FutureInTraining(Mixer):
    """The mask is there in eval mode only."""

    def ahead(self, x):
        return super().ahead(x) & (not self.training)


@planted("sublayer", "future")
class FutureInBfloat16(Mixer):
    """The mask's value is no minus infinity in bfloat16."""

    def pattern(self, x, ctx):
        scores = self.score(x) @ x.transpose(1, 2) / x.shape[-1] ** 0.5
        low = -8.0 if scores.dtype == torch.bfloat16 else -math.inf
        return scores.masked_fill(self.ahead(x), low).softmax(-1)


@planted("sublayer", "future")
class FutureByAStatistic(Mixer):
    """Subtracts the mean over time."""

    def forward(self, x, ctx):
        return super().forward(x - x.mean(dim=1, keepdim=True), ctx)


@planted("sublayer", "future")
class FutureByGradientAlone(Mixer):
    """The values are causal, the gradient is not."""

    def forward(self, x, ctx):
        later = 0.1 * x.flip(1)
        return super().forward(x, ctx) + later - later.detach()


@planted("sublayer", "future")
class FutureByValueAlone(Mixer):
    """Later tokens come in where no gradient looks."""

    def forward(self, x, ctx):
        return super().forward(x, ctx) * (1 + x.detach().mean(dim=(1, 2), keepdim=True).tanh())


@planted("sublayer", "future")
class FutureByConvolution(nn.Module):
    """A convolution padded on both sides."""

    def __init__(self, cfg, layer: int):
        super().__init__()
        self.weight = nn.Parameter(torch.full((cfg.d_model, 1, 3), 0.02))

    def forward(self, x, ctx):
        return F.conv1d(x.transpose(1, 2), self.weight, padding=1, groups=x.shape[-1]).transpose(1, 2)


@planted("sublayer", "prefix")
class MeanOverTheLength(Mixer):
    """Divides the sum over the past by the length of the sequence instead of the number of summands."""

    def pattern(self, x, ctx):
        return (~self.ahead(x)).to(x.dtype).expand(x.shape[0], -1, -1) / x.shape[1] + 0 * super().pattern(x, ctx)


@planted("sublayer", "batch")
class BatchMean(Pointwise):
    """Subtracts the mean over the batch."""

    def forward(self, x, ctx):
        return super().forward(x - x.mean(dim=0, keepdim=True), ctx)


@planted("sublayer", "batch")
class BatchByReshape(Pointwise):
    """A view that takes the batch for the time axis: each sequence gets values of its neighbours."""

    def forward(self, x, ctx):
        y = super().forward(x, ctx)
        return y.transpose(0, 1).reshape(x.shape)


@planted("sublayer", "batch")
class BatchInTraining(Pointwise):
    """Batch statistics in training mode only."""

    def forward(self, x, ctx):
        y = super().forward(x, ctx)
        return y / (1 + y.std(dim=0, keepdim=True, correction=0)) if self.training else y


@planted("sublayer", "cache")
class CacheOffByOne(Attention):
    """With a cache, each token takes itself for the one before."""

    def forward(self, x, ctx):
        if ctx.cache is not None:
            ctx = dataclasses.replace(ctx, positions=ctx.positions.clamp(min=1) - 1)
        return super().forward(x, ctx)


@planted("sublayer", "cache")
class CacheForgotten(Mixer):
    """Promises to be incremental, and looks at nothing but the tokens at hand."""

    incremental = True


@planted("sublayer", "cache")
class PaddingSeen(Attention):
    """Looks at padding before the text."""

    def mask(self, ctx, k_positions):
        mask = ctx.positions[..., :, None] >= k_positions[..., None, :]
        return mask[:, None] if mask.ndim == 3 else mask


@planted("sublayer", "state_dict")
class BufferNotRegistered(Pointwise):
    """A random projection that no checkpoint holds."""

    def __init__(self, cfg, layer: int):
        super().__init__(cfg, layer)
        self.random = torch.randn(cfg.d_model)

    def forward(self, x, ctx):
        return super().forward(x, ctx) * self.random.to(x)


@planted("sublayer", "state_dict")
class BufferNotPersistent(Pointwise):
    """A random projection in a buffer that is left out of checkpoints."""

    def __init__(self, cfg, layer: int):
        super().__init__(cfg, layer)
        self.register_buffer("random", torch.randn(cfg.d_model), persistent=False)

    def forward(self, x, ctx):
        return super().forward(x, ctx) * self.random


@planted("sublayer", "state_dict")
class ObjectInTheCheckpoint(Pointwise):
    """Saves an object that only a full unpickling could load."""

    def get_extra_state(self):
        return random.Random(0)

    def set_extra_state(self, state):
        pass


@planted("sublayer", "device")
class TableLeftBehind(Pointwise):
    """A constant tensor that does not move with the model."""

    def __init__(self, cfg, layer: int):
        super().__init__(cfg, layer)
        self.table = torch.linspace(0.5, 1.5, cfg.d_model)

    def forward(self, x, ctx):
        return super().forward(x, ctx) * self.table.to(x.dtype)


@planted("sublayer", "device")
class MadeOnTheCPU(Mixer):
    """The mask is made on the CPU, whatever the device of x."""

    def ahead(self, x):
        return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)


@planted("sublayer", "parameters")
class ParametersInAList(Pointwise):
    """Two matrices in a Python list: no optimiser sees them."""

    def __init__(self, cfg, layer: int):
        super().__init__(cfg, layer)
        self.experts = [nn.Linear(cfg.d_model, cfg.d_model) for _ in range(2)]

    def forward(self, x, ctx):
        return super().forward(x, ctx) + sum(0.1 * expert(x) for expert in self.experts)


@planted("sublayer", "parameters")
class TensorThatLearns(Pointwise):
    """A tensor with requires_grad that is no nn.Parameter."""

    def __init__(self, cfg, layer: int):
        super().__init__(cfg, layer)
        self.shift = torch.zeros(cfg.d_model, requires_grad=True)

    def forward(self, x, ctx):
        return super().forward(x, ctx) + self.shift


@planted("sublayer", "parameters")
class MadeInForward(Pointwise):
    """A parameter that the first forward makes, after the optimiser was built."""

    def forward(self, x, ctx):
        if not hasattr(self, "shift"):
            self.shift = nn.Parameter(torch.zeros_like(x[0, 0]))
        return super().forward(x, ctx) + self.shift


@planted("sublayer", "parameters")
class RegisteredTwice(Pointwise):
    """One matrix under two names."""

    def __init__(self, cfg, layer: int):
        super().__init__(cfg, layer)
        self.again = self.matrix


@planted("sublayer", "parameters")
class SharedByTheClass(Pointwise):
    """One parameter for all instances."""

    common = nn.Parameter(torch.ones(1))

    def __init__(self, cfg, layer: int):
        super().__init__(cfg, layer)
        self.factor = self.common

    def forward(self, x, ctx):
        return super().forward(x, ctx) * self.factor


@planted("sublayer", "gradients")
class Unused(Pointwise):
    """A bias that forward forgets."""

    def __init__(self, cfg, layer: int):
        super().__init__(cfg, layer)
        self.bias = nn.Parameter(torch.zeros(cfg.d_model))


@planted("sublayer", "gradients")
class Detached(Pointwise):
    """The gain comes in through .data."""

    def forward(self, x, ctx):
        return self.matrix(x) * self.gain.data


@planted("sublayer", "gradients")
class Cancelled(Pointwise):
    """A scale that the division after it removes."""

    def __init__(self, cfg, layer: int):
        super().__init__(cfg, layer)
        self.level = nn.Parameter(torch.ones(cfg.d_model))

    def forward(self, x, ctx):
        return super().forward(x, ctx) * self.level.sign()


@planted("sublayer", "every_batch")
class UsedForLongTextsOnly(Pointwise):
    """A parameter that texts of one token pass by."""

    def __init__(self, cfg, layer: int):
        super().__init__(cfg, layer)
        self.past = nn.Parameter(torch.zeros(cfg.d_model))

    def forward(self, x, ctx):
        y = super().forward(x, ctx)
        return y if x.shape[1] == 1 else y + self.past * F.pad(x, (0, 0, 1, 0))[:, :-1]


@planted("sublayer", "every_batch")
class ExpertNotChosen(Pointwise):
    """An expert that runs only where a token chose it."""

    def __init__(self, cfg, layer: int):
        super().__init__(cfg, layer)
        self.expert = nn.Linear(cfg.d_model, cfg.d_model)

    def forward(self, x, ctx):
        y, chosen = super().forward(x, ctx), x[..., 0] < 0
        return torch.where(chosen[..., None], y + 0.1 * self.expert(x), y) if bool(chosen.any()) else y


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 - ctx.saved_tensors[0].tanh())  # the square is missing


@planted("sublayer", "gradcheck")
class WrongBackward(Pointwise):
    """A backward of its own that lacks a square."""

    def forward(self, x, ctx):
        return super().forward(_WrongBackward.apply(x), ctx)


@planted("sublayer", "gradcheck")
class HalfDetached(Pointwise):
    """One of two paths of the input is cut."""

    def forward(self, x, ctx):
        return super().forward(x * x.detach().sigmoid(), ctx)


@planted("sublayer", "in_place")
class StreamChanged(Pointwise):
    """Adds to the stream where it lies."""

    def forward(self, x, ctx):
        delta = super().forward(x, ctx)
        x.data.mul_(0.5)
        return delta


@planted("sublayer", "in_place")
class FirstTokenCleared(Pointwise):
    """Writes to a slice of the stream in eval mode."""

    def forward(self, x, ctx):
        if not self.training:
            x[:, 0] = 0
        return super().forward(x, ctx)


@planted("sublayer", "in_place")
class PositionsShifted(Pointwise):
    """Changes the positions that all sublayers share."""

    def forward(self, x, ctx):
        ctx.positions.add_(1)
        return super().forward(x, ctx) * torch.where(ctx.positions > 0, 1.0, 0.0).to(x.dtype)[:, None]


@planted("sublayer", "scale")
class TooLarge(nn.Module):
    """Starts at standard normal values: the delta drowns the stream."""

    def __init__(self, cfg, layer: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(cfg.d_model, cfg.d_model))

    def init_weights(self, draw):
        self.weight.copy_(draw("weight"))

    def forward(self, x, ctx):
        return x @ self.weight


@planted("sublayer", "initialization")
class Uninitialised(TooLarge):
    """torch.empty, and nothing after it."""

    def __init__(self, cfg, layer: int):
        super().__init__(cfg, layer)
        self.weight = nn.Parameter(torch.empty(cfg.d_model, cfg.d_model))

    init_weights = property()  # no such method: the class fills nothing


@planted("sublayer", "initialization")
class DrawnInTheConstructor(Pointwise):
    """Values from torch's generator, which depend on all that was drawn before."""

    def __init__(self, cfg, layer: int):
        super().__init__(cfg, layer)
        self.extra = nn.Parameter(torch.randn(cfg.d_model) * 0.02)

    def forward(self, x, ctx):
        return super().forward(x, ctx) + self.extra


@planted("sublayer", "initialization")
class AddsToWhatIsThere(TooLarge):
    """init_weights adds instead of setting."""

    def init_weights(self, draw):
        self.weight.add_(draw("weight") * 0.02)


@planted("sublayer", "dtype")
class Promotes(Pointwise):
    """A float32 vector turns bfloat16 into float32."""

    def forward(self, x, ctx):
        return super().forward(x, ctx) * torch.linspace(0.5, 1.5, self.dim, device=x.device)


@planted("sublayer", "dtype")
class AlwaysFloat32(Pointwise):
    """Goes to float32 and does not come back."""

    def forward(self, x, ctx):
        return super().forward(x, ctx).float()


@planted("sublayer", "dtype")
class Float32Inside(Pointwise):
    """A product with a float32 matrix, which other dtypes refuse."""

    def forward(self, x, ctx):
        return super().forward(x, ctx) @ torch.eye(self.dim, device=x.device)


@planted("sublayer", "dtype")
class KeepsTheFirstDtype(Mixer):
    """Keeps a constant of the dtype that came first."""

    def forward(self, x, ctx):
        if not hasattr(self, "level_of_x"):
            self.level_of_x = torch.full((self.value.out_features,), 0.5, dtype=x.dtype, device=x.device)
        return super().forward(x, ctx) * self.level_of_x


@planted("sublayer", "autocast")
class FragileUnderAutocast(Pointwise):
    """Writes a bfloat16 product into a float32 buffer by index, which autocast does not cast."""

    def forward(self, x, ctx):
        y = self.matrix(x * self.gain)
        return torch.zeros_like(x).index_add(1, torch.arange(x.shape[1], device=x.device), y)


_LAST: dict[str, torch.Tensor] = {}


@planted("sublayer", "history")
class HiddenGlobalState(Pointwise):
    """A module-level dict keeps a number of the last call, of whichever instance."""

    def forward(self, x, ctx):
        y = super().forward(x, ctx) * (1 + _LAST.get("level", torch.zeros(())).to(x))
        _LAST["level"] = x.detach().abs().mean().cpu()
        return y


@planted("sublayer", "history")
class CountsItsCalls(Pointwise):
    """Grows with each call."""

    def __init__(self, cfg, layer: int):
        super().__init__(cfg, layer)
        self.calls = 0

    def forward(self, x, ctx):
        self.calls += 1
        return super().forward(x, ctx) * (1 + 0.01 * self.calls)


@planted("sublayer", "history")
class MaskOfAnotherLength(Mixer):
    """Keeps the longest mask of a window of half the length, and cuts it to shorter texts."""

    def ahead(self, x):
        kept = getattr(self, "kept", None)
        if kept is None or kept.shape[0] < x.shape[1]:
            ahead = super().ahead(x)
            self.kept = kept = ahead | ahead.T.tril(-x.shape[1] // 2)
        return kept[: x.shape[1], : x.shape[1]]


@planted("sublayer", "compiles")
class BranchesOnData(Pointwise):
    """An if on a tensor."""

    def forward(self, x, ctx):
        y = super().forward(x, ctx)
        return y * 2 if y.abs().max() > 1e6 else y


@planted("sublayer", "compiles")
class LoopsOverValues(Pointwise):
    """A loop as long as a number in a tensor says."""

    def forward(self, x, ctx):
        y = super().forward(x, ctx)
        for _ in range(int(x.detach().abs().amax() > 1e6)):
            y = y * 0.5
        return y


@planted("sublayer", "compiles")
class RecompilesForEachBatch(Pointwise):
    """A dict keyed by the batch size makes the size a constant of the graph."""

    def forward(self, x, ctx):
        return super().forward(x, ctx) * {n: 1.0 for n in range(64)}[x.shape[0]]


@planted("sublayer", "modes")
class DropoutInEval(Mixer):
    """Drops in eval mode too."""

    def forward(self, x, ctx):
        return F.dropout(super().forward(x, ctx), self.dropout.p)


@planted("sublayer", "modes")
class DropoutOfOldStyle(Pointwise):
    """Scales in eval mode instead of in training."""

    def __init__(self, cfg, layer: int):
        super().__init__(cfg, layer)
        self.keep = 1 - cfg.dropout

    def forward(self, x, ctx):
        y = super().forward(x, ctx)
        return y * (torch.rand_like(y) < self.keep) if self.training else y * self.keep


@planted("sublayer", "modes")
class NotDeterministic(Pointwise):
    """Noise in training from a generator that no seed reaches."""

    def forward(self, x, ctx):
        y = super().forward(x, ctx)
        return y * (1 + 0.1 * np.random.default_rng().random()) if self.training else y


@planted("sublayer", "global_state")
class SeedsTorch(Pointwise):
    """Seeds torch's generator in each forward."""

    def forward(self, x, ctx):
        torch.manual_seed(0)
        return super().forward(x, ctx)


@planted("sublayer", "global_state")
class ChangesTheDefaultDtype(Pointwise):
    """The constructor sets the default dtype of the process."""

    def __init__(self, cfg, layer: int):
        super().__init__(cfg, layer)
        torch.set_default_dtype(torch.float64)


@planted("sublayer", "recomputation")
class AnotherDropoutTheSecondTime(Pointwise):
    """A counter in a buffer decides what is dropped, and moves on when the block is computed again."""

    def __init__(self, cfg, layer: int):
        super().__init__(cfg, layer)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x, ctx):
        y = super().forward(x, ctx)
        if self.training:
            self.count = self.count + 1
            y = y * (0.9 + 0.1 * self.count).to(y.dtype)
        return y


@planted("sublayer", "inference")
class KeepsAnInferenceTensor(Mixer):
    """A constant made by the first forward, which may be one of a validation."""

    def forward(self, x, ctx):
        if getattr(self, "level_of_x", None) is None or self.level_of_x.dtype != x.dtype:
            self.level_of_x = torch.full((x.shape[-1],), 0.5, dtype=x.dtype, device=x.device)
        return super().forward(x * self.level_of_x, ctx)


@planted("sublayer", "copies")
class LambdaInside(Pointwise):
    """A lambda as attribute: pickle refuses it, and with it spawned workers."""

    def __init__(self, cfg, layer: int):
        super().__init__(cfg, layer)
        self.function = lambda x: x * 0.5

    def forward(self, x, ctx):
        return super().forward(self.function(x), ctx)


@planted("sublayer", "copies")
class KeepsTheGraph(Pointwise):
    """Keeps its last output with its graph: deepcopy refuses it."""

    def forward(self, x, ctx):
        self.last = super().forward(x, ctx)
        return self.last * 1.0


@planted("sublayer", "optimizer_groups")
class DecayedVector(Pointwise):
    """A gain with leading axes of one, which weight decay takes for a matrix."""

    def __init__(self, cfg, layer: int):
        super().__init__(cfg, layer)
        self.gain = nn.Parameter(torch.ones(1, 1, cfg.d_model))


@planted("sublayer", "formula")
class WrongFormula(Pointwise):
    """The formula forgets that the matrix is square."""

    parameter_formulas = {"matrix.weight": "D*d", "gain": "D"}


@planted("sublayer", "formula")
class IncompleteFormula(Pointwise):
    """No formula for the gain."""

    parameter_formulas = {"matrix.weight": "D*D"}


@planted("sublayer", "cost")
class Cubic(Mixer):
    """Computes all that came before again for each token."""

    def forward(self, x, ctx):
        return torch.cat([super(Cubic, self).forward(x[:, : t + 1], ctx)[:, -1:] for t in range(x.shape[1])], dim=1)


@planted("sublayer", "numerics")
class NoEpsilon(Pointwise):
    """Divides by a norm that is 0 for a stream of zeros."""

    def forward(self, x, ctx):
        return super().forward(x / x.norm(dim=-1, keepdim=True), ctx)


@planted("sublayer", "contract")
class Transposed(Pointwise):
    """Returns [B, D, T]."""

    def forward(self, x, ctx):
        return super().forward(x, ctx).transpose(1, 2)


@planted("sublayer", "contract")
class ReturnsNothing(Pointwise):
    """The return is missing."""

    def forward(self, x, ctx):
        super().forward(x, ctx)


@planted("sublayer", "contract")
class FailsForOneToken(Pointwise):
    """A statistic over two tokens at least: the first step of generation has one."""

    def forward(self, x, ctx):
        if x.shape[1] < 2:
            raise ValueError("too short")
        return super().forward(x, ctx)


@planted("sublayer", "meta")
class LooksAtItsOwnWeights(Pointwise):
    """The constructor takes a value out of a tensor."""

    def __init__(self, cfg, layer: int):
        super().__init__(cfg, layer)
        self.norm = float(torch.ones(cfg.d_model).norm())


@planted("sublayer", "meta")
class NamesADevice(Pointwise):
    """The constructor puts a parameter on the CPU by name."""

    def __init__(self, cfg, layer: int):
        super().__init__(cfg, layer)
        self.gain = nn.Parameter(torch.ones(cfg.d_model, device="cpu"))


@planted("sublayer", "documents")
class BlindToDocuments(Mixer):
    """Looks at all earlier tokens, whatever their document."""

    def hidden(self, x, ctx):
        return self.ahead(x)


@planted("sublayer", "losses")
class LossOfEachToken(Pointwise):
    """Adds a loss that is not reduced."""

    def forward(self, x, ctx):
        y = super().forward(x, ctx)
        ctx.add_loss("size", y.square().mean(dim=-1))
        return y


@planted("sublayer", "losses")
class LossWithoutGradient(Pointwise):
    """Adds a loss through .detach()."""

    def forward(self, x, ctx):
        y = super().forward(x, ctx)
        ctx.add_loss("size", y.detach().square().mean())
        return y


@planted("sublayer", "two_processes")
class GainForSomeBatches(Pointwise):
    """Uses its gain in some batches only."""

    def forward(self, x, ctx):
        y = self.matrix(x)
        return y * self.gain if float(x.detach()[0, 0, 0]) > -1.3 else y


@sound("sublayer")
class Sum(nn.Module):
    """A fading sum of the tokens so far, which a cache keeps as a state."""

    incremental = True

    def __init__(self, cfg, layer: int):
        super().__init__()
        self.matrix = with_role(nn.Linear(cfg.d_model, cfg.d_model, bias=False), "residual")

    def keys(self, x, ctx):
        return x.masked_fill((ctx.positions < 0)[..., None], 0.0) if ctx.positions.ndim == 2 else x

    def before(self, x, ctx):
        known = ctx.cache.state(self) if ctx.cache is not None else None
        return torch.zeros_like(x[:, 0]) if known is None else known[0]

    def forward(self, x, ctx):
        total, sums = self.before(x, ctx), []
        own = self.keys(x, ctx)
        for t in range(x.shape[1]):
            if ctx.documents is not None and t:
                total = total * (ctx.documents[:, t] == ctx.documents[:, t - 1])[:, None]
            total = 0.5 * total + own[:, t]
            sums.append(total)
        if ctx.cache is not None:
            ctx.cache.set_state(self, total)
        return self.matrix(torch.stack(sums, dim=1))


@planted("sublayer", "cache")
class StateForgotten(Sum):
    """Begins each piece anew."""

    def before(self, x, ctx):
        return torch.zeros_like(x[:, 0])


@planted("sublayer", "cache")
class StateOfPadding(Sum):
    """Takes padding into its state."""

    def keys(self, x, ctx):
        return x


# Norms.


@sound("norm")
class Gain(nn.Module):
    """x / rms(x) * gain in the dtype of x."""

    def __init__(self, dim: int):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))

    def divide(self, x):
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-5)

    def forward(self, x):
        return self.divide(x) * self.gain.to(x.dtype)


@planted("norm", "batch")
class NormOverTheBatch(Gain):
    """The mean square is taken over the batch as well."""

    def divide(self, x):
        return x * torch.rsqrt(x.square().mean(dim=(0, 2), keepdim=True) + 1e-5)


@planted("norm", "future")
class NormOverTime(Gain):
    """The mean square is taken over time as well."""

    def divide(self, x):
        return x * torch.rsqrt(x.square().mean(dim=(1, 2), keepdim=True) + 1e-5)


@planted("norm", "tokens")
class NormOverThePast(Gain):
    """The mean square runs over the past: causal, but wrong as soon as text is generated from a cache."""

    def divide(self, x):
        counts = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)[:, None]
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True).cumsum(dim=1) / counts + 1e-5)


@planted("norm", "history")
class RunningMean(Gain):
    """Eval mode divides by what it saw before, in a plain attribute."""

    def divide(self, x):
        level = x.detach().square().mean()
        self.level = 0.9 * getattr(self, "level", level) + 0.1 * level
        return super().divide(x) / (1 + self.level)


@planted("norm", "numerics")
class NormWithoutEpsilon(Gain):
    """0 / 0 for a stream of zeros."""

    def divide(self, x):
        return x / x.square().mean(dim=-1, keepdim=True).sqrt()


@planted("norm", "numerics")
class RootAtZero(Gain):
    """The eps is added after the root: finite values, and an infinite gradient at 0."""

    def divide(self, x):
        return x / (x.square().mean(dim=-1, keepdim=True).sqrt() + 1e-5)


@planted("norm", "scale")
class RootForgotten(Gain):
    """Divides by the mean square instead of its root."""

    def divide(self, x):
        return x / (x.square().mean(dim=-1, keepdim=True) + 1e-8)


@planted("norm", "dtype")
class NormInFloat32(Gain):
    """Promotes to float32 and stays there."""

    def divide(self, x):
        return super().divide(x.float())


@planted("norm", "optimizer_groups")
class DecayedGain(Gain):
    """The gain has three axes, and is decayed."""

    def __init__(self, dim: int):
        super().__init__(dim)
        self.gain = nn.Parameter(torch.ones(1, 1, dim))


@planted("norm", "gradcheck")
class MeanDetached(RMSNorm):
    """The statistic is taken for a constant in backward."""

    def forward(self, x):
        return x * torch.rsqrt(x.detach().square().mean(dim=-1, keepdim=True) + self.eps) * self.weight


@planted("norm", "contract")
class KeepsNoAxis(Gain):
    """Returns the statistic."""

    def forward(self, x):
        return x.square().mean(dim=-1)


# Activations.


@sound("activation")
class Slope(nn.Module):
    """A leaky ReLU with a trained slope."""

    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.tensor([0.1]))

    def forward(self, x):
        return torch.where(x > 0, x, x * self.slope.to(x.dtype))


@sound("activation")
class Gate(nn.Module):
    """x * sigmoid(gate)."""

    inputs = 2

    def forward(self, x, gate):
        return x * gate.sigmoid()


@planted("activation", "numerics")
class Overflows(Slope):
    """log(1 + exp(x)) is infinite from 89 on."""

    def forward(self, x):
        return torch.log(1 + torch.exp(x)) * self.slope.to(x.dtype)


@planted("activation", "future")
class SoftmaxOverTime(Slope):
    """A softmax along the wrong axis."""

    def forward(self, x):
        return super().forward(x) * x.softmax(dim=-2)


@planted("activation", "in_place")
class ReluInPlace(nn.Module):
    """Writes over its input."""

    def forward(self, x):
        return x.relu_()


@planted("activation", "gradients")
class SlopeAsNumber(Slope):
    """The slope leaves the graph."""

    def forward(self, x):
        return torch.where(x > 0, x, x * self.slope.detach().to(x.dtype))


@planted("activation", "dtype")
class PromotingConstant(nn.Module):
    """A float32 vector of one element promotes bfloat16."""

    def forward(self, x):
        return x.sigmoid() * torch.tensor([1.7], device=x.device)


@planted("activation", "contract")
class HalvesTheWidth(nn.Module):
    """Gates itself, and returns half of the width."""

    def forward(self, x):
        a, b = x.chunk(2, dim=-1)
        return a * b.sigmoid()


@planted("activation", "offers")
class OffersSomethingElse(Slope):
    """forward_with_bias forgets the bias on one side."""

    def forward_with_bias(self, x, bias):
        return torch.where(x > 0, x + bias, (x + bias) * self.slope)


@planted("activation", "batch")
class LevelOfTheBatch(Gate):
    """The gate is compared with the mean of the whole batch, taken as a constant."""

    def forward(self, x, gate):
        return super().forward(x, gate - gate.detach().mean(dim=(0, 2), keepdim=True))


@planted("activation", "compiles")
class PrintsWhenLarge(Slope):
    """Looks at its values to warn."""

    def forward(self, x):
        if x.abs().max() > 1e9:
            print("large")
        return super().forward(x)


# Positions.


@sound("position")
class Ramp(Position):
    """Adds a trained vector times the position, scaled to the context."""

    seat = "embedding"
    incremental = True

    def __init__(self, cfg):
        super().__init__(cfg)
        self.context = cfg.context_length
        self.direction = nn.Parameter(torch.full((cfg.d_model,), 0.02))

    def places(self, x, ctx):
        return ctx.positions

    def forward(self, x, ctx):
        return x + self.direction * (self.places(x, ctx) / self.context).to(x.dtype)[..., None]


@sound("position")
class Turns(RoPE):
    """RoPE under another name."""


@planted("position", "cache")
class CountsFromZero(Ramp):
    """Counts the tokens at hand, not those before them."""

    def places(self, x, ctx):
        return torch.arange(x.shape[1], device=x.device)


@planted("position", "prefix")
class CountsFromTheEnd(Ramp):
    """The last token is at 0."""

    incremental = False

    def places(self, x, ctx):
        return torch.arange(x.shape[1], device=x.device).flip(0)


@planted("position", "dtype")
class Float32Angles(Position):
    """Sines in float32 promote a bfloat16 stream."""

    def forward(self, x, ctx):
        return x + 0.1 * torch.sin(ctx.positions.float())[:, None]


@planted("position", "scale")
class RawNumbers(Position):
    """Adds the number of the position itself."""

    def forward(self, x, ctx):
        return x + ctx.positions.to(x.dtype)[:, None]


@planted("position", "initialization")
class TableFromTheConstructor(Position):
    """A table drawn from torch's generator."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.table = nn.Parameter(torch.randn(cfg.context_length, cfg.d_model) * 0.02)

    def forward(self, x, ctx):
        return x + self.table[ctx.positions]


@planted("position", "tokens")
class MixesNeighbours(LearnedPosition):
    """Adds a part of the token before."""

    incremental = False

    def forward(self, x, ctx):
        return super().forward(x, ctx) + 0.1 * F.pad(x, (0, 0, 1, 0))[:, :-1]


@planted("position", "contract")
class NoSeat(nn.Module):
    """Does not say where it sits."""

    def __init__(self, cfg):
        super().__init__()

    def forward(self, x, ctx):
        return x


@planted("position", "contract")
class PromotesQueries(RoPE):
    """Queries come back in float32."""

    def rotate(self, q, k, ctx):
        q, k = super().rotate(q, k, ctx)
        return q.float(), k


@planted("position", "contract")
class BiasOfTheWrongShape(Position):
    """A bias [T, S, H]."""

    seat = "attention"

    def __init__(self, cfg):
        super().__init__(cfg)
        self.heads = cfg.n_heads

    def score_bias(self, q_positions, k_positions):
        return torch.zeros(len(q_positions), len(k_positions), self.heads, device=q_positions.device)


@planted("position", "future")
class KeysCentred(RoPE):
    """Subtracts the mean of all keys, later ones included."""

    def rotate(self, q, k, ctx):
        q, k = super().rotate(q, k, ctx)
        return q, k - k.mean(dim=2, keepdim=True) * (1 + k.square().mean(dim=2, keepdim=True))


@planted("position", "cache")
class TurnsFromZero(RoPE):
    """Rotates by the index in the piece at hand."""

    def rotate(self, q, k, ctx):
        return super().rotate(q, k, dataclasses.replace(ctx, positions=torch.arange(q.shape[2], device=q.device)))


@planted("position", "device")
class AnglesOnTheCPU(Position):
    """The frequencies are made on the CPU."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.dim = cfg.d_model

    def forward(self, x, ctx):
        return x + 0.1 * torch.sin(ctx.positions[:, None] * torch.linspace(0, 1, self.dim)).to(x.dtype)


# Blocks, and transforms of the model.


@sound("topology")
class Mixed(Block):
    """The sublayers, then a trained part of the stream that came into the first block."""

    def __init__(self, cfg, layer: int, residual_scale: float):
        super().__init__(cfg, layer, residual_scale)
        self.part = nn.Parameter(torch.full((1,), 0.1))

    def forward(self, x, ctx):
        first = ctx.shared.setdefault("mixed.first", x)
        return super().forward(x, ctx) + self.part * first


@planted("topology", "future")
class ShiftedBack(Mixed):
    """What it adds of the first stream is of the token after."""

    def forward(self, x, ctx):
        first = ctx.shared.setdefault("mixed.first", x)
        return Block.forward(self, x, ctx) + self.part * F.pad(first[:, 1:], (0, 0, 0, 1))


@planted("topology", "gradients")
class SkipsItsLastSublayer(Mixed):
    """Leaves out one of the sublayers that it was given."""

    def forward(self, x, ctx):
        first = ctx.shared.setdefault("mixed.first", x)
        for _, sublayer in list(sublayers(self))[:-1]:
            x = sublayer(x, ctx)
        return x + self.part * first


@planted("topology", "history")
class KeepsTheFirstStream(Mixed):
    """Keeps a stream on itself instead of in ctx.shared: it is that of the call before."""

    last = None

    def forward(self, x, ctx):
        last, self.last = self.last, x.detach()
        seen = x if last is None or last.shape != x.shape else last
        return Block.forward(self, x, ctx) + self.part * seen


class Gain(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.full((dim,), 0.5))

    def forward(self, x):
        return x * self.weight.to(x.dtype)


@sound("transform")
def gains(model):
    """A gain for each sublayer."""
    for module in list(model.modules()):
        if isinstance(module, Sublayer):
            module.out = Gain(model.cfg.d_model)


@planted("transform", "parameters")
def gains_twice(model):
    """The same gain under two names."""
    gains(model)
    for block in model.blocks:
        for _, sublayer in sublayers(block):
            sublayer.again = sublayer.out


@planted("transform", "initialization")
def drawn_gains(model):
    """Gains drawn from torch's generator."""
    gains(model)
    for module in model.modules():
        if isinstance(module, Gain):
            with torch.no_grad():
                module.weight.copy_(torch.rand_like(module.weight))


class TokenMean(nn.Module):
    def forward(self, x):
        return x - x.mean(dim=1, keepdim=True)


@planted("transform", "future")
def centred(model):
    """Takes the mean over the tokens off each delta."""
    for module in list(model.modules()):
        if isinstance(module, Sublayer):
            module.out = TokenMean()
