"""``docs/coupling.md``: the record, as a page for people."""

from __future__ import annotations

from vllm_dsv4.commands.contract.check import describe
from vllm_dsv4.commands.contract.record import Record
from vllm_dsv4.commands.contract.uses import How, Use

HEAD = """\
# What vllm_dsv4 uses of vLLM

Made by `make coupling` from our source and vLLM {version}; a test fails while it is not
current. `vllm-dsv4 contract VERSION_OR_PATH` checks the same list against another vLLM, without
installing it. What to do with its findings: [upgrade.md](upgrade.md).

Nothing in vLLM is patched: the list has no function whose place ours takes behind vLLM's back.
"Replaced" are objects that vLLM offers to replace: kernels through its dispatcher, and the class
of attention layers that our model has built itself.
"""

SECTIONS = {
    How.SUBCLASS: "Subclassed",
    How.OVERRIDE: "Overridden",
    How.REPLACE: "Replaced",
    How.CONSTRUCT: "Constructed",
    How.CALL: "Called",
    How.READ: "Read or set",
    How.IMPORT: "Imported",
}

_MEANING = {
    How.SUBCLASS: "Every member of these is ours too.",
    How.OVERRIDE: "Ours is called where vLLM calls its own.",
    How.REPLACE: "Kernels must keep the names of their arguments.",
    How.CONSTRUCT: "With these arguments; for a dataclass that we extend, its own fields only.",
    How.CALL: "With these arguments (numbers stand for positions).",
    How.READ: "Attributes, and constants by name.",
    How.IMPORT: "Names that a module of ours imports.",
}


def coupling_page(record: Record) -> str:
    lines = [HEAD.format(version=record.vllm)]
    lines += [f"{len(record.faces)} parts of vLLM, by the strongest way in which each is used:"]
    lines += ["", "| | parts |", "| --- | --- |"]
    strongest = [
        min((use.how for use in record.uses_of(target)), key=list(How).index)
        for target in record.faces
    ]
    lines += [f"| {title} | {strongest.count(how)} |" for how, title in SECTIONS.items()]
    for how, title in SECTIONS.items():
        uses = [use for use in record.uses if use.how is how]
        lines += ["", f"## {title}", "", _MEANING[how], ""]
        lines += _table(uses, with_shape=any(use.shape for use in uses))
    return "\n".join(lines) + "\n"


def _table(uses: list[Use], with_shape: bool) -> list[str]:
    lines = ["| vLLM | ours | arguments |", "| --- | --- | --- |"]
    if not with_shape:
        lines = ["| vLLM | ours |", "| --- | --- |"]
    for target in dict.fromkeys(use.target for use in uses):
        same = [use for use in uses if use.target == target]
        where = ", ".join(
            f"`{name.removeprefix('vllm_dsv4.')}`" for name in sorted({u.where for u in same})
        )
        shapes = sorted({describe(use.shape) for use in same if use.shape is not None})
        cells = [f"`{target}`", where]
        if with_shape:
            cells.append(" or ".join(f"`{shape}`" for shape in shapes))
        lines.append(f"| {' | '.join(cells)} |")
    return lines
