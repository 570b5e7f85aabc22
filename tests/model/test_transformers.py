"""Side by side with Hugging Face transformers: small random GPT-2, LLaMA and GPT-NeoX with the weights copied over."""

from __future__ import annotations

import pytest
import torch
from helpers import tokens

from gptframe.config import Config
from gptframe.model import build_model

transformers = pytest.importorskip("transformers")

SIZES = {"d_model": 48, "n_layers": 2, "n_heads": 4, "vocab_size": 61, "context_length": 32}


def build(**model):
    model = {**SIZES, "norm_placement": {"name": "pre"}, **model}
    return build_model(Config.from_dict({"model": model}).model).double().eval()


def randomised(theirs):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=generator))
    return theirs.double().eval()


def assert_equal_logits(ours, theirs, renamed):
    """`renamed` maps all of our names to their tensors; logits in float64 agree to rounding."""
    assert set(renamed) == set(ours.state_dict())
    ours.load_state_dict(renamed)
    ids = tokens(ours.cfg, 2, 20)
    with torch.no_grad():
        got, want = ours(ids), theirs(ids).logits
    assert want.abs().max() > 0.5
    # the 1e-6 is for rotary tables, which transformers holds in float32
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def rows(prefix, ours, theirs):
    return {f"{ours}.{part}": theirs[f"{prefix}.{part}"] for part in ("weight", "bias") if f"{prefix}.{part}" in theirs}


def test_gpt2():
    config = transformers.GPT2Config(n_embd=48, n_layer=2, n_head=4, vocab_size=61, n_positions=32)
    theirs = randomised(transformers.GPT2LMHeadModel(config))
    ours = build(position={"name": "learned"}, activation={"name": "gelu_tanh"}, attention={"bias": True})
    state = theirs.state_dict()
    renamed = {
        "token_embedding.weight": state["transformer.wte.weight"],
        "position.table.weight": state["transformer.wpe.weight"],
        **rows("transformer.ln_f", "final_norm", state),
    }
    for i in range(2):
        hf, block = f"transformer.h.{i}", f"blocks.{i}"
        renamed |= rows(f"{hf}.ln_1", f"{block}.attention.pre", state) | rows(f"{hf}.ln_2", f"{block}.mlp.pre", state)
        weights = state[f"{hf}.attn.c_attn.weight"].T.chunk(3)  # their Conv1D holds [in, out]
        biases = state[f"{hf}.attn.c_attn.bias"].chunk(3)
        for part, weight, bias in zip("qkv", weights, biases, strict=True):
            renamed |= {f"{block}.attention.core.{part}.weight": weight, f"{block}.attention.core.{part}.bias": bias}
        for theirs_name, name in (
            ("attn.c_proj", "attention.core.out"),
            ("mlp.c_fc", "mlp.core.up"),
            ("mlp.c_proj", "mlp.core.down"),
        ):
            renamed[f"{block}.{name}.weight"] = state[f"{hf}.{theirs_name}.weight"].T
            renamed[f"{block}.{name}.bias"] = state[f"{hf}.{theirs_name}.bias"]
    assert_equal_logits(ours, theirs, renamed)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_llama(kv_heads):
    config = transformers.LlamaConfig(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        vocab_size=61,
        max_position_embeddings=32,
        intermediate_size=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    theirs = randomised(transformers.LlamaForCausalLM(config))
    ours = build(
        position={"name": "rope", "pairing": "half"},
        activation={"name": "swiglu"},
        norm={"name": "rmsnorm"},
        expansion={"factor": 2.6667},
        attention={"n_kv_heads": kv_heads},
        mlp={"bias": False},
        tie_head=False,
    )
    state = theirs.state_dict()
    names = {"token_embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
    for i in range(2):
        hf, block = f"model.layers.{i}", f"blocks.{i}"
        names |= {
            f"{block}.attention.pre": f"{hf}.input_layernorm",
            f"{block}.mlp.pre": f"{hf}.post_attention_layernorm",
            **{f"{block}.attention.core.{p}": f"{hf}.self_attn.{p}_proj" for p in "qkv"},
            f"{block}.attention.core.out": f"{hf}.self_attn.o_proj",
            f"{block}.mlp.core.gate": f"{hf}.mlp.gate_proj",
            f"{block}.mlp.core.up": f"{hf}.mlp.up_proj",
            f"{block}.mlp.core.down": f"{hf}.mlp.down_proj",
        }
    assert_equal_logits(ours, theirs, {f"{k}.weight": state[f"{v}.weight"] for k, v in names.items()})


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_gpt_neox(fraction):
    config = transformers.GPTNeoXConfig(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=61,
        max_position_embeddings=32,
        intermediate_size=192,
        rotary_pct=fraction,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": fraction},
        use_parallel_residual=True,
        hidden_act="gelu",
    )
    theirs = randomised(transformers.GPTNeoXForCausalLM(config))
    ours = build(
        position={"name": "rope", "pairing": "half", "fraction": fraction},
        activation={"name": "gelu_exact"},
        topology="parallel",
        attention={"bias": True},
        tie_head=False,
    )
    state = theirs.state_dict()
    renamed = {
        "token_embedding.weight": state["gpt_neox.embed_in.weight"],
        "head.weight": state["lm_head.weight" if "lm_head.weight" in state else "embed_out.weight"],
        **rows("gpt_neox.final_layer_norm", "final_norm", state),
    }
    for i in range(2):
        hf, block = f"gpt_neox.layers.{i}", f"blocks.{i}"
        renamed |= rows(f"{hf}.input_layernorm", f"{block}.attention.pre", state)
        renamed |= rows(f"{hf}.post_attention_layernorm", f"{block}.mlp.pre", state)
        renamed |= rows(f"{hf}.attention.dense", f"{block}.attention.core.out", state)
        renamed |= rows(f"{hf}.mlp.dense_h_to_4h", f"{block}.mlp.core.up", state)
        renamed |= rows(f"{hf}.mlp.dense_4h_to_h", f"{block}.mlp.core.down", state)
        for part in ("weight", "bias"):
            packed = state[f"{hf}.attention.query_key_value.{part}"].unflatten(0, (4, 3, 12))  # head, q k v, dimension
            for j, name in enumerate("qkv"):
                renamed[f"{block}.attention.core.{name}.{part}"] = packed[:, j].flatten(0, 1)
    assert_equal_logits(ours, theirs, renamed)
