"""A running server, and clients that ask it greedily."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI, OpenAI

from tests.support.server import Server, wait_for

MODEL = "dsv4"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}


class Served:
    """A running server and its clients."""

    def __init__(self, running: Server) -> None:
        self.running = running
        self.client = OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        self.asynchronous = AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)

    def metric(self, name: str) -> float:
        return self.running.metrics()[f"vllm:{name}"]

    def wait_until_idle(self) -> None:
        """No request, no slot and no page is in use."""
        names = ("num_requests_running", "dsv4_slots_in_use", "kv_cache_usage_perc")
        wait_for(lambda: not any(self.metric(name) for name in names), 20, f"{names} to be 0")

    def logit_step(self, tokens: list[int]) -> float:
        """One step of bf16 at the largest logits: no two at a place are nearer, unless equal."""
        answer = self.client.completions.create(
            prompt=tokens, max_tokens=1, extra_body={"prompt_logprobs": 2}, **GREEDY
        )
        gaps = []
        for entry in answer.choices[0].model_dump()["prompt_logprobs"][1:]:
            best, second = sorted((one["logprob"] for one in entry.values()), reverse=True)[:2]
            gaps.append(best - second)
        return min(gap for gap in gaps if gap > 1e-3)

    def prompt_logprobs(self, tokens: list[int]) -> list[tuple[float, float]]:
        """As ``tests.support.engine.Engine.prompt_logprobs``, asked of the server."""
        answer = self.client.completions.create(
            prompt=tokens, max_tokens=1, extra_body={"prompt_logprobs": 1}, **GREEDY
        )
        entries = answer.choices[0].model_dump()["prompt_logprobs"]
        return [(0.0, 0.0)] + [
            (
                entry[str(token)]["logprob"],
                max(other["logprob"] for other in entry.values()),
            )
            for token, entry in zip(tokens[1:], entries[1:], strict=True)
        ]
