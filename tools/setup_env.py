"""Makes ``.venv`` with everything that serves, tests and lints this project on a CPU.

Run by ``make setup``. Steps that are already done are skipped: each step leaves a digest of what
it depends on in ``.venv/setup.json``, so a changed requirements file repeats its step only.
Needs nothing beyond Python's own library.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = (3, 11)
METADATA = Path("tools/vllm_metadata")


class SetupFailed(Exception):
    """A step did not work; the message says what to do about it."""


@dataclass(frozen=True)
class Step:
    """One thing to install.

    Attributes:
        title: shown while it runs.
        inputs: files, from the project's root, whose content decides whether to repeat it.
        run: does it.
    """

    title: str
    inputs: tuple[Path, ...]
    run: Callable[[], None]

    def digest(self) -> str:
        content = hashlib.sha256()
        for path in self.inputs:
            content.update((ROOT / path).read_bytes())
        return content.hexdigest()


@dataclass(frozen=True)
class Environment:
    """A virtual environment in ``folder``; ``torch_index`` is searched for packages as well."""

    folder: Path
    torch_index: str | None

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def stamp(self) -> Path:
        return self.folder / "setup.json"

    def works(self) -> bool:
        probe = [str(self.python), "-c", "import pip"]
        return self.python.exists() and subprocess.run(probe, check=False).returncode == 0

    def pip_install(self, *arguments: str) -> None:
        """Install without dependencies: the requirements files name them all."""
        command = [str(self.python), "-m", "pip", "install", "--no-deps", *arguments]
        if self.torch_index:
            command += ["--extra-index-url", self.torch_index]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            raise SetupFailed(f"pip failed: {' '.join(command)}")

    def install_requirements(self, name: str) -> None:
        self.pip_install("-r", f"requirements/{name}.txt")

    def steps(self) -> list[Step]:
        return [
            Step("torch for the CPU", (Path("requirements/cpu.txt"),), self._install_torch),
            Step(
                "vLLM for the CPU",
                (Path("requirements/cpu.txt"),),
                lambda: self.install_requirements("cpu"),
            ),
            Step(
                "vLLM's metadata",
                (METADATA / "pyproject.toml",),
                lambda: self.pip_install("--no-build-isolation", f"./{METADATA}"),
            ),
            Step(
                "test and lint tools",
                (Path("requirements/dev.txt"),),
                lambda: self.install_requirements("dev"),
            ),
            Step(
                "this project",
                (Path("setup.py"), Path("pyproject.toml")),
                lambda: self.pip_install("--no-build-isolation", "--editable", "."),
            ),
        ]

    def _install_torch(self) -> None:
        """Alone and first: a pip that knows no CPU build fails before it fetches anything."""
        pins = (ROOT / "requirements" / "cpu.txt").read_text().splitlines()
        pin = next(pin for pin in pins if pin.startswith("torch=="))
        try:
            self.pip_install(pin)
        except SetupFailed as error:
            raise SetupFailed(
                f"{error}\npip finds no {pin}, the CPU build of torch, which is on an index of "
                "PyTorch's own. Name it: make setup TORCH_INDEX=URL (PyTorch's 'Get started' page "
                "shows the URL when CPU is chosen)."
            ) from error


def set_up(environment: Environment) -> None:
    """Create ``environment`` if need be, and run its steps that are not done yet."""
    if not environment.works():
        print(f"== making {environment.folder}", flush=True)
        venv.create(environment.folder, with_pip=True, symlinks=True)
    stamp = environment.stamp
    done: dict[str, str] = json.loads(stamp.read_text()) if stamp.exists() else {}
    steps = environment.steps()
    for number, step in enumerate(steps, start=1):
        if done.get(step.title) == step.digest():
            continue
        print(f"== [{number}/{len(steps)}] {step.title}", flush=True)
        started = time.monotonic()
        step.run()
        print(f"== {step.title}: {time.monotonic() - started:.0f} s", flush=True)
        done[step.title] = step.digest()
        stamp.write_text(json.dumps(done, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Set up the project's virtual environment.")
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv")
    parser.add_argument("--torch-index", default=None, help="index with the CPU build of torch")
    args = parser.parse_args()
    if sys.version_info[:2] != PYTHON:
        found = ".".join(map(str, sys.version_info[:2]))
        print(
            f"setup: error: this is Python {found}, and the pinned packages are for "
            f"{PYTHON[0]}.{PYTHON[1]}; name another: make setup PYTHON=python3.11",
            file=sys.stderr,
        )
        return 2
    try:
        set_up(Environment(args.folder.absolute(), args.torch_index or None))
    except SetupFailed as error:
        print(f"setup: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
