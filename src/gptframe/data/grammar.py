"""The forms of twenty verbs in English and Spanish: rules for the regular ones, tables for the rest."""

from __future__ import annotations

from dataclasses import dataclass, field

PERSONS = ("I", "you", "he", "we", "you all", "they")
SPANISH_PERSONS = ("yo", "tú", "él", "nosotros", "vosotros", "ellos")
TENSES = ("present", "past", "perfect", "future", "going_to", "conditional")

# Spanish endings by the class of the infinitive (-ar, -er, -ir), for yo, tú, él, nosotros, vosotros, ellos.
_PRESENT = {
    "ar": ("o", "as", "a", "amos", "áis", "an"),
    "er": ("o", "es", "e", "emos", "éis", "en"),
    "ir": ("o", "es", "e", "imos", "ís", "en"),
}
_PAST = {
    "ar": ("é", "aste", "ó", "amos", "asteis", "aron"),
    "er": ("í", "iste", "ió", "imos", "isteis", "ieron"),
    "ir": ("í", "iste", "ió", "imos", "isteis", "ieron"),
}
_FUTURE = ("é", "ás", "á", "emos", "éis", "án")
_CONDITIONAL = ("ía", "ías", "ía", "íamos", "íais", "ían")
_HABER = ("he", "has", "ha", "hemos", "habéis", "han")
_IR_PRESENT = ("voy", "vas", "va", "vamos", "vais", "van")
_IR_PAST = ("fui", "fuiste", "fue", "fuimos", "fuisteis", "fueron")
_EXPERIENCER = ("me", "te", "le", "nos", "os", "les")  # "me gusta": the one who likes is the object


@dataclass(frozen=True)
class Verb:
    """One verb in both languages. The tables hold only what the rules do not give."""

    english: str
    spanish: str
    # English irregular forms: "third" (he ...), "past", "participle"; tuples of six where the person matters.
    english_forms: dict = field(default_factory=dict)
    # Spanish irregular forms: "present" and "past" (tuples of six), "participle", "future" (the stem of future and
    # conditional).
    spanish_forms: dict = field(default_factory=dict)


VERBS = (
    Verb("work", "trabajar"),
    Verb(
        "play",
        "jugar",
        {},
        {
            "present": ("juego", "juegas", "juega", "jugamos", "jugáis", "juegan"),
            "past": ("jugué", "jugaste", "jugó", "jugamos", "jugasteis", "jugaron"),
        },
    ),
    Verb("walk", "caminar"),
    Verb("talk", "hablar"),
    Verb("listen", "escuchar"),
    Verb("watch", "observar"),
    Verb("study", "estudiar"),
    Verb("finish", "terminar"),
    Verb(
        "start",
        "empezar",
        {},
        {
            "present": ("empiezo", "empiezas", "empieza", "empezamos", "empezáis", "empiezan"),
            "past": ("empecé", "empezaste", "empezó", "empezamos", "empezasteis", "empezaron"),
        },
    ),
    Verb("look", "mirar"),
    Verb(
        "want",
        "querer",
        {},
        {
            "present": ("quiero", "quieres", "quiere", "queremos", "queréis", "quieren"),
            "past": ("quise", "quisiste", "quiso", "quisimos", "quisisteis", "quisieron"),
            "future": "querr",
        },
    ),
    Verb("like", "gustar"),
    Verb(
        "be",
        "ser",
        {
            "present": ("am", "are", "is", "are", "are", "are"),
            "past": ("was", "were", "was", "were", "were", "were"),
            "participle": "been",
        },
        {"present": ("soy", "eres", "es", "somos", "sois", "son"), "past": _IR_PAST},
    ),
    Verb(
        "have",
        "tener",
        {"third": "has", "past": "had", "participle": "had"},
        {
            "present": ("tengo", "tienes", "tiene", "tenemos", "tenéis", "tienen"),
            "past": ("tuve", "tuviste", "tuvo", "tuvimos", "tuvisteis", "tuvieron"),
            "future": "tendr",
        },
    ),
    Verb(
        "do",
        "hacer",
        {"past": "did", "participle": "done"},
        {
            "present": ("hago", "haces", "hace", "hacemos", "hacéis", "hacen"),
            "past": ("hice", "hiciste", "hizo", "hicimos", "hicisteis", "hicieron"),
            "participle": "hecho",
            "future": "har",
        },
    ),
    Verb("go", "ir", {"past": "went", "participle": "gone"}, {"present": _IR_PRESENT, "past": _IR_PAST}),
    Verb(
        "come",
        "venir",
        {"past": "came", "participle": "come"},
        {
            "present": ("vengo", "vienes", "viene", "venimos", "venís", "vienen"),
            "past": ("vine", "viniste", "vino", "vinimos", "vinisteis", "vinieron"),
            "future": "vendr",
        },
    ),
    Verb(
        "see",
        "ver",
        {"past": "saw", "participle": "seen"},
        {
            "present": ("veo", "ves", "ve", "vemos", "veis", "ven"),
            "past": ("vi", "viste", "vio", "vimos", "visteis", "vieron"),
            "participle": "visto",
        },
    ),
    Verb("eat", "comer", {"past": "ate", "participle": "eaten"}),
    Verb("write", "escribir", {"past": "wrote", "participle": "written"}, {"participle": "escrito"}),
)

BY_NAME = {verb.english: verb for verb in VERBS}


def _third(base: str) -> str:
    if base.endswith(("s", "x", "z", "ch", "sh", "o")):
        return base + "es"
    if base.endswith("y") and base[-2] not in "aeiou":
        return base[:-1] + "ies"
    return base + "s"


def _ed(base: str) -> str:
    if base.endswith("e"):
        return base + "d"
    if base.endswith("y") and base[-2] not in "aeiou":
        return base[:-1] + "ied"
    return base + "ed"


def english(verb: Verb, tense: str, person: int) -> list[str]:
    """Words of the verb phrase, without its subject. person: 0..5 as in PERSONS; tense: one of TENSES."""
    forms = verb.english_forms
    if tense == "present":
        if "present" in forms:
            return [forms["present"][person]]
        return [forms.get("third", _third(verb.english)) if person == 2 else verb.english]
    if tense == "past":
        past = forms.get("past", _ed(verb.english))
        return [past if isinstance(past, str) else past[person]]
    if tense == "perfect":
        return ["has" if person == 2 else "have", forms.get("participle", _ed(verb.english))]
    if tense == "future":
        return ["will", verb.english]
    if tense == "conditional":
        return ["would", verb.english]
    if tense == "going_to":
        return [("am", "are", "is", "are", "are", "are")[person], "going", "to", verb.english]
    raise ValueError(f"unknown tense {tense!r}")


def _spanish_rule(verb: Verb, tense: str, person: int, irregular: dict) -> list[str]:
    infinitive = verb.spanish
    stem, kind = infinitive[:-2], infinitive[-2:]
    if tense == "present":
        return [irregular["present"][person] if "present" in irregular else stem + _PRESENT[kind][person]]
    if tense == "past":
        return [irregular["past"][person] if "past" in irregular else stem + _PAST[kind][person]]
    if tense == "perfect":
        return [_HABER[person], irregular.get("participle", stem + ("ado" if kind == "ar" else "ido"))]
    if tense == "future":
        return [irregular.get("future", infinitive) + _FUTURE[person]]
    if tense == "conditional":
        return [irregular.get("future", infinitive) + _CONDITIONAL[person]]
    if tense == "going_to":
        return [_IR_PRESENT[person], "a", infinitive]
    raise ValueError(f"unknown tense {tense!r}")


def spanish(verb: Verb, tense: str, person: int) -> list[str]:
    """Words of the verb phrase, without its subject. gustar takes the third person and a pronoun: `me gusta`."""
    if verb.spanish == "gustar":
        return [_EXPERIENCER[person], *_spanish_rule(verb, tense, 2, verb.spanish_forms)]
    return _spanish_rule(verb, tense, person, verb.spanish_forms)


def is_regular(verb: Verb, language: str, tense: str, person: int) -> bool:
    """Whether the rules alone, without the verb's table, give the form."""
    if language == "en":
        return english(verb, tense, person) == english(Verb(verb.english, verb.spanish), tense, person)
    return spanish(verb, tense, person) == spanish(Verb(verb.english, verb.spanish), tense, person)
