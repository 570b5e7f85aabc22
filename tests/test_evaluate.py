"""Evaluation against sums computed window by window, models whose loss is known, and hand-computed intervals."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gptframe import cli
from gptframe.config import Config
from gptframe.data.tokenizer import ByteTokenizer, ClosedTokenizer, Source
from gptframe.data.verbs import Slot, VerbsCorpus
from gptframe.errors import UserError
from gptframe.evaluate import (
    Document,
    bootstrap,
    score,
    slices,
    slot_hits,
    summarise,
    texts_to_ids,
    unknown_tokens,
    wilson,
    windows,
)
from gptframe.interop.rundir import Imported, write_run
from gptframe.model import GPT, build_model

C = 16


def small(position: str = "rope", **changes) -> GPT:
    section = {
        "d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 23, "context_length": C, "tie_head": False,
        "position": {"name": position}, "init": {"name": "normal", "std": 0.2, "embedding_std": 1.0}, **changes,
    }  # fmt: skip
    return build_model(Config.from_dict({"model": section}).model, seed=1).double().eval()


def text(n: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 23, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 31, 32, 33, 100])
@pytest.mark.parametrize("stride", [1, 3, 8, 16])
def test_each_token_is_scored_once_with_enough_before_it(n: int, stride: int) -> None:
    scored = []
    for window in windows(n, C, stride):
        assert 0 <= window.start < window.stop <= n and window.stop - window.start <= C
        for target in range(window.first, window.stop + 1):
            scored.append(target)
            seen = target - window.start  # tokens before it
            assert seen >= min(target, C - stride + 1)
    assert scored == list(range(1, n + 1))


@pytest.mark.parametrize("position", ["rope", "learned", "alibi"])
@pytest.mark.parametrize("stride", [1, 5, 16])
@torch.no_grad()
def test_losses_are_those_of_one_token_at_a_time(position: str, stride: int) -> None:
    model = small(position)
    ids = text(40)
    found = list(score(model, [(ids, 99)], stride, batch_size=3))[0]
    # by hand: the window of a target i ends at the smallest C + k * stride (or the end) at or after it
    total = 0.0
    for i in range(1, 40):
        stop = C
        while stop < i:
            stop += stride
        stop = min(stop, 39)
        window = ids[max(0, stop - C) : i]
        total -= F.log_softmax(model(torch.tensor([window]))[0, -1].float(), -1)[ids[i]].item()
    assert found.tokens == 39 and found.bytes == 99
    assert found.nats == pytest.approx(total, abs=1e-4)


def test_batches_change_no_result() -> None:
    model = small().float()
    documents = [(text(n, n), n) for n in (5, 40, 1, 2, 90, 17, 3, 3, 60)]
    alone = list(score(model, documents, 4, batch_size=1))
    assert [d.tokens for d in alone] == [4, 39, 0, 1, 89, 16, 2, 2, 59]
    for size in (2, 3, 7, 100):
        together = list(score(model, documents, 4, batch_size=size))
        for a, b in zip(alone, together, strict=True):
            assert (a.tokens, a.bytes, len(a.stretches)) == (b.tokens, b.bytes, len(b.stretches))
            assert a.nats == pytest.approx(b.nats, rel=1e-5)
    again = list(score(model, documents, 4, batch_size=3))
    assert [d.nats for d in again] == [d.nats for d in score(model, documents, 4, batch_size=3)]


def test_a_model_that_knows_nothing_has_the_loss_of_chance() -> None:
    """Zero weights in the head: ln 23 a token; a byte tokenizer's bits per byte are then log2 23."""
    model = small()
    with torch.no_grad():
        model.head.weight.zero_()
    found = summarise(list(score(model, [(text(50), 49)])))
    assert found.loss.value == pytest.approx(math.log(23), rel=1e-6)
    assert found.perplexity.value == pytest.approx(23, rel=1e-5)
    assert found.bits_per_byte.value == pytest.approx(math.log2(23), rel=1e-6)
    assert found.loss.low == pytest.approx(found.loss.high, rel=1e-6)


def test_bits_per_byte_do_not_depend_on_the_tokens() -> None:
    """The same nats over the same bytes, in 10 tokens or in 30."""
    few, many = Document(10, 40, 60.0, [(60.0, 10)]), Document(30, 40, 60.0, [(60.0, 30)])
    assert few.bits_per_byte == many.bits_per_byte == pytest.approx(60 / math.log(2) / 40)
    assert summarise([few]).bits_per_byte.value == summarise([many]).bits_per_byte.value


def test_the_bootstrap_against_theory_and_by_hand() -> None:
    """The mean of n normal values has the interval mean +- 1.96 s / sqrt(n)."""
    random = np.random.default_rng(0)
    values = random.normal(3.0, 1.0, 400)
    documents = [Document(10, 20, 10 * v, [(10 * v, 10)]) for v in values]
    found = summarise(documents, resamples=4000)
    half = 1.96 * values.std() / 20
    assert found.resampled == "documents" and found.loss.value == pytest.approx(values.mean())
    assert found.loss.low == pytest.approx(values.mean() - half, abs=0.15 * half)
    assert found.loss.high == pytest.approx(values.mean() + half, abs=0.15 * half)
    assert summarise(documents, resamples=50) == summarise(documents, resamples=50)
    assert summarise(documents, resamples=50, seed=1).loss != summarise(documents, resamples=50).loss
    assert summarise(documents[:29]).resampled == "stretches of text"
    single = summarise(documents[:1])  # one stretch has no interval, and none of width 0 is claimed
    assert single.resampled is None and single.loss.value == pytest.approx(values[0])
    assert math.isnan(single.loss.low) and math.isnan(single.bits_per_byte.high)
    assert summarise(documents, resamples=50, seed=-1).loss.value == found.loss.value
    # every row is a sum of rows that exist
    units = np.array([[1.0, 10.0], [100.0, 1000.0]])
    sums = bootstrap(units, 200, 0)
    assert {tuple(s) for s in sums} == {(2.0, 20.0), (101.0, 1010.0), (200.0, 2000.0)}


def test_wilson_by_hand() -> None:
    """Wilson (1927) for 8 of 10: 0.4902 to 0.9433; for 0 of 10: 0 to z^2 / (n + z^2) = 0.2775."""
    found = wilson(8, 10)
    assert (found.value, found.low, found.high) == pytest.approx((0.8, 0.49016, 0.94331), abs=1e-5)
    assert (wilson(0, 10).low, wilson(0, 10).high) == pytest.approx((0.0, 0.27753), abs=1e-5)
    assert wilson(10, 10).high == pytest.approx(1) and math.isnan(wilson(0, 0).value)


def test_texts_begin_with_their_start_token() -> None:
    byte = ByteTokenizer(Source())
    assert list(texts_to_ids(["é", "ab"], byte)) == [([256, 0xC3, 0xA9], 2), ([256, 97, 98], 2)]
    assert len(list(texts_to_ids(["a"] * 5, byte, limit=2))) == 2
    without = ByteTokenizer(Source())
    without.bos_id = without.eos_id = None
    assert list(texts_to_ids(["abc"], without)) == [([97, 98, 99], 2)]  # the first byte is not scored
    closed = ClosedTokenizer(Source(), ["<pad>", "<bos>", "<eos>", "<unk>", "I"])
    assert unknown_tokens([[1, 3, 4], [3]], closed) == 2 and unknown_tokens([[3]], byte) == 0


@pytest.mark.parametrize(
    "options,words", [({"stride": 0}, "--stride 0"), ({"stride": 17}, "--stride 17 must be from 1 to")]
)
def test_strides_that_leave_gaps_are_refused(options: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        list(score(small(), [(text(5), 5)], **options))
    with pytest.raises(UserError, match="--batch-size 0"):
        list(score(small(), [(text(5), 5)], batch_size=0))
    with pytest.raises(UserError, match="nothing to score"):
        summarise(list(score(small(), [([3], 1), ([], 0)])))


def test_weights_that_are_not_numbers_are_named() -> None:
    model = small()
    with torch.no_grad():
        model.head.weight[3, 3] = math.nan
    with pytest.raises(UserError, match="NaN or infinite"):
        list(score(model, [(text(5), 5)]))


# Verb forms.


class Knows(torch.nn.Module):
    """A stand-in whose most likely next token is given by a table of the last two tokens."""

    def __init__(self, size: int, table: dict[tuple[int, int], int]):
        super().__init__()
        self.cfg = Config.from_dict({"model": {"context_length": 32}}).model
        self.token_embedding = torch.nn.Embedding(size, 2)
        self.table = table

    def forward(self, ids):
        logits = torch.zeros(*ids.shape, self.token_embedding.num_embeddings)
        for row, text in enumerate(ids.tolist()):
            for i in range(1, len(text)):
                logits[row, i, self.table.get((text[i - 1], text[i]), 0)] = 1
        return logits


def test_slices_by_hand() -> None:
    words = ["<pad>", "<bos>", "<eos>", "<unk>", "I", "you", "will", "work", "ate", "yo", "comí"]
    closed = ClosedTokenizer(Source(), words)
    slots = [
        Slot(("I",), ("will", "work"), "work", "future", "I", "en", True),
        Slot(("you",), ("will", "work"), "work", "future", "you", "en", True),
        Slot(("I",), ("ate",), "eat", "past", "I", "en", False),
        Slot(("yo",), ("comí",), "eat", "past", "I", "es", True),
    ]
    i = {w: n for n, w in enumerate(words)}
    # After "<bos> I" comes "will" and after "I will" comes "work"; after "you will" nothing is known.
    table = {(1, i["I"]): i["will"], (i["I"], i["will"]): i["work"], (1, i["you"]): i["will"], (1, i["yo"]): i["comí"]}
    model = Knows(len(words), table)
    for size in (1, 3, 64):
        assert slot_hits(model, slots, closed, size) == [True, False, False, True]
    found = slices(slots, [True, False, False, True])
    assert found["all"] == {"all": (2, 4)}
    assert found["tense"] == {"future": (1, 2), "past": (1, 2)}
    assert found["person"] == {"I": (2, 3), "you": (0, 1)}
    assert found["language"] == {"en": (1, 3), "es": (1, 1)}
    assert found["regular"] == {"regular": (2, 3), "irregular": (0, 1)}
    assert slices(slots, [True, None, None, None])["all"] == {"all": (1, 1)}


def test_slots_for_other_tokenizers_keep_their_spaces() -> None:
    byte = ByteTokenizer(Source())
    slot = Slot(("I",), ("ate",), "eat", "past", "I", "en", False)
    ids = [256, *b"I ate"]
    table = {(ids[i - 1], ids[i]): ids[i + 1] for i in range(1, len(ids) - 1)}
    assert slot_hits(Knows(257, table), [slot], byte) == [True]
    table[ord(" "), ord("a")] = 0
    assert slot_hits(Knows(257, table), [slot], byte) == [False]
    long = Slot(("I",) * 40, ("ate",), "eat", "past", "I", "en", False)
    assert slot_hits(Knows(257, table), [long], byte) == [None]


# The command.


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    corpus = VerbsCorpus()
    closed = ClosedTokenizer(Source(corpus))
    closed.name = "closed"
    place = tmp_path_factory.mktemp("runs") / "verbs"
    model = small(vocab_size=64, context_length=32).float()
    write_run(Imported(model.cfg, model.state_dict(), {"name": "closed"}, closed.save), place)
    return place


@pytest.fixture(scope="module")
def bytes_run(tmp_path_factory) -> Path:
    byte = ByteTokenizer(Source())
    byte.name = "byte"
    place = tmp_path_factory.mktemp("runs") / "bytes"
    model = small(vocab_size=257).float()
    write_run(Imported(model.cfg, model.state_dict(), {"name": "byte"}, byte.save), place)
    return place


def command(capsys, *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["evaluate", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_on_verbs(run: Path, capsys) -> None:
    code, out, err = command(capsys, run, "data=verbs", "--documents", "40")
    assert code == 0 and err == ""
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert any(line.startswith("bits per byte ") for line in lines)
    assert any(line.startswith("tense past ") for line in lines)
    assert any(line.startswith("irregular ") for line in lines) and any(line.startswith("person he ") for line in lines)
    small_batches = json.loads(
        command(capsys, run, "data=verbs", "--documents", "40", "--json", "--batch-size", "1")[1]
    )
    large_batches = json.loads(
        command(capsys, run, "data=verbs", "--documents", "40", "--json", "--batch-size", "40")[1]
    )
    assert small_batches == large_batches and small_batches["documents"] == 40
    total = small_batches["verbs"]["all"]["all"]["of"]
    for key in ("tense", "person", "language", "regular", "verb"):
        assert sum(group["of"] for group in small_batches["verbs"][key].values()) == total


def test_the_command_on_ones_own_text(bytes_run: Path, tmp_path: Path, capsys) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("the quick brown fox, é\n" * 9, encoding="utf-8")
    arguments = (bytes_run, "data=text", f"data.path={tmp_path}", "--split", "all", "--json")
    code, out, _ = command(capsys, *arguments, "--per-document", tmp_path / "out" / "documents.jsonl")
    found = json.loads(out)
    size = 2 * len(("the quick brown fox, é\n" * 9).encode())
    assert code == 0 and found["bytes"] == found["tokens"] == size
    rows = [json.loads(line) for line in (tmp_path / "out" / "documents.jsonl").read_text().splitlines()]
    assert len(rows) == found["documents"] and sum(r["bytes"] for r in rows) == size
    nats = sum(r["nats"] for r in rows)
    assert found["loss"]["value"] == pytest.approx(nats / size, rel=1e-5)
    assert found["bits_per_byte"]["value"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    code, _, err = command(capsys, *arguments, "--per-document", tmp_path / "out" / "documents.jsonl")
    assert code == 2 and "exists, and nothing is overwritten" in err


def test_a_text_of_one_window_has_no_interval(bytes_run: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "t.txt").write_text("some words")
    arguments = (bytes_run, "data=text", f"data.path={tmp_path / 't.txt'}")
    code, out, err = command(capsys, *arguments)
    assert code == 0, err
    assert "no intervals" in out and " to " not in out.split("bits per byte")[1].splitlines()[0]
    found = json.loads(command(capsys, *arguments, "--json")[1], parse_constant=pytest.fail)  # NaN is no JSON
    assert found["interval"] is None and found["loss"]["low"] is None and found["loss"]["value"] > 0


def test_token_files(bytes_run: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("GPTFRAME_CACHE", str(tmp_path / "cache"))
    np.frombuffer(b"hello world. " * 50, np.uint8).astype("<u2").tofile(tmp_path / "t.bin")
    code, out, _ = command(capsys, bytes_run, "data=bin", f"data.path={tmp_path / 't.bin'}", "--split", "all", "--json")
    found = json.loads(out)
    assert code == 0 and found["tokens"] == found["bytes"] == 650 - found["documents"]


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["data=txt"], ["Did you mean 'text'"]),
        (["model=gpt2"], ["model=gpt2: only the text is chosen here"]),
        (["data=text"], ["data.path"]),
        (["data=text", "data.path=/no/such/file"], ["/no/such/file"]),
        (["data=verbs", "--stride", "40"], ["--stride 40 must be from 1 to the context, 32"]),
        (["data=verbs", "--stride", "0"], ["--stride 0"]),
        (["data=verbs", "--documents", "0"], ["--documents 0"]),
        (["data=verbs", "--resamples", "1"], ["--resamples 1"]),
        (["data=verbs", "--resamples", "1000001"], ["must be from 2 to 1,000,000"]),
        (["data=verbs", "data.baseline_order=2"], ["data.baseline_order=2 has no effect"]),
        (["--tasks", "x", "--stride", "3"], ["leave out --stride"]),
        (["--tasks", "x", "--seed", "0"], ["leave out --seed"]),
        (["--split", "test"], ["--split: invalid choice: 'test'", "gptframe evaluate --help"]),
        (["--device", "meta"], ["--device meta"]),
        (["data=verbs", "--tasks", "x"], ["leave out data="]),
        (["--limit", "3"], ["--tasks"]),
        ([], ["has no text of its own", "data=text"]),
    ],
)
def test_what_is_wrong_is_said_in_a_line(run: Path, capsys, arguments: list[str], words: list[str]) -> None:
    code, out, err = command(capsys, run, *arguments)
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") <= 2
    assert all(word in err for word in words), err


def test_unknown_words_make_a_note(run: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "t.txt").write_text("I work , you work\nzebras and other words\n" * 5)
    code, out, _ = command(capsys, run, "data=text", f"data.path={tmp_path / 't.txt'}", "--split", "all")
    assert code == 0 and "note: 20 tokens are unknown to the tokenizer" in out


# Tasks of lm-eval.

TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: {target}
{more}
metric_list:
  - metric: {metric}
"""


def test_a_task_from_a_local_file(bytes_run: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from gptframe import load
    from gptframe.interop.lm_eval import GPTFrameLM

    model = load(bytes_run)
    rows = [
        {"question": q, "choices": [" one", " two words", " three"], "gold": g}
        for q, g in (("a b", 0), ("c", 2), ("d!", 1))
    ]
    file = tmp_path / "rows.json"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    more = 'doc_to_choice: "{{choices}}"\n'
    common = {"file": file, "metric": "acc"}
    (tmp_path / "choice.yaml").write_text(
        TASK.format(name="choice_of_this_test", kind="multiple_choice", target="gold", more=more, **common)
    )

    def logp(question: str, answer: str) -> float:
        ids = [256, *question.encode(), *answer.encode()]
        logits = model.model(torch.tensor([ids]))[0].float().log_softmax(-1)
        n = len(answer.encode())
        return sum(logits[i - 1, ids[i]].item() for i in range(len(ids) - n, len(ids)))

    with torch.no_grad():
        best = [max(range(3), key=lambda i: logp(r["question"], r["choices"][i])) for r in rows]
    want = sum(b == r["gold"] for b, r in zip(best, rows, strict=True)) / 3
    arguments = (bytes_run, "--tasks", "choice_of_this_test", "--tasks-from", tmp_path)
    code, out, err = command(capsys, *arguments, "--json")
    assert code == 0, err
    found = json.loads(out)["tasks"]["choice_of_this_test"]
    assert found["acc"] == pytest.approx(want) and found["examples"] == 3
    code, out, _ = command(capsys, *arguments, "--limit", "2")
    assert code == 0 and out.startswith("choice_of_this_test: 2 examples")
    code, _, err = command(capsys, bytes_run, "--tasks", ",")
    assert code == 2 and err == "error: --tasks is empty: give names separated by commas\n"
    code, _, err = command(capsys, bytes_run, "--tasks", "choice_of_this_tset", "--tasks-from", tmp_path)
    assert code == 2 and "Did you mean 'choice_of_this_test'" in err

    class Request:
        def __init__(self, *args):
            self.args = args

    adapter = GPTFrameLM(model, batch_size=2)
    with torch.no_grad():
        scored = adapter.loglikelihood([Request("a b", " one"), Request("", "xy"), Request("q " * 30, "end")])
        assert scored[0][0] == pytest.approx(logp("a b", " one"), abs=1e-4)
        assert scored[1][0] == pytest.approx(logp("", "xy"), abs=1e-4)
        whole = adapter.loglikelihood_rolling([Request("hello")])
        assert whole[0] == pytest.approx(logp("", "hello"), abs=1e-4)
    greedy = model.continuations(["hello"], 6, temperature=0)[0][0][0]
    assert adapter.generate_until([Request("hello", {"until": [], "max_gen_toks": 6})]) == [greedy]


@pytest.mark.parametrize(
    "do_sample,temperature,used",
    [
        (None, None, 0),
        (None, 0.7, 0.7),
        (False, 0.7, 0),
        (False, None, 0),
        (True, None, 1),
        (True, 0.7, 0.7),
        (True, 0, 0),
    ],
)
def test_a_task_that_says_greedy_is_greedy(do_sample, temperature, used) -> None:
    pytest.importorskip("lm_eval")
    from gptframe.interop.lm_eval import _temperature

    assert _temperature(do_sample, temperature) == used


def test_tasks_without_the_library(bytes_run: Path, capsys, monkeypatch) -> None:
    import builtins
    import sys

    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("lm_eval"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.delitem(sys.modules, "gptframe.interop.lm_eval", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    code, out, err = command(capsys, bytes_run, "--tasks", "x")
    assert (code, out, err) == (2, "", "error: --tasks needs lm-eval: pip install lm-eval\n")
