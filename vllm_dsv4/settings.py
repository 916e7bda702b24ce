"""Our environment variables, parsed in one place.

All start with ``VLLM_``, which is among what vLLM copies to Ray's ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

PREFIX = "VLLM_DSV4_"


class SettingError(ValueError):
    """An environment variable that cannot be used; the message says what can be."""


@dataclass(frozen=True)
class Settings:
    """What the environment asks for.

    Attributes:
        ring: ``VLLM_DSV4_RING``; False serves DSV4 on vLLM's own paged path.
        slots: ``VLLM_DSV4_SLOTS``; None means one per ``--max-num-seqs``.
        poison: ``VLLM_DSV4_POISON``; fill a slot with NaN when it is lent (a debugging aid:
            results must not change by a bit).
        attention: ``VLLM_DSV4_ATTENTION``; on ROCm, our Triton kernels or vLLM's own.
        snapshot_slots: ``VLLM_DSV4_SNAPSHOT_SLOTS``; None means the default of ``snapshots``.
        snapshot_interval: ``VLLM_DSV4_SNAPSHOT_INTERVAL``; tokens, 0 for the last boundary only.
            ``ring.plan`` checks that it is whole blocks.
        c128_state: ``VLLM_DSV4_C128_STATE``; raw rows of an open group, or its running softmax.
        check_ray: ``VLLM_DSV4_CHECK_RAY``; False waits, as vLLM does, for devices that are missing.
        check_checkpoint: ``VLLM_DSV4_CHECK_CHECKPOINT``; False loads what vLLM alone would load.
    """

    ring: bool = True
    slots: int | None = None
    poison: bool = False
    attention: Literal["triton", "native"] = "triton"
    snapshot_slots: int | None = None
    snapshot_interval: int = 0
    c128_state: Literal["exact", "online"] = "exact"
    check_ray: bool = True
    check_checkpoint: bool = True


VARIABLES = frozenset(
    PREFIX + name
    for name in (
        "RING",
        "SLOTS",
        "POISON",
        "ATTENTION",
        "SNAPSHOT_SLOTS",
        "SNAPSHOT_INTERVAL",
        "C128_STATE",
        "CHECK_RAY",
        "CHECK_CHECKPOINT",
    )
)


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Parse the environment.

    Raises:
        SettingError: a value that cannot be parsed, or an unknown ``VLLM_DSV4_`` name.
    """
    env = os.environ if environ is None else environ
    unknown = sorted(name for name in env if name.startswith(PREFIX) and name not in VARIABLES)
    if unknown:
        raise SettingError(
            f"unknown environment variable {unknown[0]}={env[unknown[0]]!r}; known are "
            f"{', '.join(sorted(VARIABLES))}. Unset it or correct its name."
        )
    attention = env.get(PREFIX + "ATTENTION") or "triton"
    if attention not in ("triton", "native"):
        raise SettingError(
            f"VLLM_DSV4_ATTENTION={attention!r}; use 'triton' (our kernels) or 'native' (vLLM's)."
        )
    c128_state = env.get(PREFIX + "C128_STATE") or "exact"
    if c128_state not in ("exact", "online"):
        raise SettingError(
            f"VLLM_DSV4_C128_STATE={c128_state!r}; use 'exact' (raw rows of an open group) or "
            "'online' (its running softmax)."
        )
    return Settings(
        ring=_flag(env, "RING", True),
        slots=_count(env, "SLOTS", minimum=1),
        poison=_flag(env, "POISON", False),
        attention=attention,  # type: ignore[arg-type]
        snapshot_slots=_count(env, "SNAPSHOT_SLOTS", minimum=0),
        snapshot_interval=_count(env, "SNAPSHOT_INTERVAL", minimum=0) or 0,
        c128_state=c128_state,  # type: ignore[arg-type]
        check_ray=_flag(env, "CHECK_RAY", True),
        check_checkpoint=_flag(env, "CHECK_CHECKPOINT", True),
    )


def _flag(env: Mapping[str, str], name: str, default: bool) -> bool:
    value = env.get(PREFIX + name)
    if value is None or value == "":
        return default
    if value in ("0", "1"):
        return value == "1"
    raise SettingError(f"{PREFIX}{name}={value!r}; use 0 or 1.")


def _count(env: Mapping[str, str], name: str, minimum: int) -> int | None:
    value = env.get(PREFIX + name)
    if value is None or value == "":
        return None
    try:
        number = int(value)
    except ValueError:
        number = minimum - 1
    if number < minimum:
        raise SettingError(f"{PREFIX}{name}={value!r}; use a whole number, {minimum} or more.")
    return number
