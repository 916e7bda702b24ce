"""A checkpoint whose draft layer says what the model itself will say.

A random draft layer is right by chance only, so its acceptance shows nothing. Here it is right by
construction, and only as long as it reads the right rows:

- of the model's layers, only the last one, which reads a window, adds anything, and it adds much;
- the draft layer has that layer's weights, the model's final norm and head, and passes the next
  token's embedding on as it is, without the model's streams (embeddings hold only +3 and -3, so
  that the norm before the draft layer gives them back to the bit);
- few tokens are ever answered, so that rounding seldom changes which one is.

At position ``p`` the draft layer holds token ``p + 1``, so its window holds the tokens of the
model's window one position later. The first two tokens of a sequence are hidden from it: from
``AGREES_FROM`` on it computes what the model will.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.prompts import VOCABULARY
from vllm_dsv4.checkpoint.config import Shape
from vllm_dsv4.checkpoint.weights import EMBEDDING
from vllm_dsv4.checkpoint.write import make_tiny

AGREES_FROM = 130
ANSWERED = 256
"""Token ids from 0 on that the model can answer; the others' logits are 0."""
ATTENTION_GAIN = 3.0
"""How much more than in other small checkpoints the last layer's attention adds."""

_RATIOS = (4, 128, 0)
_LAST = f"layers.{len(_RATIOS) - 1}."
_DRAFT = "mtp.0."


def make_own_draft(folder: Path) -> Path:
    """Write the checkpoint into a new folder, and return it."""
    make_tiny(folder, Shape(ratios=_RATIOS, mtp=1, vocab=VOCABULARY))
    files = {path: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
    tensors = {name: value for held in files.values() for name, value in held.items()}
    for path, held in files.items():
        # A file keeps no tensor twice, so what the draft layer shares with the model is copied.
        changed = {name: _changed(name, tensors).contiguous().clone() for name in held}
        save_file(changed, path, metadata={"format": "pt"})
    return folder


def _changed(name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    value = tensors[name]
    if not name.startswith(_DRAFT):
        return _of_the_model(name, value)
    part = name.removeprefix(_DRAFT)
    if part == "enorm.weight":
        return torch.full_like(value, EMBEDDING)
    if part == "e_proj.weight":
        return torch.eye(len(value), dtype=value.dtype)
    if part == "h_proj.weight":
        return torch.zeros_like(value)
    source = "embed.weight" if part == "emb.tok_emb.weight" else part
    source = _LAST + part if _LAST + part in tensors else source
    return _of_the_model(source, tensors[source]) if source in tensors else value


def _of_the_model(name: str, value: torch.Tensor) -> torch.Tensor:
    if name == "embed.weight":
        return torch.where(value < 0, -EMBEDDING, EMBEDDING).to(value.dtype)
    if name == "head.weight":
        return torch.cat([value[:ANSWERED], torch.zeros_like(value[ANSWERED:])])
    if name == _LAST + "attn.wo_b.weight":
        return value * ATTENTION_GAIN
    adds = name.endswith(("attn.wo_b.weight", ".w2.weight"))
    if adds and not name.startswith(_LAST):
        return torch.zeros_like(value)
    return value
