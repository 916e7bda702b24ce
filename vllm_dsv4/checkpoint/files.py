"""Which files of a checkpoint's folder are damaged: asked once a load has failed."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

INDEX = "model.safetensors.index.json"


def damaged_files(folder: Path) -> list[str]:
    """Names, each with its fault, of files that cannot be read or that the index names in vain.

    Empty for what is no folder: vLLM resolves names of a hub by itself.
    """
    if not folder.is_dir():
        return []
    found = []
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            found.append(f"{file.name} ({error})")
    return found + _absent(folder)


def _absent(folder: Path) -> list[str]:
    index = folder / INDEX
    if not index.is_file():
        return []
    try:
        named = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        return [f"{INDEX} ({type(error).__name__}: {error})"]
    return [f"{name} (absent)" for name in sorted(named) if not (folder / name).is_file()]
