"""The images' files: linted, and every instruction's command run, in a folder in place of an image.

What no image shows here: that the bases and packages which these instructions name can be fetched.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.dockerfile import Build, InstructionFailed, Stage, instructions
from tests.support.fake_distribution import add_distribution
from tests.support.linked import linked_environment
from vllm_dsv4.versions import is_supported

ROOT = Path(__file__).parents[2]
ROCM = ROOT / "deploy" / "Dockerfile"
CPU = ROOT / "deploy" / "Dockerfile.cpu"
HADOLINT = Path(sys.executable).parent / "hadolint"


@pytest.mark.parametrize("file", [ROCM, CPU], ids=lambda file: file.name)
def test_hadolint_finds_nothing(file: Path) -> None:
    done = subprocess.run([HADOLINT, file], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_hadolint_would_find_something(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN cd /tmp && pip install requests\n")
    done = subprocess.run([HADOLINT, tmp_path / "Dockerfile"], capture_output=True, check=False)
    assert done.returncode != 0


@pytest.fixture(scope="module")
def image_without_card(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """What vLLM's ROCm image adds to this environment, on a machine that builds and has no card."""
    environment = tmp_path_factory.mktemp("rocm-environment")
    site = linked_environment(environment, "vllm-")
    add_distribution(site, "vllm", "0.32.0+rocm721")
    (site / "amdsmi.py").touch()
    return Build(ROOT, environment, tmp_path_factory.mktemp("rocm"), {})


@pytest.fixture(scope="module")
def rocm(image_without_card: Build) -> Stage:
    return image_without_card.run(ROCM)


@pytest.fixture(scope="module")
def cpu_build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    environment = tmp_path_factory.mktemp("cpu-environment")
    linked_environment(environment, "vllm-")
    cache = {"VLLM_CACHE_ROOT": str(tmp_path_factory.mktemp("cache"))}
    return Build(ROOT, environment, tmp_path_factory.mktemp("cpu"), cache)


@pytest.fixture(scope="module")
def cpu(cpu_build: Build) -> Stage:
    return cpu_build.run(CPU)


def test_every_command_of_the_rocm_image_runs_and_doctor_is_the_last(
    rocm: Stage, image_without_card: Build
) -> None:
    ran = [command for stage in image_without_card.stages.values() for command in stage.ran]
    assert ran == [i.value for i in instructions(ROCM) if i.keyword == "RUN"]
    assert ran[-1].endswith("&& vllm-dsv4 doctor --without-card")
    site = next((image_without_card.environment / "lib").glob("python*/site-packages"))
    assert (site / "vllm_dsv4" / "kernels" / "attention.py").is_file()


def test_the_rocm_image_is_vllms_of_a_supported_version_and_keeps_its_entry_point(
    rocm: Stage,
) -> None:
    name, _, tag = rocm.base.partition(":")
    assert name == "vllm/vllm-openai-rocm"
    assert is_supported(tag.removeprefix("v"))
    assert rocm.entry_point == ["vllm", "serve"]


def test_the_image_has_the_version_of_ray_that_is_tested(rocm: Stage) -> None:
    pins = (ROOT / "requirements" / "dev.txt").read_text().splitlines()
    assert f"ray=={rocm.variables['RAY_VERSION']}" in pins


def test_an_image_whose_plugin_is_shut_out_is_not_built(tmp_path: Path, rocm: Stage) -> None:
    """``doctor``, the last step, ends the build."""
    file = tmp_path / "Dockerfile"
    file.write_text(f"FROM scratch\nRUN {rocm.ran[-1].split(' && ')[-1]}\n")
    environment = Path(sys.executable).parents[1]
    with pytest.raises(InstructionFailed, match="CPU build, which needs no card"):
        Build(ROOT, environment, tmp_path, {}).run(file)


def test_every_command_of_the_cpu_image_runs_and_doctor_is_the_last(
    cpu: Stage, cpu_build: Build
) -> None:
    assert cpu.ran == [i.value for i in instructions(CPU) if i.keyword == "RUN"]
    assert cpu.ran[-1] == "vllm-dsv4 doctor"
    assert cpu.entry_point == ["vllm", "serve"]
    update, installed, user = cpu_build.calls.read_text().splitlines()
    assert update == "apt-get update"
    assert installed == "apt-get install --yes --no-install-recommends gcc libc6-dev libnuma1"
    assert f"--uid {cpu.user} " in user
    assert f"--home-dir {cpu.root}{cpu.folder} " in user, "a volume there would not be the user's"


def test_the_cpu_image_installs_what_vllm_is_linked_with() -> None:
    """Of what the base, a slim Debian with Python, does not have."""
    if shutil.which("dpkg") is None:
        pytest.skip("not checked: without dpkg it is not known which package a library is of")
    has = {"libc6", "libgcc-s1", "libstdc++6"}
    vllm = find_spec("vllm")
    assert vllm is not None and vllm.origin is not None
    extension = Path(vllm.origin).with_name("_C.abi3.so")
    linked = subprocess.run(["ldd", extension], capture_output=True, text=True, check=True).stdout
    names = re.findall(r"^\s*(\S+) => /\S+", linked, re.MULTILINE)
    system = [name for name in names if "torch" not in name]
    found = subprocess.run(
        ["dpkg", "--search", *(f"*/{name}" for name in system)],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    packages = {line.split(":")[0] for line in found.splitlines()}
    assert "libnuma1" in packages, found
    assert {p for p in packages if not p.endswith(("-dev", "-cross"))} - has == {"libnuma1"}


def test_what_is_copied_is_in_the_context() -> None:
    """``.dockerignore`` leaves out everything that it does not name."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    sent = [line.removeprefix("!") for line in lines if line.startswith("!")]
    for file in (ROCM, CPU):
        for instruction in instructions(file):
            words = instruction.value.split()
            if instruction.keyword == "COPY" and not words[0].startswith("--from="):
                for name in words[:-1]:
                    assert name in sent
                    assert os.path.exists(ROOT / name)  # noqa: PTH110
