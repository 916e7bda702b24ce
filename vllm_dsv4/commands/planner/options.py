"""What a plan is asked for: a model, the memory of a card, and the server's flags."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_dsv4.commands.planner.models import PlannedModel
from vllm_dsv4.serving.refusals import MAX_DRAFTS

GIB = 2**30

MOST_GIB = 2**20
"""A pebibyte: no card has it, and sums of more would be no numbers."""

SPECULATIVE_METHODS = ("mtp", "ngram")
"""MTP drafts with the checkpoint's own window-only layer, n-gram without a model."""


class BadFlag(ValueError):
    """A flag that no plan can be made with; the message names flag, value and remedy."""

    def __init__(self, flag: str, value: object, reason: str, remedy: str) -> None:
        super().__init__(f"{flag} {value}: {reason}. {remedy[:1].upper()}{remedy[1:]}.")


@dataclass(frozen=True)
class PlanOptions:
    """The flags of a deployment. Names and meanings are those of ``vllm serve`` where it has them.

    Attributes:
        model: whose caches are planned.
        gpu_memory_gib: GiB of one card that weights and caches may use together: the card's
            memory times ``--gpu-memory-utilization``, less what activations take.
        weights_gib: GiB of all weights; each card holds its share.
        experts_gib: GiB of the routed experts among them; None takes what the model's config says.
        max_num_seqs: of an engine, as the other limits.
        tensor_parallel_size: cards that share an engine's weights. Each holds the whole KV cache,
            because DSV4 has one key-value head.
        data_parallel_size: engines, each with its own slots and pages; they share the experts.
        enable_expert_parallel: a card then has whole experts rather than a part of each.
        speculative_tokens: drafts of a step.
        async_scheduling: vLLM then has two batches in flight, and its paged path reserves for both.
        enable_prefix_caching: rings then have snapshots beside the slots.
        host_gib: host memory of an engine for its prefix cache; 0 for none.
        disk_gib: the same on disk.
    """

    model: PlannedModel
    gpu_memory_gib: float = 100.0
    weights_gib: float = 0.0
    experts_gib: float | None = None
    max_model_len: int = 131072
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    speculative_tokens: int = 0
    speculative_method: str = "mtp"
    async_scheduling: bool = False
    enable_prefix_caching: bool = False
    host_gib: float = 0.0
    disk_gib: float = 0.0

    def __post_init__(self) -> None:
        for flag, value in (
            ("--max-model-len", self.max_model_len),
            ("--max-num-seqs", self.max_num_seqs),
            ("--max-num-batched-tokens", self.max_num_batched_tokens),
            ("--tensor-parallel-size", self.tensor_parallel_size),
            ("--data-parallel-size", self.data_parallel_size),
        ):
            if value < 1:
                raise BadFlag(flag, value, "it counts at least one", "give 1 or more")
        if not 0 < self.gpu_memory_gib <= MOST_GIB:
            raise BadFlag(
                "--gpu-memory-gib", self.gpu_memory_gib, "no card has it", "give GiB of one card"
            )
        if not 0 <= self.weights_gib <= MOST_GIB:
            raise BadFlag(
                "--weights-gib", self.weights_gib, "no size of weights", "give GiB, 0 or more"
            )
        for flag, size in (("--host-gib", self.host_gib), ("--disk-gib", self.disk_gib)):
            if not 0 <= size <= MOST_GIB:
                raise BadFlag(flag, size, "no size of a prefix cache", "give GiB, 0 or more")
        if self.disk_gib and not self.host_gib:
            raise BadFlag(
                "--disk-gib",
                self.disk_gib,
                "what is on disk is loaded through host memory",
                "give --host-gib too",
            )
        self._check_experts()
        if self.speculative_tokens < 0:
            raise BadFlag(
                "--speculative-tokens", self.speculative_tokens, "negative", "give 0 or more"
            )
        if self.speculative_tokens > MAX_DRAFTS:
            raise BadFlag(
                "--speculative-tokens",
                self.speculative_tokens,
                f"vLLM's rejection sampler takes at most {MAX_DRAFTS} drafts of a request",
                f"give {MAX_DRAFTS} or fewer",
            )
        if self.speculative_method not in SPECULATIVE_METHODS:
            raise BadFlag(
                "--speculative-method",
                self.speculative_method,
                "unknown here",
                f"use one of {', '.join(SPECULATIVE_METHODS)}",
            )
        if self.drafts_with_the_model and not self.model.draft_layers:
            raise BadFlag(
                "--speculative-method",
                self.speculative_method,
                f"{self.model.name} has no draft layers (num_nextn_predict_layers)",
                "use ngram, or name a checkpoint that has them",
            )
        if self.max_model_len > self.model.max_positions:
            raise BadFlag(
                "--max-model-len",
                self.max_model_len,
                f"{self.model.name} was made for {self.model.max_positions:,} tokens",
                f"give {self.model.max_positions} or less",
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise BadFlag(
                "--max-num-batched-tokens",
                self.max_num_batched_tokens,
                f"vLLM refuses less than --max-num-seqs ({self.max_num_seqs})",
                f"give {self.max_num_seqs} or more, or lower --max-num-seqs",
            )

    def _check_experts(self) -> None:
        if self.experts_gib is not None and not 0 <= self.experts_gib <= self.weights_gib:
            raise BadFlag(
                "--experts-gib",
                self.experts_gib,
                f"the experts are a part of --weights-gib {self.weights_gib:g}",
                "give GiB from 0 to that",
            )
        if self.experts_gib is None and self.weights_gib and self.data_parallel_size > 1:
            known = self.model.expert_bytes / GIB
            if not known:
                raise BadFlag(
                    "--data-parallel-size",
                    self.data_parallel_size,
                    f"engines share the experts and nothing else, and {self.model.name} does not "
                    "say how large they are",
                    "give --experts-gib",
                )
            if known > self.weights_gib:
                raise BadFlag(
                    "--weights-gib",
                    self.weights_gib,
                    f"the experts of {self.model.name} alone are {known:.0f} GiB",
                    "give the size of all weight files, or --experts-gib",
                )

    @property
    def drafts_with_the_model(self) -> bool:
        """Whether the checkpoint's own draft layers run."""
        return self.speculative_tokens > 0 and self.speculative_method == "mtp"

    @property
    def draft_layers(self) -> int:
        """Window-only layers that drafting adds."""
        return self.model.draft_layers if self.drafts_with_the_model else 0

    @property
    def all_ratios(self) -> tuple[int, ...]:
        """Compression ratio of every layer with caches, the drafter's last."""
        return self.model.layer_ratios + (0,) * self.draft_layers

    @property
    def cards(self) -> int:
        """Of all engines."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def card_weights_gib(self) -> float:
        """GiB of weights on the card that has most.

        Experts are spread over the cards of all engines, with or without expert parallelism;
        everything else is shared by the cards of one.
        """
        experts = self.experts_gib
        if experts is None:
            experts = min(self.model.expert_bytes / GIB, self.weights_gib)
        share = 1 / self.cards
        if self.enable_expert_parallel and self.model.experts:
            share = math.ceil(self.model.experts / self.cards) / self.model.experts
        return experts * share + (self.weights_gib - experts) / self.tensor_parallel_size

    @property
    def cache_bytes(self) -> int:
        """Bytes of one card that are left for caches, rings included."""
        return int((self.gpu_memory_gib - self.card_weights_gib) * GIB)
