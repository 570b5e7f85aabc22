"""The built-in corpora: importing this module registers them."""

from gptframe.data.binary import BinCorpus
from gptframe.data.documents import Corpus
from gptframe.data.english import EnglishCorpus
from gptframe.data.hub import HuggingFaceCorpus
from gptframe.data.text import TextCorpus
from gptframe.data.verbs import Slot, VerbsCorpus, VerbsFullCorpus

__all__ = [
    "BinCorpus",
    "Corpus",
    "EnglishCorpus",
    "HuggingFaceCorpus",
    "Slot",
    "TextCorpus",
    "VerbsCorpus",
    "VerbsFullCorpus",
]
