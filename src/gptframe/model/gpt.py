"""GPT: embedding, blocks, final norm, head. Start reading here."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gptframe.config import ModelConfig
from gptframe.errors import UserError
from gptframe.model.block import seat
from gptframe.model.context import Context, KVCache
from gptframe.model.head import Head
from gptframe.model.init import initialize, with_role
from gptframe.model.linear import give_backend
from gptframe.model.norm import NormPlacement
from gptframe.model.position import Position, position_at
from gptframe.registry import build, check, entry, lookup, signature_options

__all__ = ["GPT", "Context", "KVCache", "build_model"]


class GPT(nn.Module):
    """A decoder-only language model, described by a `ModelConfig`.

    Attributes:
        recompute: in training, keep only the stream between blocks, and compute each block once more in the backward
            pass (activation checkpointing, Chen et al., 2016).

    Raises:
        UserError: options that do not exist or do not fit together.
    """

    recompute = False

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        check_architecture(cfg)
        assert cfg.vocab_size is not None
        self.cfg = cfg
        placement = lookup("norm_placement", cfg.norm_placement["name"])
        n_sublayers = sum(len(cfg.block_of(layer)) for layer in range(cfg.n_layers))
        scale = placement.residual_scale(n_sublayers) if cfg.residual_scale is None else cfg.residual_scale

        self.token_embedding = with_role(nn.Embedding(cfg.vocab_size, cfg.d_model), "embedding")
        self.position = position_at("embedding", cfg)
        self.embedding_norm = seat(placement.embedding, cfg)
        self.dropout = nn.Dropout(cfg.dropout) if cfg.dropout else nn.Identity()
        self.blocks = nn.ModuleList(
            build("topology", cfg.topology_section, cfg, layer, scale, key="model.topology")
            for layer in range(cfg.n_layers)
        )
        self.final_norm = seat(placement.final, cfg)
        self.head = None if cfg.tie_head else with_role(nn.Linear(cfg.d_model, cfg.vocab_size, bias=False), "head")
        self.output = build("head", cfg.head, cfg, key="model.head")

        position = lookup("position", cfg.position["name"])
        if position.seat == "attention" and not any(isinstance(module, position) for module in self.modules()):
            raise UserError(
                f"model.position.name={cfg.position['name']} acts in attention, and nothing in model.block uses it: "
                f"use position=learned or position=none"
            )
        for name, options in cfg.transforms.items():
            made = build("transform", {"name": name, **options}, self, key=f"model.transforms.{name}")
            if made is not None and made is not self:
                raise UserError(
                    f"transform {name!r} ({entry('transform', name).origin}) returned {type(made).__name__}, which "
                    f"would be lost: it must change the model that it gets, and return nothing"
                )
        give_backend(self, self.output, cfg)  # last: transforms know nn.Linear

    def trade_memory(self, recompute: bool = False, chunked_loss: bool = True) -> None:
        """Choose between memory and time, see `recompute` and `Head.chunked`; what is computed stays the same.

        Raises:
            UserError: the head is a plugin's that computes its loss in a way of its own.
        """
        self.recompute = recompute
        if getattr(type(self.output), "loss", None) is Head.loss:  # one of its own may heed `chunked` in part, or not
            self.output.chunked = chunked_loss
        elif not chunked_loss:
            raise UserError(f"trainer.chunked_loss=false: the head {self.cfg.head['name']!r} has no chunks")

    @property
    def head_weight(self) -> Tensor:
        """[V, D]: the token embedding itself where the head is tied."""
        return self.token_embedding.weight if self.head is None else self.head.weight

    def stream(self, ids: Tensor, ctx: Context | None = None) -> Tensor:
        """The residual stream after the final norm: Long[B,T] -> [B,T,D]."""
        return self._stream(ids, self._with_positions(ids, ctx))

    def _stream(self, ids: Tensor, ctx: Context) -> Tensor:
        x = self.token_embedding(ids) * self.cfg.embedding_scale  # [B, T, D]
        x = self.dropout(self.embedding_norm(self.position(x, ctx)))
        for block in self.blocks:
            y = checkpoint(block, x, ctx, use_reentrant=False) if self.recompute and self.training else block(x, ctx)
            x = self._mapped(y, x)
        return self.final_norm(x)

    def _mapped(self, y: object, x: Tensor) -> Tensor:
        """What a block gave, which must have the shape of `x`."""
        if isinstance(y, Tensor) and y.shape == x.shape:
            return y
        name, got = self.cfg.topology_section["name"], list(y.shape) if isinstance(y, Tensor) else type(y).__name__
        where = f"topology {name!r} ({entry('topology', name).origin})"
        raise UserError(f"{where} returned {got} for a stream of {list(x.shape)}: they must be equal")

    def forward(self, ids: Tensor, ctx: Context | None = None, targets: Tensor | None = None) -> Tensor:
        """Logits, or with targets the summed loss.

        Args:
            ids: Long[B,T], T at most context_length.
            ctx: positions, documents, cache; see `Context`.
            targets: Long[B,T]; -100 is ignored.

        Returns:
            Logits [B,T,V]; with `targets` the SUM of the cross-entropy over tokens, in nats, a float32 scalar.
        """
        ctx = self._with_positions(ids, ctx)
        x = self._stream(ids, ctx)
        if targets is not None:
            return self.output.loss(x, self.head_weight, targets, ctx)
        return self.read_out(x)

    def read_out(self, x: Tensor) -> Tensor:
        """Logits [..., V] of the normalised stream x[..., D]."""
        return self.output(x, self.head_weight)

    @property
    def incremental(self) -> bool:
        """Whether all parts give the same with a cache and in a padded batch (see `Context`)."""
        positions = [m for m in self.modules() if isinstance(m, Position)]
        return all(getattr(part, "incremental", False) for part in [*self.blocks, self.position, *positions])

    def _with_positions(self, ids: Tensor, ctx: Context | None) -> Context:
        past = len(ctx.cache) if ctx is not None and ctx.cache is not None else 0
        if past + ids.shape[1] > self.cfg.context_length:
            raise ValueError(f"{past + ids.shape[1]} tokens exceed the context of {self.cfg.context_length}")
        ctx = Context() if ctx is None else ctx
        positions = ctx.positions
        if positions is None:
            positions = torch.arange(past, past + ids.shape[1], device=ids.device)
        ctx = Context(positions, ctx.documents, ctx.cache, ids, losses=ctx.losses, metrics=ctx.metrics)
        if ctx.cache is not None:
            if ctx.documents is not None:
                raise ValueError("a cache knows no document boundaries: give Context either documents or cache")
            ctx.cache.advance(ctx.positions)
        return ctx


def check_architecture(cfg: ModelConfig) -> None:
    """Refuse, by name, what would be ignored or left without a gradient.

    Raises:
        UserError: the options that do not go together, and what to type instead.
    """
    if cfg.vocab_size is None:
        raise UserError("model.vocab_size is null until the tokenizer is known; give model.vocab_size=...")
    placement = lookup("norm_placement", cfg.norm_placement["name"], "model.norm_placement.name")
    if not isinstance(placement, NormPlacement):
        raise UserError(f"model.norm_placement.name={cfg.norm_placement['name']!r} is no NormPlacement")
    for kind, n_positional in (("init", 3), ("norm", 1), ("activation", 0), ("position", 1), ("head", 1)):
        check(kind, getattr(cfg, kind), n_positional, f"model.{kind}")
    lookup("linear_backend", cfg.linear.backend, "model.linear.backend")  # its name is the whole option, not its `name`
    topology, _ = check("topology", cfg.topology_section, 3, "model.topology")
    if hasattr(topology, "check"):
        topology.check(cfg)
    for name, options in cfg.transforms.items():
        check("transform", {"name": name, **options}, 1, f"model.transforms.{name}")
    sections = [section for layer in range(cfg.n_layers) for section in cfg.block_of(layer)]
    for section in sections:
        check("sublayer", section, 2, f"model.{section['name']}")
    for name in cfg.sublayers.keys() - {section["name"] for section in sections}:
        known, options = check("sublayer", {"name": name, **cfg.sublayers[name]}, 2, f"model.{name}")
        for option, parameter in signature_options(known, 2).items():
            # Presets set biases; that much may be left over when a block is exchanged.
            if option != "bias" and options.get(option, parameter.default) != parameter.default:
                raise UserError(
                    f"model.{name}.{option}={options[option]} does nothing: no block has the sublayer {name}"
                )
    extra = set(cfg.norm_placement) - {"name"}
    if extra:
        raise UserError(f"model.norm_placement.{extra.pop()}: a norm placement has no options")


def build_model(cfg: ModelConfig, seed: int = 0, device: str | torch.device = "cpu") -> GPT:
    """A `GPT` initialised from `seed`, on `device`; on "meta" it has shapes and no values."""
    with torch.device(device), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # for what a plugin's constructor draws itself
        model = GPT(cfg)
        if torch.device(device).type != "meta":
            initialize(model, cfg, seed)
    return model
