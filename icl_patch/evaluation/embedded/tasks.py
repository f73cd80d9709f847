"""Synthetic tasks that cannot be solved without their context, and their held-out split.

A *document* is a context followed by questions about it, one a line; a *prompt* is a context and
its first question. Four kinds:

======== ==================================== ========= ================= ==========================
kind     context                              question  answer            chance without the context
======== ==================================== ========= ================= ==========================
recall   ``bem a471 b902 c118``               ``bem b`` ``902``           1 / 1000
format   ``mode flip``                        ``bcdf>`` ``fdcb``          1 / number of functions
fewshot  ``bcdf>fdcb`` / ``ghjk>kjhg`` / ...  ``lmnp>`` ``pnml``          1 / number of functions
language ``say french``                       ``3 8 1.`` ``trois huit un`` 1 / number of languages
======== ==================================== ========= ================= ==========================

The split is by hash of the atom (key, value, word, digit triple): the held-out fifth of the atoms
enters no training document, not even outside of its questions. Keys are consonant-vowel-consonant
and occur in no fixed text; values are the only runs of three digits; words of the function tasks
have no vowels, so that none of them can contain a key.
"""

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

ANSWER_END = "\n"

_CONSONANTS = "bcdfghjklmnpqrstvwxz"
_VOWELS = "aeiou"
_WORD_LENGTH = 4
_HELD_OUT_OF = 5  # one atom in five is held out
_ATTRIBUTES = "abc"
_EXAMPLES = 3
_TRAINING_MIX = {"recall": 0.2, "format": 0.15, "fewshot": 0.35, "language": 0.3}

_FUNCTIONS: dict[str, Callable[[str], str]] = {
    "same": lambda word: word,
    "upper": lambda word: word.upper(),
    "flip": lambda word: word[::-1],
    "twin": lambda word: "".join(2 * letter for letter in word),
    "halves": lambda word: word[2:] + word[:2],
    "dash": lambda word: "-".join(word),
}

_NUMBER_WORDS: dict[str, tuple[str, ...]] = {
    "english": ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    "french": ("zero", "un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit", "neuf"),
    "german": ("null", "eins", "zwei", "drei", "vier", "funf", "sechs", "sieben", "acht", "neun"),
    "spanish": ("cero", "uno", "dos", "tres", "cuatro", "cinco", "seis", "siete", "ocho", "nueve"),
    "italian": ("zero", "uno", "due", "tre", "quattro", "cinque", "sei", "sette", "otto", "nove"),
}

CHANCE = {
    "recall": 1 / 1000,
    "format": 1 / len(_FUNCTIONS),
    "fewshot": 1 / len(_FUNCTIONS),
    "language": 1 / len(_NUMBER_WORDS),
}
KINDS = tuple(CHANCE)


_MOST_KNOWN = 20_000  # draws without a new prompt: then there are none left


@dataclass(frozen=True)
class Prompt:
    """A context, one question about it, and the answer: ``context + question`` is the prompt,
    ``answer + "\\n"`` the expected continuation.
    """

    kind: str
    context: str
    question: str
    answer: str


def is_held_out(atom: str) -> bool:
    """Whether a key, value, word or digit triple is reserved for evaluation (a fixed fifth of them,
    by hash).
    """
    return hashlib.sha256(atom.encode()).digest()[0] % _HELD_OUT_OF == 0


@cache
def _atoms(of: str, held_out: bool) -> tuple[str, ...]:
    """All keys, values, words or digit triples of one side of the split."""
    every: Iterator[str]
    if of == "key":
        fixed_text = " ".join(
            ["mode", "say", *_FUNCTIONS, *_NUMBER_WORDS, *itertools.chain(*_NUMBER_WORDS.values())]
        )
        candidates = (
            "".join(letters) for letters in itertools.product(_CONSONANTS, _VOWELS, _CONSONANTS)
        )
        every = (key for key in candidates if key not in fixed_text)
    elif of == "value":
        every = (f"{number:03d}" for number in range(1000))
    elif of == "word":
        every = ("".join(letters) for letters in itertools.permutations(_CONSONANTS, _WORD_LENGTH))
    else:
        every = (" ".join(digits) for digits in itertools.product("0123456789", repeat=3))
    return tuple(atom for atom in every if is_held_out(atom) == held_out)


def document(
    kind: str, rng: random.Random, *, held_out: bool, questions: int
) -> tuple[str, list[tuple[str, str]]]:
    """The context of one document and its ``(question, answer)`` pairs."""
    if kind == "recall":
        key, values = (
            rng.choice(_atoms("key", held_out)),
            rng.sample(_atoms("value", held_out), len(_ATTRIBUTES)),
        )
        facts = dict(zip(_ATTRIBUTES, values, strict=True))
        context = key + "".join(f" {attribute}{value}" for attribute, value in facts.items()) + "\n"
        asked = rng.sample(_ATTRIBUTES, min(questions, len(facts)))
        return context, [(f"{key} {attribute}", facts[attribute]) for attribute in asked]
    if kind == "language":
        language = rng.choice(list(_NUMBER_WORDS))
        triples = rng.sample(_atoms("digits", held_out), questions)
        answers = [
            " ".join(_NUMBER_WORDS[language][int(digit)] for digit in triple.split())
            for triple in triples
        ]
        return f"say {language}\n", [
            (f"{triple}.", answer) for triple, answer in zip(triples, answers, strict=True)
        ]
    name = rng.choice(list(_FUNCTIONS))
    shown = _EXAMPLES if kind == "fewshot" else 0
    words = rng.sample(_atoms("word", held_out), questions + shown)
    pairs = [(f"{word}>", _FUNCTIONS[name](word)) for word in words]
    context = (
        "".join(f"{question}{answer}\n" for question, answer in pairs[:shown])
        if shown
        else f"mode {name}\n"
    )
    return context, pairs[shown:]


def training_document(rng: random.Random) -> tuple[str, list[tuple[int, int]]]:
    """One training document and the ``(start, stop)`` character spans of its answers, line ends
    included.
    """
    [kind] = rng.choices(list(_TRAINING_MIX), list(_TRAINING_MIX.values()))
    context, pairs = document(kind, rng, held_out=False, questions=4)
    text, spans = context, []
    for question, answer in pairs:
        text += question
        spans.append((len(text), len(text) + len(answer) + 1))
        text += answer + ANSWER_END
    return text, spans


def held_out_prompts(kind: str, count: int = 200, seed: int = 0) -> list[Prompt]:
    """``count`` distinct prompts of one kind, made of held-out atoms only; the same ``seed`` gives
    the same prompts.

    Raises:
        ValueError: an unknown kind, or more prompts than there are of it.
    """
    if kind not in KINDS:
        raise ValueError(f"expected one of {', '.join(KINDS)}, got {kind!r}")
    rng = random.Random(f"{kind}/{seed}")
    prompts: dict[tuple[str, str], Prompt] = {}
    known = 0  # draws one after the other
    while len(prompts) < count:
        context, [(question, answer), *_] = document(kind, rng, held_out=True, questions=1)
        known = known + 1 if (context, question) in prompts else 0
        if known == _MOST_KNOWN:
            raise ValueError(
                f"expected at most {len(prompts)} held-out prompts of {kind}, got {count}"
            )
        prompts[context, question] = Prompt(kind, context, question, answer)
    return list(prompts.values())
