"""What we use of vLLM and what it looked like, kept in ``recorded.json`` beside this module."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_dsv4.commands.contract.alternatives import alternatives
from vllm_dsv4.commands.contract.faces import Detail, Face, face_of
from vllm_dsv4.commands.contract.own import own_members_by_base
from vllm_dsv4.commands.contract.shapes import Shape
from vllm_dsv4.commands.contract.source import Package, Sources
from vllm_dsv4.commands.contract.uses import OURS, THEIRS, How, Use, find_uses

RECORDED = Path(__file__).parent / "recorded.json"


@dataclass(frozen=True)
class Record:
    """The uses of our source, and the faces of one vLLM.

    Attributes:
        vllm: that vLLM's version.
        faces: by target.
        alternatives: by place, the other place where our source looks for the same.
        own_members: by vLLM class that we subclass, what our subclasses define beyond it.
    """

    vllm: str
    uses: tuple[Use, ...]
    faces: dict[str, Face]
    alternatives: dict[str, str]
    own_members: dict[str, tuple[str, ...]]

    def uses_of(self, target: str) -> list[Use]:
        return [use for use in self.uses if use.target == target]


def make_record(version: str, vllm: Path, ours: Path | None = None) -> Record:
    """Read both sources.

    Args:
        version: of the vLLM in ``vllm``.
        ours: our package's folder, the running one by default.

    Raises:
        LookupError: our source uses something that this vLLM does not have.
    """
    sources = Sources(
        Package.open(OURS, ours or Path(__file__).parents[2]), Package.open(THEIRS, vllm)
    )
    uses = find_uses(sources)
    faces = {}
    for target in sorted({use.target for use in uses}):
        face = face_of(sources, target, detail([use for use in uses if use.target == target]))
        if face is None:
            raise LookupError(f"{target} is used, and vLLM {version} does not have it")
        faces[target] = face
    return Record(
        version,
        tuple(uses),
        faces,
        alternatives(sources, OURS),
        own_members_by_base(sources),
    )


def is_whole_class(use: Use) -> bool:
    """Whether a use leans on every member: a base, or a class that an object had before ours."""
    return use.how is How.SUBCLASS or (use.how is How.REPLACE and use.shape is None)


def detail(uses: Sequence[Use]) -> Detail:
    """How much of a target matters for these uses of it."""
    if any(map(is_whole_class, uses)):
        return Detail.MEMBERS
    return Detail.NAME if all(use.how is How.IMPORT for use in uses) else Detail.FACE


def write_record(record: Record, path: Path = RECORDED) -> None:
    """One use and one face a line, so that a change of either is one line of a difference."""
    uses = [json.dumps(_bare(asdict(use))) for use in record.uses]
    faces = [
        f"{json.dumps(target)}: {json.dumps(_bare(asdict(face)))}"
        for target, face in record.faces.items()
    ]
    own = json.dumps(record.own_members, indent=1)
    others = json.dumps(record.alternatives, indent=1)
    path.write_text(
        f'{{"vllm": {json.dumps(record.vllm)},\n"uses": [\n'
        + ",\n".join(uses)
        + '\n],\n"faces": {\n'
        + ",\n".join(faces)
        + f'\n}},\n"alternatives": {others},\n"own_members": {own}\n}}\n'
    )


def read_record(path: Path = RECORDED) -> Record:
    data = json.loads(path.read_text())
    return Record(
        data["vllm"],
        tuple(
            Use(use["target"], How(use["how"]), use["where"], _shape(use.get("shape")))
            for use in data["uses"]
        ),
        {
            target: Face(
                face["kind"],
                _shape(face.get("shape")),
                tuple(face["fields"]) if "fields" in face else None,
                face.get("digest", ""),
                face.get("members", {}),
            )
            for target, face in data["faces"].items()
        },
        data["alternatives"],
        {base: tuple(names) for base, names in data["own_members"].items()},
    )


def _bare(data: dict[str, Any]) -> dict[str, Any]:
    """Without what is empty, but for the fields of a dataclass that has none."""
    return {
        key: _bare(value) if key == "shape" else value
        for key, value in data.items()
        if value or (key in ("shape", "fields") and value is not None)
    }


def _shape(data: dict[str, Any] | None) -> Shape | None:
    if data is None:
        return None
    return Shape(
        tuple(data.get("positional", ())),
        tuple(data.get("keywords", ())),
        data.get("open_ended", False),
    )
