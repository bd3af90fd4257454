"""Nouns for visible things and adjectives, read from the files of WordNet 3.0."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from selftpt.errors import SelfTPTError

# WordNet's lexicographer files of visible things: tops, act, animal, artifact, body, food, group, location, object,
# person, phenomenon, plant, shape, substance.
VISIBLE = {3, 4, 5, 6, 8, 13, 14, 15, 17, 18, 19, 20, 25, 27}
LIVING = {5, 20}
TAXA = (
    "genus ",
    "family ",
    "order ",
    "class ",
    "phylum ",
    "division ",
    "kingdom ",
    "superfamily ",
    "subclass ",
    "suborder ",
    "tribe ",
    "subfamily ",
)


@dataclass(frozen=True)
class Synset:
    """A set of synonyms.

    Attributes:
        words: The synonyms.
        hypernyms: Offsets of the synsets that it is a kind of.
        instance: Whether it is a single thing, such as a person or a city.
        definition: Its definition, without examples.
        subject: Number of its lexicographer file.
    """

    words: tuple[str, ...]
    hypernyms: tuple[str, ...]
    instance: bool
    definition: str
    subject: int

    @property
    def text(self) -> str:
        """The synonyms and the definition: the input of the sentence encoder."""
        return f"{', '.join(self.words)}: {self.definition}"


class WordNet:
    """The nouns of WordNet.

    Attributes:
        synsets: Synsets by offset; the offset is the number in a WordNet id such as "n01440764".
        senses: Offsets of the synsets of each lower-case noun, the most frequent first.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.synsets, self.senses = _read(folder, "noun")

    @cache  # noqa: B019 (there is one WordNet in a run)
    def ancestors(self, offset: str) -> frozenset[str]:
        """Return the synset itself and its direct and indirect hypernyms."""
        return frozenset({offset}).union(*(self.ancestors(parent) for parent in self.synsets[offset].hypernyms))

    def hypernym(self, offset: str) -> str:
        """Return a word for the first hypernym of a synset."""
        hypernyms = self.synsets[offset].hypernyms
        return self.synsets[hypernyms[0]].words[0] if hypernyms else "thing"

    def visible(self, offset: str) -> bool:
        """Return whether a synset is a kind of thing that an image may show: no instance and no taxon."""
        synset = self.synsets[offset]
        return (
            synset.subject in VISIBLE
            and not synset.instance
            and not any(word.lower().startswith(TAXA) for word in synset.words)
        )

    def nouns(self) -> dict[str, list[str]]:
        """Return each noun for something visible, in its usual spelling, with up to three of its visible senses.

        Latin names of species are left out; they are recognised by their second word, which is not a noun.
        """
        found = {}
        for noun, senses in self.senses.items():
            visible = [offset for offset in senses if self.visible(offset)]
            if not visible or len(noun) < 2:
                continue
            spelling = next(word for word in self.synsets[visible[0]].words if word.lower() == noun)
            latin = self.synsets[visible[0]].subject in LIVING and " " in noun and spelling[0].isupper()
            if not (latin and noun.split()[-1] not in self.senses):
                found[spelling] = visible[:3]
        return found

    def adjectives(self) -> dict[str, str]:
        """Return each single-word adjective with the synonyms and the definition of its first sense."""
        synsets, senses = _read(self.folder, "adj")
        return {word: synsets[of[0]].text for word, of in senses.items() if word.isalpha() and len(word) > 2}


def _read(folder: Path, part: str) -> tuple[dict[str, Synset], dict[str, list[str]]]:
    """Read a part of speech: synsets by offset, and offsets of senses by lower-case word."""
    synsets, senses = {}, {}
    for line in _lines(folder / f"data.{part}"):
        head, _, gloss = line.partition(" | ")
        fields = head.split()
        count = int(fields[3], 16)
        words = tuple(word.split("(")[0].replace("_", " ") for word in fields[4 : 4 + 2 * count : 2])
        pointers = fields[5 + 2 * count :]
        links = [(pointers[i], pointers[i + 1]) for i in range(0, len(pointers), 4)]
        hypernyms = tuple(offset for symbol, offset in links if symbol in ("@", "@i"))
        instance = any(symbol == "@i" for symbol, _ in links)
        definition = gloss.split('; "')[0].strip()
        synsets[fields[0]] = Synset(words, hypernyms, instance, definition, int(fields[1]))
    for line in _lines(folder / f"index.{part}"):
        fields = line.split()
        senses[fields[0].replace("_", " ")] = fields[-int(fields[2]) :]
    return synsets, senses


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        raise SelfTPTError(
            f"{path} does not exist: install Debian's package wordnet-base, or pass the folder of WordNet 3.0 with "
            "--wordnet"
        )
    return [line for line in path.read_text(encoding="utf8").splitlines() if not line.startswith("  ")]
