"""Make selftpt-tiny: python -m tools.embedded_model --pictures IMAGENET/images/train

Needs the extra `recipe` and Debian's package wordnet-base. Everything is seeded; what takes long is kept in --work.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from open_clip.model import CLIP
from open_clip.tokenizer import SimpleTokenizer
from torch import Tensor

from selftpt.errors import told_in_one_line
from selftpt.files import write_tensors
from tools.embedded_model.above import LAND
from tools.embedded_model.choose import choose
from tools.embedded_model.export import CONFIG, DIMENSIONS, rescaled, small, write_model
from tools.embedded_model.ingredients import HOME, NAMES, UNSEEN, read_looks, see, see_land, trunk
from tools.embedded_model.sentences import Sentences
from tools.embedded_model.student import CONE, REACH, Lesson, Training, in_cone, plural, token_vectors, train
from tools.embedded_model.teacher import Kernel, Nouns, Space, by_drawings, by_looks, right
from tools.embedded_model.wordnet import WordNet

TRAINING = Training(steps=6500)
FINISH = Training(steps=300, lr=2e-4, table_lr=2e-4, warmup=20)  # by the rounded tower, and mostly of classes
STREAM = 0.25  # what runs through the text tower is made so small, so that a prompt moves farther; chosen by `exam`
SIDES = 32, 64  # what small pictures have in common is no part of a class's direction
ADJECTIVES = Kernel(name=0.3, gloss=0.7, place=0.0)
FROM_ABOVE = [
    *(
        f"{view} of {article}{{}}."
        for view in ("a satellite photo", "a satellite image", "an aerial photo", "an aerial view", "a bird's-eye view")
        for article in ("", "a ", "the ")
    ),
    *("{} from above", "{} seen from the air", "{} from space"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=Path, required=True, help="ImageNet pictures, a folder a class by its wnid")
    parser.add_argument("--wordnet", type=Path, default=Path("/usr/share/wordnet"), help="WordNet 3.0's files")
    parser.add_argument("--work", type=Path, default=HOME / "build" / "embedded-model", help="kept between runs")
    parser.add_argument("--out", type=Path, default=HOME / "src" / "selftpt" / "embedded", help="where the model goes")
    parser.add_argument(
        "--choose", action="store_true", help="try settings of the teacher on held-out classes, no more"
    )
    parser.add_argument("--hold-out", action="store_true", help=f"train without {len(UNSEEN)} classes, for their exam")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()

    features, labels = see(options.pictures, options.work)
    sentences = Sentences(options.work)
    wordnet = WordNet(options.wordnet)
    nouns = Nouns(wordnet, sentences, read_looks())
    torch.manual_seed(0)
    network = trunk()
    head = network.get_classifier().weight.detach()
    seen = torch.tensor(sorted({*range(len(NAMES))} - {*UNSEEN}))
    if options.choose:
        choose(head, features, labels, nouns, seen)
        return

    known = seen if options.hold_out else torch.arange(len(NAMES))
    of_known = torch.isin(labels, known)
    tiny = {side: see(options.pictures, options.work, side)[0][of_known] for side in SIDES}
    plain = Space.of(head, features[of_known], known, DIMENSIONS)
    space = plain.blind_to(torch.cat([*tiny.values()]).mean(0) - features[of_known].mean(0))
    tokenizer = SimpleTokenizer(context_length=CONFIG["text_cfg"]["context_length"])
    taught = nouns.teach(space.prototypes, known, Kernel())
    drawn, kinds = see_land(options.work)
    land = by_drawings(space.see(drawn), kinds)
    learned = lessons(nouns, taught, land, wordnet.adjectives(), sentences, tokenizer, space, known)
    clip = build(network, space, token_vectors(sentences, tokenizer, CONFIG["text_cfg"]["width"]))
    name = "held-out" if options.hold_out else "selftpt-tiny"
    train(clip, tokenizer, learned, TRAINING, options.work / f"{name}.jsonl")
    clip.load_state_dict(small(clip.state_dict()))
    classes, *others = learned
    mostly = [replace(classes, each=256), *(replace(lesson, each=lesson.each // 2) for lesson in others)]
    train(clip, tokenizer, mostly, FINISH, options.work / f"{name}-finish.jsonl")
    clip.load_state_dict(small(rescaled(clip.state_dict(), STREAM)))  # what is shipped is what is measured

    clip.eval()
    with torch.inference_mode():
        vectors = clip.encode_text(tokenizer([f"a photo of a {name}." for name in NAMES]), normalize=True)
        pictures = F.normalize(clip.visual.head(features), dim=-1)
    where = torch.searchsorted(known, labels[of_known])
    scale = best_scale(pictures[of_known] @ vectors[known].t(), where)
    clip.logit_scale.data.fill_(torch.tensor(scale).log())
    facts: dict[str, Any] = {
        "training": asdict(TRAINING),
        "finish": asdict(FINISH),
        "stream": STREAM,
        "cone": CONE,
        "reach": REACH,
        "kernel": asdict(Kernel()),
        "kernel_of_adjectives": {"name": ADJECTIVES.name, "gloss": ADJECTIVES.gloss},
        "looks": len(nouns.looks),
        "land": len(kinds),
        "lessons": [{"texts": len(lesson.texts), "a_step": lesson.each} for lesson in learned],
        "scale": scale,
        "of_pictures_by_prototypes": right(space.see(features[of_known]), space.prototypes[known], where),
        "of_pictures_by_names": right(pictures[of_known], vectors[known], where),
        "of_small_pictures_by_prototypes": {
            side: {
                how: right(of.see(of_side), of.prototypes[known], where)
                for how, of in (("plain", plain), ("blind", space))
            }
            for side, of_side in tiny.items()
        },
        "minutes": (time.monotonic() - begin) / 60,
    }
    if options.hold_out:
        head = clip.visual.head.proj
        exam = {"projection": head.weight.half(), "bias": head.bias, "vectors": vectors[UNSEEN].half()}
        write_tensors(HOME / "benchmarks" / "embedded_unseen.safetensors", "exam", exam, {"labels": UNSEEN})
        of_unseen = torch.isin(labels, torch.tensor(UNSEEN))
        where = torch.searchsorted(torch.tensor(UNSEEN), labels[of_unseen])
        facts["of_unseen_pictures_by_names"] = right(pictures[of_unseen], vectors[UNSEEN], where)
        row = {name.lower(): i for i, name in enumerate(nouns.names)}  # the noun's, if there is one: the student's
        targets = in_cone(taught[0][[row[NAMES[label].lower()] for label in UNSEEN]])[:, :-1]
        facts["of_unseen_pictures_by_teacher"] = right(space.see(features[of_unseen]), targets, where)
    write_model(clip, options.work / name if options.hold_out else options.out)
    (options.work / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts, indent=1))


def best_scale(cosines: Tensor, labels: Tensor) -> float:
    """The scale under which the cosines [n, C] make the labels [n] most likely."""
    return min(range(5, 201), key=lambda scale: F.cross_entropy(scale * cosines, labels).item())


def lessons(
    nouns: Nouns,
    taught: tuple[Tensor, Tensor],
    land: Tensor,
    adjectives: dict[str, str],
    sentences: Sentences,
    tokenizer: SimpleTokenizer,
    space: Space,
    known: Tensor,
) -> list[Lesson]:
    """The classes by their own directions; WordNet's nouns, other words, nouns with their kinds, and definitions by the
    teacher's: `taught`, of nouns and of their senses; words for land by both the teacher's and that of its kind, seen
    from above: `land` [kinds, D], half and half; and sentences that say "from above", by the latter alone, as surely.

    Common words, those which the vocabulary has as one token, are learned more often. Of senses with the same text the
    first is learned.
    """
    given, (by_noun, by_sense) = (space.prototypes, known), taught
    taken = {name.lower() for name in nouns.names}

    def common(name: str) -> bool:
        return all(f"{word}</w>" in tokenizer.encoder for word in name.lower().split())

    pieces = {piece for piece in sentences.tokenizer.get_vocab() if piece.isalpha() and len(piece) > 2}
    adjectives = {word: text for word, text in sorted(adjectives.items()) if word not in taken and common(word)}
    others = [word for word in sorted(pieces - taken - adjectives.keys()) if common(word)]
    by_name = nouns.teach_words(sentences(others), None, *given, Kernel())
    by_gloss = nouns.teach_words(sentences([*adjectives]), sentences([*adjectives.values()]), *given, ADJECTIVES)
    by_gloss += by_looks([*adjectives], nouns.looks, *given)

    def lesson(
        texts: Sequence[str], directions: Tensor, each: int, plurals: Sequence[str] = (), company: bool = True
    ) -> Lesson:
        return Lesson(texts, directions / directions.norm(dim=-1, keepdim=True).clamp(min=1), each, plurals, company)

    names = [*nouns.names[len(NAMES) :], *others, *adjectives]
    plurals = [*map(plural, nouns.names[len(NAMES) :]), *others, *adjectives]
    directions = torch.cat([by_noun[len(NAMES) :], by_name, by_gloss])
    place = {name.lower(): i for i, name in enumerate(names)}
    above = {word: kind for kind, (_, words) in enumerate(LAND.values()) for word in words}
    words = sorted(above.keys() - {name.lower() for name in NAMES})
    by_word = nouns.teach_words(sentences(words), None, *given, Kernel())
    ground = torch.stack([directions[place[w]] if w in place else by_word[i] for i, w in enumerate(words)])
    of_land = (F.normalize(ground, dim=-1) + land[[above[word] for word in words]]) / 2
    for word, direction in zip(words, of_land, strict=True):
        if word in place:
            directions[place[word]] = direction
    viewed = [(view.format(word), land[kind] / 2**0.5) for word, kind in above.items() for view in FROM_ABOVE]
    often, seldom = ([i for i, name in enumerate(names) if common(name) == wanted] for wanted in (True, False))
    typed, defined = {}, {}
    for i, (noun, meaning) in reversed([*enumerate(zip(nouns.noun.tolist(), nouns.meaning.tolist(), strict=True))]):
        if noun >= len(NAMES):
            typed[f"{nouns.names[noun]}, a type of {nouns.kind[meaning]}"] = i
        if meaning == nouns.first[noun]:
            defined[nouns.definitions[noun]] = i
    typed, defined = (
        {text: i for text, i in of.items() if len(tokenizer.encode(text)) <= length}
        for of, length in ((typed, 16), (defined, 24))
    )
    return [
        Lesson(classes := [NAMES[i] for i in known], space.prototypes[known], 64, [*map(plural, classes)]),
        *(
            lesson([names[i] for i in some], directions[some], each, [plurals[i] for i in some])
            for some, each in ((often, 208), (seldom, 112))
        ),
        lesson([*typed], by_sense[[*typed.values()]], 16, [*typed], company=False),
        lesson([*defined], by_sense[[*defined.values()]], 16),
        lesson(words, of_land, 16, [*map(plural, words)]),
        lesson([text for text, _ in viewed], torch.stack([direction for _, direction in viewed]), 8),
    ]


def build(network: Any, space: Space, table: Tensor) -> CLIP:
    """The model with its image tower finished and its text tower at the start."""
    clip = CLIP(**CONFIG)
    given = {name: value for name, value in network.state_dict().items() if not name.startswith("classifier")}
    clip.visual.trunk.load_state_dict(given)
    with torch.no_grad():
        clip.visual.head.proj.weight.copy_(F.pad(space.projection, (0, 0, 0, 1)))
        clip.visual.head.proj.bias.copy_(F.pad(space.bias, (0, 1)))
        clip.token_embedding.weight.copy_(table)
    return clip


if __name__ == "__main__":
    with told_in_one_line():
        main()
