"""vLLM 0.32's CPU communicator cannot exchange tokens between data-parallel ranks.

Reason: a mixture of experts whose ranks hold different numbers of tokens calls ``all_gatherv`` and
``reduce_scatterv``, which ``CpuCommunicator`` leaves to a base class that raises
``NotImplementedError``: a server with ``--data-parallel-size 2`` becomes ready and ends at its
first request.
Remove when ``CpuCommunicator`` has both methods; a test fails then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class GatheringCpuCommunicator(CpuCommunicator):
    """``CpuCommunicator`` with the two collectives of unequal shares, over gloo."""

    def all_gatherv(
        self,
        input_: torch.Tensor | list[torch.Tensor],
        dim: int = 0,
        sizes: list[int] | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        """The ranks' tensors one behind the other, in every rank.

        Args:
            input_: this rank's ``[sizes[rank], ...]``, or several of that length.
            dim: 0, as vLLM's own communicators have it.
            sizes: rows of each rank; None where all have as many as this one.

        Returns:
            ``[sum(sizes), ...]``, for each tensor given.
        """
        assert dim == 0, "shares are gathered along the first dimension"
        if isinstance(input_, torch.Tensor):
            return self._gather_rows(input_, sizes)
        return [self._gather_rows(tensor, sizes) for tensor in input_]

    def reduce_scatterv(
        self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        """This rank's share of the sum over all ranks.

        Args:
            input_: ``[..., sum(sizes), ...]`` along ``dim``.
            sizes: share of each rank; None for equal ones.
        """
        total = input_.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.device_group)
        shares = sizes or [input_.shape[dim] // self.world_size] * self.world_size
        assert sum(shares) == input_.shape[dim], f"{shares} of {input_.shape[dim]}"
        start = sum(shares[: self.rank_in_group])
        return total.narrow(dim, start, shares[self.rank_in_group]).contiguous()

    def _gather_rows(self, rows: torch.Tensor, sizes: Sequence[int] | None) -> torch.Tensor:
        counts = sizes or [len(rows)] * self.world_size
        assert counts[self.rank_in_group] == len(rows), f"{counts} against {len(rows)} rows"
        # gloo gathers equal shares only: each is filled up to the largest, as bytes, since it
        # knows fewer types than a model uses.
        width = max(counts)
        flat = rows.reshape(len(rows), math.prod(rows.shape[1:]))
        share = flat.new_zeros(width, flat.shape[1])
        share[: len(rows)] = flat
        gathered = [torch.empty_like(share) for _ in counts]
        dist.all_gather(
            [one.view(torch.uint8) for one in gathered],
            share.view(torch.uint8),
            group=self.device_group,
        )
        whole = [one[:count] for one, count in zip(gathered, counts, strict=True)]
        return torch.cat(whole).view(sum(counts), *rows.shape[1:])
