"""The example plugins compute what their papers say, and train from their own option files."""

from __future__ import annotations

import ast
import csv
import math
import shlex
from pathlib import Path

import pytest
import torch

from gptframe import load, plugins, registry
from gptframe.cli import _configure
from gptframe.config import ModelConfig
from gptframe.generate import Sampling, generate_batch
from gptframe.model import Context, build_model
from gptframe.training.run import train

FOLDER = Path(__file__).parents[2] / "plugins" / "examples"


def build(kind: str, name: str, *arguments, **options):
    plugins.load([str(FOLDER / f"{name}.py")])
    return registry.build(kind, {"name": name, **options}, *arguments).double()


def noisy(part):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in part.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.5)
    return part


CFG = ModelConfig(d_model=8, n_heads=2, context_length=6, position={"name": "none"})
X = torch.randn(1, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
CTX = Context(positions=torch.arange(6))


def test_dyt():
    norm = build("norm", "dyt", 2, alpha=0.5)
    with torch.no_grad():
        norm.gain.copy_(torch.tensor([2.0, 3.0]))
        norm.bias.copy_(torch.tensor([0.0, 1.0]))
    got = norm(torch.tensor([2.0, -4.0], dtype=torch.float64))
    assert got.tolist() == pytest.approx([2 * math.tanh(1), 3 * math.tanh(-2) + 1])


def test_ntk_rope_slows_the_slowest_pair_by_the_factor_and_the_fastest_not_at_all():
    cfg = ModelConfig(d_model=32, n_heads=2, context_length=8)
    wide, plain = build("position", "ntk_rope", cfg, factor=4.0), registry.build("position", {"name": "rope"}, cfg)
    w, v = (p._frequencies(torch.device("cpu")) for p in (wide, plain))
    assert float(w[0]) == float(v[0]) == 1.0
    assert float(v[-1] / w[-1]) == pytest.approx(4.0)


def test_differential_attention_against_loops():
    part = noisy(build("sublayer", "differential_attention", CFG, 3))
    q, k, v = (m(X)[0] for m in (part.q, part.k, part.v))  # [6, 8]: two heads of 4, one pair
    one, two = ((a @ b).item() for a, b in ((part.lambda_q1, part.lambda_k1), (part.lambda_q2, part.lambda_k2)))
    factor = math.exp(one) - math.exp(two)
    start = 0.8 - 0.6 * math.exp(-0.9)
    rows = []
    for t in range(6):
        patterns = [(k[: t + 1, h] @ q[t, h] / 2).softmax(0) for h in (slice(0, 4), slice(4, 8))]
        mixed = (patterns[0] - (factor + start) * patterns[1]) @ v[: t + 1]
        rows.append(mixed / (mixed.square().mean() + 1e-5).sqrt() * (1 - start))
    assert torch.allclose(part(X, CTX)[0], part.out(torch.stack(rows)), atol=1e-10)


def test_gated_linear_attention_against_the_recurrence():
    part = noisy(build("sublayer", "gated_linear_attention", CFG, 0, keep=1.0))
    q, k, v = (m(X)[0].view(6, 2, 4) for m in (part.q, part.k, part.v))
    gates = torch.sigmoid(part.gate(X)[0] + 1.0)
    state, rows = torch.zeros(2, 4, 4, dtype=torch.float64), []
    for t in range(6):
        state = gates[t][:, None, None] * state + k[t][:, :, None] * v[t][:, None, :]
        y = torch.einsum("hd,hde->he", q[t], state) / 2
        rows.append((y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten())
    assert torch.allclose(part(X, CTX)[0], part.out(torch.stack(rows)), atol=1e-10)


def commands(file: Path) -> list[list[str]]:
    """The overrides of each command in the docstring of an example."""
    text = ast.get_docstring(ast.parse(file.read_text())).replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    return [shlex.split(line)[2:] for line in lines if line.startswith("python train.py")]


EXAMPLES = sorted(FOLDER.glob("*.py"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_the_commands_in_the_docstring_build_it_and_every_parameter_learns(file, tmp_path, monkeypatch):
    monkeypatch.chdir(FOLDER.parents[1])
    found = commands(file)
    assert any(f"plugins=[plugins/examples/{file.name}]" in overrides for overrides in found)
    for overrides in found:
        folders = [overrides.pop(i + 1) for i, o in enumerate(overrides) if o == "--config-dir"]
        given = [o for o in overrides if o != "--config-dir" and not o.startswith("init_from=")]
        model = build_model(_configure(given, folders).model)
        ids = torch.arange(16)[None]
        ctx = Context(losses={}, metrics={})
        loss = model(ids, ctx, ids)
        (loss + sum(ctx.losses.values())).backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_mixture_of_experts_against_loops():
    part = noisy(build("sublayer", "moe", CFG, 0, experts=3, top_k=2, balance=0.5))
    ctx = Context(positions=torch.arange(6), losses={}, metrics={})
    got = part(X, ctx)
    p = part.router(X)[0].softmax(-1).detach()
    counts = torch.zeros(3, dtype=torch.float64)
    for t in range(6):
        best = sorted(range(3), key=lambda e: -float(p[t, e]))[:2]
        counts[best] += 1
        total = sum(p[t, e] for e in best)
        wanted = sum(p[t, e] / total * part.experts[e](X[0, t], ctx) for e in best)
        assert torch.allclose(got[0, t], wanted, atol=1e-10)
    balance = 0.5 * 3 * sum(counts[e] / 12 * p[:, e].mean() for e in range(3))
    assert float(ctx.losses["balance"].detach()) == pytest.approx(float(balance.detach()), rel=1e-6)
    assert float(ctx.metrics["busiest"][0]) == pytest.approx(3 * float(counts.max()) / 12)


def test_latent_attention_against_loops():
    part = noisy(build("sublayer", "latent_attention", CFG, 0, rank=3))
    c = part.latent(X)[0]
    c = c / (c.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    q, q_place = part.q(X)[0].view(6, 2, 4), part.q_position(X)[0].view(6, 2, 4)
    k, v, k_place = part.k(c).view(6, 2, 4), part.v(c).view(6, 2, 4), part.k_position(X)[0]
    rows = []
    for t in range(6):
        heads = []
        for h in range(2):
            scores = (k[: t + 1, h] @ q[t, h] + k_place[: t + 1] @ q_place[t, h]) / 8**0.5
            heads.append(scores.softmax(0) @ v[: t + 1, h])
        rows.append(torch.cat(heads))
    assert torch.allclose(part(X, CTX)[0], part.out(torch.stack(rows)), atol=1e-10)


def test_value_attention_adds_the_embedding_of_the_token_to_its_value():
    plugins.load([str(FOLDER / "value_embedding.py")])
    part = noisy(registry.build("sublayer", {"name": "value_attention"}, CFG, 0).double())
    ids = torch.tensor([[5, 3, 5, 0, 1, 2]])
    got = part(X, Context(positions=torch.arange(6), ids=ids))[0, :1]
    # the first token sees itself alone: its output is the projection of its own value
    assert torch.allclose(got, part.out(part.v(X[0, :1]) + part.strength * part.table(ids[0, :1])), atol=1e-10)


def test_multi_token_head_against_loops():
    plugins.load([str(FOLDER / "multi_token.py")])
    head = noisy(registry.build("head", {"name": "multi_token", "ahead": 2, "weight": 0.3}, CFG).double())
    weight = torch.randn(11, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    targets = torch.tensor([[3, 4, -100, 1, 9, 10]])
    documents = torch.tensor([[0, 0, 0, 0, 1, 1]])
    ctx = Context(positions=torch.arange(6), documents=documents, losses={})
    head.loss(X, weight, targets, ctx)
    for k in (1, 2):
        losses = []
        for t in range(6 - k):
            if targets[0, t + k] >= 0 and documents[0, t] == documents[0, t + k]:
                x = X[0, t]
                seen = x + head.steps[k - 1](x / (x.square().mean() + 1e-5).sqrt())
                losses.append(-torch.log_softmax(weight @ seen, -1)[targets[0, t + k]])
        assert float(ctx.losses[f"ahead_{k}"]) == pytest.approx(0.3 * float(torch.stack(losses).mean()), rel=1e-6)


def model_with(*overrides, **changes):
    config = _configure([f"plugins=[{','.join(str(f) for f in sorted(FOLDER.glob('*.py')))}]", *overrides], [])
    return build_model(config.model, 0, **changes)


IDS = torch.arange(12)[None] * 5 % 64


def test_u_net_blocks_against_the_sum_written_out():
    model = model_with("model.topology=unet", "model.n_layers=3").double()
    x = model.token_embedding(IDS)
    ctx = Context(positions=torch.arange(12))

    def sublayers(block, x):
        x = x + block.attention.core(block.attention.pre(x), ctx)
        return x + block.mlp.core(block.mlp.pre(x), ctx)

    first = sublayers(model.blocks[0], x)
    second = sublayers(model.blocks[1], first)
    third = sublayers(model.blocks[2], second + model.blocks[2].skip * first)
    assert [block.skip is not None for block in model.blocks] == [False, False, True]
    wanted = model.final_norm(third) @ model.token_embedding.weight.T
    assert torch.allclose(model(IDS), wanted, atol=1e-10)


def test_layer_scale_multiplies_each_delta():
    plain, scaled = model_with(), model_with("+model.transforms.layer_scale.start=0.25")
    ctx, x = Context(positions=torch.arange(12)), torch.randn(1, 12, 64)
    one, other = plain.blocks[0].mlp, scaled.blocks[0].mlp
    assert torch.allclose(other(x, ctx) - x, 0.25 * (one(x, ctx) - x), atol=1e-6)


def test_lora_starts_as_the_model_it_is_put_on_and_trains_its_own_alone():
    plain = model_with()
    model = model_with("+model.transforms.lora.rank=2", "+model.transforms.lora.targets='*.[qv]'")
    assert torch.equal(model(IDS), plain(IDS))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"blocks.{i}.attention.core.{m}.lora.{ab}" for i in (0, 1) for m in "qv" for ab in "ab"}
    q = model.blocks[0].attention.core.q
    with torch.no_grad():
        q.lora.b.normal_()
    x = torch.randn(3, 64)
    assert torch.allclose(q(x), x @ (q.weight + 16 / 2 * q.lora.b @ q.lora.a).T, atol=1e-5)


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.block=[short_conv,gated_linear_attention,mlp]", "position=none"],
        ["model.block=[latent_attention,moe]"],
        ["model.block=[value_attention,mlp]", "model.topology=unet", "model.head.name=multi_token"],
    ],
    ids=lambda o: o[0],
)
def test_generation_with_a_cache_and_in_a_batch_gives_the_same_tokens(overrides):
    model = model_with(*overrides, "model.init.std=0.3")
    prompts = [[1, 2, 3, 4, 5, 6, 7], [9], [4, 4, 8]]
    greedy = Sampling(temperature=0.0)
    together = generate_batch(model, prompts, 40, greedy)  # past the context, which is 32
    for prompt, got in zip(prompts, together, strict=True):
        assert generate_batch(model, [prompt], 40, greedy, use_cache=False)[0].ids == got.ids
    assert model.incremental


# Trained, as many as go together at once: what only training calls is called, and the loss falls.
TRAINED = [
    (
        ["moe", "latent_attention", "layer_scale"],
        ["model.block=[latent_attention,moe]", "+model.transforms.layer_scale={}"],
    ),
    (
        ["value_embedding", "unet", "multi_token"],
        ["model.block=[value_attention,mlp]", "model.topology=unet", "model.head.name=multi_token"],
    ),
    (
        ["short_conv", "gated_linear_attention", "mish"],
        ["model.block=[short_conv,gated_linear_attention,mlp]", "position=none", "model.activation.name=mish"],
    ),
    (
        ["differential_attention", "dyt", "ntk_rope"],
        ["model.block=[differential_attention,mlp]", "norm=dyt", "position=ntk_rope"],
    ),
]
SHORT = ["trainer.max_steps=12", "trainer.val_interval=12", "trainer.val_batches=2", "data.baseline_order=0"]
SHORT += ["callbacks=none", "trainer.log_interval=1"]


def run_examples(names, overrides):
    files = ",".join(str(FOLDER / f"{name}.py") for name in names)
    given = [f"plugins=[{files}]", *overrides, *SHORT]
    return train(_configure(given, [str(FOLDER / "conf")]), given)


@pytest.mark.parametrize("names,overrides", TRAINED, ids=lambda v: "+".join(v) if "=" not in v[0] else "")
def test_examples_are_trained(names, overrides, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    result = run_examples(names, overrides)
    assert result.exit_code == 0 and result.train_loss < math.log(64) - 0.3  # a uniform guess at the start


def test_every_example_is_among_them():
    trained = {name for names, _ in TRAINED for name in names}
    assert trained | {"lora", "hypergradient"} == {file.stem for file in EXAMPLES}


def test_lora_on_a_trained_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_examples([], ["run_dir=base"])
    base = load("base").model.state_dict()
    result = run_examples(["lora"], ["init_from=base", "+model.transforms.lora.rank=4", "run_dir=tuned"])
    tuned = load("tuned").model.state_dict()
    assert result.exit_code == 0 and all(torch.equal(tuned[name], base[name]) for name in base)
    assert any(bool(value.any()) for name, value in tuned.items() if name.endswith("lora.b"))


def test_hypergradient_lengthens_steady_steps_and_resumes_to_the_bit(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    overrides = ["schedule=constant", "+callbacks.extra.hypergradient.rate=0.05", "trainer.checkpoint_interval=6"]
    whole = run_examples(["hypergradient"], [*overrides, "run_dir=whole"])
    rates = [float(row["lr"]) for row in csv.DictReader(open("whole/metrics.csv")) if row["lr"]]
    assert rates[0] < rates[1] < rates[4]  # early gradients agree
    Path("whole/checkpoints/step_00000012.ckpt").unlink()
    resumed = train(_configure(["resume=whole"], []), [])
    assert resumed.train_loss == whole.train_loss and resumed.val_loss == whole.val_loss
