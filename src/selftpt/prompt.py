"""The prompt that stage 1 learns: context vectors and a projection head."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn

from selftpt import hub
from selftpt.config import ContrastConfig, current_names
from selftpt.errors import SelfTPTError
from selftpt.files import Schema, read_tensors, write_tensors
from selftpt.losses import Head
from selftpt.models import EMBEDDED_FILES, Model, ModelId

SCHEMA = Schema(
    header={"model": get_type_hints(ModelId), "random_init": bool, "contrast": dict, "origin": dict},
    tensors={"context": "M d", "w1": "E D", "b1": "E", "w2": "F E", "b2": "F"},
)


@dataclass(frozen=True, eq=False, repr=False)
class Prompt:
    """Learned context vectors, with the projection head that they were learned with.

    Attributes:
        context: Context vectors [M, d].
        head: The projection head, which maps text features of dimension D to F dimensions.
        contrast: The configuration of CPT, which stage 2 uses.
        model: Identifies the model that the prompt was learned for.
        origin: How it was learned: settings, class names of the source, number of images, version of selftpt.
    """

    context: Tensor
    head: Head
    contrast: ContrastConfig
    model: ModelId
    origin: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        classes, images = len(self.origin.get("classes", ())), self.origin.get("images")
        learned = f", learned on {images} images of {classes} classes" if classes and images else ""
        return f"Prompt({len(self.context)} context vectors for {self.model}{learned})"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the prompt to a safetensors file, without the model.

        Args:
            path: The file.

        Raises:
            SelfTPTError: The file cannot be written.
        """
        header = {
            "model": dataclasses.asdict(self.model),
            "random_init": self.model.random_init,
            "contrast": dataclasses.asdict(self.contrast),
            "origin": dict(self.origin),
        }
        write_tensors(Path(path), "prompt", {"context": self.context, **self.head._asdict()}, header, SCHEMA)

    def check(self, model: Model) -> None:
        """Check that the prompt was learned for a model.

        Args:
            model: The model.

        Raises:
            SelfTPTError: The prompt was learned for another model, or its dimensions do not match.
        """
        self.model.check(model, "the prompt")
        found, wanted = (self.context.shape[1], self.head.w1.shape[1]), (model.text.width, model.dimension)
        if found != wanted:
            raise SelfTPTError(
                f"the prompt has vectors of width {found[0]} and a head for features of dimension {found[1]}, and "
                f"{model.id} has {wanted[0]} and {wanted[1]}: learn a prompt for this model"
            )

    @property
    def digest(self) -> str:
        """A digest of the context vectors, the head, the CPT configuration and the identity of the model."""
        sha = hashlib.sha256(repr((self.contrast, self.model)).encode())
        for tensor in (self.context, *self.head):
            sha.update(f"{tuple(tensor.shape)}".encode())
            sha.update(tensor.contiguous().numpy().data)
        return sha.hexdigest()[:32]

    @classmethod
    def of(
        cls, tensors: Mapping[str, Tensor], contrast: ContrastConfig, model: ModelId, origin: Mapping[str, Any]
    ) -> Prompt:
        """Make a prompt from named tensors.

        Args:
            tensors: The context `context` [M, d], and the tensors `w1`, `b1`, `w2` and `b2` of the head.
            contrast: The configuration of CPT.
            model: Identifies the model that the prompt was learned for.
            origin: How it was learned.

        Returns:
            The prompt.
        """
        return cls(tensors["context"], Head(*(tensors[name] for name in Head._fields)), contrast, model, origin)

    @classmethod
    def embedded(cls) -> Prompt:
        """Load the prompt that is included in selftpt.

        Returns:
            The prompt, which works with the embedded model only.
        """
        return cls.load(EMBEDDED_FILES / "prompt.safetensors")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Prompt:
        """Read a prompt from a file.

        Args:
            path: The file that `save` or `selftpt.learn` wrote.

        Returns:
            The prompt.

        Raises:
            SelfTPTError: The file cannot be read, is damaged, or is not a prompt.
        """
        header, tensors = read_tensors(Path(path), "prompt", SCHEMA)
        try:
            contrast = ContrastConfig(**current_names(header["contrast"]))
        except (TypeError, SelfTPTError) as error:  # TypeError: an unknown field
            raise SelfTPTError(f"{path} is not a valid prompt file: {error}") from error
        context = tensors.pop("context")
        return cls(context, Head(**tensors), contrast, ModelId(**header["model"]), header["origin"])

    @classmethod
    def from_hub(cls, repo: str, *, revision: str | None = None, token: hub.Token = None) -> Prompt:
        """Download a prompt from the Hugging Face hub; it is verified like a local file.

        Args:
            repo: The repository, `"user/name"`.
            revision: A branch, tag or commit; by default the main branch.
            token: An access token of the hub; by default HF_TOKEN or the token of `hf auth login`.

        Returns:
            The prompt.

        Raises:
            SelfTPTError: The file cannot be downloaded or is not a valid prompt.
        """
        return cls.load(hub.download(repo, "prompt", revision=revision, token=token))

    def push_to_hub(
        self,
        repo: str,
        *,
        private: bool | None = None,
        token: hub.Token = None,
        revision: str | None = None,
        commit_message: str | None = None,
        accuracy: Mapping[str, float] | None = None,
        license: str | None = None,
    ) -> str:
        """Upload the prompt to the Hugging Face hub, with a model card.

        Args:
            repo: The repository, `"user/name"`. It is created if it does not exist.
            private: Whether a new repository is private; by default the hub decides.
            token: An access token with write permission; by default HF_TOKEN or the token of `hf auth login`.
            revision: The branch, which is created if it does not exist; by default the main branch.
            commit_message: The commit message.
            accuracy: Top-1 accuracy in percent for each test set, for the model card: `{"my test set": 81.2}`.
            license: The identifier of a license on the hub for the model card, such as `"apache-2.0"`.

        Returns:
            The URL of the commit.

        Raises:
            SelfTPTError: The upload failed; the message says why and what to do.
        """
        shared = dataclasses.replace(self, model=hub.shareable(self.model))
        card = hub.model_card(
            repo,
            "prompt",
            shared.model,
            self.origin,
            settings={"contrast": dataclasses.asdict(self.contrast)},
            accuracy=accuracy,
            license=license,
        )
        return hub.push(
            repo,
            "prompt",
            shared.save,
            card,
            private=private,
            token=token,
            revision=revision,
            commit_message=commit_message,
        )


def initial_context(model: Model, length: int, words: str, generator: torch.Generator) -> Tensor:
    """Initialise context vectors with the token embeddings of words.

    If `words` has more than `length` tokens, the last ones are used, which are next to the class name. If it has fewer,
    random vectors with a standard deviation of 0.02 are prepended.

    Args:
        model: The model.
        length: Number M of context vectors.
        words: The words.
        generator: The random generator.

    Returns:
        Context vectors [M, d], on the CPU.
    """
    embedded = model.text.embed_words(words)[-length:].cpu()
    sampled = torch.empty(length - len(embedded), model.text.width).normal_(0, 0.02, generator=generator)
    return torch.cat([sampled, embedded.float()])


def initial_head(dimension: int, hidden: int, projection: int, generator: torch.Generator) -> Head:
    """Initialise the projection head with Xavier-uniform weights and zero biases.

    Args:
        dimension: Dimension D of the text features.
        hidden: Hidden width E.
        projection: Output width F.
        generator: The random generator.

    Returns:
        The head, on the CPU.
    """
    w1, w2 = torch.empty(hidden, dimension), torch.empty(projection, hidden)
    for weight in (w1, w2):
        nn.init.xavier_uniform_(weight, generator=generator)
    return Head(w1, torch.zeros(hidden), w2, torch.zeros(projection))
