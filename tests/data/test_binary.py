"""Token files as NumPy and llm.c write them."""

import numpy as np
import pytest

from gptframe.data.binary import BinCorpus
from gptframe.data.prepare import prepare
from gptframe.data.tokens import write_store
from gptframe.errors import UserError


def nanogpt(path, tokens, dtype=np.uint16):
    np.array(tokens, dtype=dtype).tofile(path)  # as in nanoGPT's data/*/prepare.py
    return path


def llmc(path, tokens, magic=20240520, version=1, dtype=np.uint16, count=None):
    header = np.zeros(256, dtype=np.int32)  # as in llm.c's dev/data/data_common.py, write_datafile
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + np.array(tokens, dtype=dtype).tobytes())
    return path


def prepared(path, vocab_size=60000, tokenizer="none", **options):
    return prepare({"name": "bin", "path": str(path), **options}, {"name": tokenizer}, vocab_size, context_length=4)


def refusal(path, **options):
    with pytest.raises(UserError) as caught:
        prepared(path, **options)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_nanogpt(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 50257, 1000)
    result = prepared(nanogpt(tmp_path / "train.bin", tokens), val_fraction=0.1)
    assert np.array_equal(np.concatenate((result.train.tokens, result.val.tokens)), tokens)
    assert (len(result.train), len(result.val), result.tokenizer, result.vocab_size) == (900, 100, None, 60000)
    assert not result.train.tokens.flags.writeable and not result.train.tokens.flags.owndata  # a map, not a copy


def test_val_path(tmp_path):
    nanogpt(tmp_path / "train.bin", range(50)), nanogpt(tmp_path / "val.bin", range(9))
    result = prepared(tmp_path / "train.bin", val_path=str(tmp_path / "val.bin"))
    assert (len(result.train), len(result.val)) == (50, 9)
    message = refusal(tmp_path / "train.bin", val_path=str(tmp_path / "val.bin"), val_fraction=0.5)
    assert "val_fraction has no effect beside data.val_path" in message


@pytest.mark.parametrize("magic,version,dtype", [(20240520, 1, np.uint16), (20240801, 7, np.uint32)])
def test_llmc(tmp_path, magic, version, dtype):
    tokens = [50256, *range(100)]
    result = prepared(llmc(tmp_path / "t.bin", tokens, magic, version, dtype), val_fraction=0.02)
    assert result.train.tokens.tolist() + result.val.tokens.tolist() == tokens


def test_shards_are_joined_in_order(tmp_path):
    for name, tokens in (("s_2.bin", [3, 4, 5]), ("s_1.bin", [1, 2]), ("s_3.bin", range(6, 200))):
        llmc(tmp_path / name, list(tokens))
    for path in (tmp_path, tmp_path / "s_*.bin"):
        assert prepared(path).train.tokens[:8].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_megatron_pair_keeps_documents(tmp_path):
    write_store(tmp_path / "m", [[[1, 2, 3]], [[4, 5]], [range(100)]], np.dtype("<u2"), {})
    result = prepared(tmp_path / "m.bin", mask_documents=True, val_fraction=0.5)
    assert result.train.documents.tolist() == [0, 3, 5, 53] and result.mask_documents


def test_separator(tmp_path):
    tokens = [7, 8, 50256, 9, 50256, *range(95)]
    nano = prepared(nanogpt(tmp_path / "a.bin", tokens), separator=50256)
    assert nano.train.documents.tolist()[:3] == [0, 3, 5]  # nanoGPT puts it after a document
    llm = prepared(llmc(tmp_path / "b.bin", tokens), separator=50256)
    assert llm.train.documents.tolist()[:3] == [0, 2, 4]  # llm.c puts it before one


def test_uint32(tmp_path):
    path = nanogpt(tmp_path / "a.bin", range(1, 201), np.uint32)
    assert "type data.dtype=uint32" in refusal(path)
    assert prepared(path, dtype="uint32").train.tokens[:3].tolist() == [1, 2, 3]
    assert prepared(path, dtype="uint16").train.tokens[:3].tolist() == [1, 0, 2]


@pytest.mark.parametrize(
    "write,words",
    [
        (lambda p: p.write_bytes(b""), "is empty"),
        (lambda p: p.write_bytes(b"abc"), "has 3 bytes, not a multiple of 2"),
        (lambda p: llmc(p, [1] * 9, count=10), "has 1042 bytes, its header promises 1044"),
        (lambda p: llmc(p, [1] * 9, version=3), "version 3; known is version 1"),
        (lambda p: llmc(p, [], count=0), "promises 1024"),
        (lambda p: llmc(p, [1] * 9, count=-1), "promises 1022"),
        (lambda p: p.write_bytes(np.array([20240520, 1, 5], np.int32).tobytes()), "magic 20240520"),
    ],
    ids=range(7),
)
def test_damaged_files(tmp_path, write, words):
    write(tmp_path / "t.bin")
    assert words in refusal(tmp_path / "t.bin")


def test_a_truncated_megatron_pair(tmp_path):
    write_store(tmp_path / "m", [[[1, 2, 3]]], np.dtype("<u2"), {})
    (tmp_path / "m.bin").write_bytes(b"\1\0\2\0")
    assert "has 4 bytes, its index counts 6" in refusal(tmp_path / "m.bin")


def test_ids_beyond_the_vocabulary(tmp_path):
    path = nanogpt(tmp_path / "t.bin", [*range(40), 299, *range(40), 300, 1, 2])
    message = refusal(path, vocab_size=200)
    assert "token id 299 at position 40" in message and "model.vocab_size=200" in message
    assert "largest id is 300" in message and "type model.vocab_size=301" in message
    assert "model.vocab_size=301" in refusal(path, vocab_size=None)
    assert "token id 299 at position 40 is beyond the size of tokenizer byte=257" in refusal(
        path, vocab_size=400, tokenizer="byte"
    )
    assert prepared(path, vocab_size=301).vocab_size == 301
    nanogpt(tmp_path / "t.bin", range(150))  # another file under the same name: the remembered maximum is not its
    assert prepared(path, vocab_size=150).val.max_token() == 149


def test_no_text_to_train_on(tmp_path):
    path = nanogpt(tmp_path / "t.bin", range(50))
    for tokenizer in ("bpe", "char"):
        assert "holds tokens, not text" in refusal(path, tokenizer=tokenizer)


def test_options(tmp_path):
    path = nanogpt(tmp_path / "t.bin", range(50))
    assert "data.dtype='int8'" in refusal(path, dtype="int8")
    assert "data.separator" in refusal(path, separator=-1)
    assert "uint32" not in BinCorpus(str(path)).fingerprint()
    assert "data.path is missing" in refusal("")
    assert "the header of" in refusal(llmc(tmp_path / "h.bin", [1] * 40), dtype="uint32")
    assert "there is no" in refusal(tmp_path / "nope.bin")
