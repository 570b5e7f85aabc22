"""Hugging Face datasets from this disk, and what is said where the hub is out of reach."""

import json
import os

import pytest

from gptframe.data import hub
from gptframe.data.hub import HuggingFaceCorpus
from gptframe.errors import UserError

datasets = pytest.importorskip("datasets")
ROWS = [f"row number {i}" for i in range(20)]


def refusal(**options):
    with pytest.raises(UserError) as caught:
        HuggingFaceCorpus(**options)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@pytest.fixture
def saved(tmp_path):
    datasets.Dataset.from_dict({"text": ROWS, "n": list(range(20))}).save_to_disk(str(tmp_path / "saved"))
    return str(tmp_path / "saved")


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": t, "body": t.upper()}) + "\n" for t in ROWS))
    return str(path)


@pytest.mark.parametrize("streaming", [False, True])
def test_saved_dataset(saved, streaming):
    corpus = HuggingFaceCorpus(saved, val_fraction=0.1, streaming=streaming)
    assert list(corpus.documents("val")) == [ROWS[9], ROWS[19]]
    assert sorted([*corpus.documents("train"), *corpus.documents("val")]) == sorted(ROWS)


@pytest.mark.parametrize("streaming", [False, True])
def test_data_file(jsonl, streaming):
    corpus = HuggingFaceCorpus(jsonl, val_fraction=0.1, streaming=streaming, text_column="body", max_documents=10)
    assert list(corpus.documents("train")) == [t.upper() for t in ROWS[:9]]
    assert list(corpus.documents("val")) == [ROWS[9].upper()]
    assert list(corpus.documents("val")) == [ROWS[9].upper()]  # again, from the start


def test_splits(tmp_path):
    make = datasets.Dataset.from_dict
    both = datasets.DatasetDict({"train": make({"text": ["a", None, " ", "b"]}), "validation": make({"text": ["c"]})})
    both.save_to_disk(str(tmp_path / "both"))
    corpus = HuggingFaceCorpus(str(tmp_path / "both"), val_split="validation")
    assert list(corpus.documents("train")) == ["a", "b"] and list(corpus.documents("val")) == ["c"]
    assert "has the splits train, validation, not 'test'" in refusal(path=str(tmp_path / "both"), val_split="test")


def test_fingerprint(saved, jsonl):
    first = HuggingFaceCorpus(saved).fingerprint()
    assert HuggingFaceCorpus(saved).fingerprint() == first
    assert HuggingFaceCorpus(saved, max_documents=5).fingerprint() != first
    streamed = HuggingFaceCorpus(jsonl, streaming=True).fingerprint()
    with open(jsonl, "a") as handle:
        handle.write('{"text": "more", "body": "MORE"}\n')
    assert HuggingFaceCorpus(jsonl, streaming=True).fingerprint() != streamed


def test_refusals(saved, tmp_path):
    assert "data.path is missing" in refusal()
    assert "has the columns text, n" in refusal(path=saved, text_column="words")
    assert "row 0" in refusal_of_rows(saved) and "int" in refusal_of_rows(saved)
    assert "there is no ./nowhere" in refusal(path="./nowhere")
    assert "there is no data.jsonl" in refusal(path="data.jsonl")
    assert "val_fraction has no effect beside data.val_split" in refusal(path=saved, val_split="x", val_fraction=0.1)
    assert "data.revision has no effect" in refusal(path=saved, revision="main")
    assert "data.max_documents" in refusal(path=saved, max_documents=1)
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "a"\n')
    assert "JSON parse error" in refusal(path=str(broken))
    broken.write_text("")
    assert "holds no rows" in refusal(path=str(broken))
    broken.write_text('{"text": "a"}\n')
    assert "is one file and one split" in refusal(path=str(broken), val_split="validation")
    (tmp_path / "x.pdf").write_bytes(b"%PDF")
    assert "is none of" in refusal(path=str(tmp_path / "x.pdf"))


def refusal_of_rows(saved):
    with pytest.raises(UserError) as caught:
        list(HuggingFaceCorpus(saved, text_column="n").documents("train"))
    return str(caught.value)


def test_out_of_reach_is_one_line(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(hub, "reachable", lambda url: False)
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "0")
    for module in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", module.HF_HUB_OFFLINE)
    assert "the hub cannot be reached" in refusal(path="nobody/nothing-of-this-name")


def test_an_address_that_does_not_answer_is_given_up():
    assert hub.reachable("http://127.0.0.1:9", 1.0) is False
    assert hub.reachable("nonsense") is False
