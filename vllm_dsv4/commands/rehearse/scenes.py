"""What the engine is made to do: requests whose steps are prefills, decodes, mixtures, hits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vllm_dsv4.commands.rehearse.pools import POOLS
from vllm_dsv4.commands.rehearse.result import EngineResult, Spoken

SEED = 5
POLL_SECONDS = 1.0
BLOCK = 256
"""Tokens of a paged block; a prefix that is found again is so many."""
BF16_BITS = 7
"""Bits of a bf16 number's fraction."""
VOCABULARY = 4000
"""Ids below it are used: the smallest model has 4,096."""


@dataclass
class Stage:
    """An engine, stepped by hand."""

    llm: Any
    result: EngineResult
    _ids: list[str] = field(default_factory=list)

    @property
    def engine(self) -> Any:
        return self.llm.llm_engine

    def submit(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[str]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens, logprobs=1)
        names = []
        for prompt in prompts:
            names.append(f"{len(self._ids)}")
            self._ids.append(names[-1])
            self.engine.add_request(names[-1], {"prompt_token_ids": list(prompt)}, params)
        return names

    def run(self, between: dict[int, Callable[[], Any]] | None = None) -> dict[str, Any]:
        """Step until nothing is left; ``between[n]`` is called after step ``n``."""
        outputs: dict[str, Any] = {}
        steps = 0
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                outputs[output.request_id] = output
            steps += 1
            if between and steps in between:
                between[steps]()
        return outputs

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        between: dict[int, Callable[[], Any]] | None = None,
    ) -> list[Spoken]:
        names = self.submit(prompts, max_tokens)
        outputs = self.run(between)
        return [_spoken(outputs[name]) for name in names]

    def preempt_all(self) -> None:
        """Take every running request's slot and pages, as a full pool would, and let it resume."""
        scheduler = self.engine.engine_core.engine_core.scheduler
        self.result.preempted += len(scheduler.running)
        scheduler.reset_prefix_cache(reset_running_requests=True)


def _spoken(output: Any) -> Spoken:
    said = output.outputs[0]
    tokens = list(said.token_ids)
    logprobs = [entry[t].logprob for entry, t in zip(said.logprobs, tokens, strict=True)]
    return Spoken(list(output.prompt_token_ids), tokens, logprobs, output.num_cached_tokens or 0)


def prompt(length: int, seed: int) -> list[int]:
    """Random ids."""
    generator = torch.Generator().manual_seed(SEED + seed)
    ids: list[int] = torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()
    return ids


def short(stage: Stage) -> list[Spoken]:
    """Two prompts at once, then steps of decodes only."""
    return stage.answers([prompt(20, 0), prompt(33, 1)], 6)


def preempted(stage: Stage) -> list[Spoken]:
    """Two more, both of which lose their slots in the middle and start again."""
    return stage.answers([prompt(9, 2), prompt(14, 3)], 6, {4: stage.preempt_all})


def session(stage: Stage) -> list[Spoken]:
    """A prompt over a block long, in chunks beside a decode; then the next turn, which hits."""
    turn = prompt(BLOCK + 6, 4)
    beside, first = stage.answers([prompt(7, 5), turn], 6)
    (second,) = stage.answers([[*turn, *first.tokens, *prompt(5, 7)]], 4)
    return [beside, first, second]


class Changed(RuntimeError):
    """An answer differs where not a bit may."""


def slept(stage: Stage) -> list[Spoken]:
    """The same prompts before sleep and after it, at both levels."""
    return _around_sleep(stage, [prompt(20, 0), prompt(9, 2)], levels=(1, 2))


def forgotten(stage: Stage) -> list[Spoken]:
    """A prompt whose first block would be cached, had its bytes not gone in sleep."""
    return _around_sleep(stage, [prompt(BLOCK + 5, 8)], levels=(1,))


def _around_sleep(
    stage: Stage, prompts: Sequence[Sequence[int]], levels: Sequence[int]
) -> list[Spoken]:
    """Raises Changed where an answer is another after waking, or owes anything to the cache."""
    first = stage.answers(prompts, 4)
    for level in levels:
        stage.llm.sleep(level=level)
        stage.result.offloaded[str(level)] = dict(POOLS.offloaded)
        stage.llm.wake_up()
        if level == 2:
            stage.llm.collective_rpc("reload_weights")
        again = stage.answers(prompts, 4)
        if again != first:
            raise Changed(f"after sleep of level {level}: {again} in place of {first}")
    return first


SCENES = {scene.__name__: scene for scene in (short, preempted, session, slept, forgotten)}


def play(names: Iterable[str], stage: Stage) -> None:
    """Put the scenes' answers into the result."""
    for name in names:
        stage.result.answers += SCENES[name](stage)
    stage.result.answered = True


def score_all(paths: Iterable[Path], stage: Stage, up_to: int | None = None) -> None:
    """Score the answers of engines, each of which may still be at it, under its file's name.

    Args:
        up_to: tokens of the longest text that is scored, if not all are.
    """
    paths = list(paths)
    if not paths:
        return
    told: dict[str, list[Spoken]] = {}
    for path in paths:
        while not (other := EngineResult.read(path)).answered:
            time.sleep(POLL_SECONDS)  # whoever started both ends this one if the other fails
        told[path.stem] = [
            answer
            for answer in other.answers
            if up_to is None or len(answer.prompt) + len(answer.tokens) <= up_to
        ]
    with _largest_logit(stage) as largest:
        regrets = iter(score([answer for answers in told.values() for answer in answers], stage))
    stage.result.logit_step = 2.0 ** (math.floor(math.log2(max(largest))) - BF16_BITS)
    stage.result.scored = {name: [next(regrets) for _ in told[name]] for name in told}


def score(answers: Sequence[Spoken], stage: Stage) -> list[float]:
    """Nats that each answer lacks, at its worst token, against what this engine would have said.

    A text that another begins with is scored within the other.
    """
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    texts = [[*answer.prompt, *answer.tokens] for answer in answers]
    within = [max((t for t in texts if t[: len(text)] == text), key=len) for text in texts]
    asked = [text for number, text in enumerate(texts) if text not in texts[:number]]
    asked = [text for text in asked if text in within]
    outputs = stage.llm.generate(
        [{"prompt_token_ids": text} for text in asked], params, use_tqdm=False
    )
    entries = [outputs[asked.index(text)].prompt_logprobs for text in within]
    return [
        _regret(found[len(a.prompt) : len(text)], a)
        for found, text, a in zip(entries, texts, answers, strict=True)
    ]


@contextmanager
def _largest_logit(stage: Stage) -> Iterator[list[float]]:
    """The largest logit in magnitude of every call of the head."""
    model = stage.engine.model_executor.driver_worker.worker.model_runner.model
    compute = model.compute_logits
    found: list[float] = []

    def look(*args: Any, **kwargs: Any) -> Any:
        logits = compute(*args, **kwargs)
        found.append(float(logits.abs().max()))
        return logits

    model.compute_logits = look
    try:
        yield found
    finally:
        model.compute_logits = compute


def _regret(entries: Sequence[Any], answer: Spoken) -> float:
    """Of an answer's worst token; infinite where a log-probability on either side is NaN."""
    lacking = [
        max(other.logprob for other in entry.values()) - entry[token].logprob
        for entry, token in zip(entries, answer.tokens, strict=True)
    ]
    if any(math.isnan(value) for value in (*lacking, *answer.logprobs)):
        return math.inf
    return max(lacking)
