"""How the findings are told: as text for a terminal, or as Markdown to keep."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_dsv4.commands.contract.check import Change, Finding
from vllm_dsv4.commands.contract.record import Record


def summary(record: Record, version: str, findings: Sequence[Finding]) -> str:
    """One sentence with the counts."""
    breaks = {finding.target for finding in findings if finding.change.breaks}
    reads = {finding.target for finding in findings} - breaks
    same = len(record.faces) - len((breaks | reads) & record.faces.keys())
    return (
        f"Of {len(record.faces)} parts of vLLM {record.vllm} that vllm_dsv4 uses, {same} are the "
        f"same in {version}, {len(reads)} changed and are to be read again, {len(breaks)} break."
    )


def as_text(record: Record, version: str, findings: Sequence[Finding]) -> str:
    lines = [summary(record, version, findings)]
    for change in Change:
        group = [finding for finding in findings if finding.change is change]
        if group:
            lines += ["", _title(change, len(group))]
        for finding in group:
            lines.append(f"  {finding.target}")
            lines += [f"      {finding.text}"] if finding.text else []
            lines.append(f"      used in {', '.join(map(_short, finding.where))}")
    return "\n".join(lines)


def as_markdown(record: Record, version: str, findings: Sequence[Finding]) -> str:
    lines = [summary(record, version, findings)]
    for change in Change:
        group = [finding for finding in findings if finding.change is change]
        if not group:
            continue
        lines += ["", f"### {_title(change, len(group))}", ""]
        lines += ["| part of vLLM | change | used in |", "| --- | --- | --- |"]
        lines += [
            f"| `{f.target}` | {f.text.replace('|', chr(92) + '|')} | "
            f"{', '.join(f'`{_short(where)}`' for where in f.where)} |"
            for f in group
        ]
    return "\n".join(lines)


def as_json(record: Record, version: str, findings: Sequence[Finding]) -> dict[str, object]:
    return {
        "recorded": record.vllm,
        "checked": version,
        "parts": len(record.faces),
        "findings": [
            {
                "change": finding.change.name.lower(),
                "breaks": finding.change.breaks,
                "target": finding.target,
                "text": finding.text,
                "where": list(finding.where),
            }
            for finding in findings
        ],
    }


def _title(change: Change, count: int) -> str:
    consequence = "breaks" if change.breaks else "to be read"
    return f"{change.value[0].upper()}{change.value[1:]} ({count}, {consequence})"


def _short(module: str) -> str:
    return module.removeprefix("vllm_dsv4.")
