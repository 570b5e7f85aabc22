"""Hugging Face transformers, through our own export: whatever that can write."""

from __future__ import annotations

import tempfile
from pathlib import Path

from peers import Peer, decayed_by_axes

OVERRIDES: list[str] = []


def load(ours, config, given: str) -> Peer:
    import transformers

    from gptframe.errors import UserError
    from gptframe.interop.folders import write_folder_files
    from gptframe.interop.rundir import Run

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as place:
        try:
            write_folder_files(
                Run(Path(place), config, ours.state_dict(), 0, None, []), Path(place), None, None, 10**12
            )
        except UserError as error:
            raise ValueError(str(error)) from None
        model = transformers.AutoModelForCausalLM.from_pretrained(place)

    def loss(model, ids, targets):
        # its own shift: the target of the last token, which it does not have, is -100 with us
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    return Peer(transformers.__version__, model.train(), loss, decayed_by_axes(model, 0.1))
