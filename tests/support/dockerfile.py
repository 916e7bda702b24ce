"""A Dockerfile's instructions, run one after the other in a folder instead of an image.

An absolute path of an instruction is one below that folder. Packages come from an environment of
links to this one's (see ``linked``), so that pip finds what it is asked for without a network.
What would change the machine itself is stood in for by a program that only writes down how it was
called.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ABSOLUTE = re.compile(r"(?<![\w./:])/(?=\w)")
STAND_INS = ("apt-get", "useradd")
PIP_ALONE = {
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_NO_INDEX": "1",
    # What this variable says is taken for the flag's negation: builds use what is installed.
    "PIP_NO_BUILD_ISOLATION": "false",
}


@dataclass(frozen=True)
class Instruction:
    """``RUN``, and what follows it on its line and those it continues on."""

    keyword: str
    value: str


def instructions(file: Path) -> list[Instruction]:
    """Of a file that a linter has passed: comments go, continued lines are joined."""
    lines = [line for line in file.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    found = [line.split(None, 1) for line in joined.splitlines() if line.strip()]
    return [Instruction(keyword.upper(), value.strip()) for keyword, value in found]


@dataclass
class Stage:
    """A build stage.

    Attributes:
        base: what it is built from, with variables put in.
        root: the folder that stands for its file system.
        ran: its RUN instructions, which all succeeded.
        entry_point, user: as the image would have them.
    """

    base: str
    root: Path
    folder: str = "/"
    variables: dict[str, str] = field(default_factory=dict)
    ran: list[str] = field(default_factory=list)
    entry_point: list[str] = field(default_factory=list)
    user: str = ""

    def path(self, inside: str) -> Path:
        return self.root / os.path.normpath(os.path.join(self.folder, inside)).lstrip("/")  # noqa: PTH118


class InstructionFailed(AssertionError):
    """A RUN instruction's command; the message holds what it printed."""


@dataclass
class Build:
    """Runs the instructions of a Dockerfile.

    Args:
        context: the folder that COPY takes from.
        environment: a virtual environment, first on the path of every command.
        folder: gets a folder for each stage, and the programs that stand in.
        variables: of the environment, for every command.
    """

    context: Path
    environment: Path
    folder: Path
    variables: Mapping[str, str]
    stages: dict[str, Stage] = field(default_factory=dict)

    @property
    def calls(self) -> Path:
        """The calls of the programs that stand in, one a line."""
        return self.folder / "calls"

    def run(self, file: Path) -> Stage:
        """All instructions of ``file``; the last stage.

        Raises:
            InstructionFailed: a command ended with another status than 0.
        """
        self._make_stand_ins()
        arguments: dict[str, str] = {}
        stage: Stage | None = None
        for instruction in instructions(file):
            if instruction.keyword == "FROM":
                stage = self._begin(instruction.value, arguments)
            elif stage is None:
                assert instruction.keyword == "ARG", instruction
                arguments |= _default(instruction.value)
            else:
                self._carry_out(stage, instruction)
        assert stage is not None
        return stage

    def _begin(self, value: str, arguments: Mapping[str, str]) -> Stage:
        base, _, name = value.partition(" AS ")
        for argument, default in arguments.items():
            base = base.replace(f"${{{argument}}}", default)
        root = self.folder / f"stage{len(self.stages)}"
        root.mkdir()
        self.stages[name or str(len(self.stages))] = stage = Stage(base, root)
        return stage

    def _carry_out(self, stage: Stage, instruction: Instruction) -> None:
        match instruction.keyword:
            case "ARG":
                stage.variables |= _default(instruction.value)
            case "WORKDIR":
                stage.folder = instruction.value
                stage.path(".").mkdir(parents=True, exist_ok=True)
            case "COPY":
                self._copy(stage, instruction.value.split())
            case "RUN":
                self._run(stage, instruction.value)
            case "USER":
                stage.user = instruction.value
            case "ENTRYPOINT":
                stage.entry_point = json.loads(instruction.value)
            case _:
                raise NotImplementedError(instruction)

    def _copy(self, stage: Stage, words: list[str]) -> None:
        source = self.context
        if words[0].startswith("--from="):
            source = self.stages[words.pop(0).removeprefix("--from=")].root
        *names, target = words
        for name in names:
            origin = source / name.lstrip("/")
            goal = stage.path(target)
            if origin.is_dir():
                shutil.copytree(
                    origin, goal, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
                )
            else:
                if target.endswith("/"):
                    goal /= origin.name
                goal.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(origin, goal)

    def _run(self, stage: Stage, command: str) -> None:
        paths = f"{self._programs}{os.pathsep}{self.environment / 'bin'}"
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "PIP_", "PYTHON"))
        }
        done = subprocess.run(
            ["/bin/sh", "-c", ABSOLUTE.sub(f"{stage.root}/", command)],
            cwd=stage.path("."),
            env=kept
            | PIP_ALONE
            | stage.variables
            | self.variables
            | {"PATH": f"{paths}{os.pathsep}{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        if done.returncode:
            raise InstructionFailed(f"RUN {command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        stage.ran.append(command)

    @property
    def _programs(self) -> Path:
        return self.folder / "programs"

    def _make_stand_ins(self) -> None:
        self._programs.mkdir()
        for name in STAND_INS:
            program = self._programs / name
            program.write_text(f'#!/bin/sh\necho "{name} $*" >> "{self.calls}"\n')
            program.chmod(0o755)


def _default(value: str) -> dict[str, str]:
    """The variable that ``ARG NAME=VALUE`` sets; none without a value."""
    name, equals, default = value.partition("=")
    return {name: default} if equals else {}
