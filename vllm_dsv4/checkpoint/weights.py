"""Seeded random values of each tensor, scaled so that every part of the model matters.

Linears keep the size of what they carry (variance 1/fan-in), so each sublayer adds about as
much to the residual streams as the embedding did. Keys get a norm weight of 2: the score of a
key then has a standard deviation of about 2, and attention picks a few keys in place of
averaging all of them away. The head spreads the logits with a standard deviation of
``LOGIT_SPREAD``, which puts the best token of 129,280 well before the second.
"""

import hashlib

import numpy as np
import torch

from vllm_dsv4.checkpoint.names import FLOAT32_KINDS, Kind, Spec

LOGIT_SPREAD = 10.0
KEY_NORM = 2.0

# Mean and standard deviation of the kinds that are not scaled by their fan-in.
_PLAIN: dict[Kind, tuple[float, float]] = {
    Kind.EMBEDDING: (0.0, 1.0),
    Kind.ROUTER_BIAS: (0.0, 0.05),
    Kind.NORM: (1.0, 0.1),
    Kind.KEY_NORM: (KEY_NORM, 0.2),
    Kind.SINK: (0.0, 1.0),
    Kind.POSITION_BIAS: (0.0, 0.5),
    Kind.STREAM_BASE: (0.0, 0.5),
    Kind.STREAM_SCALE: (0.5, 0.05),
}
# Standard deviation of what a row gives for inputs of unit size.
_ROW_GAIN: dict[Kind, float] = {
    Kind.HEAD: LOGIT_SPREAD,
    Kind.LINEAR: 1.0,
    Kind.ROUTER: 2.0,
    Kind.STREAM_MIX: 1.0,
}


def values(spec: Spec, seed: int, experts: int) -> torch.Tensor:
    """The tensor of ``spec``, shape ``spec.shape``; bf16, float32 or (expert table) int32.

    Depends on the seed and the name only, so tensors can be made in any order. The draws are
    NumPy's Philox, the same on every machine.
    """
    digest = hashlib.sha256(f"{seed}:{spec.copy_of or spec.name}".encode()).digest()
    rng = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    if spec.kind is Kind.EXPERT_TABLE:
        return _expert_table(rng, spec.shape, experts)
    mean, deviation = _PLAIN.get(spec.kind) or (0.0, _ROW_GAIN[spec.kind] / spec.shape[-1] ** 0.5)
    drawn = rng.standard_normal(spec.shape, dtype=np.float32)
    drawn *= np.float32(deviation)
    drawn += np.float32(mean)
    dtype = torch.float32 if spec.kind in FLOAT32_KINDS else torch.bfloat16
    return torch.from_numpy(drawn).to(dtype)


def _expert_table(rng: np.random.Generator, shape: tuple[int, ...], experts: int) -> torch.Tensor:
    """int32 [vocabulary, experts of a token]: a different expert in each column of a row."""
    drawn = rng.random((shape[0], experts), dtype=np.float32)
    return torch.from_numpy(np.argsort(drawn, axis=1)[:, : shape[1]].astype(np.int32))
