"""The user's own text: what is found, how it is split, and what bad input is answered."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptframe.data.documents import cut_tail, is_val
from gptframe.data.text import TextCorpus
from gptframe.errors import UserError


def put(path, content="some words\n" * 20):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def texts(path, **options):
    corpus = TextCorpus(str(path), **options)
    return "".join(a + b for a, b in zip(corpus.documents("train"), corpus.documents("val"), strict=True))


def refusal(path, **options):
    with pytest.raises(UserError) as caught:
        TextCorpus(path if path is None or isinstance(path, list) else str(path), **options)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@given(st.text(), st.floats(0.01, 0.99))
def test_split_loses_nothing_and_keeps_the_fraction(text, fraction):
    train, val = cut_tail(text, fraction)
    assert train + val == text
    wanted = round(len(text) * fraction)
    assert wanted / 2 - 1 <= len(val) <= wanted


def test_split_is_at_a_line_end():
    assert cut_tail("aaaa\nbbbb\ncccc\ndddd\n", 0.5) == ("aaaa\nbbbb\n", "cccc\ndddd\n")
    assert cut_tail("one two\nthree four\nfive six seven eight nine ten\n", 0.8)[0].endswith("\n")


@given(st.integers(1, 500), st.floats(0.01, 0.5))
def test_documents_for_validation_are_evenly_spaced(n, fraction):
    chosen = [i for i in range(n) if is_val(i, fraction)]
    assert len(chosen) == int(n * fraction)
    gaps = [b - a for a, b in zip(chosen, chosen[1:], strict=False)]
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert 0 not in chosen


def test_file(tmp_path):
    assert texts(put(tmp_path / "a.txt")) == "some words\n" * 20


def test_byte_order_mark_and_line_ends(tmp_path):
    assert texts(put(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\ntwo\rthree\n" * 1 + b"x" * 40)).startswith(
        "one\ntwo\nthree\n"
    )


def test_folder_takes_text_files_only(tmp_path):
    put(tmp_path / "b.md", "B" * 30)
    put(tmp_path / "sub" / "a.txt", "A" * 30)
    put(tmp_path / "image.png", b"\x89PNG\xff")
    put(tmp_path / ".hidden.txt", "H" * 30)
    put(tmp_path / ".git" / "x.txt", "G" * 30)
    put(tmp_path / "empty.txt", "")
    corpus = TextCorpus(str(tmp_path))
    assert [d[0] for d in corpus.documents("train")] == ["B", "A"]
    assert "skipped 1 empty files" in corpus.notes[0] and "empty.txt" in corpus.notes[0]


def test_loops_of_links_end_and_a_file_counts_once(tmp_path):
    put(tmp_path / "data" / "a.txt")
    os.symlink(tmp_path / "data", tmp_path / "data" / "loop")
    os.symlink(tmp_path / "data", tmp_path / "data" / "loop2")
    os.symlink(tmp_path / "data" / "a.txt", tmp_path / "data" / "again.txt")
    os.symlink(tmp_path / "nowhere", tmp_path / "data" / "broken.txt")
    assert len(list(TextCorpus(str(tmp_path / "data")).documents("train"))) == 1
    assert len(list(TextCorpus(str(tmp_path / "data" / "**" / "*.txt")).documents("train"))) == 1


def test_glob(tmp_path):
    put(tmp_path / "one.py", "1" * 30)
    put(tmp_path / "deep" / "er" / "two.py", "2" * 30)
    corpus = TextCorpus(f"{tmp_path}/**/*.py")
    assert sorted(d[0] for d in corpus.documents("train")) == ["1", "2"]
    assert len(list(TextCorpus(f"{tmp_path}/deep/**").documents("train"))) == 1
    assert "no file matches" in refusal(f"{tmp_path}/*.nope")


def test_a_name_that_looks_like_a_pattern_is_a_name(tmp_path):
    put(tmp_path / "[draft] a*.txt", "D" * 30)
    put(tmp_path / "d.txt", "other" * 9)
    assert texts(tmp_path / "[draft] a*.txt") == "D" * 30


def test_a_number_is_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "2024" / "a.txt")
    assert len(list(TextCorpus(2024).documents("train"))) == 1


def test_list_of_paths(tmp_path):
    put(tmp_path / "a.txt", "a" * 30), put(tmp_path / "b.txt", "b" * 30)
    corpus = TextCorpus([str(tmp_path / "b.txt"), str(tmp_path / "a.txt")])
    assert [d[0] for d in corpus.documents("train")] == ["b", "a"]


def test_missing(tmp_path):
    assert "data.path is missing" in refusal(None) and "data.path=my.txt" in refusal("")
    assert f"there is no {tmp_path}/my.txt" in refusal(tmp_path / "my.txt")
    assert "there is no" in refusal("a\0b") or "null" in refusal("a\0b")
    assert "x" * 20 in refusal("x" * 5000)


def test_empty(tmp_path):
    assert "holds no text" in refusal(put(tmp_path / "a.txt", ""))
    assert "holds no text" in refusal(put(tmp_path / "b.txt", " \n\t\n"))
    (tmp_path / "folder").mkdir()
    message = refusal(tmp_path / "folder")
    assert "holds no text file" in message and "**/*.py" in message


@pytest.mark.parametrize(
    "content,offset",
    [
        (b"abc\xff", 3),
        (b"\xef\xbb\xbfabc\xc3(", 6),
        ("é".encode() * 5 + b"\xed\xa0\x80", 10),
        (b"\xff\xfea\0b\0", 0),
        (b"caf\xe9", 3),
    ],
)
def test_not_utf8_names_the_offset(tmp_path, content, offset):
    message = refusal(put(tmp_path / "a.txt", content))
    assert "not UTF-8" in message and f"offset {offset}" in message and "iconv" in message


def test_binary(tmp_path):
    assert "NUL byte at offset 5" in refusal(put(tmp_path / "a.txt", b"\xef\xbb\xbfab\0c"))


def test_special_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "neither a file nor a folder" in refusal(tmp_path / "pipe")
    if os.geteuid():
        closed = put(tmp_path / "closed.txt")
        closed.chmod(0)
        assert "Permission denied" in refusal(closed)


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 1.5, float("nan"), "half", True, None])
def test_bad_fraction(tmp_path, fraction):
    assert "data.val_fraction" in refusal(put(tmp_path / "a.txt"), val_fraction=fraction)


def test_fingerprint_follows_content_and_options(tmp_path):
    path = put(tmp_path / "a.txt")
    first = TextCorpus(str(path)).fingerprint()
    assert TextCorpus(str(put(tmp_path / "moved.txt"))).fingerprint() == first
    assert TextCorpus(str(path), val_fraction=0.2).fingerprint() != first
    put(path, "some words\n" * 19 + "some wordz\n")
    assert TextCorpus(str(path)).fingerprint() != first


def test_english_is_extracted_without_import(tmp_path, monkeypatch):
    from gptframe.data import english

    put(tmp_path / "pydoc_data" / "topics.py", "# a comment\ntopics = {'a': 'Topic one\\n', 'b': r'''Topic two'''}\n")
    put(
        tmp_path / "mod.py",
        "'''Module.'''\nraise SystemExit\nclass A:\n    '''Class.'''\n    def f(self):\n"
        "        '''\n        Method\n          indented.\n        '''\nasync def g():\n    'G.'\n",
    )
    put(tmp_path / "broken.py", "def (:\n")
    put(tmp_path / "latin.py", b"# coding: latin-1\n'''\xe9'''\n")
    put(tmp_path / "surrogate.py", "'''A \\ud800 here.'''\n")
    put(tmp_path / "test" / "t.py", "'''Not this.'''")
    put(tmp_path / "site-packages" / "s.py", "'''Nor this.'''")
    assert english.extract(tmp_path) == [
        "Topic one\n", "Topic two\n", "Module.\n\nClass.\n\nMethod\n  indented.\n\nG.\n", "A ? here.\n"
    ]  # fmt: skip


def test_english_of_this_python():
    from gptframe.data.english import EnglishCorpus

    corpus = EnglishCorpus()
    train, val = list(corpus.documents("train")), list(corpus.documents("val"))
    assert sum(map(len, train)) > 1_000_000 and len(val) >= 10
    assert 0.01 < len(val) / (len(train) + len(val)) < 0.06
    assert "assignment" in " ".join(train)
    assert EnglishCorpus().fingerprint() == corpus.fingerprint()  # the second one from the cache
    assert EnglishCorpus(val_fraction=0.1).fingerprint() != corpus.fingerprint()
