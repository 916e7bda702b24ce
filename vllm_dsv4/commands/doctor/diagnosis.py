"""What the doctor found, and how it is told."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class EntryPoint:
    """One entry point of a group that vLLM reads. ``allowed`` is what ``VLLM_PLUGINS`` says."""

    group: str
    name: str
    value: str
    allowed: bool


@dataclass(frozen=True)
class Workaround:
    """A workaround for vLLM. ``why`` is the head of its module's docstring."""

    name: str
    in_force: bool
    why: str


@dataclass(frozen=True)
class Device:
    """A device that vLLM would serve on. ``memory_bytes`` is 0 where it cannot be read."""

    name: str
    memory_bytes: int


@dataclass
class Diagnosis:
    """All findings. Classes are named ``module.Class``; empty where none was found.

    Attributes:
        live: DSV4 would be served on rings by a vLLM started in this environment.
        reasons: why it is not live; empty if it is.
        vllm_was_asked: False where only what needs no card was looked at; then ``live`` is False,
            and what vLLM resolves is left empty.
        data_parallel: whether engines of this platform can exchange tokens for the experts, which
            data parallelism needs and expert parallelism within it; one engine needs neither.
        settings: ``VLLM_DSV4_*`` and the variables of vLLM that decide whether plugins load.
    """

    live: bool = False
    reasons: list[str] = field(default_factory=list)
    vllm_was_asked: bool = True
    versions: dict[str, str | None] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    entry_points: list[EntryPoint] = field(default_factory=list)
    platform: str = ""
    model: str = ""
    spec: str = ""
    manager: str = ""
    model_runner: str = ""
    data_parallel: str = ""
    workarounds: list[Workaround] = field(default_factory=list)
    devices: list[Device] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def describe(self) -> str:
        """The findings as lines: the verdict, its reasons, then everything else."""
        lines = [self._verdict(), *(f"  {reason}" for reason in self.reasons)]
        lines += _block(
            "versions", [f"{k} {v or 'not installed'}" for k, v in self.versions.items()]
        )
        lines += _block("environment", [f"{k}={v!r}" for k, v in self.settings.items()])
        lines += _block(
            "entry points",
            [
                f"{e.group}: {e.name} -> {e.value}{'' if e.allowed else ' (not allowed)'}"
                for e in self.entry_points
            ],
        )
        if not self.vllm_was_asked:
            return "\n".join(lines)
        lines += _block(
            "what vLLM resolves",
            [
                f"platform      {self.platform}",
                f"model         {self.model}",
                f"spec          {self.spec}",
                f"manager       {self.manager}",
                f"model runner  {self.model_runner}",
                f"engines       {self.data_parallel}",
            ],
        )
        lines += _block(
            "workarounds in force",
            [f"{w.name}: {w.why.replace('``', '')}" for w in self.workarounds if w.in_force],
        )
        lines += _block(
            "workarounds not needed here", [w.name for w in self.workarounds if not w.in_force]
        )
        lines += _block("devices", [_device(device) for device in self.devices])
        return "\n".join(lines)

    def _verdict(self) -> str:
        if self.live:
            return "live: DeepSeek-V4 is served on rings"
        if self.reasons:
            return "NOT live"
        return "installed: with an AMD card DeepSeek-V4 is served on rings (vLLM was not asked)"


def _block(title: str, lines: list[str]) -> list[str]:
    return ["", title, *(f"  {line}" for line in lines or ["none"])]


def _device(device: Device) -> str:
    memory = f", {device.memory_bytes / 2**30:.1f} GiB" if device.memory_bytes else ""
    return f"{device.name}{memory}"
