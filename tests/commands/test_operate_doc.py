"""The figures in docs/operate.md and docs/tiers.md are what the commands above them print today."""

import json
import re
from pathlib import Path

import pytest

from vllm_dsv4.commands.cli.main import main

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "operate.md").read_text()
BLOCKS = [
    block
    for name in ("operate.md", "tiers.md")
    for block in re.findall(
        r"```console\n\$ vllm-dsv4 ([^\n]*)\n(.*?)```", (DOCS / name).read_text(), re.DOTALL
    )
]


@pytest.mark.parametrize(("command", "expected"), BLOCKS, ids=[command for command, _ in BLOCKS])
def test_a_block_is_the_output_of_its_command(
    command: str, expected: str, capsys: pytest.CaptureFixture[str]
):
    main(command.split())
    printed = capsys.readouterr()
    assert (printed.out or printed.err).strip() == expected.strip()


def test_the_table_over_batched_tokens_is_what_plan_says(capsys: pytest.CaptureFixture[str]):
    rows = re.findall(r"\| `(--max-num-batched-tokens) (\d+)` \| ([\d,]+) \| ([\d,]+) \|", TEXT)
    assert len(rows) == 4
    for flag, value, paged, rings in rows:
        assert main(["plan", "flash", flag, value, "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert f"{plan['native']['tokens']:,}" == paged
        assert f"{plan['rings']['tokens']:,}" == rings
