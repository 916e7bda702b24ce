"""Python packages as syntax trees, from a folder or a wheel; nothing is imported."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class Symbol:
    """Something that a module defines. ``node`` is None for the module itself."""

    module: str
    name: str
    node: Definition | None

    def __str__(self) -> str:
        return f"{self.module}:{self.name}" if self.name else self.module


class Package:
    """One package's modules. Paths are relative, as in the package: ``v1/request.py``."""

    def __init__(self, name: str, files: Mapping[str, Path | zipfile.Path]) -> None:
        self.name = name
        self._files = files

    @classmethod
    def open(cls, name: str, location: Path) -> Package:
        """A package inside a wheel, inside a folder, or the package's own folder.

        Raises:
            FileNotFoundError: there is no such package.
        """
        if location.suffix == ".whl":
            wheel = zipfile.ZipFile(location)
            root = zipfile.Path(wheel)
            files = {
                entry.removeprefix(f"{name}/"): root / entry
                for entry in wheel.namelist()
                if entry.startswith(f"{name}/") and entry.endswith(".py")
            }
            if not files:
                raise FileNotFoundError(f"{location} holds no package {name!r}")
            return cls(name, files)
        folder = location if location.name == name else location / name
        if not (folder / "__init__.py").is_file():
            raise FileNotFoundError(f"{location} holds no package {name!r}")
        return cls(
            name, {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*.py"))}
        )

    def file(self, module: str) -> str | None:
        """The file of a module, or None."""
        inner = module.removeprefix(self.name).lstrip(".").replace(".", "/")
        candidates = [f"{inner}.py", f"{inner}/__init__.py"] if inner else ["__init__.py"]
        return next((path for path in candidates if path in self._files), None)

    def text(self, file: str) -> str:
        return self._files[file].read_text(encoding="utf-8")

    def modules(self) -> Iterator[str]:
        for file in self._files:
            dotted = file.removesuffix(".py").replace("/", ".")
            if dotted == "__init__":
                yield self.name
            else:
                yield f"{self.name}.{dotted.removesuffix('.__init__')}"


class Sources:
    """Several packages, and where their names are defined."""

    def __init__(self, *packages: Package) -> None:
        self.packages = {package.name: package for package in packages}
        self._trees: dict[str, ast.Module] = {}
        self._tables: dict[str, dict[str, Symbol | str]] = {}

    def package_of(self, module: str) -> Package | None:
        return self.packages.get(module.split(".")[0])

    def has_module(self, module: str) -> bool:
        package = self.package_of(module)
        return package is not None and package.file(module) is not None

    def tree(self, module: str) -> ast.Module:
        if module not in self._trees:
            package = self.package_of(module)
            file = package.file(module) if package else None
            assert package is not None and file is not None, f"no module {module}"
            self._trees[module] = ast.parse(package.text(file))
        return self._trees[module]

    def find(self, module: str, name: str) -> Symbol | None:
        """Where ``from module import name`` comes from, through all re-exports."""
        seen = set()
        while (module, name) not in seen:
            seen.add((module, name))
            entry = self._table(module).get(name) if self.has_module(module) else None
            if entry is None:
                inner = f"{module}.{name}"
                return Symbol(inner, "", None) if self.has_module(inner) else None
            if isinstance(entry, Symbol):
                return entry
            module, _, name = entry.partition(":")
            if not name:
                return Symbol(module, "", None) if self.has_module(module) else None
        return None

    def _table(self, module: str) -> dict[str, Symbol | str]:
        """Names at a module's top level: defined here, or imported from ``module:name``."""
        if module not in self._tables:
            table: dict[str, Symbol | str] = {}
            for node in top_level(self.tree(module).body):
                for name, origin in imports_of(node, module, self._is_folder(module)):
                    table.setdefault(name, origin)
                for name in _names_defined(node):
                    assert isinstance(node, Definition)
                    table[name] = Symbol(module, name, node)
            self._tables[module] = table
        return self._tables[module]

    def _is_folder(self, module: str) -> bool:
        package = self.package_of(module)
        file = package.file(module) if package else None
        return file is not None and file.endswith("__init__.py")


def top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when a body runs, also below ``if``, ``try`` and ``with``."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from top_level(node.body)
        if isinstance(node, ast.If | ast.Try):
            yield from top_level(node.orelse)
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                yield from top_level(handler.body)


def imports_of(node: ast.AST, module: str, is_folder: bool) -> Iterator[tuple[str, str]]:
    """Local name and origin (``module:name``, or ``module``) of what an import binds."""
    if isinstance(node, ast.ImportFrom):
        parts = module.split(".")
        if node.level:
            parts = parts[: len(parts) - node.level + is_folder]
        base = ".".join([*(parts if node.level else []), *filter(None, [node.module])])
        for alias in node.names:
            yield alias.asname or alias.name, f"{base}:{alias.name}"
    elif isinstance(node, ast.Import):
        for alias in node.names:
            yield (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2


def _names_defined(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Name):
                yield target.id
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
