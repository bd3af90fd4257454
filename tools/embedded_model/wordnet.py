"""Things that can be in a picture, from WordNet 3.0's files: nouns, what they mean, and what they are kinds of; and
adjectives."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from selftpt.errors import SelfTPTError

# WordNet's files by subject that hold visible things: tops, act, animal, artifact, body, food, group, location,
# object, person, phenomenon, plant, shape, substance.
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
    """A meaning: the words for it, what it is a kind of (offsets), its definition, and its subject."""

    words: tuple[str, ...]
    kinds: tuple[str, ...]
    instance: bool
    gloss: str
    subject: int

    @property
    def text(self) -> str:
        """All of it that the sentence encoder reads."""
        return f"{', '.join(self.words)}: {self.gloss}"


class WordNet:
    """`meanings` by offset (as in "n01440764"), `senses` of each lower-case noun, the most frequent first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meanings, self.senses = _read(folder, "noun")

    @cache  # noqa: B019 (one WordNet in a run)
    def ancestors(self, offset: str) -> frozenset[str]:
        """A meaning and all it is a kind of."""
        return frozenset({offset}).union(*(self.ancestors(kind) for kind in self.meanings[offset].kinds))

    def kind(self, offset: str) -> str:
        """A word for what a meaning is a kind of."""
        kinds = self.meanings[offset].kinds
        return self.meanings[kinds[0]].words[0] if kinds else "thing"

    def visible(self, offset: str) -> bool:
        """Whether it is a kind of thing, not a single one, nor a taxon, that a picture may show."""
        meaning = self.meanings[offset]
        return (
            meaning.subject in VISIBLE
            and not meaning.instance
            and not any(word.lower().startswith(TAXA) for word in meaning.words)
        )

    def nouns(self) -> dict[str, list[str]]:
        """Each noun for something visible, as a person writes it, with up to three of its senses that are.

        Latin names of species are left out: their second word is no noun.
        """
        found = {}
        for noun, senses in self.senses.items():
            seen = [offset for offset in senses if self.visible(offset)]
            if not seen or len(noun) < 2:
                continue
            written = next(word for word in self.meanings[seen[0]].words if word.lower() == noun)
            latin = self.meanings[seen[0]].subject in LIVING and " " in noun and written[0].isupper()
            if not (latin and noun.split()[-1] not in self.senses):
                found[written] = seen[:3]
        return found

    def adjectives(self) -> dict[str, str]:
        """Each adjective of one word, with its first meaning: the words for it and the definition."""
        meanings, senses = _read(self.folder, "adj")
        return {word: meanings[of[0]].text for word, of in senses.items() if word.isalpha() and len(word) > 2}


def _read(folder: Path, part: str) -> tuple[dict[str, Synset], dict[str, list[str]]]:
    """The meanings by offset and the senses by lower-case word of a part of speech."""
    meanings, senses = {}, {}
    for line in _lines(folder / f"data.{part}"):
        head, _, gloss = line.partition(" | ")
        fields = head.split()
        count = int(fields[3], 16)
        words = tuple(word.split("(")[0].replace("_", " ") for word in fields[4 : 4 + 2 * count : 2])
        pointers = fields[5 + 2 * count :]
        links = [(pointers[i], pointers[i + 1]) for i in range(0, len(pointers), 4)]
        kinds = tuple(offset for symbol, offset in links if symbol in ("@", "@i"))
        instance = any(symbol == "@i" for symbol, _ in links)
        definition = gloss.split('; "')[0].strip()
        meanings[fields[0]] = Synset(words, kinds, instance, definition, int(fields[1]))
    for line in _lines(folder / f"index.{part}"):
        fields = line.split()
        senses[fields[0].replace("_", " ")] = fields[-int(fields[2]) :]
    return meanings, senses


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        raise SelfTPTError(f"there is no {path}: install Debian's wordnet-base, or name WordNet's folder by --wordnet")
    return [line for line in path.read_text(encoding="utf8").splitlines() if not line.startswith("  ")]
