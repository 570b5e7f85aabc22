"""x-transformers (lucidrains), from the package index: `pip install x-transformers==2.31.10`."""

from __future__ import annotations

from importlib.metadata import version

from peers import Peer, decayed_by_axes

OVERRIDES = ["norm=rmsnorm", "position=none", "activation=gelu_exact"]
OVERRIDES += ["model.norm.eps=1e-12", "model.attention.bias=false", "model.mlp.bias=true"]


def load(ours, config, given: str) -> Peer:
    import torch
    import torch.nn.functional as F
    from x_transformers import Decoder, TransformerWrapper

    cfg = config.model
    if not cfg.tie_head or cfg.norm["name"] != "rmsnorm" or cfg.position["name"] != "none":
        raise ValueError("this comparison has RMS norms, no positions and a tied head")
    model = TransformerWrapper(
        num_tokens=cfg.vocab_size,
        max_seq_len=cfg.context_length,
        use_abs_pos_emb=False,
        tie_embedding=True,
        attn_layers=Decoder(
            dim=cfg.d_model,
            depth=cfg.n_layers,
            heads=cfg.n_heads,
            attn_dim_head=cfg.head_dim,
            ff_mult=cfg.hidden / cfg.d_model,
            use_rmsnorm=True,
            attn_flash=True,
        ),
    )
    model.tie_embedding_scale = 1.0  # of the logits
    theirs, state = dict(model.named_parameters()), ours.state_dict()
    with torch.no_grad():
        theirs["token_emb.emb.weight"].copy_(state["token_embedding.weight"])
        copied = {"token_emb.emb.weight"}

        def copy(name: str, value: torch.Tensor) -> None:
            theirs[name].copy_(value)
            copied.add(name)

        for i in range(cfg.n_layers):
            a, m = f"attn_layers.layers.{2 * i}", f"attn_layers.layers.{2 * i + 1}"
            for name, layer in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("out", "to_out")):
                copy(f"{a}.1.{layer}.weight", state[f"blocks.{i}.attention.core.{name}.weight"])
            for place, part in ((a, "attention"), (m, "mlp")):
                copy(f"{place}.0.0.g", state[f"blocks.{i}.{part}.pre.weight"] - 1)  # its gain is 1 + g
            for kind in ("weight", "bias"):
                copy(f"{m}.1.ff.0.0.{kind}", state[f"blocks.{i}.mlp.core.up.{kind}"])
                copy(f"{m}.1.ff.2.{kind}", state[f"blocks.{i}.mlp.core.down.{kind}"])
        copy("attn_layers.final_norm.g", state["final_norm.weight"] - 1)
    left = set(theirs) - copied
    if left:
        raise ValueError(f"this version of it has parameters of another kind: {', '.join(sorted(left)[:3])}")

    def loss(model, ids, targets):
        return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), ignore_index=-100)

    return Peer(version("x-transformers"), model.train(), loss, decayed_by_axes(model, 0.1))
