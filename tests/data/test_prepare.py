"""From a config to batches: caching, refusals, composition of the option files, the data module."""

import itertools

import pytest
import torch
from hydra import compose, initialize_config_dir

from gptframe import compose as composing
from gptframe.data import tokenizer as tokenizer_module
from gptframe.data.batches import Batches
from gptframe.data.prepare import prepare
from gptframe.errors import UserError


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "my.txt"
    path.write_text("the cat sat on the mat\n" * 50)
    return str(path)


def refusal(data, tokenizer="byte", vocab_size=None, context_length=32):
    with pytest.raises(UserError) as caught:
        prepare(data, {"name": tokenizer}, vocab_size, context_length=context_length)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_verbs():
    result = prepare({"name": "verbs"}, {"name": "closed"}, 64, context_length=32)
    assert result.vocab_size == result.tokenizer.vocab_size == 64
    assert len(result.train) > 100_000 and len(result.val) > 5_000
    assert result.train.max_token() < 64 and 3 not in result.train.tokens
    # The last document's words, as they come out of the store.
    start = result.val.documents[-2]
    ids = result.val.window(int(start), 100)
    assert ids[0] == 1 and ids[-1] == 2
    assert result.tokenizer.decode(ids) == list(result.corpus.documents("val"))[-1]
    baseline = result.baseline()
    assert 1 <= baseline.order <= 5 and baseline.best_loss <= baseline.loss
    assert baseline.val_tokens == len(result.val)


def test_text(text):
    result = prepare({"name": "text", "path": text}, {"name": "byte"}, None, context_length=32)
    assert result.vocab_size == 257 and result.fingerprints["corpus"].startswith("text:")
    assert (
        result.tokenizer.decode(result.train.tokens) + result.tokenizer.decode(result.val.tokens) == open(text).read()
    )
    assert result.train.tokens.dtype == "uint16"


def test_the_second_time_comes_from_the_cache(text, cache, monkeypatch):
    data = {"name": "text", "path": text}
    first = prepare(data, {"name": "bpe"}, 300)
    files = {f: f.stat().st_mtime_ns for f in cache.rglob("*.*")}

    def never(*args):
        raise AssertionError("worked again")

    monkeypatch.setattr(tokenizer_module, "train_bpe", never)
    monkeypatch.setattr("gptframe.data.prepare.token_documents", never)
    second = prepare(data, {"name": "bpe"}, 300)
    assert second.train.tokens.tolist() == first.train.tokens.tolist()
    assert second.fingerprints == first.fingerprints
    assert {f: f.stat().st_mtime_ns for f in cache.rglob("*.*")} == files
    with pytest.raises(AssertionError, match="worked again"):
        prepare({**data, "val_fraction": 0.2}, {"name": "bpe"}, 300)


def test_a_runs_own_tokenizer(text, tmp_path):
    other = prepare({"name": "verbs"}, {"name": "closed"}, 64)
    other.tokenizer.save(tmp_path / "tokenizer")
    result = prepare({"name": "verbs"}, {"name": "byte"}, 64, tokenizer_dir=tmp_path / "tokenizer")
    assert result.tokenizer.name == "closed"


def test_an_unwritable_cache_says_what_to_set(text, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="GPTFRAME_CACHE"):
        prepare({"name": "text", "path": text}, {"name": "byte"}, None, tmp_path / "file" / "cache")


def test_shorter_than_the_context(tmp_path):
    path = tmp_path / "my.txt"
    path.write_text("0123456789 123456789")
    message = refusal({"name": "text", "path": str(path)})
    assert "has 19 tokens" in message and "model.context_length=32" in message and "model.context_length=18" in message
    assert prepare({"name": "text", "path": str(path)}, {"name": "byte"}, None, context_length=18)
    path.write_text("x")
    assert "give more text" in refusal({"name": "text", "path": str(path)})


def test_no_validation(tmp_path):
    path = tmp_path / "my.txt"
    path.write_text("0123456789" * 10)
    message = refusal({"name": "text", "path": str(path), "val_fraction": 0.001})
    assert "0 tokens for validation" in message and "data.val_fraction" in message


@pytest.mark.parametrize(
    "data,words",
    [
        ({"name": "verbs", "val_fraction": 0.1}, "data.val_fraction: corpus VerbsCorpus has no such option"),
        ({"name": "text", "path": "x", "val_fracton": 0.1}, "Did you mean 'val_fraction'"),
        ({"name": "verb"}, "Did you mean 'verbs'"),
        ({"name": "verbs", "mask_documents": "yes"}, "mask_documents='yes' must be true or false"),
        ({"name": "verbs", "baseline_order": -1}, "baseline_order=-1"),
        ({"name": "verbs", "baseline_tokens": 1.5}, "baseline_tokens=1.5"),
    ],
)
def test_bad_options(data, words):
    assert words in refusal(data, "closed", 64)


def test_a_tokenizer_that_does_not_fit_the_data(text):
    assert "257 entries, more than model.vocab_size=64" in refusal({"name": "text", "path": text}, vocab_size=64)
    assert "tokenizer=closed knows only" in refusal({"name": "text", "path": text}, "closed")


def test_mask_documents_without_documents_says_so(text):
    result = prepare({"name": "text", "path": text, "mask_documents": True}, {"name": "byte"}, None)
    assert any("mask_documents=true has no effect" in note for note in result.notes)


def composed(*overrides):
    composing.prepare_hydra()
    with initialize_config_dir(str(composing.conf_dir()), version_base="1.3"):
        return composing.to_container(compose("train", overrides=list(overrides)))


@pytest.mark.parametrize(
    "arguments,corpus,tokenizer,vocab_size",
    [
        ([], "verbs", "closed", 64),
        (["data=text", "data.path=my.txt"], "text", "byte", 257),
        (["data=text", "tokenizer=char"], "text", "char", None),
        (["data=text", "tokenizer=bpe"], "text", "bpe", 1024),
        (["data=text", "tokenizer=bpe", "model.vocab_size=500"], "text", "bpe", 500),
        (["data=verbs_full"], "verbs_full", "bpe", 1024),
        (["data=english"], "english", "bpe", 1024),
        (["data=bin"], "bin", "none", None),
        (["data=hf", "tokenizer=tiktoken"], "hf", "tiktoken", None),
        (["model=andrea120m"], "english", "bpe", 8449),
        (["model=andrea120m", "data=text"], "text", "bpe", 8449),
        (["model=andrea120m", "data=text", "tokenizer=byte"], "text", "byte", 8449),
        (["model=andrea120m", "data=text", "tokenizer=byte", "model.vocab_size=257"], "text", "byte", 257),
        (["model=andrea12m", "data=verbs_full"], "verbs_full", "bpe", 2305),
        (["model=gpt2", "data=bin"], "bin", "bpe", 50257),
    ],
    ids=lambda a: " ".join(a) if isinstance(a, list) else None,
)
def test_options_compose_in_any_order(arguments, corpus, tokenizer, vocab_size):
    for order in itertools.islice(itertools.permutations(arguments), 0, None, 5 if len(arguments) > 3 else 1):
        config = composed(*order)
        assert (config["data"]["name"], config["tokenizer"]["name"]) == (corpus, tokenizer)
        assert config["model"]["vocab_size"] == vocab_size


@pytest.mark.parametrize("group,kind", [("data", "corpus"), ("tokenizer", "tokenizer")])
def test_each_option_file_sets_what_its_class_takes(group, kind):
    import inspect

    from gptframe.registry import lookup, names

    assert composing.groups()[group] == names(kind)
    for option in names(kind):
        section = composed(f"{group}={option}")[group]
        known = set(inspect.signature(lookup(kind, option)).parameters) - {"source"}
        common = {"mask_documents", "baseline_order", "baseline_tokens"} if group == "data" else set()
        # These three are a saved tokenizer's, not a person's.
        assert set(section) - {"name"} == (known | common) - {"words", "characters", "segments"}


def test_datamodule_is_the_stream_from_the_trainers_step(text):
    pl = pytest.importorskip("pytorch_lightning")
    from gptframe.data.datamodule import GPTDataModule

    prepared = prepare({"name": "text", "path": text}, {"name": "byte"}, None)
    seen, steps = [], []

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def training_step(self, batch, index):
            seen.append(batch["ids"].clone())
            steps.append(self.trainer.global_step)
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.weight * 0)
            optimizer.step()

        def validation_step(self, batch, index):
            assert batch["ids"].shape == (3, 16)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(max_steps, ckpt=None):
        module = GPTDataModule(prepared, 16, 4, 3, seed=7, val_batches=2)
        trainer = pl.Trainer(
            max_steps=max_steps,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            val_check_interval=2,
            check_val_every_n_epoch=None,
        )
        trainer.fit(Model(), module, ckpt_path=ckpt)
        return trainer

    trainer = fit(3)
    trainer.save_checkpoint(text + ".ckpt")
    fit(6, text + ".ckpt")
    expected = Batches(prepared.train, 16, 4, 7)
    assert steps == [0, 1, 2, 3, 4, 5]
    for step, ids in zip(steps, seen, strict=True):
        assert torch.equal(ids, expected.at(step)["ids"])


@pytest.mark.parametrize("gpu", [False, True])
def test_beside_a_gpu_batches_are_pinned_and_nothing_waits_for_their_copy(text, monkeypatch, gpu):
    pytest.importorskip("pytorch_lightning")
    from lightning_fabric.utilities.apply_func import move_data_to_device

    from gptframe.data.datamodule import GPTDataModule

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    module = GPTDataModule(prepare({"name": "text", "path": text}, {"name": "byte"}, None), 16, 4, 3)
    assert module.train_dataloader().pin_memory is gpu and module.val_dataloader().pin_memory is gpu
    moved = []
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device, **how: moved.append((device, how)) or tensor)
    move_data_to_device(module.batches().at(0), torch.device("cuda"))  # as Lightning does with a batch
    assert moved == [(torch.device("cuda"), {"non_blocking": True})] * 2
