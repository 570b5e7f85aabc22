"""Train a GPT: `python train.py --help` says how."""

import sys

from gptframe.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
