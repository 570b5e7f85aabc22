"""Side by side with transformers: logits, greedy continuations, bit-exact round trips, and what is refused."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch

from gptframe import load
from gptframe.config import Config, ModelConfig
from gptframe.errors import UserError
from gptframe.interop.hf import FORMATS, Reader, config_of, expansion, half_split, model_of
from gptframe.model import build_model
from gptframe.model.block import Block
from gptframe.registry import register
from gptframe.training import checkpoint, directory

transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402

transformers.utils.logging.disable_progress_bar()

BASE = {
    "vocab_size": 61,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "intermediate_size": 100,
}
GQA = {"num_key_value_heads": 2}
LLAMA3 = {"rope_type": "default", "rope_theta": 5e5}
LLAMA31 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
GPT2 = {"n_embd": 48, "n_layer": 3, "n_head": 4, "vocab_size": 61, "n_positions": 64}

# name: (model_type, options of its config class)
MODELS = {
    "gpt2": ("gpt2", GPT2),
    "gpt2_untied": ("gpt2", {**GPT2, "tie_word_embeddings": False, "n_inner": 77, "activation_function": "gelu"}),
    "llama2": ("llama", BASE),
    "llama3": ("llama", {**BASE, **GQA, "rms_norm_eps": 1e-5, "rope_parameters": LLAMA3}),
    "llama31": ("llama", {**BASE, **GQA, "rope_parameters": LLAMA31, "tie_word_embeddings": True, "head_dim": 16}),
    "llama_linear": ("llama", {**BASE, "rope_parameters": LINEAR, "attention_bias": True, "mlp_bias": True}),
    "pythia": ("gpt_neox", {**BASE, "rotary_pct": 0.5, "use_parallel_residual": True}),
    "neox_sequential": (
        "gpt_neox",
        {
            **BASE, "use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_new",
            "rope_parameters": {"rope_type": "default", "rope_theta": 777.0, "partial_rotary_factor": 1.0},
        },
    ),
    "mistral": ("mistral", {**BASE, **GQA, "sliding_window": 7}),
    "mistral_nemo": ("mistral", {**BASE, **GQA, "sliding_window": None, "head_dim": 20}),
    "qwen2": ("qwen2", {**BASE, **GQA}),
    "qwen2_windows": ("qwen2", {**BASE, **GQA, **WINDOWS}),
    "qwen3": ("qwen3", {**BASE, **GQA, "head_dim": 16}),
    "qwen3_bias": ("qwen3", {**BASE, **GQA, "head_dim": 12, "attention_bias": True, "hidden_act": "gelu_pytorch_tanh"}),
    "olmo2": ("olmo2", {**BASE, **GQA, "rms_norm_eps": 1e-6}),
}  # fmt: skip


def build(name: str):
    kind, options = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, **options)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():  # gains and biases too, so that each of them matters
            p.add_(0.2 * torch.randn(p.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """name -> (transformers' model, its folder, our run directory)."""
    cache: dict = {}

    def get(name: str):
        if name not in cache:
            from gptframe import cli

            place = tmp_path_factory.mktemp(name)
            model = build(name)
            model.save_pretrained(place / "hf")
            kind = MODELS[name][0]
            assert cli.main(["import", kind, "--from", str(place / "hf"), "--to", str(place / "run")]) == 0
            cache[name] = (model, place / "hf", place / "run")
        return cache[name]

    return get


def ids_of(n: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 61, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_continuations_are_those_of_transformers(name: str, made) -> None:
    theirs, _, run = made(name)
    ours = load(run)
    ids = ids_of(40)
    with torch.no_grad():
        want = theirs(torch.tensor([ids])).logits[0]
    got = ours.logits(ids)
    assert got.dtype == torch.float32 and want.abs().max() > 1
    assert (got - want).abs().max() <= 1e-4
    prompt = ids[:9]
    continued = theirs.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, 9), max_new_tokens=30, do_sample=False, pad_token_id=0,
        eos_token_id=None,
    )[0, 9:].tolist()  # fmt: skip
    found = ours.continuations([prompt], 30, temperature=0)[0][0][1].ids
    assert found == continued and len(continued) == 30


@pytest.mark.parametrize("name", MODELS)
def test_the_round_trip_is_exact_to_the_bit(name: str, made, tmp_path: Path, command) -> None:
    theirs, folder, run = made(name)
    code, out, _ = command("export", run, "--format", "hf", "--to", tmp_path / "back")
    assert code == 0 and FORMATS[MODELS[name][0]].architecture in out
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    head = {"embed_out.weight": "lm_head.weight"}  # one tensor, which transformers 5 renamed
    before, after = ({head.get(k, k): v for k, v in side.items()} for side in (before, after))
    assert sorted(before) == sorted(after)
    assert all(torch.equal(before[key], after[key]) for key in before)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert type(again) is type(theirs) and again.dtype == torch.float32
    ids = torch.tensor([ids_of(40)])
    with torch.no_grad():
        assert (again(ids).logits - theirs(ids).logits).abs().max() <= 1e-5
    assert command("import", "hf", "--from", tmp_path / "back", "--to", tmp_path / "run")[0] == 0
    assert torch.equal(load(tmp_path / "run").logits(ids_of(40)), load(run).logits(ids_of(40)))
    # Before transformers 5 the same configs said rope_theta and rope_scaling: that is what we write.
    assert "rope_parameters" not in json.loads((tmp_path / "back" / "config.json").read_text())


def test_interleaved_pairs_are_put_in_half_split_order(tmp_path: Path, command) -> None:
    """mini's RoPE turns pairs (2i, 2i+1); GPT-NeoX's (i, i + d/2): rows of queries and keys change places."""
    model = build_model(ModelConfig(vocab_size=61))
    run = write_run(tmp_path / "mini", model)
    code, out, _ = command("export", run, "--format", "hf", "--to", tmp_path / "hf")
    assert code == 0 and "GPTNeoXForCausalLM" in out
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    ids = ids_of(30)
    with torch.no_grad():
        assert (theirs(torch.tensor([ids])).logits[0] - load(run).logits(ids)).abs().max() <= 1e-4


@pytest.mark.parametrize("qk_norm", ["head", "full"])
def test_the_norms_of_queries_and_keys_move_with_them(qk_norm: str) -> None:
    cfg = Config.from_dict(
        {"model": {"d_model": 32, "position": {"name": "rope", "fraction": 0.5}, "attention": {"qk_norm": qk_norm}}}
    ).model
    model = build_model(cfg).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator))
    halves = Config.from_dict(
        {
            "model": {
                "d_model": 32, "position": {"name": "rope", "fraction": 0.5, "pairing": "half"},
                "attention": {"qk_norm": qk_norm},
            }
        }
    ).model  # fmt: skip
    other = build_model(halves).double()
    other.load_state_dict(half_split(model.state_dict(), cfg))
    ids = torch.tensor([ids_of(20)])
    assert (other(ids) - model(ids)).abs().max() <= 1e-12


# Files.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_shards(dtype: torch.dtype, made, tmp_path: Path, command) -> None:
    theirs = build("llama3").to(dtype)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="30KB")
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 2
    code, out, _ = command("import", "llama", "--from", tmp_path / "hf", "--to", tmp_path / "run")
    assert code == 0 and str(dtype).removeprefix("torch.") in out
    ours = load(tmp_path / "run")
    assert ours.model.token_embedding.weight.dtype == dtype
    ids = ids_of(30)
    with torch.no_grad():
        whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
        want = whole(torch.tensor([ids])).logits[0]
    assert (load(tmp_path / "run", dtype="fp32").logits(ids) - want).abs().max() <= 1e-4
    with torch.no_grad():
        rounded = theirs(torch.tensor([ids])).logits[0].float()

    def error(logits: torch.Tensor) -> float:
        return float((logits - want).square().mean().sqrt())

    # In half precision each library rounds in its own places: ours is no further from fp32 than theirs.
    assert 0 < error(ours.logits(ids)) <= 1.25 * error(rounded)
    back = tmp_path / "back"
    assert command("export", tmp_path / "run", "--format", "llama", "--to", back, "--shard-size", "20KB")[0] == 0
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    for key, value in theirs.state_dict().items():
        assert torch.equal(load_file(back / index["weight_map"][key])[key], value)
    again = transformers.AutoModelForCausalLM.from_pretrained(back)
    assert again.dtype == dtype


def test_a_dtype_for_export(made, tmp_path: Path, command) -> None:
    _, folder, run = made("qwen3")
    code, out, _ = command("export", run, "--format", "hf", "--to", tmp_path / "hf", "--dtype", "bf16")
    assert code == 0 and "bfloat16" in out
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(after[key], before[key].bfloat16()) for key in before)


def test_torch_files_and_names_without_the_prefix(made, tmp_path: Path, command) -> None:
    """The hub's own gpt2 has names without `transformer.`, and masks among its tensors; old files are torch's."""
    _, folder, run = made("gpt2")
    state = {k.removeprefix("transformer."): v for k, v in load_file(folder / "model.safetensors").items()}
    state["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    state["lm_head.weight"] = state["wte.weight"].clone()
    (tmp_path / "hf").mkdir()
    shutil.copy(folder / "config.json", tmp_path / "hf")
    torch.save(state, tmp_path / "hf" / "pytorch_model.bin")
    assert command("import", "gpt2", "--from", tmp_path / "hf", "--to", tmp_path / "run")[0] == 0
    assert torch.equal(load(tmp_path / "run").logits(ids_of(9)), load(run).logits(ids_of(9)))
    state["lm_head.weight"][0] += 1
    torch.save(state, tmp_path / "hf" / "pytorch_model.bin")
    code, _, err = command("import", "gpt2", "--from", tmp_path / "hf", "--to", tmp_path / "run2")
    assert code == 2 and "lm_head.weight is not the embedding" in err


def test_configs_of_transformers_4() -> None:
    """rope_theta, rope_scaling with `type`, rotary_pct and rotary_emb_base, as on the hub."""
    llama = {
        "model_type": "llama", **BASE, "hidden_act": "silu", "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }  # fmt: skip
    position = model_of(llama, "config.json", "x")[1].position
    assert position["base"] == 500000.0 and position["scaling"]["factor"] == 32.0
    assert position["scaling"]["original_context"] == 8192
    old = {**llama, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert model_of(old, "config.json", "x")[1].position["scaling"] == {"name": "linear", "factor": 2.0}
    pythia = {"model_type": "gpt_neox", **BASE, "hidden_act": "gelu", "rotary_pct": 0.5, "rotary_emb_base": 9000}
    position = model_of(pythia, "config.json", "x")[1].position
    assert (position["fraction"], position["base"]) == (0.5, 9000.0)
    qwen = {
        "model_type": "qwen2", **BASE, "hidden_act": "silu", "use_sliding_window": True, "sliding_window": 9,
        "max_window_layers": 2,
    }  # fmt: skip
    cfg = model_of(qwen, "config.json", "x")[1]
    assert [cfg.block_of(i)[0].get("window") for i in range(3)] == [None, None, 9]
    qwen["use_sliding_window"] = False
    assert not model_of(qwen, "config.json", "x")[1].layers


def test_released_sizes_have_their_published_counts() -> None:
    """Parameters of the released models, from config.json as on the hub; Qwen's width is no round multiple."""
    rope = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
    cases = {
        8_030_261_248: {  # LLaMA 3.1 8B
            "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "hidden_act": "silu",
            "max_position_embeddings": 131072, "rope_theta": 500000.0, "rope_scaling": rope,
        },
        494_032_768: {  # Qwen 2.5 0.5B
            "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
            "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "hidden_act": "silu",
            "max_position_embeddings": 32768, "rope_theta": 1e6, "tie_word_embeddings": True,
        },
        596_049_920: {  # Qwen 3 0.6B
            "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
            "hidden_act": "silu", "max_position_embeddings": 40960, "rope_theta": 1e6, "tie_word_embeddings": True,
        },
        7_241_732_096: {  # Mistral 7B
            "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "hidden_act": "silu",
            "max_position_embeddings": 32768, "sliding_window": 4096,
        },
        7_298_617_344: {  # OLMo 2 7B
            "model_type": "olmo2", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
            "num_attention_heads": 32, "vocab_size": 100352, "hidden_act": "silu", "max_position_embeddings": 4096,
            "rope_theta": 500000.0,
        },
        70_426_624: {  # Pythia 70M
            "model_type": "gpt_neox", "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6,
            "num_attention_heads": 8, "vocab_size": 50304, "hidden_act": "gelu", "max_position_embeddings": 2048,
            "rotary_pct": 0.25,
        },
    }  # fmt: skip
    for count, values in cases.items():
        model = build_model(model_of(values, "config.json", "x")[1], device="meta")
        assert sum(p.numel() for p in model.parameters()) == count, values["model_type"]


@pytest.mark.parametrize(
    "hidden,d_model", [(4864, 896), (11008, 4096), (100, 48), (1, 64), (2049, 768), (53248, 16384), (43691, 16384)]
)
def test_any_width_can_be_given(hidden: int, d_model: int) -> None:
    assert ModelConfig(d_model=d_model, n_heads=1, expansion=expansion(hidden, d_model)).hidden == hidden


# The tokenizer.


def words(folder: Path, template: bool) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "I": 3, "work": 4, "you": 5}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens(["<s>", "</s>"])
    if template:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    inner.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("template", [True, False])
def test_the_tokenizer_comes_along(template: bool, made, tmp_path: Path, command) -> None:
    """A text begins with what the file itself puts before it, and ends with the id that config.json names."""
    shutil.copytree(made("llama2")[1], tmp_path / "hf")
    words(tmp_path / "hf", template)
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    code, out, _ = command("import", "llama", "--from", tmp_path / "hf", "--to", tmp_path / "run")
    assert code == 0 and "note" not in out
    ours = load(tmp_path / "run")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "hf" / "tokenizer.json"))
    assert ours.encode("I work") == theirs("I work").input_ids == ([1, 3, 4] if template else [3, 4])
    assert ours.tokenizer.eos_id == 2
    assert command("generate", tmp_path / "run", "--prompt", "you work", "--max-new-tokens", "3")[0] == 0
    assert command("export", tmp_path / "run", "--format", "hf", "--to", tmp_path / "back")[0] == 0
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert again("you work").input_ids == ours.encode("you work") and again.eos_token == "</s>"
    assert json.loads((tmp_path / "back" / "config.json").read_text())["eos_token_id"] == 2


def test_a_tokenizer_that_is_too_large_is_refused(made, tmp_path: Path, command) -> None:
    shutil.copytree(made("llama2")[1], tmp_path / "hf")
    words(tmp_path / "hf", False)
    values = json.loads((tmp_path / "hf" / "tokenizer.json").read_text())
    values["model"]["vocab"]["many"] = 61
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(values))
    code, _, err = command("import", "llama", "--from", tmp_path / "hf", "--to", tmp_path / "run")
    assert code == 2 and "62 entries" in err and "61" in err


# What is refused.


def copy(made, tmp_path: Path, name: str = "llama2", **changes) -> Path:
    folder = tmp_path / "hf"
    shutil.copytree(made(name)[1], folder)
    values = json.loads((folder / "config.json").read_text())
    values.update(changes)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def refused(command, tmp_path: Path, kind: str = "llama") -> str:
    code, out, err = command("import", kind, "--from", tmp_path / "hf", "--to", tmp_path / "run")
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") <= 2, err
    assert not (tmp_path / "run").exists() and [p.name for p in tmp_path.iterdir()] == ["hf"]
    return err


CONFIGS = {
    "another type": ({"model_type": "gpt2"}, ["'gpt2', not 'llama'", "gptframe import gpt2"]),
    "an unknown type": ({"model_type": "bert"}, ["'bert', not 'llama'"]),
    "a false width": ({"hidden_size": 52}, ["model.embed_tokens.weight", "[61, 48]", "[61, 52]"]),
    "a false depth": ({"num_hidden_layers": 4}, ["model.layers.3.", "missing"]),
    "too small a depth": ({"num_hidden_layers": 2}, ["model.layers.2.", "no tensor of llama"]),
    "a false vocabulary": ({"vocab_size": 62}, ["[61, 48]", "[62, 48]"]),
    "false heads": ({"num_key_value_heads": 2}, ["self_attn.k_proj.weight", "[48, 48]", "[24, 48]"]),
    "heads that do not divide": ({"num_attention_heads": 5, "head_dim": None}, ["does not fit together"]),
    "no width": ({"hidden_size": None}, ["hidden_size=None"]),
    "a text for a size": ({"hidden_size": "48"}, ["hidden_size='48'"]),
    "a negative size": ({"vocab_size": -1}, ["vocab_size=-1"]),
    "an unknown activation": ({"hidden_act": "mish"}, ["hidden_act='mish'", "silu"]),
    "another RoPE": ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}, ["'yarn'"]),
    "a head that is not tied": ({"tie_word_embeddings": True}, ["lm_head.weight is not the embedding"]),
    "eps of 0": ({"rms_norm_eps": 0}, ["rms_norm_eps=0"]),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configs_that_lie_are_refused(case: str, made, tmp_path: Path, command) -> None:
    changes, fragments = CONFIGS[case]
    copy(made, tmp_path, **changes)
    err = refused(command, tmp_path)
    assert all(fragment in err for fragment in fragments), err


def test_gpt2_variants_are_refused(made, tmp_path: Path, command) -> None:
    copy(made, tmp_path, "gpt2", scale_attn_by_inverse_layer_idx=True)
    assert "scale_attn_by_inverse_layer_idx=True is not supported" in refused(command, tmp_path, "gpt2")


def test_damaged_files_are_refused(made, tmp_path: Path, command) -> None:
    folder = copy(made, tmp_path)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (
        whole[:-5],
        whole[:100],
        whole + b"12345678",
        b"",
        struct.pack("<Q", 2**40) + whole[8:],
        b"x" * 999,
    ):
        file.write_bytes(damaged)
        assert "model.safetensors is truncated or not a safetensors file" in refused(command, tmp_path)
    state = load_file(made("llama2")[1] / "model.safetensors")
    state["model.layers.1.mlp.up_proj.weight"][3, 3] = float("nan")
    save_file(state, file)
    assert "model.layers.1.mlp.up_proj.weight holds 1 values that are NaN" in refused(command, tmp_path)
    state["model.layers.1.mlp.up_proj.weight"] = torch.zeros(100, 48, dtype=torch.int8)
    save_file(state, file)
    assert "torch.int8, not a float tensor" in refused(command, tmp_path)
    file.unlink()
    assert "holds no weights" in refused(command, tmp_path)
    (folder / "pytorch_model.bin").write_bytes(b"PK\3\4 not a zip")
    assert "pytorch_model.bin is truncated" in refused(command, tmp_path)
    (folder / "config.json").write_text("{")
    assert "is not JSON" in refused(command, tmp_path)
    (folder / "config.json").unlink()
    assert "no config.json" in refused(command, tmp_path)


class _Evil:
    def __reduce__(self):
        return (print, ("never",))


def test_code_in_a_file_is_never_run(made, tmp_path: Path, command) -> None:
    folder = copy(made, tmp_path)
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": _Evil()}, folder / "pytorch_model.bin")
    assert "not a file of tensors and plain values" in refused(command, tmp_path)


def test_shards_that_are_missing_or_empty_are_named(made, tmp_path: Path, command) -> None:
    folder = copy(made, tmp_path)
    (folder / "model.safetensors").unlink()
    build("llama2").save_pretrained(folder, max_shard_size="30KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    aside = shards[1].read_bytes()
    shards[1].unlink()
    assert f"{shards[1].name} missing" in refused(command, tmp_path)
    save_file({"other": torch.zeros(1)}, shards[1])
    assert f"is in {shards[1].name}, and it is not there" in refused(command, tmp_path)
    shards[1].write_bytes(aside)
    index = folder / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(values))
    assert "must lie beside it" in refused(command, tmp_path)


def test_nothing_is_overwritten(made, tmp_path: Path, command) -> None:
    _, folder, run = made("llama2")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    for arguments in (("import", "llama", "--from", folder), ("export", run, "--format", "hf")):
        code, _, err = command(*arguments, "--to", tmp_path / "full")
        assert code == 2 and "is not empty, and nothing is overwritten" in err
        code, _, err = command(*arguments, "--to", tmp_path / "full" / "mine.txt")
        assert code == 2 and "exists, and nothing is overwritten" in err
        (tmp_path / "empty").mkdir(exist_ok=True)
        assert command(*arguments, "--to", tmp_path / "empty")[0] == 0
        shutil.rmtree(tmp_path / "empty")
    assert (tmp_path / "full" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_export_that_is_interrupted_leaves_nothing(error, made, tmp_path: Path, command, monkeypatch) -> None:
    _, _, run = made("gpt2")
    from gptframe.interop import folders

    write = folders.write_safetensors

    def dies(*arguments) -> None:
        write(*arguments)  # the weights lie there, and config.json does not yet
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(folders, "write_safetensors", dies)
        code, out, err = command("export", run, "--format", "hf", "--to", tmp_path / "hf")
    assert (code, out) == (130 if error is KeyboardInterrupt else 2, "") and err.count("\n") <= 2
    assert not list(tmp_path.iterdir())
    assert command("export", run, "--format", "hf", "--to", tmp_path / "hf")[0] == 0


def test_the_hub_is_asked_only_for_what_is_no_folder(tmp_path: Path, command, monkeypatch) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("gptframe.data.hub.reachable", lambda url: False)
    code, _, err = command("import", "gpt2", "--from", "nobody/nothing-of-that-name", "--to", tmp_path / "run")
    assert code == 2 and "the Hugging Face hub does not answer" in err
    code, _, err = command("import", "gpt2", "--from", tmp_path / "no" / "such", "--to", tmp_path / "run")
    assert code == 2 and "no such folder" in err
    code, _, err = command("import", "gtp2", "--from", tmp_path, "--to", tmp_path / "run")
    assert code == 2 and "'gtp2': no such format. Did you mean 'gpt2'" in err


# What a format cannot express.


def write_run(folder: Path, model, plugins=()) -> Path:
    folder.mkdir()
    config = Config(model=model.cfg, tokenizer={"name": "none"}, plugins=list(plugins))
    directory.write_yaml(folder / "config.yaml", config.to_dict())
    state = {f"model.{k}": v for k, v in model.state_dict().items()}
    meta = {
        "model": config.to_dict()["model"],
        "step": 3,
        "plugins": checkpoint.used_plugins(config.to_dict()["model"]),
    }
    checkpoint.save({"state_dict": state, "gptframe": meta}, checkpoint.checkpoint_path(folder, 3))
    return folder


GPT2_LIKE = {
    "position": {"name": "learned"}, "attention": {"bias": True}, "mlp": {"bias": True},
    "activation": {"name": "gelu_tanh"},
}  # fmt: skip
LLAMA_LIKE = {
    "position": {"name": "rope", "pairing": "half"}, "norm": {"name": "rmsnorm"}, "activation": {"name": "swiglu"},
    "attention": {"bias": False}, "mlp": {"bias": False},
}  # fmt: skip
OBSTACLES = [
    (GPT2_LIKE, {"norm_placement": {"name": "post"}}, "gpt2", "model.norm_placement.name=post"),
    (GPT2_LIKE, {"position": {"name": "alibi"}}, "gpt2", "model.position.name=alibi"),
    (GPT2_LIKE, {"position": {"name": "sinusoidal"}}, "gpt2", "model.position.name=sinusoidal"),
    (GPT2_LIKE, {"attention": {"bias": False}}, "gpt2", "model.attention.bias=false"),
    (GPT2_LIKE, {"attention": {"bias": True, "n_kv_heads": 2}}, "gpt2", "model.attention.n_kv_heads=2"),
    (GPT2_LIKE, {"attention": {"bias": True, "softcap": 5.0}}, "gpt2", "model.attention.softcap=5.0"),
    (GPT2_LIKE, {"mlp": {"bias": False}}, "gpt2", "model.mlp.bias=false"),
    (GPT2_LIKE, {"topology": "parallel"}, "gpt2", "model.topology=parallel"),
    (GPT2_LIKE, {"norm": {"name": "layernorm", "bias": False}}, "gpt2", "model.norm.bias=false"),
    (GPT2_LIKE, {"norm": {"name": "layernorm", "affine": False}}, "gpt2", "model.norm.affine=false"),
    (GPT2_LIKE, {"activation": {"name": "squared_relu"}}, "gpt2", "model.activation.name=squared_relu"),
    (GPT2_LIKE, {"embedding_scale": 2.0}, "gpt2", "model.embedding_scale=2.0"),
    (GPT2_LIKE, {"logit_softcap": 30.0}, "gpt2", "model.logit_softcap=30.0"),
    (GPT2_LIKE, {"residual_scale": 0.5}, "gpt2", "model.residual_scale=0.5"),
    (GPT2_LIKE, {"block": ["attention", "mlp", "mlp"]}, "gpt2", "model.block=[attention,mlp,mlp]"),
    (GPT2_LIKE, {"layers": {1: ["mlp"]}}, "gpt2", "model.layers.1=[mlp]"),
    (LLAMA_LIKE, {"attention": {"window": 4}}, "llama", "model.attention.window=4"),
    (LLAMA_LIKE, {"attention": {"qk_norm": "head"}}, "llama", "model.attention.qk_norm=head"),
    (LLAMA_LIKE, {"attention": {"bias": True, "out_bias": False}}, "llama", "bias=true with out_bias=false"),
    (LLAMA_LIKE, {"norm_placement": {"name": "sandwich"}}, "llama", "model.norm_placement.name=sandwich"),
    (LLAMA_LIKE, {"position": {"name": "rope", "fraction": 0.5}}, "llama", "model.position.fraction=0.5"),
    (LLAMA_LIKE, {"attention": {"head_dim": 8}}, "qwen2", "model.attention.head_dim=8"),
    (LLAMA_LIKE, {"layers": {0: [{"name": "attention", "window": 3}, "mlp"]}}, "mistral", "model.layers"),
]


@pytest.mark.parametrize("like,changes,kind,words", OBSTACLES)
def test_what_stands_in_the_way_is_named(like: dict, changes: dict, kind: str, words: str) -> None:
    base = Config.from_dict({"model": like}).model
    expected = "llama" if kind in ("qwen2", "mistral") else kind
    assert config_of(base)[0].model_type == expected
    with pytest.raises(UserError) as caught:
        config_of(Config.from_dict({"model": {**like, **changes}}).model, kind)
    assert words in str(caught.value) and str(caught.value).startswith(f"{kind} cannot express this model: ")


def test_a_block_of_a_plugin_is_in_the_way_of_every_format() -> None:
    @register("topology", "own_for_export")
    class Own(Block):
        pass

    from gptframe.interop import andrea

    for like in (GPT2_LIKE, LLAMA_LIKE, {**GPT2_LIKE, "position": {"name": "rope", "pairing": "half"}}):
        with pytest.raises(UserError, match="model.topology=own_for_export"):
            config_of(Config.from_dict({"model": {**like, "topology": "own_for_export"}}).model)
    own = Config.from_dict({"model": {**GPT2_LIKE, "topology": {"name": "own_for_export"}}}).model
    assert "model.topology=own_for_export" in andrea._obstacles(own)
    same = Config.from_dict({"model": {**GPT2_LIKE, "topology": {"name": "sequential"}}}).model
    assert config_of(same)[0].model_type == "gpt2"


def test_the_nearest_format_is_named(tmp_path: Path, command) -> None:
    model = build_model(Config.from_dict({"model": {**LLAMA_LIKE, "norm_placement": {"name": "peri"}}}).model)
    run = write_run(tmp_path / "run", model)
    code, out, err = command("export", run, "--format", "hf", "--to", tmp_path / "hf")
    assert code == 2 and out == "" and not (tmp_path / "hf").exists()
    assert err == (
        "error: no Hugging Face format can (the nearest is llama) express this model: model.norm_placement.name=peri\n"
    )


PLUGIN = """
from torch import nn
from gptframe import register

@register("sublayer", "mine_for_export")
class Mine(nn.Module):
    def __init__(self, cfg, layer):
        super().__init__()
        self.mix = nn.Linear(cfg.d_model, cfg.d_model)
    def forward(self, x, ctx):
        return self.mix(x)
"""


def test_a_plugin_is_refused_by_foreign_formats_and_kept_by_ours(tmp_path: Path, command, fresh_registry) -> None:
    from gptframe import plugins

    file = tmp_path / "mine.py"
    file.write_text(PLUGIN)
    plugins.load([str(file)])
    model = build_model(ModelConfig(block=["attention", "mine_for_export", "mlp"]))
    run = write_run(tmp_path / "run", model, [str(file)])
    code, _, err = command("export", run, "--format", "hf", "--to", tmp_path / "hf")
    assert code == 2 and "model.block=[attention,mine_for_export,mlp]" in err
    assert command("export", run, "--format", "safetensors", "--to", tmp_path / "own")[0] == 0
    arguments = ("import", "safetensors", "--from", tmp_path / "own")
    assert command(*arguments, "--to", tmp_path / "again", "--name", "other")[0] == 0
    assert command(*arguments, "--to", tmp_path / "no", "--name", "a/b")[0] == 2 and not (tmp_path / "no").exists()
    again = load(tmp_path / "again").model
    assert again.cfg.name == "other"
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_formats_are_rows_of_one_table() -> None:
    """Each rule's tensors are each parameter exactly once, for every format."""
    for name, (kind, options) in MODELS.items():
        values = transformers.AutoConfig.for_model(kind, **options).to_dict()
        known, cfg = model_of(values, "config.json", "x")
        placed = [ours for rule in known.rules(cfg) for ours in rule.ours]
        parameters = [n for n, _ in build_model(cfg, device="meta").named_parameters()]
        assert sorted(placed) == sorted(parameters), name
    assert Reader({"a": None}, "x").get("a", 3) == 3
