"""Every number, list and word of a request, at values that nobody should send."""

from __future__ import annotations

import math
from typing import Any

from tests.clients.cells import CHAT, COMPLETIONS, TEXT, Cell

GROUP = "Absurd values"

VALUES: tuple[Any, ...] = (-1, 2**63, 10**30, 1e308, math.nan, "x", "\ud800", [], {})
"""Of every type, and at the ends of each."""

FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "n", "seed", "max_tokens", "min_tokens", "logprobs",
    "prompt_logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "length_penalty", "stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logit_bias",
    "priority", "truncate_prompt_tokens", "stream", "stream_options", "ignore_eos", "echo",
    "skip_special_tokens", "use_beam_search", "cache_salt", "request_id", "response_format",
    "structured_outputs", "logprob_token_ids", "vllm_xargs", "kv_transfer_params", "user",
)  # fmt: skip
COMPLETIONS_ONLY = ("prompt", "suffix", "best_of", "prompt_embeds")
CHAT_ONLY = ("messages", "top_logprobs", "tools", "tool_choice", "chat_template_kwargs",
             "reasoning_effort", "thinking_token_budget", "max_completion_tokens")  # fmt: skip
COMBINED: tuple[dict[str, Any], ...] = (
    {"min_tokens": 3, "stop_token_ids": [10**9]},
    {"min_tokens": 3, "stop_token_ids": [-1]},
    {"min_tokens": 3, "stop_token_ids": [2**63]},
    {"logit_bias": {"999999999": 1}},
    {"logit_bias": {"-1": 1}},
    {"logit_bias": {"0": 1e30}},
    {"logit_bias": {"0": math.nan}},
    {"allowed_token_ids": [10**9]},
    {"allowed_token_ids": [-1]},
    {"logprob_token_ids": [10**9]},
    {"logprob_token_ids": [-1]},
    {"bad_words": [""]},
    {"bad_words": ["\u0000"]},
    {"bad_words": [" " * 3000]},
    {"temperature": 1e-320},
    {"temperature": 1e-10, "seed": -(2**63)},
    {"temperature": 1.0, "top_k": 2**31 - 1, "seed": 2**63 - 1},
    {"temperature": 1.0, "top_p": 1e-320},
    {"repetition_penalty": 1e-320},
    {"repetition_penalty": 1e30, "presence_penalty": 2, "frequency_penalty": -2},
    {"prompt_logprobs": -1},
    {"prompt_logprobs": 10**6},
    {"stop": [""]},
    {"stop": ["a"] * 1000},
    {"structured_outputs": {"regex": "("}},
    {"structured_outputs": {"regex": "(a{100}){100}"}},
    {"structured_outputs": {"grammar": "root ::= root"}},
    {"structured_outputs": {"grammar": ""}},
    {"structured_outputs": {"json": {"$ref": "#"}}},
    {"structured_outputs": {"json": "{"}},
    {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"choice": [""]}},
    {"structured_outputs": {"structural_tag": "{}"}},
    {"structured_outputs": {"regex": "a", "choice": ["a"]}},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "structural_tag", "format": {}}},
    {"truncate_prompt_tokens": 0},
    {"n": 100, "temperature": 1.0},
    {"use_beam_search": True, "n": 40, "temperature": 0},
    {"use_beam_search": True, "n": 0, "temperature": 0},
    {"stream": True, "n": 3, "temperature": 1.0, "max_tokens": 0},
)
"""Together, and out of the vocabulary's range."""

PROMPTS: tuple[Any, ...] = (
    [10**9], [-1], [2**63], [0] * 511, [0] * 512, [0] * 100_000, "x" * 100_000, "\ud800", "\u0000",
    [[], [1]], ["", "x"], [["x"]], [1, "x"], [1.5], " ",
)  # fmt: skip


def absurd_cells() -> list[Cell]:
    """Of completions, and of what only a chat has."""
    chat = {"messages": [{"role": "user", "content": TEXT}]}
    made = [
        *_one_by_one("completions", COMPLETIONS, {"prompt": TEXT}, FIELDS + COMPLETIONS_ONLY),
        *_one_by_one("chat", CHAT, chat, CHAT_ONLY),
    ]
    bodies = [{"max_tokens": 4, "prompt": TEXT} | option for option in COMBINED]
    bodies += [{"max_tokens": 1, "prompt": prompt} for prompt in PROMPTS]
    return made + [
        Cell(GROUP, f"body {number}", "completions", COMPLETIONS, {"model": "dsv4", **body})
        for number, body in enumerate(bodies)
    ]


def _one_by_one(where: str, path: str, base: dict[str, Any], fields: tuple[str, ...]) -> list[Cell]:
    return [
        Cell(
            GROUP, f"{field}={value!r}", where, path,
            {"model": "dsv4", "max_tokens": 1, **base, field: value},
        )
        for field in fields
        for value in VALUES
    ]  # fmt: skip
