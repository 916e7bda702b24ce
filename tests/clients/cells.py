"""What clients send: one request for each feature of the API, on every endpoint that has it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Body = Mapping[str, Any]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "The quick brown fox jumps over the lazy dog"
TOKENS = list(range(1000, 1020))
SAMPLED = {"temperature": 0.8, "seed": 7}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 4}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
}
GRAMMAR = 'root ::= "yes" | "no"'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Look something up.",
            "parameters": SCHEMA,
        },
    }
    for name in ("weather", "traffic")
]
WEATHER = {"type": "function", "function": {"name": "weather"}}


@dataclass(frozen=True)
class Cell:
    """One request.

    Attributes:
        group: heading in the document.
        name: what it asks for.
        where: short name of the endpoint.
        leaves: the client closes the stream after its first event.
    """

    group: str
    name: str
    where: str
    path: str
    body: Body | None = None
    leaves: bool = False

    @property
    def streams(self) -> bool:
        return bool(self.body and self.body.get("stream"))


SAMPLING: dict[str, Body] = {
    "nothing else": {},
    "temperature, top_p, top_k, min_p": SAMPLED | {"top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "n=2": SAMPLED | {"n": 2},
    "best_of=2": SAMPLED | {"best_of": 2},
    "seed": SAMPLED,
    "prompt_logprobs": {"prompt_logprobs": 1},
    "stop": {"stop": ["a", "e"]},
    "stop, kept in the answer": {"stop": "e", "include_stop_str_in_output": True},
    "stop_token_ids": {"stop_token_ids": [11, 12]},
    "min_tokens": {"min_tokens": 3},
    "logit_bias": {"logit_bias": {"1000": 5.0}},
    "allowed_token_ids": {"allowed_token_ids": [1000, 1001]},
    "presence, frequency, repetition": {
        "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1,
    },
    "bad_words": {"bad_words": ["fox"]},
    "priority": {"priority": 1},
    "ignore_eos": {"ignore_eos": True},
    "skip_special_tokens=false": {"skip_special_tokens": False},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 4},
    "return_token_ids": {"return_token_ids": True},
    "cache_salt": {"cache_salt": "tenant"},
    "beam search": {"use_beam_search": True, "n": 2, "temperature": 0},
}  # fmt: skip
"""Of completions and of chats, streamed and whole."""

STRUCTURED: dict[str, Body] = {
    "response_format json_object": {"response_format": {"type": "json_object"}},
    "response_format json_schema": {
        "response_format": {
            "type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA},
        }
    },
    "grammar": {"structured_outputs": {"grammar": GRAMMAR}},
    "regex": {"structured_outputs": {"regex": "[0-9]{1,4}"}},
    "choice": {"structured_outputs": {"choice": ["yes", "no"]}},
}  # fmt: skip

TOOL_CHOICES: dict[str, Body] = {
    "auto": {"tool_choice": "auto"},
    "none": {"tool_choice": "none"},
    "required": {"tool_choice": "required"},
    "named": {"tool_choice": WEATHER},
    "parallel": {"tool_choice": "required", "parallel_tool_calls": True},
    "one at a time": {"tool_choice": "required", "parallel_tool_calls": False},
}


def cells() -> list[Cell]:
    return [*_sampling(), *_structured(), *_tools(), *_batches(), *_others(), *_cancelled()]


def _completion(**changes: Any) -> Body:
    return {"model": "dsv4", "prompt": TEXT, "max_tokens": 5, "temperature": 0} | changes


def _chat(**changes: Any) -> Body:
    asked = [{"role": "user", "content": TEXT}]
    return {"model": "dsv4", "messages": asked, "max_tokens": 5, "temperature": 0} | changes


def _both(group: str, name: str, path: str, body: Body) -> Iterator[Cell]:
    """Whole and streamed."""
    where = path.removeprefix("/v1/").removesuffix("/completions")
    yield Cell(group, name, where, path, body)
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    yield Cell(group, name, f"{where} (streamed)", path, streamed)


def _sampling() -> Iterator[Cell]:
    group = "Sampling and output"
    for name, option in SAMPLING.items():
        yield from _both(group, name, COMPLETIONS, _completion(**option))
        yield from _both(group, name, CHAT, _chat(**option))
    yield from _both(group, "logprobs", COMPLETIONS, _completion(logprobs=2))
    yield from _both(group, "logprobs", CHAT, _chat(logprobs=True, top_logprobs=2))
    yield from _both(group, "echo", COMPLETIONS, _completion(echo=True))
    yield from _both(group, "echo, logprobs", COMPLETIONS, _completion(echo=True, logprobs=1))
    begun = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "It"}]
    going_on = {"messages": begun, "add_generation_prompt": False, "continue_final_message": True}
    yield from _both(group, "echo, going on", CHAT, _chat(**going_on, echo=True))


def _structured() -> Iterator[Cell]:
    group = "Structured outputs"
    for name, option in STRUCTURED.items():
        yield from _both(group, name, COMPLETIONS, _completion(**option))
        for thinking in (False, True):
            body = _chat(**option, chat_template_kwargs={"thinking": thinking})
            words = f"{name}, {'with' if thinking else 'without'} reasoning"
            yield from _both(group, words, CHAT, body)


def _tools() -> Iterator[Cell]:
    for name, option in TOOL_CHOICES.items():
        yield from _both("Tools", name, CHAT, _chat(tools=TOOLS, **option))
    history = [
        {"role": "user", "content": TEXT},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "call-1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call-1", "content": "warm"},
    ]
    yield from _both("Tools", "a tool's answer", CHAT, _chat(messages=history, tools=TOOLS))


def _batches() -> Iterator[Cell]:
    prompts = {
        "token ids": TOKENS,
        "prompts": [TEXT, TEXT[:9], "x"],
        "prompts of token ids": [TOKENS, TOKENS[:3]],
        "prompts, n=2": [TEXT, TEXT[:9]],
        "an empty prompt": "",
        "no prompt": [],
    }
    for name, prompt in prompts.items():
        more = SAMPLED | {"n": 2} if name.endswith("n=2") else {}
        yield from _both("Batches", name, COMPLETIONS, _completion(prompt=prompt, **more))
    chats = [[{"role": "user", "content": text}] for text in (TEXT, "x")]
    yield Cell("Batches", "chats", "chat/batch", f"{CHAT}/batch", _chat(messages=chats))


def _others() -> Iterator[Cell]:
    group = "Other endpoints"
    yield Cell(group, "models", "models", "/v1/models")
    yield Cell(group, "tokenize a text", "tokenize", "/tokenize", {"model": "dsv4", "prompt": TEXT})
    yield Cell(
        group, "tokenize a chat", "tokenize", "/tokenize",
        {"model": "dsv4", "messages": _chat()["messages"]},
    )  # fmt: skip
    yield Cell(group, "detokenize", "detokenize", "/detokenize",
               {"model": "dsv4", "tokens": TOKENS})  # fmt: skip
    response = {"model": "dsv4", "input": TEXT, "max_output_tokens": 5, "temperature": 0}
    yield from _both(group, "responses", "/v1/responses", response)
    yield from _both(group, "responses with tools", "/v1/responses", response | {
        "tools": [{"type": "function", **TOOLS[0]["function"]}],
    })  # fmt: skip
    message = {
        "model": "dsv4", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 5,
    }  # fmt: skip
    yield from _both(group, "messages", "/v1/messages", message)
    yield Cell(group, "messages, counted", "messages", "/v1/messages/count_tokens", message)
    yield Cell(group, "embeddings", "embeddings", "/v1/embeddings",
               {"model": "dsv4", "input": TEXT})  # fmt: skip
    yield Cell(group, "a model that is not served", "completions", COMPLETIONS,
               _completion(model="adapter"))  # fmt: skip
    yield Cell(group, "prompt_embeds", "completions", COMPLETIONS,
               _completion(prompt_embeds="AAAA"))  # fmt: skip


def _cancelled() -> Iterator[Cell]:
    """Each ends the moment its first event has come; what it held must come back."""
    long = {"max_tokens": 1000, "ignore_eos": True, "stream": True}
    message = {"model": "dsv4", "messages": _chat()["messages"], "max_tokens": 1000, "stream": True}
    response = {"model": "dsv4", "input": TEXT, "max_output_tokens": 1000, "stream": True}
    bodies: dict[str, tuple[str, Body]] = {
        "completions": (COMPLETIONS, _completion(**long)),
        "completions, n=2": (COMPLETIONS, _completion(**long, **SAMPLED, n=2)),
        "chat": (CHAT, _chat(**long)),
        "chat, tools": (CHAT, _chat(**long, tools=TOOLS, tool_choice="required")),
        "responses": ("/v1/responses", response),
        "messages": ("/v1/messages", message),
    }
    for name, (path, body) in bodies.items():
        yield Cell("Cancelled streams", name, "closed after an event", path, body, leaves=True)
