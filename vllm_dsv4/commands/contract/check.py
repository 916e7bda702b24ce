"""The record against another vLLM: what is gone, what no longer fits, what has to be read again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from vllm_dsv4.commands.contract.faces import Face, face_of
from vllm_dsv4.commands.contract.record import Record, detail, is_whole_class
from vllm_dsv4.commands.contract.shapes import Shape
from vllm_dsv4.commands.contract.source import Sources
from vllm_dsv4.commands.contract.uses import THEIRS, How


class Change(StrEnum):
    """Classes of change, the worst first."""

    GONE = "gone or moved"
    KIND = "became another kind of thing"
    CALL = "a call of ours no longer fits"
    OVERRIDE = "an override of ours no longer fits"
    KERNEL = "a kernel's arguments changed"
    COLLISION = "vLLM took a name that our subclass uses"
    MOVED = "moved, to where our source looks too"
    SIGNATURE = "parameters changed, and ours still fit"
    FIELDS = "fields of a dataclass changed"
    MEMBERS = "members of a base class changed"
    CODE = "same face, other code"

    @property
    def breaks(self) -> bool:
        """Whether our source needs a change; otherwise somebody has to read."""
        return self in (
            Change.GONE,
            Change.KIND,
            Change.CALL,
            Change.OVERRIDE,
            Change.KERNEL,
            Change.COLLISION,
        )


@dataclass(frozen=True)
class Finding:
    """One change of one target. ``where`` names the modules of ours that use it."""

    change: Change
    target: str
    text: str
    where: tuple[str, ...]


def check(record: Record, sources: Sources) -> list[Finding]:
    """Compare every face in the record with what ``sources`` holds."""
    findings = []
    for target, was in record.faces.items():
        uses = record.uses_of(target)
        where = tuple(sorted({use.where for use in uses}))
        now = face_of(sources, target, detail(uses))
        if now is None:
            other = _other_place(record, target)
            now = face_of(sources, other, detail(uses))
            if now is not None:
                findings.append(Finding(Change.MOVED, target, f"now {other}", where))
        if now is None:
            found = _other_places(sources, target)
            findings.append(Finding(Change.GONE, target, f"now in {found}" if found else "", where))
            continue
        if now.kind != was.kind:
            text = f"was a {was.kind}, is a {now.kind}"
            findings.append(Finding(Change.KIND, target, text, where))
            continue
        for use in uses:
            misfit = _misfit(use.how, use.shape, now)
            if misfit is not None:
                findings.append(Finding(misfit[0], target, misfit[1], (use.where,)))
        findings += [Finding(c, target, text, where) for c, text in _differences(was, now)]
    findings += _collisions(record, sources)
    order = list(Change)
    return sorted(set(findings), key=lambda f: (order.index(f.change), f.target, f.text))


def _misfit(how: How, shape: Shape | None, now: Face) -> tuple[Change, str] | None:
    if shape is None or now.shape is None:
        return None
    if how in (How.CALL, How.CONSTRUCT):
        change, text = Change.CALL, call_misfit(shape, now.shape)
    elif how is How.OVERRIDE:
        change, text = Change.OVERRIDE, override_misfit(shape, now.shape)
    elif how is How.REPLACE:
        change, text = Change.KERNEL, kernel_misfit(shape, now.shape)
    else:
        return None
    return (change, text) if text else None


def call_misfit(call: Shape, takes: Shape) -> str:
    """Why a call cannot be bound to these parameters, or nothing."""
    names, keywords = _names(takes.positional), _names(takes.keywords)
    if not takes.open_ended:
        if len(call.positional) > len(names):
            return f"{len(call.positional)} arguments by position, {len(names)} are taken"
        unknown = sorted(set(call.keywords) - set(names) - set(keywords))
        if unknown:
            return f"no parameter {', '.join(unknown)}"
    if call.open_ended:
        return ""
    given = {*names[: len(call.positional)], *call.keywords}
    needed = [n for n in (*takes.positional, *takes.keywords) if not n.endswith("=")]
    missing = [name for name in needed if name not in given]
    return f"no argument for {', '.join(missing)}" if missing else ""


def override_misfit(ours: Shape, base: Shape) -> str:
    """Why callers of the base's method cannot call ours in its place, or nothing."""
    names, wanted = _names(ours.positional), _names(base.positional)
    accepted = {*names, *_names(ours.keywords)}
    for mine, theirs in zip(names, wanted, strict=False):
        if mine != theirs and not (ours.open_ended and mine in wanted):
            return f"vLLM passes {theirs} where ours takes {mine}"
    if not ours.open_ended:
        refused = [n for n in (*wanted, *_names(base.keywords)) if n not in accepted]
        if refused or (base.open_ended and not base.positional and not base.keywords):
            return f"ours takes no {', '.join(refused) or 'arguments'}"
    passed = {*wanted, *_names(base.keywords)}
    needed = [n for n in (*ours.positional, *ours.keywords) if not n.endswith("=")]
    extra = [name for name in needed if name not in passed]
    return f"ours needs {', '.join(extra)}" if extra and not base.open_ended else ""


def kernel_misfit(ours: Shape, kernel: Shape) -> str:
    """Why our version of a kernel cannot be launched by name in its place, or nothing."""
    mine, theirs = _names(ours.positional), _names(kernel.positional)
    return "" if mine == theirs else _difference(mine, theirs) or "another order"


def _names(parameters: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name.rstrip("=") for name in parameters)


def _differences(was: Face, now: Face) -> Iterator[tuple[Change, str]]:
    if was.fields != now.fields:
        yield Change.FIELDS, _difference(was.fields or (), now.fields or ())
    elif was.shape is not None and now.shape is not None and was.shape != now.shape:
        names = [(*shape.positional, *shape.keywords) for shape in (was.shape, now.shape)]
        order = f"{describe(was.shape)} is now {describe(now.shape)}"
        yield Change.SIGNATURE, _difference(*names) or order
    if was.members != now.members:
        both = was.members.keys() & now.members.keys()
        changed = sorted(name for name in both if was.members[name] != now.members[name])
        parts = [_difference(tuple(was.members), tuple(now.members))]
        parts.append(f"other code: {', '.join(changed)}" if changed else "")
        yield Change.MEMBERS, "; ".join(filter(None, parts))
    if was.digest != now.digest:
        yield Change.CODE, ""


def describe(shape: Shape) -> str:
    """Parameters as one would write them."""
    star = ["*"] if shape.keywords else []
    tail = ["..."] if shape.open_ended else []
    return f"({', '.join([*shape.positional, *star, *shape.keywords, *tail])})"


def _difference(was: tuple[str, ...], now: tuple[str, ...]) -> str:
    parts = [
        f"{word}: {', '.join(names)}"
        for word, names in (
            ("new", [name for name in now if name not in was]),
            ("gone", [name for name in was if name not in now]),
        )
        if names
    ]
    return "; ".join(parts)


def _collisions(record: Record, sources: Sources) -> Iterator[Finding]:
    for base, names in record.own_members.items():
        for name in names:
            if face_of(sources, f"{base}.{name}") is not None:
                where = tuple(sorted({u.where for u in record.uses_of(base) if is_whole_class(u)}))
                yield Finding(Change.COLLISION, f"{base}.{name}", "", where)


def _other_place(record: Record, target: str) -> str:
    """Where our source looks if the target is not there."""
    others = record.alternatives
    for same in (target, target.replace(":", ".")):
        if same in others:
            return others[same]
    module, colon, name = target.partition(":")
    return others.get(module, module) + colon + name


def _other_places(sources: Sources, target: str) -> str:
    """Where else in vLLM a class or function of that name is defined."""
    name = target.partition(":")[2].split(".")[0]
    package = sources.packages[THEIRS]
    places = []
    for module in package.modules():
        file = package.file(module)
        assert file is not None
        text = package.text(file)
        if name and (f"class {name}" in text or f"def {name}(" in text):
            symbol = sources.find(module, name)
            if symbol is not None and symbol.module == module:
                places.append(module)
    return ", ".join(places)
