"""Decode speed: gptframe against transformers' generate on the same weights, dtype and threads, interleaved.

    python benchmarks/generate.py                      # the mini model and a small GPT-2, on the CPU
    python benchmarks/generate.py --model gpt2 --threads 2 --new-tokens 128 --rounds 7

The weights are random and the model is exported from gptframe, so that both hold the same numbers; both decode greedily
from the same prompt, and their tokens are compared. Rounds alternate between the two; the ratio is the median over
rounds of the ratio within a round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

# name: overrides. What the two differ in is the work around the matrices. A model whose weights fit no cache waits for
# them, whoever asks: there the ratio of one sequence tends to 1, and that of a batch shows what the cache costs.
MODELS = {
    "mini": ["model=mini", "position=rope_half", "model.vocab_size=64", "model.context_length=1024"],
    "gpt2_12m": ["model=gpt2", "model.d_model=384", "model.n_layers=6", "model.n_heads=6", "model.vocab_size=8192"],
    "llama_15m": [
        "model=llama_160m", "model.d_model=384", "model.n_layers=6", "model.n_heads=6", "model.vocab_size=8192",
        "attention=gqa", "model.context_length=1024",
    ],
    "gpt2": ["model=gpt2"],
    "llama_160m": ["model=llama_160m"],
}  # fmt: skip


def build(name: str, folder: Path, dtype: str):
    """Our model and transformers' with the same weights."""
    import torch
    import transformers

    from gptframe.compose import compose_config
    from gptframe.config import Config
    from gptframe.generate import lay_out
    from gptframe.interop.folders import write_folder_files
    from gptframe.interop.rundir import Run
    from gptframe.model import build_model

    config = Config.from_dict(compose_config(MODELS[name]))
    ours = build_model(config.model, seed=1).to(getattr(torch, dtype)).eval()
    with torch.no_grad():  # logits that are far apart, so that rounding cannot choose another token
        ours.token_embedding.weight.mul_(5)
        ours.head_weight.mul_(3 if ours.head is not None else 1)
    folder.mkdir()
    write_folder_files(Run(folder, config, ours.state_dict(), 0, None, []), folder, None, None, 10**12)
    lay_out(ours)  # as gptframe.load does
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    return ours, theirs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=MODELS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    import torch
    import transformers

    from gptframe.generate import Sampling, generate_batch

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(arguments.threads)
    a = arguments
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {a.threads} threads, {a.dtype}")
    print(f"batch {a.batch}, {a.prompt_tokens} + {a.new_tokens} tokens, {a.rounds} rounds")
    with tempfile.TemporaryDirectory() as place:
        for name in arguments.model or list(MODELS)[:2]:
            ours, theirs = build(name, Path(place) / name, arguments.dtype)
            generator = torch.Generator().manual_seed(0)
            shape = (arguments.batch, arguments.prompt_tokens)
            ids = torch.randint(0, ours.cfg.vocab_size, shape, generator=generator)
            options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}

            def run_ours(n: int, ours=ours, ids=ids) -> list[list[int]]:
                return [new.ids for new in generate_batch(ours, ids.tolist(), n, Sampling(temperature=0))]

            def run_theirs(n: int, theirs=theirs, ids=ids, options=options) -> list[list[int]]:
                with torch.inference_mode():
                    out = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, **options)
                return out[:, ids.shape[1] :].tolist()

            same = run_ours(arguments.new_tokens) == run_theirs(arguments.new_tokens)  # and a warm-up
            rates: list[tuple[float, float]] = []
            for i in range(arguments.rounds):
                seconds = {}
                for which, function in [("ours", run_ours), ("theirs", run_theirs)][:: 1 if i % 2 else -1]:
                    began = time.perf_counter()
                    function(arguments.new_tokens)
                    seconds[which] = time.perf_counter() - began
                tokens = arguments.batch * arguments.new_tokens
                rates.append((tokens / seconds["ours"], tokens / seconds["theirs"]))
            ratios = sorted(a / b for a, b in rates)
            n = sum(p.numel() for p in ours.parameters())
            print(f"{name:<11} {n / 1e6:7.1f}M  gptframe {statistics.median(a for a, _ in rates):7.1f} tokens/s  "
                  f"transformers {statistics.median(b for _, b in rates):7.1f}  ratio {statistics.median(ratios):.2f} "
                  f"({ratios[0]:.2f} to {ratios[-1]:.2f})  {'same tokens' if same else 'TOKENS DIFFER'}")  # fmt: skip


if __name__ == "__main__":
    main()
