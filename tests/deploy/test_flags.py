"""Every flag and variable that a deployment passes is one that the installed vLLM or we know."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm import envs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.deploy.test_kubernetes import server_pod
from tests.support.compose import services
from vllm_dsv4.settings import PREFIX, read_settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
ENVIRONMENT = re.compile(r"\b(VLLM_[A-Z0-9_]+)\b")


def served() -> Iterator[tuple[str, list[str]]]:
    """Where something is served, and what follows ``vllm serve``."""
    for name in ("cpu", "rocm"):
        yield f"compose, {name}", services()[name]["command"]
    yield "one host", server_pod("one-host")["containers"][0]["args"]
    (script,) = server_pod("two-hosts")["containers"][0]["args"]
    yield "two hosts", shlex.split(script.split("exec vllm serve")[1].replace("\\\n", " "))
    settings = dict(
        line.split("=", 1)
        for line in (DEPLOY / "systemd" / "server.env").read_text().splitlines()
        if line and not line.startswith("#")
    )
    unit = (DEPLOY / "systemd" / "vllm-dsv4.service").read_text()
    assert "vllm serve $MODEL $FLAGS\n" in unit
    yield "systemd", [settings["MODEL"], *settings["FLAGS"].split()]


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    return make_arg_parser(FlexibleArgumentParser())


@pytest.mark.parametrize(("where", "arguments"), list(served()), ids=lambda value: str(value)[:20])
def test_vllm_knows_every_flag(
    parser: FlexibleArgumentParser, where: str, arguments: list[str]
) -> None:
    parsed = parser.parse_args(arguments)
    assert parsed.model_tag == arguments[0]
    assert parsed.served_model_name == ["dsv4"]
    if where != "compose, cpu":
        assert parsed.compilation_config.mode == 3
        assert parsed.compilation_config.cudagraph_mode.name == "FULL_DECODE_ONLY"


def test_vllm_ends_at_a_flag_that_it_does_not_know(parser: FlexibleArgumentParser) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(["model", "--no-such-flag=1"])


def test_every_variable_is_known() -> None:
    files = [file for file in DEPLOY.rglob("*") if file.is_file() and file.suffix != ".json"]
    named = {name for file in files for name in ENVIRONMENT.findall(file.read_text())}
    ours = {f"{PREFIX}{field.upper()}" for field in vars(read_settings())}
    assert {"VLLM_ENGINE_READY_TIMEOUT_S", "VLLM_ROCM_USE_AITER"} < named
    assert named - set(envs.environment_variables) - ours == set()
