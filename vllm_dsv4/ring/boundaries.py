"""At which block boundaries of a request a snapshot is of use, and by which hash it is found.

A snapshot at boundary ``b`` holds a slot as it is after ``b`` paged blocks. It is found by the hash
of its last block. With a draft model it is found by the hash of the block after that: the draft
layer's last row there was computed from the token that follows, so only a sequence that shares it
may start from the copy. This is what vLLM's ``drop_eagle_block`` asks of pages; a hit is one block
shorter for it, and every snapshot is taken one boundary earlier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True)
class Boundaries:
    """Boundaries are counted in paged blocks, from 1.

    Attributes:
        block_size: tokens of a paged block.
        interval: tokens between a prompt's snapshots, 0 for its last boundaries only.
        blocks_ahead: blocks after its boundary that a snapshot's hash covers too: 1 with a draft
            model, else 0.
    """

    block_size: int
    interval: int
    blocks_ahead: int

    def key(self, boundary: int) -> int:
        """The block, counted from 1, by whose hash a snapshot at this boundary is found."""
        return boundary + self.blocks_ahead

    def own(self, request: Request) -> set[int]:
        """Those that the session itself resumes from.

        Resending the same prompt resumes at the last boundary before its last token, a longer
        prompt at its last full block; they differ on a prompt of whole blocks. With a draft model
        both resume one block before the last full one.
        """
        prompt = request.num_prompt_tokens
        # A resumed request prefills its own output too.
        resent = {
            min((tokens - 1) // self.block_size, self._last_found(tokens))
            for tokens in (prompt, request.num_tokens)
        }
        return {boundary for boundary in resent | {self._last_found(prompt)} if boundary > 0}

    def shared(self, request: Request) -> set[int]:
        """Those of the prompt for other sessions: asked for by interval, or seen by vLLM."""
        prompt = request.num_prompt_tokens
        tokens = set(range(self.interval, prompt + 1, self.interval)) if self.interval else set()
        tokens.add(request.shared_prefix_boundary)
        return {found for end in tokens if (found := self._last_found(end)) > 0}

    def pending(self, request: Request) -> int:
        """The last one within the known tokens if no snapshot there can be found yet, else 0.

        With a draft model the prompt's last boundary serves nobody until decoding has filled the
        block after it. Then it is what a boundary crossed while decoding is.
        """
        return request.num_tokens // self.block_size if self.blocks_ahead else 0

    def is_reachable(self, request: Request, boundary: int) -> bool:
        """Whether a snapshot there can be found before the request has ended."""
        if request.resumable:  # the next turn's tokens are not known
            return True
        longest = max(request.num_tokens, request.num_prompt_tokens + request.max_tokens)
        return self.key(boundary) * self.block_size <= longest

    def _last_found(self, tokens: int) -> int:
        """The last boundary whose key lies within the first ``tokens``."""
        return tokens // self.block_size - self.blocks_ahead
