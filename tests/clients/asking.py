"""Sends cells to a server, and says what came back in words that two servers can be compared by."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from tests.clients.cells import Cell

TIMEOUT = 600
AT_ONCE = 6


@dataclass(frozen=True)
class Reply:
    """What a server made of a cell.

    Attributes:
        status: of HTTP.
        shape: keys of the answer (of all events, where it streams), without their values, which
            depend on what the model says.
        error: the message, where it was refused.
    """

    status: int
    shape: tuple[str, ...] = ()
    error: str = ""


def ask(url: str, cell: Cell) -> Reply:
    with httpx.Client(timeout=TIMEOUT) as client:
        if cell.body is None:
            return _whole(client.get(url + cell.path))
        content = json.dumps(cell.body)  # NaN and infinity as they are
        headers = {"Content-Type": "application/json"}
        if not cell.streams:
            return _whole(client.post(url + cell.path, content=content, headers=headers))
        with client.stream("POST", url + cell.path, content=content, headers=headers) as answer:
            if answer.status_code != 200:
                answer.read()
                return _whole(answer)
            return _streamed(answer.iter_lines(), cell.leaves)


def ask_all(url: str, cells: Iterable[Cell]) -> list[Reply]:
    """Several at once, so that they share batches."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda cell: ask(url, cell), cells))


def _whole(answer: httpx.Response) -> Reply:
    try:
        content = answer.json()
    except ValueError:
        return Reply(answer.status_code, error=answer.text[:200])
    if answer.status_code != 200:
        return Reply(answer.status_code, error=_message(content))
    return Reply(200, tuple(sorted(set(_keys(content)))))


def _streamed(lines: Iterable[str], leaves: bool) -> Reply:
    keys: set[str] = set()
    for line in lines:
        data = line.removeprefix("data: ")
        if data == line or data == "[DONE]":
            continue
        event = json.loads(data)
        if isinstance(event, dict) and event.get("error"):
            return Reply(200, error=_message(event))
        if leaves:
            return Reply(200)
        keys.update(_keys(event))
    return Reply(200, tuple(sorted(keys)))


def _keys(value: Any, path: str = "") -> Iterable[str]:
    """``choices.text`` and the like. Keys that are data are left out."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not key.lstrip("-").isdigit():
                yield f"{path}{key}"
                yield from _keys(inner, f"{path}{key}.")
    elif isinstance(value, list):
        for inner in value:
            yield from _keys(inner, path)


def _message(content: Any) -> str:
    """The error's message in one line, without what differs from call to call."""
    error = content.get("error", content) if isinstance(content, dict) else content
    text = error.get("message", error) if isinstance(error, dict) else error
    words = " ".join(str(text).split()).partition(" For further information visit")[0]
    return re.sub(r"[0-9a-f]{8}-?[0-9a-f-]{8,}|0x[0-9a-f]+", "...", words)
