"""Tokenizers against the libraries they wrap and against their own contract."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptframe.data.documents import Corpus
from gptframe.data.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    Source,
    _bounded,
    _pieces,
    build_tokenizer,
    load,
    token_documents,
    train_bpe,
)
from gptframe.data.verbs import VerbsCorpus
from gptframe.errors import UserError

TEXTS = ["The cat sat on the mat.\nThe dog did not.\n" * 3, "¿Quién comió? Él comió.\n", "naïve 日本語 🙂\t\r\n  x\n"]


class Toy(Corpus):
    notes: list = []

    def __init__(self, texts=tuple(TEXTS), words=None):
        self.texts, self.words = list(texts), words

    def documents(self, split):
        return iter(self.texts if split == "train" else ["val ñ"])

    def fingerprint(self):
        return "toy" + json.dumps(self.texts)


def source(vocab_size=None, corpus=None):
    return Source(corpus or Toy(), vocab_size)


def everything(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    bpe = build_tokenizer({"name": "bpe"}, source(300))
    path = tmp_path / "hf" / "tokenizer.json"
    path.parent.mkdir()
    tokenizers.Tokenizer.from_str(bpe._inner.to_str()).save(str(path))
    return [
        build_tokenizer({"name": "byte"}, source()),
        build_tokenizer({"name": "char"}, source()),
        bpe,
        build_tokenizer({"name": "hf_file", "path": str(path)}, source()),
        build_tokenizer({"name": "closed"}, Source(VerbsCorpus(), 64)),
    ]


def test_save_and_load(tmp_path):
    for i, tokenizer in enumerate(everything(tmp_path)):
        tokenizer.save(tmp_path / f"{i}")
        again = load(tmp_path / f"{i}")
        assert type(again) is type(tokenizer) and again.name == tokenizer.name
        assert again.fingerprint() == tokenizer.fingerprint()
        for attribute in ("vocab_size", "bos_id", "eos_id", "pad_id"):
            assert getattr(again, attribute) == getattr(tokenizer, attribute)
        text = "I work , he ate <|endoftext|> The cat"
        assert again.encode(text) == tokenizer.encode(text)


def test_specials_are_never_made_from_text(tmp_path):
    for tokenizer in everything(tmp_path):
        for text in ("<|endoftext|>", "<eos> <bos> <pad>", "<|reserved_0|>", ""):
            ids = tokenizer.encode(text)
            assert not {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id} & set(ids)
            assert all(0 <= i < tokenizer.vocab_size for i in ids)


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_byte_and_bpe_bring_any_text_back(text):
    for tokenizer in (ByteTokenizer(Source()), BPE):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.fixture(scope="module", autouse=True)
def bpe_of_the_toy(tmp_path_factory):
    global BPE
    BPE = build_tokenizer({"name": "bpe"}, Source(Toy(), 300, tmp_path_factory.mktemp("bpe")))


def test_lone_surrogates_are_refused(tmp_path):
    for tokenizer in everything(tmp_path):
        with pytest.raises(UserError, match=r"surrogate \\ud83d at character 3"):
            tokenizer.encode("abc\ud83d")


def test_decode_skips_specials_and_unknown_ids(tmp_path):
    for tokenizer in everything(tmp_path):
        ids = tokenizer.encode("he ate")
        noisy = [tokenizer.eos_id, *ids, tokenizer.eos_id, tokenizer.vocab_size, 10**9, -1]
        assert tokenizer.decode(noisy) == tokenizer.decode(ids)
        assert tokenizer.decode(noisy, skip_special=False) != tokenizer.decode(ids)
    assert ByteTokenizer(Source()).decode([0xC3]) == "\ufffd"


def test_byte_is_utf8():
    assert ByteTokenizer(Source()).encode("é€") == [0xC3, 0xA9, 0xE2, 0x82, 0xAC]


def test_char_has_the_characters_of_both_splits():
    tokenizer = CharTokenizer(source())
    assert tokenizer.vocab_size == len(set("".join(TEXTS) + "val ñ")) + 2
    assert tokenizer.decode(tokenizer.encode(TEXTS[2] + "ñ")) == TEXTS[2] + "ñ"
    assert tokenizer.encode("Ж") == [1]


def test_closed():
    tokenizer = build_tokenizer({"name": "closed"}, Source(VerbsCorpus(), 64))
    assert tokenizer.decode(tokenizer.encode("I work, you work,he works")) == "I work , you work , he works"
    assert tokenizer.encode("zebra") == [3]
    with pytest.raises(UserError, match="closed knows only the words of data=verbs.*tokenizer=byte"):
        build_tokenizer({"name": "closed"}, source())


@pytest.mark.parametrize("text", TEXTS)
def test_bpe_beside_the_library(text):
    # The library's own byte-level BPE, trained on the same texts with the same size.
    tokenizers = pytest.importorskip("tokenizers")
    theirs = tokenizers.ByteLevelBPETokenizer()
    theirs.train_from_iterator(
        TEXTS, vocab_size=300, min_frequency=1, special_tokens=["<|endoftext|>"], show_progress=False
    )
    ids = BPE.encode(text)
    assert ids == theirs.encode(text).ids
    assert BPE.decode(ids) == theirs.decode(ids) == text


def test_bpe_size_is_exact_and_filled_up():
    notes = []
    tokenizer = build_tokenizer({"name": "bpe"}, Source(Toy(), 1000, notes=notes))
    assert tokenizer.vocab_size == tokenizer._inner.get_vocab_size() == 1000
    assert tokenizer.eos_id == 0
    assert len(notes) == 1 and "of 1000 entries" in notes[0] and "reserved" in notes[0]
    assert BPE.vocab_size == 300 and not any(t.startswith("<|reserved") for t in BPE._inner.get_vocab())
    assert tokenizer.decode([0, 999]) == ""


def test_bpe_is_deterministic_and_cached(tmp_path):
    assert train_bpe(TEXTS, 300, 1).to_str() == train_bpe(TEXTS, 300, 1).to_str()
    place = tmp_path / "bpe"
    first = build_tokenizer({"name": "bpe"}, Source(Toy(), 300, place))
    (file,) = (place / "tokenizers").glob("*.json")

    class Silent(Toy):
        def documents(self, split):
            raise AssertionError("trained again")

    assert build_tokenizer({"name": "bpe"}, Source(Silent(), 300, place)).fingerprint() == first.fingerprint()
    file.write_text(file.read_text()[:100])  # a torn file is trained again
    assert build_tokenizer({"name": "bpe"}, Source(Toy(), 300, place)).fingerprint() == first.fingerprint()
    rare = build_tokenizer({"name": "bpe", "min_frequency": 4}, Source(Toy(), 300, place))
    assert rare.fingerprint() != first.fingerprint()


@pytest.mark.parametrize(
    "section,size,words",
    [
        ({"name": "byte"}, 64, "257 entries, more than model.vocab_size=64: type model.vocab_size=257"),
        ({"name": "bpe"}, 256, "at least 257 entries"),
        ({"name": "bpe"}, None, "type model.vocab_size=1024"),
        ({"name": "bpe", "min_frequency": 0}, 300, "min_frequency"),
        ({"name": "char"}, 10, "more than model.vocab_size=10"),
        ({"name": "none"}, 10, "tokenizer=none needs data that is tokens already"),
        ({"name": "hf_file"}, 10, "tokenizer.path is missing"),
        ({"name": "hf_file", "path": "/nowhere/t.json"}, 10, "there is no file /nowhere/t.json"),
        ({"name": "byt"}, 10, "Did you mean 'byte'"),
    ],
)
def test_refusals(section, size, words):
    with pytest.raises(UserError, match=words) as caught:
        build_tokenizer(section, source(size))
    assert len(str(caught.value).splitlines()) <= 2


def test_hf_file_refusals(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is not a tokenizer.json"):
        build_tokenizer({"name": "hf_file", "path": str(tmp_path)}, source())
    (tmp_path / "tokenizer.json").write_text(BPE._inner.to_str())
    with pytest.raises(UserError, match="tokenizer.eos='</s>' is no token"):
        build_tokenizer({"name": "hf_file", "path": str(tmp_path), "eos": "</s>"}, source())
    with pytest.raises(UserError, match="300 entries, more than model.vocab_size=299"):
        build_tokenizer({"name": "hf_file", "path": str(tmp_path)}, source(299))


def test_load_refuses_a_folder_without_tokenizer(tmp_path):
    with pytest.raises(UserError, match="holds no tokenizer"):
        load(tmp_path)


def test_documents_have_bos_and_eos(tmp_path):
    def flat(tokenizer, texts):
        return [[i for part in d for i in part] for d in token_documents(tokenizer, texts)]

    assert flat(ByteTokenizer(Source()), ["ab", ""]) == [[97, 98, 256], [256]]
    closed = build_tokenizer({"name": "closed"}, Source(VerbsCorpus(), 64))
    assert flat(closed, ["I work"])[0][0] == 1 and flat(closed, ["I work"])[0][-1] == 2


@settings(max_examples=60, deadline=None)
@given(st.text("ab \n\t.", max_size=80), st.integers(1, 9))
def test_pieces_are_encoded_as_the_whole(text, size):
    parts = list(_pieces(text, size))
    assert "".join(parts) == text
    assert [i for part in parts for i in BPE.encode(part)] == BPE.encode(text)


@given(st.text("ab ", max_size=60), st.integers(1, 7))
def test_training_text_has_no_endless_words(text, longest):
    parts = list(_bounded(text, longest))
    assert "".join(parts) == text
    assert not any(len(run) > 2 * longest for part in parts for run in part.split(" "))


class TestTiktoken:
    @pytest.fixture
    def encoding(self, monkeypatch):
        tiktoken = pytest.importorskip("tiktoken")
        ranks = {bytes([i]): i for i in range(256)}
        ranks.update({b"th": 256, b"the": 257, b" the": 260})  # with a gap
        inner = tiktoken.Encoding(
            "gpt2", pat_str=r" ?\w+|\s+|[^\s\w]+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 261}
        )
        monkeypatch.setattr(tiktoken, "get_encoding", lambda name: inner)
        return inner

    def test_beside_the_library(self, encoding, tmp_path):
        tokenizer = build_tokenizer({"name": "tiktoken"}, source(262))
        text = "the cat, the 日本 <|endoftext|>"
        assert tokenizer.encode(text) == encoding.encode(text, disallowed_special=())
        assert tokenizer.encode_batch([text, ""]) == [tokenizer.encode(text), []]
        assert tokenizer.decode([*tokenizer.encode(text), 261, 259]) == text
        assert tokenizer.vocab_size == 262 and tokenizer.eos_id == 261
        tokenizer.save(tmp_path / "t")
        again = load(tmp_path / "t")
        assert again.encode(text) == tokenizer.encode(text) and again.fingerprint() == tokenizer.fingerprint()

    def test_too_large(self, encoding):
        with pytest.raises(UserError, match="262 entries, more than model.vocab_size=64"):
            build_tokenizer({"name": "tiktoken"}, source(64))

    def test_no_network_is_one_line(self, monkeypatch):
        tiktoken = pytest.importorskip("tiktoken")

        def offline(name):
            raise ConnectionError("no route")

        monkeypatch.setattr(tiktoken, "get_encoding", offline)
        with pytest.raises(UserError, match="TIKTOKEN_CACHE_DIR"):
            build_tokenizer({"name": "tiktoken"}, source())

    def test_a_download_that_never_ends_is_given_up(self, monkeypatch):
        import threading

        from gptframe.data import tokenizer as module

        tiktoken = pytest.importorskip("tiktoken")
        monkeypatch.setattr(module, "_DOWNLOAD_SECONDS", 0.05)
        monkeypatch.setattr(tiktoken, "get_encoding", lambda name: threading.Event().wait())
        with pytest.raises(UserError, match="did not end"):
            build_tokenizer({"name": "tiktoken"}, source())

    def test_unknown_encoding(self):
        pytest.importorskip("tiktoken")
        with pytest.raises(UserError, match="Did you mean 'gpt2'"):
            build_tokenizer({"name": "tiktoken", "encoding": "gpt-2"}, source())
