"""What `gptframe trace` prints, writes and refuses; its page in a real headless Chromium."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess

import mini_by_hand
import pytest
import torch

from gptframe import cli
from gptframe.config import Config, ModelConfig
from gptframe.data.tokenizer import ByteTokenizer, ClosedTokenizer, Source
from gptframe.inspect import trace_report
from gptframe.inspect.page import write_page
from gptframe.inspect.trace import trace
from gptframe.model import build_model
from gptframe.training import checkpoint
from gptframe.training.directory import write_yaml

CHROMIUM = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["trace", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def squeezed(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_canonical_example_and_its_tokens(capsys) -> None:
    code, out, err = run(capsys, "--text", mini_by_hand.TEXT)
    assert code == 0 and err == "" and "\x1b" not in out
    lines = squeezed(out)
    assert "text I work , you work , he works" in lines
    assert "id " + " ".join(map(str, mini_by_hand.IDS)) in lines
    values = mini_by_hand.forward(mini_by_hand.weights())
    delta = values["blocks.1.mlp.delta"]
    row = next(line for line in lines if line.startswith("blocks.1.mlp.delta B T D 1 8 64"))
    numbers = [float(n) for n in row.split("64 ", 1)[1].replace("...", "").split()]
    expected = [delta.mean(), delta.std(), (delta**2).sum() ** 0.5, *delta[7, :5]]
    assert numbers == pytest.approx(expected, abs=1.1e-4)
    order = [
        line.split()[0] for line in lines if line.startswith(("blocks.1.attention.", "blocks.1.mlp.")) and "B" in line
    ]
    assert order[: len(order) // 2 * 2 - 1][:3] == [
        "blocks.1.attention.pre",
        "blocks.1.attention.q",
        "blocks.1.attention.k",
    ]


def test_a_layer_value_by_value(capsys) -> None:
    out = squeezed(run(capsys, "--token", "3", "--layer", "0")[1])
    pattern = mini_by_hand.forward(mini_by_hand.weights())["blocks.0.attention.pattern"]
    start = next(i for i, line in enumerate(out) if line.startswith("blocks.0.attention.pattern softmax"))
    head_2 = next(line for line in out[start:] if line.startswith("2 "))
    assert [float(x) for x in head_2.split()[1:]] == pytest.approx(list(pattern[2, 3]), abs=1.1e-4)
    assert not any(line.startswith("blocks.1.attention.pre") for line in out)


def test_ids_need_no_tokenizer_and_names_are_listed(capsys) -> None:
    code, out, _ = run(
        capsys, "data=bin", "data.path=/nowhere", "tokenizer=none", "model.vocab_size=9", "--ids", "[1, 2,8]"
    )
    assert code == 0 and "text #1 #2 #8" in squeezed(out)
    assert "blocks.1.attention.pattern" in run(capsys, "--names")[1]
    shown = run(capsys, "--show", "blocks.*.attention.mask")[1]
    assert shown.count("which keys a query may look at") == 2 and "False" in shown


def test_json_is_all_that_json_prints(capsys, tmp_path) -> None:
    arguments = [
        "--json",
        "--full",
        str(tmp_path / "a.safetensors"),
        "--html",
        str(tmp_path / "a.html"),
        "position=alibi",
    ]
    code, out, _ = run(capsys, *arguments)
    found = json.loads(out)
    assert code == 0 and found["tokens"] == mini_by_hand.TEXT.split()
    assert len(found["values"]["blocks.1.attention.pattern"]["at_token"]) == 4


def test_all_values_in_a_safetensors_file(capsys, tmp_path) -> None:
    library = pytest.importorskip("safetensors.torch")
    file = tmp_path / "deep" / "mini.safetensors"
    assert run(capsys, "--full", str(file), "model.attention.window=3")[0] == 0
    found = library.load_file(file)
    with torch.no_grad(), trace(build_model(ModelConfig(sublayers={"attention": {"window": 3}, "mlp": {}}))) as t:
        t.model(torch.tensor([mini_by_hand.IDS]))
    assert found.keys() == t.keys()
    assert all(torch.equal(found[name], t[name]) for name in t)


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["--text", "I wrok , you flies"], ["'wrok'", "'flies'", "not in the vocabulary", "'work'"]),
        (["--text", "  "], ["--text is empty"]),
        (["--ids", "1,64"], ["token 1", "64", "0 to 63"]),
        (["--ids", "-1"], ["-1"]),
        (["--ids", "a,b"], ["'a'"]),
        (["--ids", ""], ["--ids is empty"]),
        (["--text", "I work , " * 11], ["33 tokens", "context of 32", "model.context_length=33"]),
        (["--token", "8"], ["--token 8", "0 to 7"]),
        (["--layer", "2"], ["--layer 2", "0 to 1"]),
        (["--show", "blocks.1.attention.patern"], ["blocks.1.attention.pattern"]),
        (["tokenizer=none", "data=bin", "data.path=x.bin", "model.vocab_size=9"], ["x.bin"]),
        (["model=llama2_7b", "model.d_model=131072", "tokenizer=byte"], ["parameters need", "available"]),
        (["/no/such/run"], ["/no/such/run"]),
        (["--html", "/"], ["--html / is a folder"]),
    ],
)
def test_what_is_wrong_is_said_in_a_line(capsys, arguments: list[str], words: list[str]) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") <= 2, err
    assert all(word in err for word in words), err


def test_the_blocks_of_a_deep_model_are_left_out_until_asked_for(capsys) -> None:
    few = run(capsys, "model.n_layers=7")[1]
    assert "5 blocks between are left out" in few and "blocks.6.mlp.up" in few and "blocks.3.mlp.up" not in few
    assert "blocks.3.mlp.up" in run(capsys, "model.n_layers=7", "--all")[1]


def test_models_without_attention_and_with_parallel_blocks(capsys) -> None:
    code, out, _ = run(capsys, "model.block=[mlp]", "position=learned", "norm_placement=keel")
    assert code == 0 and "attention" not in out and "blocks.1.mlp.sum" in out
    code, out, _ = run(capsys, "model.topology=parallel", "norm_placement=peri")
    assert code == 0 and "blocks.1.stream_after" in out and "embedding_norm" in out


# A run directory.


@pytest.fixture
def run_directory(tmp_path):
    """A run with a tokenizer of three words beside the specials, and weights that are not the initialisation's."""
    config = Config.from_dict({"model": {"vocab_size": 7, "context_length": 6}, "seed": 3})
    folder = tmp_path / "run"
    folder.mkdir()
    write_yaml(folder / "config.yaml", config.to_dict())
    words = ["<pad>", "<bos>", "<eos>", "<unk>", "one", "two", "three"]
    tokenizer = ClosedTokenizer(Source(), words)
    tokenizer.name = "closed"
    tokenizer.save(folder / "tokenizer")
    model = build_model(config.model, seed=99)
    return folder, config, model


def test_a_run_directory_brings_its_weights_and_words(capsys, run_directory) -> None:
    folder, config, model = run_directory
    state = {"state_dict": {f"model.{k}": v for k, v in model.state_dict().items()}}
    checkpoint.save(
        {**state, checkpoint.META: {"step": 5, "model": config.to_dict()["model"]}},
        checkpoint.checkpoint_path(folder, 5),
    )
    code, out, err = run(capsys, str(folder), "--text", "one two three", "--json")
    assert code == 0, err
    with torch.no_grad():
        expected = model(torch.tensor([[4, 5, 6]]))[0, -1]
    assert json.loads(out)["values"]["logits"]["at_token"] == pytest.approx(expected.tolist(), abs=1e-6)
    code, _, err = run(capsys, str(folder), "--text", "one four")
    assert code == 2 and "'four'" in err
    code, out, _ = run(capsys, str(folder), "--text", "one", "--bos", "--json")
    assert json.loads(out)["ids"] == [1, 4]


def test_a_run_directory_without_a_checkpoint(capsys, run_directory) -> None:
    code, out, err = run(capsys, str(run_directory[0]), "--text", "one")
    assert code == 2 and out == "" and "no checkpoint" in err and err.count("\n") == 1
    code, _, err = run(capsys, str(run_directory[0]), "model.d_model=3")
    assert code == 2 and "either a run directory or overrides" in err


# The page.


def page_of(tmp_path, labels=None, **options):
    model = build_model(ModelConfig(**options)).eval()
    ids = mini_by_hand.IDS
    with torch.no_grad(), trace(model) as t:
        model(torch.tensor([ids]))
    labels = labels or mini_by_hand.TEXT.split()
    vocabulary = [f"#{i}" for i in range(64)]
    for i, label in zip(ids, labels, strict=True):
        vocabulary[i] = label
    write_page(t, labels, vocabulary, "a test", tmp_path / "page.html")
    return t, tmp_path / "page.html"


def test_the_page_is_self_contained_and_survives_hostile_tokens(tmp_path) -> None:
    labels = ["</script><b>", "<!--", "&amp;", '"', "\\", "\u2028", "\n", "works"]
    _, page = page_of(tmp_path, labels)
    text = page.read_text(encoding="utf-8")
    assert text.count("</script>") == 2 and "<!--" not in text
    assert set(re.findall(r"https?://[^\"' )]+", text)) <= {"http://www.w3.org/2000/svg"}
    data = json.loads(text.split('type="application/json">')[1].split("</script>")[0])
    assert [t["text"] for t in data["tokens"]] == labels


PROBE = """<script>
const seen = {};
window.addEventListener("error", e => seen.error = e.message);
function over(e, x, y) {
  const box = e.getBoundingClientRect();
  e.dispatchEvent(new MouseEvent("mousemove", {clientX: box.left + x * box.width, clientY: box.top + y * box.height}));
  return document.getElementById("tip").style.display === "block" ? document.getElementById("tip").textContent : "";
}
seen.ready = document.body.dataset.ready;
seen.maps = document.querySelectorAll("[data-map]").length;
const map = document.querySelector('[data-map="blocks.1.attention.pattern.2"]');
if (map) seen.pattern = over(map, 6.5 / 8, 7.5 / 8);
document.querySelectorAll(".chip")[3].click();
seen.chosen = document.querySelector(".chip[aria-pressed=true]").textContent;
seen.expected = document.getElementById("expected-of").textContent;
seen.parts = [...document.querySelectorAll("#diagram [data-name]")].map(e => e.dataset.name);
const part = document.querySelector('#diagram [data-name="blocks.0.mlp.delta"] rect');
if (part) seen.delta = over(part, 0.5, 0.5);
seen.norm = over(document.querySelector("#norms circle"), 0.5, 0.5);
seen.bars = document.querySelectorAll("#deltas rect").length;
seen.lens = document.querySelectorAll("#lens td").length;
seen.top = over(document.querySelector("#lens td"), 0.5, 0.5);
const pick = document.getElementById("pick");
if ([...pick.options].some(o => o.value === "blocks.0.attention.q")) pick.value = "blocks.0.attention.q";
pick.onchange();
const grid = document.querySelector("#value canvas");
if (grid) seen.query = over(grid, 0.5 / 16, 3.5 / 8);
seen.wide = document.documentElement.scrollWidth <= innerWidth;
document.body.dataset.seen = JSON.stringify(seen);
</script></body>"""


def in_chromium(page) -> dict:
    """Open the page with a script that hovers and clicks, and return what it saw."""
    probed = page.with_name("probed.html")
    probed.write_text(page.read_text(encoding="utf-8").replace("</body>", PROBE), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={page.parent / 'profile'}"]
    flags += ["--window-size=1280,900", "--dump-dom"]
    done = subprocess.run([CHROMIUM, *flags, probed.as_uri()], capture_output=True, text=True, timeout=120)
    found = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert found, done.stderr[-2000:]
    seen = json.loads(html.unescape(found[1]))
    assert "error" not in seen and seen["ready"] == "yes" and seen["wide"], seen
    return seen


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@needs_chromium
def test_the_page_shows_the_numbers_of_the_trace_in_a_browser(tmp_path) -> None:
    t, page = page_of(tmp_path)
    seen = in_chromium(page)
    assert seen["maps"] == 8
    number = t["blocks.1.attention.pattern"][0, 2, 7, 6].item()
    assert seen["pattern"] == f"block 1, head 2\nworks (7) looks at he (6): {number:.4f}"
    assert seen["chosen"] == "you3" and seen["expected"] == "After: I work , you"
    assert {"token_embedding", "blocks.0.attention.pre", "blocks.1.mlp.delta", "final_norm", "logits"} <= set(
        seen["parts"]
    )
    delta = t["blocks.0.mlp.delta"][0, 3]
    assert f"norm {delta.norm().item():.4f}" in seen["delta"] and f"{delta[0].item():.4f}" in seen["delta"]
    assert f"> you: {t['blocks.0.stream_before'][0, 3].norm().item():.4f}" in seen["norm"]
    assert seen["bars"] == 4 and seen["lens"] == 5 * 8
    assert seen["top"].startswith("embedding, after I\nI  ")
    assert seen["query"].endswith(f"token 3, you, head 0, index 0: {t['blocks.0.attention.q'][0, 0, 3, 0].item():.4f}")


@needs_chromium
@pytest.mark.parametrize(
    "options,maps",
    [
        ({"topology": "parallel", "norm_placement": {"name": "peri"}, "position": {"name": "learned"}}, 8),
        ({"block": ["mlp"], "norm_placement": {"name": "keel"}, "position": {"name": "sinusoidal"}}, 0),
        ({"n_layers": 12, "block": ["attention", "mlp", "mlp"], "norm_placement": {"name": "sandwich"}}, 48),
    ],
)
def test_the_page_of_other_architectures(tmp_path, options: dict, maps: int) -> None:
    assert in_chromium(page_of(tmp_path, **options)[1])["maps"] == maps


def test_labels_of_bytes_and_spaces() -> None:
    from gptframe.inspect.source import token_labels

    assert token_labels(ByteTokenizer(Source()), [72, 32, 195, 10]) == ["H", " ", "#195", "\\n"]


def test_a_number_format_that_keeps_its_columns() -> None:
    lines = trace_report._lines(torch.arange(20) / 3)
    assert len(lines) == 2 and lines[0].split()[1] == "0.3333"
