"""How far apart a checkpoint's best two tokens are, by transformers' own DeepSeek-V4."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, DeepseekV4ForCausalLM
from transformers.utils import logging

PROMPT = (
    "The river had risen in the night, and by morning the lower meadow was a sheet of brown "
    "water with only the gateposts standing out of it. Anna counted nine of them from the "
    "window while the kettle boiled. On Tuesday there had been eleven, and her brother, who "
    "kept such numbers in a school exercise book, said that twelve was the most that anyone "
    "had seen. He wanted to row out to the farthest post and tie a ribbon to it. She said that "
    "the boat leaked, that the oars were in the barn, and that the barn was under water too."
)


@dataclass(frozen=True)
class Separation:
    """Distances between the best and the second-best logit, over the positions of a text.

    Attributes:
        positions: tokens of the text.
        median: the middle distance, in units of the logits (nats).
        tenth: the distance that one position in ten falls short of.
        spread: standard deviation of all logits.
    """

    positions: int
    median: float
    tenth: float
    spread: float

    def describe(self) -> str:
        return (
            f"best two logits, over {self.positions} tokens of text in float32: "
            f"median gap {self.median:.2f}, one in ten below {self.tenth:.2f} "
            f"(all logits: standard deviation {self.spread:.1f})"
        )


def separation(checkpoint: Path, prompt: str = PROMPT) -> Separation:
    """Run ``prompt`` through the bf16 (or dequantised) checkpoint in float32."""
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = DeepseekV4ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.inference_mode():
        logits = model(ids).logits[0]
    best = logits.topk(2, dim=-1).values
    gaps = best[:, 0] - best[:, 1]
    return Separation(
        positions=ids.shape[1],
        median=gaps.median().item(),
        tenth=gaps.quantile(0.1).item(),
        spread=logits.std().item(),
    )
