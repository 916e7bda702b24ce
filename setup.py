"""Packaging of vllm_dsv4: two vLLM entry points under one name, and the console script."""

import runpy
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = "0.1.0"
LOW, HIGH = runpy.run_path(str(ROOT / "vllm_dsv4" / "versions.py"))["SUPPORTED_VLLM"]

setup(
    name="vllm-dsv4",
    version=VERSION,
    description="DeepSeek-V4 on vLLM with per-sequence rings for the sliding window",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: GPU",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    # vLLM's internals change between minor versions: vllm_dsv4/versions.py says which are known.
    install_requires=[f"vllm>={LOW},<{HIGH}"],
    packages=[
        *find_packages(include=["vllm_dsv4", "vllm_dsv4.*"]),
        "vllm_dsv4.kernels",
        *[f"vllm_dsv4.kernels.{name}" for name in find_packages("kernels")],
    ],
    package_dir={"vllm_dsv4.kernels": "kernels"},
    package_data={
        "vllm_dsv4": ["py.typed", "commands/contract/recorded.json", "cpu/portable/operators.c"],
        "vllm_dsv4.kernels": ["py.typed"],
    },
    entry_points={
        # vLLM filters both groups by VLLM_PLUGINS, by name: the names must be equal.
        "vllm.platform_plugins": ["dsv4 = vllm_dsv4.entrypoints:platform"],
        "vllm.general_plugins": ["dsv4 = vllm_dsv4.entrypoints:register"],
        "console_scripts": ["vllm-dsv4 = vllm_dsv4.commands.cli.main:main"],
    },
)
