"""Which combinations are built, what each parameter gets from them, and what is refused by name."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import ACTIVATIONS, ATTENTIONS, NORMS, PLACEMENTS, POSITIONS, POST, TOPOLOGIES, perturbed, small, tokens
from torch import nn

from gptframe import registry
from gptframe.errors import UserError
from gptframe.model import GPT, build_model
from gptframe.model.norm import NormPlacement


def key_shift(cfg, name):
    """A shift common to all keys changes no softmax: its gradient is 0 unless something stands between the two."""
    attention = cfg.sublayers["attention"]
    if cfg.position["name"] == "rope" or attention.get("softcap"):
        return False
    if attention.get("qk_norm", "none") == "none":
        return name.endswith("core.k.bias")
    return name.endswith("core.k_norm.bias")


@pytest.mark.parametrize("topology,placement", TOPOLOGIES)
def test_every_parameter_gets_a_gradient(topology, placement):
    """Finite, and not zero but for the shift of keys; with and without residual connections."""
    turns = (itertools.cycle(x) for x in (ATTENTIONS.values(), NORMS.values(), [True, False, False], [None, 0.0, 1.0]))
    attentions, norms, ties, scales = turns
    for activation, position in itertools.product(ACTIVATIONS, POSITIONS):
        cfg = small(
            placement,
            activation,
            position,
            topology=topology,
            attention=next(attentions),
            norm=next(norms),
            tie_head=next(ties),
            residual_scale=next(scales),
        )
        model = perturbed(cfg)
        ids = tokens(cfg, 3, 16)  # as long as the context, so that each position has a token
        model(ids, targets=ids.roll(-1, 1)).backward()
        for name, p in model.named_parameters():
            assert p.grad is not None and p.grad.isfinite().all(), (name, cfg)
            largest = p.grad.abs().max()
            assert largest < 1e-9 if key_shift(cfg, name) else largest > 0, (name, cfg)


def test_gradients_agree_with_finite_differences():
    """Through both topologies, a gated activation, two norms and an attention with every switch."""
    for topology, placement in (("sequential", "keel"), ("parallel", "sandwich")):
        changes = {"topology": topology, "attention": ATTENTIONS["all"], "logit_softcap": 3.0, "dropout": 0.0}
        model = perturbed(small(placement, "swiglu", "rope", **changes))
        ids = tokens(model.cfg)
        model(ids, targets=ids.roll(-1, 1)).backward()
        generator = torch.Generator().manual_seed(1)
        for name, p in model.named_parameters():
            direction = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            with torch.no_grad():
                values = []
                for step in (1e-5, -1e-5):
                    p.add_(direction, alpha=step)
                    values.append(model(ids, targets=ids.roll(-1, 1)))
                    p.sub_(direction, alpha=step)
            slope = (values[0] - values[1]) / 2e-5
            assert torch.allclose((p.grad * direction).sum(), slope, rtol=1e-6, atol=1e-6), name


def test_the_tables_are_complete():
    assert registry.names("norm_placement") == sorted(PLACEMENTS)
    assert registry.names("position") == sorted({p["name"] for p in POSITIONS.values()})
    assert registry.names("norm") == sorted({n["name"] for n in NORMS.values()})
    assert registry.names("sublayer") == ["attention", "mlp"]
    assert registry.names("init") == ["deepnorm", "normal"]


SEATS = {  # (pre, out, post) of each sublayer, the embedding's and the final norm
    "pre": ("pre", "final"),
    "post": ("post",),
    "output": ("out", "final"),
    "sandwich": ("pre", "out", "final"),
    "peri": ("pre", "out", "embedding", "final"),
    "keel": ("pre", "post"),
    "deepnorm": ("post",),
    "none": (),
}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_norms_sit_where_the_placement_says(placement):
    model = build_model(small(placement))
    for layer, kind, at in itertools.product((0, 1), ("attention", "mlp"), ("pre", "out", "post")):
        norm = model.get_submodule(f"blocks.{layer}.{kind}.{at}")
        assert isinstance(norm, nn.LayerNorm if at in SEATS[placement] else nn.Identity)
    assert isinstance(model.embedding_norm, nn.LayerNorm) == ("embedding" in SEATS[placement])
    assert isinstance(model.final_norm, nn.LayerNorm) == ("final" in SEATS[placement])


SCALES = {"deepnorm": (2 * 2) ** 0.25, "keel": 4.0}  # of 2 layers, 4 sublayers


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_scale_of_the_stream(placement):
    def scales(**changes):
        return {s.residual_scale for b in build_model(small(placement, **changes)).blocks for s in b.children()}

    assert scales() == {SCALES.get(placement, 1.0)}
    assert scales(residual_scale=0.25) == {0.25}
    if placement == "keel":  # five sublayers
        assert scales(layers={0: ["attention", "mlp", "mlp"]}) == {5.0}


REFUSED = {
    **{
        f"parallel {p}": (
            {"topology": "parallel", "norm_placement": {"name": p}},
            f"model.topology=parallel has no place for the post norms of norm_placement={p}",
        )
        for p in POST
    },
    "parallel with one sublayer": (
        {"topology": "parallel", "block": ["attention"]},
        "model.topology=parallel needs at least two sublayers",
    ),
    "rope without attention": ({"block": ["mlp"]}, "model.position.name=rope acts in attention"),
    "alibi without attention": (
        {"block": ["mlp"], "position": {"name": "alibi"}},
        "model.position.name=alibi acts in attention",
    ),
    "a window without attention": (
        {"block": ["mlp"], "position": {"name": "none"}, "attention": {"window": 4}},
        "model.attention.window=4 does nothing: no block has the sublayer attention",
    ),
    "query norm without attention": (
        {"block": ["mlp"], "position": {"name": "none"}, "attention": {"qk_norm": "head"}},
        "model.attention.qk_norm=head does nothing",
    ),
    "heads": ({"attention": {"n_kv_heads": 3}}, "n_heads=4 is not divisible by model.attention.n_kv_heads=3"),
    "no heads": ({"attention": {"n_kv_heads": 0}}, "model.attention.n_kv_heads=0"),
    "negative heads": ({"attention": {"n_kv_heads": -2}}, "model.attention.n_kv_heads=-2"),
    "more heads": ({"attention": {"n_kv_heads": 8}}, "model.attention.n_kv_heads=8"),
    "no window": ({"attention": {"window": 0}}, "model.attention.window=0 must be at least 1"),
    "half a window": ({"attention": {"window": 2.5}}, "model.attention.window=2.5 must be a whole number or null"),
    "no cap": ({"attention": {"softcap": 0.0}}, "model.attention.softcap=0.0 must be greater than 0"),
    "bias is a word": ({"attention": {"bias": "no"}}, "model.attention.bias='no' must be true or false"),
    "qk_norm": ({"attention": {"qk_norm": "heads"}}, "model.attention.qk_norm='heads' must be one of none, head, full"),
    "misspelt option": (
        {"attention": {"windw": 4}},
        "model.attention.windw: sublayer Attention has no such option. Did you",
    ),
    "mlp option": ({"mlp": {"biass": True}}, "model.mlp.biass: sublayer MLP has no such option. Did you mean 'bias'"),
    "a name in the options": (
        {"attention": {"name": "mlp"}},
        "model.attention.name: sublayers are chosen in model.block",
    ),
    "norm option": ({"norm": {"name": "rmsnorm", "bias": True}}, "model.norm.bias: norm RMSNorm has no such option"),
    "norm option unused": (
        {"norm_placement": {"name": "none"}, "norm": {"name": "rmsnorm", "epz": 1.0}},
        "model.norm.epz: norm RMSNorm has no such option. Did you mean 'eps'",
    ),
    "norm eps": ({"norm": {"name": "layernorm", "eps": "tiny"}}, "model.norm.eps='tiny' must be a number"),
    "affine is a word": (
        {"norm": {"name": "layernorm", "affine": "off"}},
        "model.norm.affine='off' must be true or false",
    ),
    "unknown norm": (
        {"norm": {"name": "layer_norm"}},
        "model.norm.name: unknown norm 'layer_norm'. Did you mean 'layernorm'",
    ),
    "unknown activation": ({"activation": {"name": "gelu"}}, "model.activation.name: unknown activation 'gelu'"),
    "unknown activation without mlp": (
        {"block": ["attention"], "activation": {"name": "gelu"}},
        "model.activation.name: unknown activation 'gelu'",
    ),
    "activation option": (
        {"activation": {"name": "relu", "slope": 1.0}},
        "model.activation.slope: activation ReLU has no",
    ),
    "unknown position": ({"position": {"name": "rotary"}}, "model.position.name: unknown position 'rotary'"),
    "unknown placement": ({"norm_placement": {"name": "prenorm"}}, "model.norm_placement.name: unknown norm_placement"),
    "placement option": (
        {"norm_placement": {"name": "pre", "eps": 1}},
        "model.norm_placement.eps: a norm placement has no",
    ),
    "unknown sublayer": ({"block": ["atention", "mlp"]}, "unknown sublayer 'atention'. Did you mean 'attention'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(monkeypatch, case):
    changes, message = REFUSED[case]
    with pytest.raises(UserError) as refusal:
        build_model(small(**changes))
    assert message in str(refusal.value)
    assert len(str(refusal.value)) < 450


def test_options_are_refused_before_anything_is_allocated(monkeypatch):
    """A huge model with an option that does not exist must not take the memory first."""
    made = []
    monkeypatch.setattr(nn.Module, "register_parameter", lambda self, name, p: made.append(name))
    monkeypatch.setattr(nn.Module, "__setattr__", lambda self, k, v: made.append(k) or object.__setattr__(self, k, v))
    for case in ("parallel post", "misspelt option", "norm option", "unknown activation", "affine is a word"):
        with pytest.raises(UserError):
            GPT(small(**REFUSED[case][0]))
    assert not {"token_embedding", "weight"} & set(made)


def test_presets_biases_may_be_left_over():
    """`model=gpt2 model.block=[mlp]` must not need attention.bias=false too."""
    cfg = small(block=["mlp"], position={"name": "learned"}, attention={"bias": True})
    assert not any("attention" in name for name, _ in build_model(cfg).named_parameters())


def test_layers_without_attention_and_options_of_single_layers():
    layers = {0: ["mlp"], 1: [{"name": "attention", "window": 2, "n_kv_heads": 1}, "mlp", "mlp"]}
    model = build_model(small(n_layers=3, attention={"window": 5}, layers=layers))
    kinds = [[name for name, _ in block.named_children()] for block in model.blocks]
    assert kinds == [["mlp"], ["attention", "mlp", "mlp__2"], ["attention", "mlp"]]
    one, usual = model.blocks[1].attention.core, model.blocks[2].attention.core
    assert (one.window, usual.window) == (2, 5)
    assert (one.k.weight.shape[0], usual.k.weight.shape[0]) == (8, 32)
    ids = tokens(model.cfg)
    model(ids, targets=ids).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_wrong_options_of_a_single_layer_are_refused():
    with pytest.raises(UserError, match="model.attention.windw"):
        build_model(small(layers={1: [{"name": "attention", "windw": 2}]}))


class Doubling(nn.Module):
    """A plugin's sublayer, reached by path."""

    def __init__(self, cfg, layer: int, factor: float = 2.0):
        super().__init__()
        self.factor = factor

    def forward(self, x, ctx):
        return x * self.factor


class Wrong(Doubling):
    def forward(self, x, ctx):
        return x[:, :-1]


class Nothing(Doubling):
    def forward(self, x, ctx):
        return None


class Narrow(nn.Module):
    def __init__(self, cfg):
        super().__init__()


class Buggy(Doubling):
    def __init__(self, cfg, layer: int):
        super().__init__(cfg, layer)
        len(5)


def test_a_sublayer_by_its_path():
    name = f"{__name__}:Doubling"
    cfg = small(block=["attention", {"name": name, "factor": 3}, "mlp"])
    model = build_model(cfg)
    (label,) = (n for n, _ in model.blocks[0].named_children() if "Doubling" in n)
    assert model.blocks[1].get_submodule(label).core.factor == 3.0
    assert model(tokens(cfg)).shape == (2, 8, 19)


def test_a_wrong_shape_is_named_with_both_shapes(fresh_registry):
    registry.register("sublayer", "wrong")(Wrong)
    model = build_model(small(block=["attention", "wrong", "mlp"]))
    with pytest.raises(UserError) as refusal:
        model(tokens(model.cfg))
    assert "sublayer 'wrong'" in str(refusal.value)
    assert "test_architecture.py:" in str(refusal.value)
    assert "returned [2, 7, 32] for an input of [2, 8, 32]" in str(refusal.value)
    model = build_model(small(block=["attention", f"{__name__}:Nothing"]))
    with pytest.raises(UserError, match="Nothing.* returned NoneType for an input of"):
        model(tokens(model.cfg))


def test_a_sublayer_without_the_layer_argument_is_told_the_contract(fresh_registry):
    registry.register("sublayer", "narrow")(Narrow)
    with pytest.raises(
        UserError, match=r"sublayer 'narrow' \(.*test_architecture.py:\d+\) .*__init__\(cfg: ModelConfig, layer"
    ):
        build_model(small(block=["narrow", "attention"]))


def test_a_bug_in_a_constructor_stays_a_bug(fresh_registry):
    registry.register("sublayer", "buggy")(Buggy)
    with pytest.raises(TypeError) as error:
        build_model(small(block=["attention", "buggy"]))
    assert error.traceback[-1].path.name == "test_architecture.py"


@pytest.mark.parametrize("name", ["forward", "training", "residual_scale", "register_buffer"])
def test_a_sublayer_cannot_be_called_as_an_attribute_of_its_block(fresh_registry, name):
    registry.register("sublayer", name)(Doubling)
    with pytest.raises(UserError, match=f"{name!r} is an attribute of every block"):
        build_model(small(block=["attention", name]))


def test_a_norm_placement_and_a_norm_of_a_plugin(fresh_registry):
    registry.register("norm_placement", "after_all")(NormPlacement(out=True, post=True, final=False))

    @registry.register("norm", "half")
    class Half(nn.Module):
        def __init__(self, dim: int, by: float = 2.0):
            super().__init__()
            self.by = by

        def forward(self, x):
            return x / self.by

    model = build_model(small("after_all", norm={"name": "half", "by": 4}))
    assert isinstance(model.blocks[0].mlp.post, Half) and model.blocks[0].mlp.out.by == 4.0
    assert isinstance(model.blocks[0].mlp.pre, nn.Identity)
    assert "norm_placement/after_all" in registry.origins()


def test_a_norm_placement_that_is_none(fresh_registry):
    registry.register("norm_placement", "odd")(Doubling)
    with pytest.raises(UserError, match="'odd' is no NormPlacement"):
        build_model(small("odd"))


@pytest.mark.parametrize("seat", ["attention", "embedding", "embeddings", None])
def test_a_position_of_a_plugin(fresh_registry, seat):
    class Shift(nn.Module):
        def __init__(self, cfg, by: float = 1.0):
            super().__init__()
            self.by = by

        def forward(self, x, ctx):
            return x + self.by

        def rotate(self, q, k, ctx):
            return q * (1 + ctx.positions[:, None]), k

        def score_bias(self, q_positions, k_positions):
            return None

    if seat:
        Shift.seat = seat
    registry.register("position", "shift")(Shift)
    cfg = small(position={"name": "shift", "by": 0.5}, norm={"name": "rmsnorm"})  # a LayerNorm removes a common shift
    if seat in ("attention", "embedding"):
        shifted, none = perturbed(cfg), perturbed(small("pre", "gelu_tanh", "none", norm={"name": "rmsnorm"}))
        assert not torch.allclose(shifted(tokens(cfg)), none(tokens(cfg)), atol=1e-3)
    else:
        with pytest.raises(UserError, match="position 'shift'.*seat=.* must be embedding or attention"):
            build_model(cfg)


def test_a_transform_that_returns_a_module_or_freezes_all_is_refused(fresh_registry):
    from gptframe.training.optimizer import param_groups

    @registry.register("transform", "spoils")
    def spoils(model, how: str):
        model.requires_grad_(False)
        return {"lost": nn.Linear(2, 2), "itself": model}[how]

    def built(how):
        return build_model(small(transforms={"spoils": {"how": how}}))

    with pytest.raises(UserError, match=r"transform 'spoils' .* returned Linear, which would be lost"):
        built("lost")
    with pytest.raises(UserError, match="every parameter is frozen"):
        param_groups(built("itself"))
