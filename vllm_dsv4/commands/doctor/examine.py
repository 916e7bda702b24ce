"""Looks at this environment as vLLM will: by asking vLLM, in this process."""

from __future__ import annotations

import os
from importlib import metadata
from importlib.util import find_spec

from vllm_dsv4.commands.doctor.diagnosis import Diagnosis, EntryPoint
from vllm_dsv4.ring.plan import check_interval
from vllm_dsv4.settings import PREFIX, SettingError, read_settings
from vllm_dsv4.versions import installed_vllm, unsupported_reason

GROUPS = ("vllm.platform_plugins", "vllm.general_plugins")
PLUGIN = "dsv4"
PACKAGES = ("vllm", "torch", "triton", "ray", "vllm-dsv4")
VLLM_SETTINGS = ("VLLM_PLUGINS", "VLLM_TARGET_DEVICE", "VLLM_USE_V2_MODEL_RUNNER")


def examine() -> Diagnosis:
    """Every finding, and the verdict. Never raises for what it finds."""
    found = _before_vllm()
    if found.versions["vllm"] is not None:
        try:
            from vllm_dsv4.commands.doctor import resolved

            found.reasons += resolved.fill(found)
        except Exception as error:
            found.reasons.append(f"vLLM cannot be asked: {type(error).__name__}: {error}")
    found.live = not found.reasons
    return found


def examine_without_card() -> Diagnosis:
    """What can be told of a ROCm build where vLLM sees no card, and so chooses no platform."""
    found = _before_vllm()
    found.vllm_was_asked = False
    version = found.versions["vllm"]
    if version is not None and "cpu" in version:
        found.reasons.append(
            f"vLLM {version} is a CPU build, which needs no card: leave out --without-card."
        )
    elif find_spec("amdsmi") is None:
        found.reasons.append(
            "amdsmi, by which vLLM sees AMD cards, is not installed: use a ROCm build of vLLM "
            "with the amdsmi of its ROCm."
        )
    return found


def _before_vllm() -> Diagnosis:
    """What can be told without importing vLLM."""
    found = Diagnosis(
        versions={name: _version(name) for name in PACKAGES},
        settings={
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(PREFIX) or name in VLLM_SETTINGS
        },
        entry_points=_entry_points(),
    )
    found.reasons += _reasons_before_vllm(found)
    return found


def _version(name: str) -> str | None:
    if name == "vllm":
        return installed_vllm()
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _entry_points() -> list[EntryPoint]:
    """All entry points of the groups that concern us, others' too."""
    allowed = os.environ.get("VLLM_PLUGINS")
    names = None if allowed is None else allowed.split(",")
    return [
        EntryPoint(group, point.name, point.value, names is None or point.name in names)
        for group in GROUPS
        for point in sorted(metadata.entry_points(group=group), key=lambda point: point.name)
    ]


def _reasons_before_vllm(found: Diagnosis) -> list[str]:
    """What keeps the plugin from being live that can be told without importing vLLM."""
    reasons = []
    unsupported = unsupported_reason()
    if unsupported:
        reasons.append(f"vllm_dsv4 registers nothing: {unsupported}")
    for group in GROUPS:
        ours = [e for e in found.entry_points if e.group == group and e.name == PLUGIN]
        if not ours:
            reasons.append(
                f"entry point {PLUGIN!r} of group {group} is not installed: install vllm-dsv4 "
                "into this environment (pip install)."
            )
        elif not ours[0].allowed:
            reasons.append(
                f"VLLM_PLUGINS={os.environ['VLLM_PLUGINS']!r} does not name {PLUGIN!r} (group "
                f"{group}): unset it or add {PLUGIN} to it."
            )
    target = os.environ.get("VLLM_TARGET_DEVICE")
    if target == "cpu":
        reasons.append(
            "VLLM_TARGET_DEVICE='cpu' makes vLLM skip platform plugins: unset it (the CPU build "
            "finds the CPU without it)."
        )
    try:
        settings = read_settings()
        check_interval(settings)
        if not settings.ring:
            reasons.append(
                "VLLM_DSV4_RING=0 asks for vLLM's own paged path: unset it to serve on rings."
            )
    except SettingError as error:
        reasons.append(str(error))
    return reasons
