"""Make the embedded model, selftpt-tiny: python -m tools.embedded_model --images IMAGENET/images/train

Needs the extra `recipe` and Debian's package wordnet-base. All randomness is seeded. Image features and sentence
embeddings are cached in --work.
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

from selftpt.errors import exit_on_error
from selftpt.files import write_tensors
from tools.embedded_model.aerial_scenes import LAND_COVER
from tools.embedded_model.compare_targets import compare_settings
from tools.embedded_model.export import CONFIG, DIMENSIONS, quantize, scale_residual_stream, write_model
from tools.embedded_model.image_features import (
    CLASS_NAMES,
    HELD_OUT,
    ROOT,
    aerial_features,
    imagenet_features,
    load_backbone,
    read_visual_neighbours,
)
from tools.embedded_model.sentence_encoder import SentenceEncoder
from tools.embedded_model.targets import (
    EmbeddingSpace,
    Kernel,
    Vocabulary,
    accuracy,
    discriminant_directions,
    neighbour_directions,
)
from tools.embedded_model.text_training import (
    CONFIDENCE_EXPONENT,
    SHARED_NORM,
    TextSet,
    TrainingConfig,
    add_shared_component,
    initial_token_embeddings,
    plural,
    train,
)
from tools.embedded_model.wordnet import WordNet

TRAINING = TrainingConfig(steps=6500)
FINE_TUNING = TrainingConfig(steps=300, lr=2e-4, embedding_lr=2e-4, warmup=20)  # after quantisation
RESIDUAL_SCALE = 0.25  # lets a prompt move farther at a given learning rate; selected with compare_prompts.py
LOW_RESOLUTIONS = 32, 64  # class directions are made orthogonal to the mean effect of downsampling to these sizes
ADJECTIVE_KERNEL = Kernel(name=0.3, definition=0.7, hierarchy=0.0)
AERIAL_TEMPLATES = [
    *(
        f"{view} of {article}{{}}."
        for view in ("a satellite photo", "a satellite image", "an aerial photo", "an aerial view", "a bird's-eye view")
        for article in ("", "a ", "the ")
    ),
    *("{} from above", "{} seen from the air", "{} from space"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True, help="ImageNet images, one folder per class (WordNet id)")
    parser.add_argument(
        "--wordnet", type=Path, default=Path("/usr/share/wordnet"), help="folder of WordNet 3.0's files"
    )
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "embedded-model", help="folder of logs and cached features"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "src" / "selftpt" / "embedded", help="folder that the model is written to"
    )
    parser.add_argument(
        "--compare-settings",
        action="store_true",
        help="compare settings of the target regression by cross-validation, and make no model",
    )
    parser.add_argument(
        "--hold-out",
        action="store_true",
        help=f"make a model without {len(HELD_OUT)} of the classes, to evaluate it on them",
    )
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()

    features, labels = imagenet_features(options.images, options.work)
    encoder = SentenceEncoder(options.work)
    wordnet = WordNet(options.wordnet)
    vocabulary = Vocabulary(wordnet, encoder, read_visual_neighbours())
    torch.manual_seed(0)
    backbone = load_backbone()
    head = backbone.get_classifier().weight.detach()
    not_held_out = torch.tensor(sorted({*range(len(CLASS_NAMES))} - {*HELD_OUT}))
    if options.compare_settings:
        compare_settings(head, features, labels, vocabulary, not_held_out)
        return

    known = not_held_out if options.hold_out else torch.arange(len(CLASS_NAMES))
    is_known = torch.isin(labels, known)
    low_resolution = {
        size: imagenet_features(options.images, options.work, size)[0][is_known] for size in LOW_RESOLUTIONS
    }
    plain_space = EmbeddingSpace.fit(head, features[is_known], known, DIMENSIONS)
    shift = torch.cat([*low_resolution.values()]).mean(0) - features[is_known].mean(0)
    space = plain_space.invariant_to(shift)
    tokenizer = SimpleTokenizer(context_length=CONFIG["text_cfg"]["context_length"])
    targets = vocabulary.predict_targets(space.prototypes, known, Kernel())
    scenes, kinds = aerial_features(options.work)
    aerial = discriminant_directions(space.project(scenes), kinds)
    text_sets = make_text_sets(vocabulary, targets, aerial, wordnet.adjectives(), encoder, tokenizer, space, known)
    clip = build_model(backbone, space, initial_token_embeddings(encoder, tokenizer, CONFIG["text_cfg"]["width"]))
    name = "held-out" if options.hold_out else "selftpt-tiny"
    train(clip, tokenizer, text_sets, TRAINING, options.work / f"{name}.jsonl")
    clip.load_state_dict(quantize(clip.state_dict()))
    classes, *others = text_sets
    mostly_classes = [
        replace(classes, per_step=256),
        *(replace(text_set, per_step=text_set.per_step // 2) for text_set in others),
    ]
    train(clip, tokenizer, mostly_classes, FINE_TUNING, options.work / f"{name}-fine-tuning.jsonl")
    # Quantise before evaluating, so that the measured weights are those that are written.
    clip.load_state_dict(quantize(scale_residual_stream(clip.state_dict(), RESIDUAL_SCALE)))

    clip.eval()
    with torch.inference_mode():
        vectors = clip.encode_text(tokenizer([f"a photo of a {name}." for name in CLASS_NAMES]), normalize=True)
        images = F.normalize(clip.visual.head(features), dim=-1)
    known_labels = torch.searchsorted(known, labels[is_known])
    scale = best_logit_scale(images[is_known] @ vectors[known].t(), known_labels)
    clip.logit_scale.data.fill_(torch.tensor(scale).log())
    report: dict[str, Any] = {
        "training": asdict(TRAINING),
        "fine_tuning": asdict(FINE_TUNING),
        "residual_scale": RESIDUAL_SCALE,
        "shared_norm": SHARED_NORM,
        "confidence_exponent": CONFIDENCE_EXPONENT,
        "kernel": asdict(Kernel()),
        "adjective_kernel": {"name": ADJECTIVE_KERNEL.name, "definition": ADJECTIVE_KERNEL.definition},
        "visual_neighbours": len(vocabulary.visual_neighbours),
        "aerial_scenes": len(kinds),
        "text_sets": [{"texts": len(text_set.texts), "per_step": text_set.per_step} for text_set in text_sets],
        "logit_scale": scale,
        "accuracy_by_prototypes": accuracy(space.project(features[is_known]), space.prototypes[known], known_labels),
        "accuracy_by_names": accuracy(images[is_known], vectors[known], known_labels),
        "low_resolution_accuracy_by_prototypes": {
            size: {
                key: accuracy(of.project(small), of.prototypes[known], known_labels)
                for key, of in (("plain", plain_space), ("invariant", space))
            }
            for size, small in low_resolution.items()
        },
        "minutes": (time.monotonic() - begin) / 60,
    }
    if options.hold_out:
        head = clip.visual.head.proj
        tensors = {"projection": head.weight.half(), "bias": head.bias, "vectors": vectors[HELD_OUT].half()}
        file = ROOT / "benchmarks" / "embedded_held_out.safetensors"
        write_tensors(file, "held_out_classes", tensors, {"labels": HELD_OUT})
        is_held_out = torch.isin(labels, torch.tensor(HELD_OUT))
        held_out_labels = torch.searchsorted(torch.tensor(HELD_OUT), labels[is_held_out])
        report["held_out_accuracy_by_names"] = accuracy(images[is_held_out], vectors[HELD_OUT], held_out_labels)
        # Of a class and a WordNet noun of the same name, the text tower is trained on the noun.
        row_of = {name.lower(): i for i, name in enumerate(vocabulary.names)}
        rows = [row_of[CLASS_NAMES[label].lower()] for label in HELD_OUT]
        held_out_targets = add_shared_component(targets[0][rows])[:, :-1]
        report["held_out_accuracy_by_targets"] = accuracy(
            space.project(features[is_held_out]), held_out_targets, held_out_labels
        )
    write_model(clip, options.work / name if options.hold_out else options.out)
    (options.work / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


def best_logit_scale(cosines: Tensor, labels: Tensor) -> float:
    """Return the logit scale that minimises the cross-entropy of cosines [N, C] and labels [N]."""
    return min(range(5, 201), key=lambda scale: F.cross_entropy(scale * cosines, labels).item())


def make_text_sets(
    vocabulary: Vocabulary,
    targets: tuple[Tensor, Tensor],
    aerial: Tensor,
    adjectives: dict[str, str],
    encoder: SentenceEncoder,
    tokenizer: SimpleTokenizer,
    space: EmbeddingSpace,
    known: Tensor,
) -> list[TextSet]:
    """Return the texts that the text tower is trained on, with their targets.

    The text sets are: the known ImageNet classes, with their own directions; common and rare words (WordNet's nouns,
    adjectives and other words); nouns with their hypernyms; definitions; words for land cover, whose targets are the
    mean of the word's and the aerial direction; and sentences with aerial templates, with aerial directions.

    A word is common if each of its parts is a single token; common words are drawn more often. Of senses with the same
    text, the first is used.

    Args:
        vocabulary: ImageNet's classes and WordNet's nouns.
        targets: Targets of the nouns [N, D] and of the senses [P, D].
        aerial: Aerial directions of the kinds of land cover [K, D].
        adjectives: Definitions of adjectives.
        encoder: Sentence encoder.
        tokenizer: Tokenizer of the text tower.
        space: Embedding space, for the directions of classes.
        known: Labels of the known classes.
    """
    noun_targets, sense_targets = targets
    class_count = len(CLASS_NAMES)
    nouns = {name.lower() for name in vocabulary.names}

    def is_common(name: str) -> bool:
        return all(f"{word}</w>" in tokenizer.encoder for word in name.lower().split())

    pieces = {piece for piece in encoder.tokenizer.get_vocab() if piece.isalpha() and len(piece) > 2}
    adjectives = {word: text for word, text in sorted(adjectives.items()) if word not in nouns and is_common(word)}
    others = [word for word in sorted(pieces - nouns - adjectives.keys()) if is_common(word)]
    other_targets = vocabulary.predict_word_targets(encoder(others), None, space.prototypes, known, Kernel())
    adjective_targets = vocabulary.predict_word_targets(
        encoder([*adjectives]), encoder([*adjectives.values()]), space.prototypes, known, ADJECTIVE_KERNEL
    )
    adjective_targets += neighbour_directions([*adjectives], vocabulary.visual_neighbours, space.prototypes, known)

    def text_set(
        texts: Sequence[str], directions: Tensor, per_step: int, plurals: Sequence[str] = (), combine: bool = True
    ) -> TextSet:
        limited = directions / directions.norm(dim=-1, keepdim=True).clamp(min=1)
        return TextSet(texts, limited, per_step, plurals, combine)

    words = [*vocabulary.names[class_count:], *others, *adjectives]
    plurals = [*map(plural, vocabulary.names[class_count:]), *others, *adjectives]
    word_targets = torch.cat([noun_targets[class_count:], other_targets, adjective_targets])
    row_of = {word.lower(): i for i, word in enumerate(words)}

    kind_of = {word: kind for kind, (_, kind_words) in enumerate(LAND_COVER.values()) for word in kind_words}
    land_words = sorted(kind_of.keys() - {name.lower() for name in CLASS_NAMES})
    predicted = vocabulary.predict_word_targets(encoder(land_words), None, space.prototypes, known, Kernel())
    ground = torch.stack(
        [word_targets[row_of[word]] if word in row_of else predicted[i] for i, word in enumerate(land_words)]
    )
    land_targets = (F.normalize(ground, dim=-1) + aerial[[kind_of[word] for word in land_words]]) / 2
    for word, target in zip(land_words, land_targets, strict=True):
        if word in row_of:
            word_targets[row_of[word]] = target
    # The same confidence as that of the words: the norm of the mean of two orthogonal directions.
    aerial_texts = [
        (template.format(word), aerial[kind] / 2**0.5)
        for word, kind in kind_of.items()
        for template in AERIAL_TEMPLATES
    ]

    common, rare = ([i for i, word in enumerate(words) if is_common(word) == wanted] for wanted in (True, False))
    with_hypernym, defined = {}, {}
    senses = zip(vocabulary.sense_noun.tolist(), vocabulary.sense_synset.tolist(), strict=True)
    for i, (noun, synset) in reversed([*enumerate(senses)]):
        if noun >= class_count:
            with_hypernym[f"{vocabulary.names[noun]}, a type of {vocabulary.hypernyms[synset]}"] = i
        if synset == vocabulary.first_synset[noun]:
            defined[vocabulary.definitions[noun]] = i
    with_hypernym, defined = (
        {text: i for text, i in texts.items() if len(tokenizer.encode(text)) <= length}
        for texts, length in ((with_hypernym, 16), (defined, 24))
    )
    classes = [CLASS_NAMES[i] for i in known]
    return [
        TextSet(classes, space.prototypes[known], 64, [*map(plural, classes)]),
        *(
            text_set([words[i] for i in some], word_targets[some], per_step, [plurals[i] for i in some])
            for some, per_step in ((common, 208), (rare, 112))
        ),
        text_set([*with_hypernym], sense_targets[[*with_hypernym.values()]], 16, [*with_hypernym], combine=False),
        text_set([*defined], sense_targets[[*defined.values()]], 16),
        text_set(land_words, land_targets, 16, [*map(plural, land_words)]),
        text_set([text for text, _ in aerial_texts], torch.stack([target for _, target in aerial_texts]), 8),
    ]


def build_model(backbone: Any, space: EmbeddingSpace, token_embeddings: Tensor) -> CLIP:
    """Return the model with its final image tower and an untrained text tower."""
    clip = CLIP(**CONFIG)
    weights = {name: value for name, value in backbone.state_dict().items() if not name.startswith("classifier")}
    clip.visual.trunk.load_state_dict(weights)
    with torch.no_grad():
        clip.visual.head.proj.weight.copy_(F.pad(space.projection, (0, 0, 0, 1)))
        clip.visual.head.proj.bias.copy_(F.pad(space.bias, (0, 1)))
        clip.token_embedding.weight.copy_(token_embeddings)
    return clip


if __name__ == "__main__":
    with exit_on_error():
        main()
