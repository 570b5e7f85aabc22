"""Generated sentences of English and Spanish verb forms: a closed vocabulary of 64 entries, or all twenty verbs.

The closed corpus asks whether a model learns a rule. Seven of its 36 combinations of verb, tense and person are held
out in both languages: in the training sentences their pronoun never stands before their form. Every word form occurs
in training all the same (English `ate` with `you`, `eats` after `who`, Spanish `comí` in sentences without a pronoun),
and every sentence with a held-out combination belongs to the validation set.

Where a verb form cannot be known from what precedes it, a model would learn that the held-out one never comes. So
sentences about a verb with held-out combinations begin with its infinitive, as an entry of a dictionary would:

    I work , you work , he works                      drill
    eat , today I eat , yesterday you ate             change of tense
    comer , hoy como , ayer comí                      the same without pronouns
    eat = comer , today he eats = él come             parallel pair
    eat = comer , who ate ? = ¿ quién comió ?         parallel question
    eat , who eats ? I eat                            question and answer
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gptframe.data import grammar
from gptframe.data.cache import fingerprint
from gptframe.data.documents import Corpus, check_split
from gptframe.registry import register

Cell = tuple[str, str, int]  # verb (English infinitive), tense, person (index into grammar.PERSONS)

VERBS = ("work", "eat", "write", "go")
TENSES = ("present", "past", "future")
HELD_OUT: frozenset[Cell] = frozenset(
    {
        ("eat", "present", 2),
        ("write", "present", 1),  # he eats, you write; él come, tú escribes
        ("eat", "past", 0),
        ("work", "past", 1),
        ("go", "past", 2),  # I ate, you worked, he went; yo comí, ...
        ("work", "future", 0),
        ("write", "future", 2),  # I will work, he will write; yo voy a trabajar, ...
    }
)
_WHEN = {"en": ("today", "yesterday", "tomorrow"), "es": ("hoy", "ayer", "mañana")}
_PRONOUNS = {"en": grammar.PERSONS, "es": grammar.SPANISH_PERSONS}
_ENOUGH = 12_000  # training sentences, about 160,000 tokens
_VALIDATION = 600
SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>")


@dataclass(frozen=True)
class Slot:
    """A verb phrase that a sentence asks for: the words before it, and the words that are right."""

    prompt: tuple[str, ...]
    answer: tuple[str, ...]
    verb: str
    tense: str
    person: str
    language: str
    regular: bool


@dataclass(frozen=True)
class _Phrase:
    """A verb phrase inside a sentence. asked: what precedes determines it; subject: a pronoun stands before it."""

    language: str
    cell: Cell
    asked: bool
    subject: bool


Sentence = list[Any]  # words (str) and _Phrase


def phrase(language: str, cell: Cell) -> list[str]:
    """The words of a verb phrase in the closed corpus; its Spanish future is `ir a` with the infinitive."""
    verb, tense, person = grammar.BY_NAME[cell[0]], cell[1], cell[2]
    if language == "en":
        return grammar.english(verb, tense, person)
    return grammar.spanish(verb, "going_to" if tense == "future" else tense, person)


def words_of(sentence: Sentence) -> list[str]:
    return [w for part in sentence for w in ([part] if isinstance(part, str) else phrase(part.language, part.cell))]


class _Writer:
    """Draws sentences. Only random() of Python's generator is the same in every version, so all draws come from it."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def below(self, n: int) -> int:
        return int(self._random() * n)

    def one(self, items: Sequence[Any]) -> Any:
        return items[self.below(len(items))]

    def some(self, items: Sequence[Any], n: int) -> list[Any]:
        rest = list(items)
        return [rest.pop(self.below(len(rest))) for _ in range(n)]

    def sentence(self) -> Sentence:
        kind = self._random()
        if kind < 0.15:
            return self.drill()
        if kind < 0.42:
            return self.tenses()
        if kind < 0.55:
            return self.without_pronouns()
        if kind < 0.72:
            return self.pair()
        if kind < 0.86:
            return self.question_pair()
        return self.answers()

    def _verb(self) -> tuple[str, str, str, list[Cell]]:
        language, verb = self.one(("en", "es")), self.one(VERBS)
        return language, "es" if language == "en" else "en", verb, [(verb, t, p) for t in TENSES for p in range(3)]

    def drill(self) -> Sentence:
        # The first form is a free choice among verbs, so only rows without held-out combinations are drilled.
        rows = [(v, t) for v in VERBS for t in TENSES if not any((v, t, p) in HELD_OUT for p in range(3))]
        language, (verb, tense) = self.one(("en", "es")), self.one(rows)
        persons = self.some(range(3), 2 + self.below(2))
        return _join(_clause(language, (verb, tense, p), i > 0, when=False) for i, p in enumerate(persons))

    def tenses(self) -> Sentence:
        language, _, verb, cells = self._verb()
        clauses = [_clause(language, cell) for cell in self.some(cells, 2 + self.below(2))]
        return _join([[_infinitive(language, verb)], *clauses])

    def without_pronouns(self) -> Sentence:
        verb, person = self.one(VERBS), self.below(3)
        tenses = self.some(TENSES, 2 + self.below(2))
        clauses = [_clause("es", (verb, t, person), i > 0, subject=False) for i, t in enumerate(tenses)]
        return _join([[_infinitive("es", verb)], *clauses])

    def pair(self) -> Sentence:
        language, other, verb, cells = self._verb()
        when = self.below(2) == 0
        chosen = self.some(cells, 1 + self.below(2))
        pairs = [[*_clause(language, c), "=", *_clause(other, c, when=when)] for c in chosen]
        return _join([_header(language, other, verb), *pairs])

    def question_pair(self) -> Sentence:
        language, other, verb, _ = self._verb()
        tenses = self.some(TENSES, 1 + self.below(2))
        pairs = [[*_question(language, verb, t, False), "=", *_question(other, verb, t, True)] for t in tenses]
        return _join([_header(language, other, verb), *pairs])

    def answers(self) -> Sentence:
        language, _, verb, _ = self._verb()
        header = self._random() < 0.7
        tenses = self.some(TENSES, 1 + self.below(2)) if header else [self.one(TENSES)]
        parts = [
            [*_question(language, verb, t, False), *_clause(language, (verb, t, self.below(3)), when=False)]
            for t in tenses
        ]
        return _join([[_infinitive(language, verb)], *parts] if header else parts)


def _join(parts: Any) -> Sentence:
    sentence: Sentence = []
    for part in parts:
        sentence += [",", *part] if sentence else part
    return sentence


def _infinitive(language: str, verb: str) -> str:
    return verb if language == "en" else grammar.BY_NAME[verb].spanish


def _header(language: str, other: str, verb: str) -> Sentence:
    return [_infinitive(language, verb), "=", _infinitive(other, verb)]


def _clause(language: str, cell: Cell, asked: bool = True, *, when: bool = True, subject: bool = True) -> Sentence:
    clause: Sentence = [_WHEN[language][TENSES.index(cell[1])]] if when else []
    if subject:
        clause.append(_PRONOUNS[language][cell[2]])
    return [*clause, _Phrase(language, cell, asked, subject)]


def _question(language: str, verb: str, tense: str, asked: bool) -> Sentence:
    who = ["who"] if language == "en" else ["¿", "quién"]
    return [*who, _Phrase(language, (verb, tense, 2), asked, False), "?"]


def _is_held_out(sentence: Sentence) -> bool:
    return any(isinstance(part, _Phrase) and part.subject and part.cell in HELD_OUT for part in sentence)


@register("corpus", "verbs")
class VerbsCorpus(Corpus):
    """Four verbs (work, eat, write, go), three persons, three tenses, in sentences of 60 different words."""

    def __init__(self) -> None:
        self.notes = []
        writer = _Writer(0)
        self._sentences: dict[str, list[Sentence]] = {"train": [], "val": []}
        seen = set()
        while len(self._sentences["train"]) < _ENOUGH:
            sentence = writer.sentence()
            if not _is_held_out(sentence):
                self._sentences["train"].append(sentence)
            elif len(self._sentences["val"]) < _VALIDATION:
                text = " ".join(words_of(sentence))
                if text not in seen:
                    seen.add(text)
                    self._sentences["val"].append(sentence)
        self.words = (*SPECIALS, *sorted({w for s in self._sentences["train"] for w in words_of(s)}))

    def documents(self, split: str) -> Iterator[str]:
        return (" ".join(words_of(sentence)) for sentence in self._sentences[check_split(split)])

    def fingerprint(self) -> str:
        return f"verbs:{fingerprint([list(self.documents(split)) for split in ('train', 'val')])}"

    def slots(self, split: str = "val", limit: int | None = None) -> list[Slot]:
        """The verb phrases that a reader could know from what precedes them.

        "val": those of held-out combinations; "train": all of them, from as many sentences as validation has.
        """
        found: list[Slot] = []
        for sentence in self._sentences[check_split(split)][:_VALIDATION]:
            before: list[str] = []
            for part in sentence:
                if isinstance(part, str):
                    before.append(part)
                    continue
                verb, tense, person = part.cell
                answer = phrase(part.language, part.cell)
                if part.asked and (split == "train" or (part.subject and part.cell in HELD_OUT)):
                    form = "going_to" if part.language == "es" and tense == "future" else tense
                    regular = grammar.is_regular(grammar.BY_NAME[verb], part.language, form, person)
                    found.append(
                        Slot(tuple(before), tuple(answer), verb, tense, grammar.PERSONS[person], part.language, regular)
                    )
                before += answer
        return found[:limit]


_FULL_WHEN = {
    "en": ("every day", "yesterday", "this week", "tomorrow", "tonight", "with more time"),
    "es": ("todos los días", "ayer", "esta semana", "mañana", "esta noche", "con más tiempo"),
}
_FULL_ENOUGH = 24_000
_FULL_VALIDATION = 1200


def full_clause(language: str, verb: grammar.Verb, tense: str, person: int) -> str:
    """Subject and verb phrase: `they have gone`, `ellos han ido`, `a ellos les ha gustado`."""
    if language == "en":
        return " ".join([grammar.PERSONS[person], *grammar.english(verb, tense, person)])
    subject = grammar.SPANISH_PERSONS[person]
    if verb.spanish == "gustar":
        subject = ("a mí", "a ti", "a él", "a nosotros", "a vosotros", "a ellos")[person]
    return " ".join([subject, *grammar.spanish(verb, tense, person)])


def full_held_out(verb: int, tense: int, person: int) -> bool:
    """Whether the full corpus keeps a combination (indices into the grammar's tables) for validation: one in eleven."""
    return (7 * verb + 3 * tense + 5 * person) % 11 == 0


@register("corpus", "verbs_full")
class VerbsFullCorpus(Corpus):
    """Twenty verbs, six persons, six tenses, both languages; for tokenizers with an open vocabulary.

    A sentence with one of the held-out combinations (see `full_held_out`) is for validation.
    """

    def __init__(self) -> None:
        self.notes = []
        writer = _Writer(1)
        self._texts: dict[str, list[str]] = {"train": [], "val": []}
        while len(self._texts["train"]) < _FULL_ENOUGH:
            text, held_out = self._sentence(writer)
            if not held_out:
                self._texts["train"].append(text)
            elif len(self._texts["val"]) < _FULL_VALIDATION:
                self._texts["val"].append(text)

    @staticmethod
    def _sentence(writer: _Writer) -> tuple[str, bool]:
        language = writer.one(("en", "es"))
        other = "es" if language == "en" else "en"
        v = writer.below(len(grammar.VERBS))
        verb = grammar.VERBS[v]
        infinitive = {"en": "to " + verb.english, "es": verb.spanish}
        kind = writer.below(3)
        if kind == 0:  # drill: one tense, several persons
            tense = writer.below(6)
            cells = [(tense, p) for p in writer.some(range(6), 2 + writer.below(2))]
        else:
            cells = writer.some([(t, p) for t in range(6) for p in range(6)], 1 + writer.below(2))

        def clause(where: str, tense: int, person: int) -> str:
            return f"{_FULL_WHEN[where][tense]} {full_clause(where, verb, grammar.TENSES[tense], person)}"

        if kind == 2:
            body = ", ".join(f"{clause(language, *cell)} = {clause(other, *cell)}" for cell in cells)
            text = f"{infinitive[language]} = {infinitive[other]}: {body}."
        else:
            text = f"{infinitive[language]}: {', '.join(clause(language, *cell) for cell in cells)}."
        return text, any(full_held_out(v, *cell) for cell in cells)

    def documents(self, split: str) -> Iterator[str]:
        return iter(self._texts[check_split(split)])

    def fingerprint(self) -> str:
        return f"verbs_full:{fingerprint(self._texts)}"
