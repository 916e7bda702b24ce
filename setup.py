"""Packaging of vllm_dsv4: two vLLM entry points under one name, and the console script."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = "0.1.0"

setup(
    name="vllm-dsv4",
    version=VERSION,
    description="DeepSeek-V4 on vLLM with per-sequence rings for the sliding window",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[
        *find_packages(include=["vllm_dsv4", "vllm_dsv4.*"]),
        "vllm_dsv4.kernels",
        *[f"vllm_dsv4.kernels.{name}" for name in find_packages("kernels")],
    ],
    package_dir={"vllm_dsv4.kernels": "kernels"},
    package_data={"vllm_dsv4": ["py.typed"], "vllm_dsv4.kernels": ["py.typed"]},
    entry_points={
        # vLLM filters both groups by VLLM_PLUGINS, by name: the names must be equal.
        "vllm.platform_plugins": ["dsv4 = vllm_dsv4.entrypoints:platform"],
        "vllm.general_plugins": ["dsv4 = vllm_dsv4.entrypoints:register"],
        "console_scripts": ["vllm-dsv4 = vllm_dsv4.cli.main:main"],
    },
)
