"""Generation: the same tokens with and without the cache, alone and in a batch; sampling by hand; the command."""

from __future__ import annotations

import copy
import io
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from gptframe import cli, load
from gptframe.config import Config, ModelConfig
from gptframe.data.tokenizer import ByteTokenizer, CharTokenizer, ClosedTokenizer, Source
from gptframe.errors import UserError
from gptframe.generate import (
    Sampling,
    TextStream,
    choose,
    generate,
    generate_batch,
    lay_out,
    probabilities,
    view_start,
)
from gptframe.model import GPT, Context, KVCache, build_model
from gptframe.training import checkpoint, directory

ATTENTIONS = {
    "mha": {},
    "gqa": {"n_kv_heads": 2, "bias": True, "out_bias": False},
    "mqa": {"n_kv_heads": 1},
    "window": {"window": 3},
    "qk_norm_head": {"qk_norm": "head", "head_dim": 16},
    "qk_norm_full": {"qk_norm": "full"},
    "softcap": {"softcap": 1.5},
    "all": {"n_kv_heads": 2, "window": 4, "qk_norm": "head", "softcap": 2.0},
}
POSITIONS = {
    "learned": {"name": "learned"},
    "rope": {"name": "rope"},
    "rope_half_part": {"name": "rope", "pairing": "half", "fraction": 0.5},
    "rope_scaled": {"name": "rope", "scaling": {"name": "llama3", "factor": 4.0, "original_context": 16}},
    "sinusoidal": {"name": "sinusoidal"},
    "alibi": {"name": "alibi"},
    "none": {"name": "none"},
}
C = 16  # context


def small(attention: str = "mha", position: str = "rope", **changes) -> GPT:
    """A model whose logits are far apart, so that no two kernels can disagree about the best."""
    cfg = Config.from_dict(
        {
            "model": {
                "d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 23, "context_length": C,
                "attention": ATTENTIONS[attention], "position": POSITIONS[position],
                "init": {"name": "normal", "std": 0.2, "embedding_std": 1.0}, "tie_head": False, **changes,
            }
        }
    ).model  # fmt: skip
    return build_model(cfg, seed=1).double().eval()


def naive(model: GPT, ids: list[int], n: int, seed: int | None = None) -> list[int]:
    """From the documented rule alone: all tokens up to the context; beyond it the oldest half goes, again and again,
    until the rest fits. Greedy without a seed, else drawn from the softmax."""
    text, generator = list(ids), torch.Generator().manual_seed(seed or 0)
    for _ in range(n):
        view = text
        while len(view) > C:
            view = view[C // 2 :]
        logits = model(torch.tensor([view]))[0, -1].float()
        drawn = logits.argmax() if seed is None else torch.multinomial(logits.softmax(-1), 1, generator=generator)
        text.append(int(drawn))
    return text[len(ids) :]


PAIRS = [(a, p) for a in ATTENTIONS for p in POSITIONS if a in ("mha", "all") or p in ("learned", "alibi")]


@pytest.mark.parametrize("attention,position", PAIRS)
@torch.no_grad()
def test_cache_and_batch_change_no_token(attention: str, position: str) -> None:
    model, n = small(attention, position), C + 5
    prompts = [[3], [1, 2, 3, 4, 5, 6, 7], [5, 9, 2], list(range(20))]  # the last is longer than the context
    greedy = [naive(model, prompt, n) for prompt in prompts]
    drawn = [naive(model, prompt, n, seed=i) for i, prompt in enumerate(prompts)]
    assert all(len(set(new)) > 5 for new in drawn)  # every token of the past counts for these
    together = generate_batch(model, prompts, n, Sampling(temperature=0))
    assert [new.ids for new in together] == greedy
    for use_cache in (True, False):
        generators = [torch.Generator().manual_seed(i) for i in range(4)]
        together = generate_batch(model, prompts, n, Sampling(), generators=generators, use_cache=use_cache)
        assert [new.ids for new in together] == drawn
    for i, prompt in enumerate(prompts):
        assert generate(model, prompt, n, generator=torch.Generator().manual_seed(i)) == drawn[i]


def test_the_view_by_hand() -> None:
    """Context 16: tokens 0 to 16 are all seen; at 17 the oldest 8 go, at 25 the next 8. Odd 5: 3 go at a time."""
    assert [view_start(n, 16) for n in (1, 16, 17, 24, 25, 32, 33)] == [0, 0, 8, 8, 16, 16, 24]
    assert [view_start(n, 5) for n in range(4, 13)] == [0, 0, 3, 3, 3, 6, 6, 6, 9]
    assert [view_start(n, 1) for n in (1, 2, 3)] == [0, 1, 2]
    for context in range(1, 40):
        for n in range(1, 200):
            seen = n - view_start(n, context)
            assert 1 <= seen <= context and (n <= context or seen > context // 2)


def test_rows_end_on_their_own() -> None:
    """A text that ends leaves the batch, and the others go on as they would alone."""
    model = small("gqa", "learned")
    prompts = [[3], [1, 2, 3, 4], [5, 9, 2]]
    alone = [generate(model, prompt, 12, temperature=0) for prompt in prompts]
    end = alone[1][2]
    found = generate_batch(model, prompts, 12, Sampling(temperature=0), stop_ids=[end])
    for new, full in zip(found, alone, strict=True):
        cut = full.index(end) if end in full else len(full)
        assert new.ids == full[:cut]
        assert new.reason == ("end" if end in full else "length")


def test_the_longest_text_may_leave_first() -> None:
    """The others go on up to the context and past it, though the cache is full of their padding before."""
    model, n = small(), 2 * C
    prompts = [list(range(C - 1)), [3], [1, 2, 3, 4]]
    alone = [generate(model, prompt, n, temperature=0) for prompt in prompts]
    found = generate_batch(model, prompts, n, Sampling(temperature=0), on_token=lambda row, token: row == 0)
    assert [new.ids for new in found] == [alone[0][:1], *alone[1:]]


def test_a_seed_gives_a_sample_whatever_is_beside_it() -> None:
    model = small()
    prompts = [[3], [1, 2, 3, 4], [5, 9, 2]]
    together = generate_batch(model, prompts, 20, generators=[torch.Generator().manual_seed(7 + i) for i in range(3)])
    for i, prompt in enumerate(prompts):
        alone = generate(model, prompt, 20, generator=torch.Generator().manual_seed(7 + i))
        assert together[i].ids == alone
    assert generate(model, [3], 20, generator=torch.Generator().manual_seed(8)) != together[0].ids


def test_a_sublayer_that_knows_no_cache_is_given_the_whole_text(fresh_registry) -> None:
    class Before(nn.Module):  # what the README's example does: it looks at the token before
        def __init__(self, cfg: ModelConfig, layer: int):
            super().__init__()

        def forward(self, x, ctx):
            return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)

    fresh_registry.register("sublayer", "before")(Before)
    model = small(block=["attention", "before", "mlp"])
    assert not model.incremental
    prompts = [[3], [1, 2, 3, 4, 5, 6, 7]]
    found = generate_batch(model, prompts, 20, Sampling(temperature=0))
    assert [new.ids for new in found] == [naive(model, prompt, 20) for prompt in prompts]
    Before.incremental = True  # a false promise shows
    broken = generate_batch(model, prompts, 20, Sampling(temperature=0))
    assert [new.ids for new in broken] != [new.ids for new in found]


# Sampling, by hand.

P = torch.tensor([[0.5, 0.25, 0.15, 0.08, 0.02]], dtype=torch.float64)


def drawn(**options) -> list[float]:
    p = probabilities(P.log(), Sampling(**options))[0]
    return (p / p.sum()).tolist()


def test_the_filters_by_hand() -> None:
    assert drawn() == pytest.approx(P[0].tolist())
    assert drawn(top_k=2) == pytest.approx([2 / 3, 1 / 3, 0, 0, 0])
    assert drawn(top_k=99) == pytest.approx(P[0].tolist())
    assert drawn(top_p=0.7) == pytest.approx([2 / 3, 1 / 3, 0, 0, 0])  # 0.5 + 0.25 reaches 0.7
    assert drawn(top_p=0.5) == pytest.approx([1, 0, 0, 0, 0])
    assert drawn(top_p=1.0) == pytest.approx(P[0].tolist())
    assert drawn(min_p=0.3) == pytest.approx([0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0, 0])  # at least 0.3 * 0.5
    assert drawn(min_p=1.0) == pytest.approx([1, 0, 0, 0, 0])
    squares = [p * p for p in P[0].tolist()]  # temperature 1/2
    assert drawn(temperature=0.5) == pytest.approx([s / sum(squares) for s in squares])
    assert drawn(temperature=1e-30) == pytest.approx([1, 0, 0, 0, 0])
    assert drawn(temperature=1e30) == pytest.approx([0.2] * 5)
    for options in ({"temperature": 1e-50}, {"top_p": 1e-50}):  # 0 in float32
        assert probabilities(P.log().float(), Sampling(**options)).argwhere().tolist() == [[0, 0]]
    # top-k of 3 leaves 0.9; top-p 0.6 of that needs 0.54, reached by 0.5 + 0.25
    assert drawn(top_k=3, top_p=0.6) == pytest.approx([2 / 3, 1 / 3, 0, 0, 0])


def test_filters_of_transformers() -> None:
    generation = pytest.importorskip("transformers.generation")
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)) * 2
    ids = torch.randint(0, 50, (6, 9), generator=torch.Generator().manual_seed(1))
    for options in ({"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.7, "min_p": 0.2}):
        want = logits / 0.7
        if "top_k" in options:
            want = generation.TopKLogitsWarper(options["top_k"])(ids, want)
        if "top_p" in options:
            want = generation.TopPLogitsWarper(options["top_p"])(ids, want)
        if "min_p" in options:
            want = generation.MinPLogitsWarper(options["min_p"])(ids, want)
        got = probabilities(logits, Sampling(temperature=0.7, **options))
        assert torch.allclose(got / got.sum(-1, keepdim=True), want.softmax(-1), atol=1e-6), options
    penalised = generation.RepetitionPenaltyLogitsProcessor(1.7)(ids, logits.clone())
    want = penalised.argmax(-1).tolist()
    got = choose(logits, ids.tolist(), Sampling(temperature=0, repetition_penalty=1.7), [None] * 6)
    assert got == want != logits.argmax(-1).tolist()


def test_draws_have_the_frequencies_of_the_distribution() -> None:
    g = torch.Generator().manual_seed(0)
    draws = choose(P.log().expand(20_000, 5), [[0]] * 20_000, Sampling(), [g] * 20_000)
    for token, p in enumerate(P[0].tolist()):
        assert abs(draws.count(token) / 20_000 - p) < 4 * math.sqrt(p * (1 - p) / 20_000)


def test_a_repetition_penalty_by_hand() -> None:
    """Token 0 (logit 2, seen) falls to 1; token 2 (logit -1, seen) to -2; token 1 (1.5) stays and wins."""
    logits = torch.tensor([[2.0, 1.5, -1.0]])
    assert choose(logits, [[0, 2, 2]], Sampling(temperature=0, repetition_penalty=2.0), [None]) == [1]
    assert logits.tolist() == [[2.0, 1.5, -1.0]]
    half = torch.tensor([[90.0, 1.5, -1.0]], dtype=torch.float16)  # 90,000 is more than float16 holds
    assert choose(half, [[0]], Sampling(temperature=0, repetition_penalty=1e-3), [None]) == [0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_numbers_are_named(value: float) -> None:
    model = small()
    with torch.no_grad():
        model.blocks[0].mlp.core.up.weight[0, 0] = value
    with pytest.raises(UserError, match="NaN or infinite"):
        generate(model, [1, 2], 3)


@pytest.mark.parametrize(
    "options,words",
    [
        ({"temperature": -1.0}, "--temperature -1.0"),
        ({"temperature": math.inf}, "--temperature inf"),
        ({"temperature": math.nan}, "--temperature nan"),
        ({"top_k": 0}, "--top-k 0"),
        ({"top_p": 0.0}, "--top-p 0.0"),
        ({"top_p": 1.5}, "--top-p 1.5"),
        ({"min_p": -0.1}, "--min-p -0.1"),
        ({"repetition_penalty": 0.0}, "--repetition-penalty 0.0"),
        ({"repetition_penalty": 1e-40}, "--repetition-penalty 1e-40"),
    ],
)
def test_options_out_of_range_are_refused(options: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        generate(small(), [1], 1, **options)


@pytest.mark.parametrize("ids,words", [([], "empty"), ([1, 23], "token 1 .* id 23"), ([-1], "id -1")])
def test_prompts_that_are_none_are_refused(ids: list[int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        generate(small(), ids, 1)


def test_the_layout_in_memory_changes_nothing_else() -> None:
    model, other = small("gqa", "learned").float(), small("gqa", "learned").float()
    lay_out(other)
    for (name, a), (_, b) in zip(model.state_dict().items(), other.state_dict().items(), strict=True):
        assert torch.equal(a, b) and a.shape == b.shape, name
    mlp = other.blocks[0].mlp.core
    assert mlp.up.weight.t().is_contiguous() and mlp.down.weight.is_contiguous()  # the longer side
    ids = torch.tensor([[1, 2, 3, 4]])
    assert torch.allclose(model(ids), other(ids), atol=1e-5)
    other(ids).sum().backward()  # it can be trained on
    half = small().bfloat16()
    lay_out(half)
    assert all(p.is_contiguous() for p in half.parameters())


def test_a_fused_optimizer_trains_on_what_was_laid_out() -> None:
    """torch's fused optimisers know no gaps between columns, nor moments in an order other than the parameter's."""
    model, other = (small("gqa", activation={"name": "swiglu"}).float() for _ in range(2))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-3, fused=True) for m in (model, other)]

    def train(trained: GPT, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        trained(ids, None, ids).backward()
        optimizer.step()

    ids = torch.tensor([[1, 2, 3, 4]])
    train(model, optimizers[0])
    other.load_state_dict(model.state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    lay_out(other)
    for _ in range(2):
        train(model, optimizers[0])
        train(other, optimizers[1])
    for (name, a), (_, b) in zip(model.state_dict().items(), other.state_dict().items(), strict=True):
        assert torch.allclose(a, b, atol=1e-4), name
    assert generate(model, [1, 2], 12, temperature=0) == generate(other, [1, 2], 12, temperature=0)


def test_streamed_matrices_give_the_same_tokens_and_gradients(monkeypatch) -> None:
    """As large models have them on some processors: products of parts of a matrix."""
    monkeypatch.setattr("gptframe.generate.streams", lambda: True)
    monkeypatch.setattr("gptframe.generate.STREAMED_BYTES", 0)
    model, other = (small("gqa", "rope_half_part", activation={"name": "swiglu"}).float() for _ in range(2))
    lay_out(other)
    products: list[int] = []
    monkeypatch.setattr("torch.bmm", lambda a, b, bmm=torch.bmm: products.append(a.shape[0]) or bmm(a, b))
    texts = [[1, 2, 3], [4], [5, 6, 7, 8], [9, 1]]
    found = [[c.ids for c in generate_batch(m, texts, 12, Sampling(temperature=0))] for m in (model, other)]
    assert found[0] == found[1] and products
    ids = torch.tensor([[1, 2]])  # few enough rows
    losses = [m(ids, None, ids) for m in (model, other)]
    grads = [torch.autograd.grad(loss, list(m.parameters())) for loss, m in zip(losses, (model, other), strict=True)]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu"])
def test_laid_out_each_token_gets_from_the_cache_what_the_whole_text_gives(attention: str, activation: str) -> None:
    model, other = (small(attention, "rope_half_part", activation={"name": activation}) for _ in range(2))
    lay_out(other)
    ids = torch.randint(0, 23, (2, C), generator=torch.Generator().manual_seed(0))
    whole = model(ids)
    with torch.inference_mode():
        cache = KVCache()
        steps = [other(ids[:, a:b], Context(cache=cache)) for a, b in ((0, 9), *((t, t + 1) for t in range(9, C)))]
    assert (torch.cat(steps, dim=1) - whole).abs().max() <= 1e-11


def test_no_tokens_asked_for_and_training_mode_kept() -> None:
    model = small(dropout=0.5).train()
    assert generate(model, [1], 0) == []
    assert generate(model, [1], 5, temperature=0) == generate(model, [1], 5, temperature=0)
    assert model.training


# Text as it comes.


def pieces(tokenizer, prompt: str, ids: list[int], stop=()) -> tuple[list[str], TextStream]:
    stream = TextStream(tokenizer, tokenizer.encode(prompt), stop)
    shown = []
    for token in ids:
        shown.append(stream.add(token))
        if stream.stopped:
            break
    return [*shown, stream.finish()], stream


def test_half_characters_wait() -> None:
    byte = ByteTokenizer(Source())
    shown, stream = pieces(byte, "a", list("é€x".encode()))
    assert shown == ["", "é", "", "", "€", "x", ""] and stream.text == "é€x"
    assert pieces(byte, "", [0xE2, 0x82])[0] == ["", "", "\ufffd"]  # it never came


def test_a_long_text_is_not_decoded_anew_for_every_token() -> None:
    byte, lengths = ByteTokenizer(Source()), list[int]()

    class Counting:
        def decode(self, ids: list[int]) -> str:
            lengths.append(len(ids))
            return byte.decode(ids)

    text = "né🙂 a" * 100
    stream = TextStream(Counting(), byte.encode("a prompt" * 100))
    shown = "".join(stream.add(token) for token in byte.encode(text)) + stream.finish()
    assert shown == stream.text == text
    assert max(lengths[2:]) < 100


def test_stop_strings_are_held_back_and_cut() -> None:
    byte = ByteTokenizer(Source())
    shown, stream = pieces(byte, "", list(b"one\n\nQ: two"), stop=["\nQ:"])
    assert "".join(shown) == stream.text == "one\n" and stream.stopped
    shown, stream = pieces(byte, "", list(b"aab"), stop=["aac"])
    assert shown == ["", "", "aab", ""] and not stream.stopped  # what could have been its beginning comes late
    shown, stream = pieces(byte, "", list(b"xya"), stop=["ya!", "a?"])
    assert shown == ["x", "", "", "ya"]
    assert pieces(byte, "stop", list(b"x"), stop=["stop"])[1].text == "x"  # the prompt is not looked at
    with pytest.raises(UserError, match="--stop is empty"):
        TextStream(byte, [], [""])


def test_words_keep_their_spaces() -> None:
    words = ClosedTokenizer(Source(), ["<pad>", "<bos>", "<eos>", "<unk>", "I", "work", ","])
    assert pieces(words, "I", [5, 6])[0] == [" work", " ,", ""]
    assert pieces(words, "", [5, 6])[0] == ["work", " ,", ""]


# A run directory, the Python interface and the command.

WORDS = ["<pad>", "<bos>", "<eos>", "<unk>", "I", "you", "he", "work", "works", ",", "eat"]


def write_run(folder: Path, model: GPT, tokenizer=None, plugins=()) -> Path:
    folder.mkdir()
    name = "none" if tokenizer is None else tokenizer.name
    config = Config(model=model.cfg, tokenizer={"name": name}, plugins=list(plugins))
    directory.write_yaml(folder / "config.yaml", config.to_dict())
    if tokenizer is not None:
        tokenizer.save(folder / "tokenizer")
    state = {f"model.{k}": v for k, v in model.state_dict().items()}
    meta = {"model": config.to_dict()["model"], "step": 7}
    checkpoint.save({"state_dict": state, "gptframe": meta}, checkpoint.checkpoint_path(folder, 7))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    tokenizer = ClosedTokenizer(Source(), WORDS)
    tokenizer.name = "closed"
    model = small("gqa", "rope", vocab_size=len(WORDS)).float()
    with torch.no_grad():
        model.head.weight[:4] = 0  # specials are never the best
    return write_run(tmp_path_factory.mktemp("runs") / "words", model, tokenizer)


def command(capsys, *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["generate", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_three_lines_in_a_notebook(run: Path) -> None:
    model = load(run)
    text = model.generate("I work ,", max_new_tokens=9, temperature=0)
    new = generate(model.model, [1, 4, 7, 9], 9, temperature=0, stop_id=2)
    assert text == "I work , " + " ".join(WORDS[i] for i in new)
    assert "".join(model.stream("I work ,", 9, temperature=0)) == text.removeprefix("I work ,")
    logits = model.logits("I work ,")
    assert logits.shape == (4, len(WORDS)) and logits[-1].argmax() == new[0]
    assert torch.equal(model.trace("I work ,")["logits"][0], logits)
    both = model.generate(["I", "you eat , he"], max_new_tokens=5, temperature=0)
    assert both == [model.generate(prompt, max_new_tokens=5, temperature=0) for prompt in ("I", "you eat , he")]
    three = model.generate("I", samples=3, seed=4, max_new_tokens=8)
    assert three == [model.generate("I", seed=4 + i, max_new_tokens=8) for i in range(3)] and len(set(three)) > 1
    assert model.generate([1, 4], max_new_tokens=5, temperature=0) == both[0]
    assert "".join(model.stream("I", 12, seed=3)) == model.generate("I", 12, seed=3).removeprefix("I")
    with pytest.raises(UserError, match="--max-new-tokens -1"):
        next(model.stream("I", -1))
    assert "LoadedModel(mini:" in repr(model)


def test_a_stop_string_across_tokens(run: Path) -> None:
    model = load(run)
    text = model.generate("I", max_new_tokens=12, temperature=0).removeprefix("I")
    words = text.split()
    stop = f"{words[2]} {words[3]}"
    cut = text[: text.index(stop)]
    assert model.generate("I", max_new_tokens=12, temperature=0, stop=stop) == "I" + cut
    assert "".join(model.stream("I", 12, temperature=0, stop=[stop, "never seen"])) == cut


def test_a_dtype_can_be_chosen(run: Path) -> None:
    assert load(run).model.token_embedding.weight.dtype == torch.float32
    assert load(run, dtype="bf16").model.token_embedding.weight.dtype == torch.bfloat16
    assert len(load(run, dtype="bf16").generate("I", 5)) > 1
    with pytest.raises(UserError, match="'int8' is none of fp32"):
        load(run, dtype="int8")
    with pytest.raises(UserError, match="--device nowhere: there is no such device"):
        load(run, device="nowhere")
    with pytest.raises(UserError, match="'temprature'|temprature: no such option. Did you mean 'temperature'"):
        load(run).generate("I", temprature=1)


def test_the_command_streams_one_sample(run: Path, capsys) -> None:
    want = load(run).generate("I work ,", max_new_tokens=6, temperature=0)
    assert command(capsys, run, "--prompt", "I work ,", "--temperature", "0", "--max-new-tokens", "6") == (
        0, want + "\n", "",
    )  # fmt: skip
    slow = command(capsys, run, "--prompt", "I work ,", "--temperature", "0", "--max-new-tokens", "6", "--no-cache")
    assert slow == (0, want + "\n", "")


def test_the_command_prints_json(run: Path, capsys) -> None:
    arguments = ["--prompt", "I", "--prompt", "you eat", "--samples", "2", "--seed", "5", "--max-new-tokens", "4"]
    code, out, err = command(capsys, run, *arguments, "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert [len(p["samples"]) for p in found["prompts"]] == [2, 2]
    assert found["prompts"][1]["prompt_ids"] == [1, 5, 10]
    first = found["prompts"][0]["samples"][1]
    assert "I" + first["text"] == load(run).generate("I", 4, seed=6)
    assert first["ended"] in ("length", "end") and found["tokens"] == sum(
        len(s["ids"]) for p in found["prompts"] for s in p["samples"]
    )
    shown = command(capsys, run, *arguments)[1]
    assert (
        shown.count("--- prompt 2, sample 2\n") == 1 and "you eat" + found["prompts"][1]["samples"][0]["text"] in shown
    )


def test_a_long_prompt_is_cut_with_a_note(run: Path, capsys) -> None:
    code, out, err = command(capsys, run, "--prompt", "I work , " * 6, "--max-new-tokens", "3")
    assert code == 0 and err == "note: the prompt has 19 tokens and the context is 16: the model sees the last 11\n"
    assert out.startswith("I work , I work ,")


def test_a_dialogue(run: Path, capsys, monkeypatch) -> None:
    lines = "I work ,\nhello\n/text\n/reset\nyou\n/what\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    code, out, err = command(capsys, run, "--interactive", "--temperature", "0", "--max-new-tokens", "4")
    model = load(run)
    first = model.generate("I work ,", 4, temperature=0)
    second = model.generate("you", 4, temperature=0)
    want = [
        first.removeprefix("I work ,"),
        first,
        second.removeprefix("you"),
        "  there is no /what; /help lists the commands",
    ]
    assert code == 0 and out.splitlines() == want
    assert err.startswith("error: prompt: 'hello' is not in the model's vocabulary of 11 entries")


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["--prompt", "I wrok , quickly"], ["'wrok', 'quickly' are not in", "Did you mean 'work'"]),
        (["--prompt", "<eos>"], ["'eos', '>' are not in"]),
        (["--top-k", "0"], ["--top-k 0 must be at least 1"]),
        (["--temperature", "inf"], ["--temperature inf"]),
        (["--samples", "0"], ["--samples 0"]),
        (["--max-new-tokens", "-1"], ["--max-new-tokens -1"]),
        (["--stop", ""], ["--stop is empty"]),
        (["--ids", "4,11"], ["id 11", "0 to 10"]),
        (["--ids", "4,b"], ["'b' is not a whole number"]),
        (["--ids", "4", "--prompt", "I"], ["either --prompt or --ids"]),
        (["--interactive", "--json"], ["--interactive"]),
        (["--device", "nowhere"], ["--device nowhere"]),
        (["--device", "meta"], ["--device meta"]),
        (["--temperature", "0", "--top-k", "5"], ["--temperature 0", "--top-k has no effect"]),
        (["--temperature", "0", "--seed", "0"], ["--seed has no effect"]),
        (["--temperature", "0", "--samples", "2"], ["--samples has no effect"]),
        (["--interactive", "--prompt", "I", "--prompt", "you"], ["one --prompt"]),
        (["--seed", "x"], ["--seed: invalid int value: 'x'", "gptframe generate --help"]),
        (["--sample", "3"], ["unrecognized arguments: --sample 3"]),
    ],
)
def test_what_is_wrong_is_said_in_a_line(run: Path, capsys, arguments: list[str], words: list[str]) -> None:
    code, out, err = command(capsys, run, *arguments)
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert all(word in err for word in words), err


def test_directories_that_are_no_runs(run: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "empty").mkdir()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text("{}")
    bare = write_run(tmp_path / "bare", small())
    for path in bare.glob("checkpoints/*"):
        path.unlink()
    for folder, words in (
        (tmp_path / "nothing", "there is no such directory"),
        (tmp_path / "empty", "is not a run directory"),
        (foreign, "gptframe import hf --from"),
        (bare, "has no checkpoint yet"),
    ):
        code, out, err = command(capsys, folder)
        assert (code, out) == (2, "") and words in err and err.count("\n") == 1


def test_a_run_on_tokens_wants_ids(tmp_path: Path, capsys) -> None:
    folder = write_run(tmp_path / "tokens", small().float())
    assert "give --ids" in command(capsys, folder, "--prompt", "I")[2]
    assert "tokenizer" in command(capsys, folder, "--interactive")[2]
    code, out, _ = command(capsys, folder, "--ids", "5,6", "--temperature", "0", "--max-new-tokens", "5")
    want = generate(load(folder).model, [5, 6], 5, temperature=0)
    assert code == 0 and out == " ".join(map(str, [5, 6, *want])) + "\n"


def test_characters_that_the_vocabulary_lacks_are_named(tmp_path: Path, capsys) -> None:
    tokenizer = CharTokenizer(Source(), "abc ")
    tokenizer.name = "char"
    folder = write_run(tmp_path / "chars", small(vocab_size=6).float(), tokenizer)
    assert "'z', '!' are not in" in command(capsys, folder, "--prompt", "az!")[2]
    assert command(capsys, folder, "--prompt", "cab", "--max-new-tokens", "3")[0] == 0


def test_ctrl_c_and_a_closed_pipe(tmp_path: Path) -> None:
    model = small(vocab_size=257).float()
    tokenizer = ByteTokenizer(Source())
    tokenizer.name = "byte"
    with torch.no_grad():
        model.head.weight[128:] = 0  # plain letters, and no end
    folder = write_run(tmp_path / "endless", model, tokenizer)
    start = [
        sys.executable,
        "-c",
        "import sys; from gptframe.cli import main; sys.exit(main())",
        "generate",
        str(folder),
    ]
    start += ["--max-new-tokens", "100000000", "--prompt", "a", "--temperature", "0"]
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    # Where the tests run in the background, their shell has told them to ignore SIGINT.
    settings["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    interrupted, closed = (subprocess.Popen(start, **settings) for _ in range(2))
    for process in (interrupted, closed):
        assert len(process.stdout.read(50)) == 50  # it streams while it runs
    interrupted.send_signal(signal.SIGINT)
    closed.stdout.close()
    out, err = interrupted.communicate(timeout=60)
    assert interrupted.returncode == 130 and err == b"\ninterrupted\n"
    assert closed.wait(timeout=60) == 141 and closed.stderr.read() == b""


def test_help_does_not_wait_for_torch() -> None:
    script = (
        "import sys; from gptframe.cli import main\n"
        "try: main(['generate', '--help'])\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True).returncode == 0
