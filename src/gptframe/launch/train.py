"""The train command as a file: what Lightning starts again, once for each further device of a run.

It has a folder of its own because Python puts a script's folder first on its path, where modules of ours would hide
the standard library's.
"""

import sys

from gptframe.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
