"""Seeded random values of each tensor, scaled so that every part matters and tokens stay apart.

The head spreads the logits with a standard deviation of ``LOGIT_SPREAD``, which puts the best of
129,280 tokens well before the second. How often rounding then changes a token depends on how much
the layers amplify it, against what the embedding contributes exactly. The scales here were
chosen by trial: with fp8 keys and bf16 products, logits move by about a tenth of the median gap,
while one changed token, in the window or in compressed history, moves them by one to three times
as much as that rounding does.

- Linears keep the size of what they carry (variance 1 / fan-in), so a sublayer adds about as much
  to the residual streams as its input has; embeddings are ``EMBEDDING`` times as large.
- Routed experts add less: two experts of nearly equal score may swap by rounding.
- Keys have a norm weight of ``KEY_NORM``, which is then the standard deviation of a key's score:
  attention picks some keys in place of averaging all of them away.
- C128 keys are few beside a window of 128, and each pools 128 tokens: twice the norm and twice
  the gate make them heard, and a token among the 128 heard in them.
"""

import hashlib

import numpy as np
import torch

from vllm_dsv4.checkpoint.names import FLOAT32_KINDS, Kind, Spec

LOGIT_SPREAD = 10.0
EMBEDDING = 3.0
KEY_NORM = 1.5

# Mean and standard deviation of the kinds that are not scaled by their fan-in.
_PLAIN: dict[Kind, tuple[float, float]] = {
    Kind.EMBEDDING: (0.0, EMBEDDING),
    Kind.ROUTER_BIAS: (0.0, 0.05),
    Kind.NORM: (1.0, 0.1),
    Kind.KEY_NORM: (KEY_NORM, 0.15),
    Kind.C128_KEY_NORM: (2 * KEY_NORM, 0.3),
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
    Kind.EXPERT_OUTPUT: 0.3,
    Kind.C128_GATE: 2.0,
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
