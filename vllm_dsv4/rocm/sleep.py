"""Which of vLLM's sleep-mode pools our tensors lie in.

vLLM builds a model within its ``weights`` pool. At level 1 all of that is copied to the host, and
at level 2 all is dropped and only ``named_buffers()`` come back. Neither suits what is not a
weight: rings hold nothing worth a copy once every request has lost its slot, which vLLM sees to
before it sleeps, and small constants are addressed by whatever memory holds after waking.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

EMPTIED = "kv_cache"
"""Pool that is dropped at every level, and comes back empty where pages do."""
KEPT = "runtime"
"""Pool that is copied to the host at every level, and back at any waking."""


def pool(tag: str) -> AbstractContextManager[object]:
    """Allocate within one of these pools, where the surroundings are within another.

    Nothing to do in an engine that cannot sleep. vLLM nests its own pools in the same way.
    """
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.instance
    if allocator is None or allocator.current_tag == CuMemAllocator.default_tag:
        return nullcontext()
    entered: AbstractContextManager[object] = allocator.use_memory_pool(tag=tag)
    return entered


SINKS = "*.attn_sink"


def keep_sinks(vllm_config: VllmConfig) -> None:
    """Have vLLM keep attention sinks on the host through level 2, a few KiB.

    A reload fills weights through their loaders, but vLLM's model copies sinks into parameters that
    are placeholders meanwhile: what was lost in sleep stays lost, without a word. Remove when a
    reload brings them back; ``make rehearse-all`` shows it with ``--sleep``.
    """
    model = vllm_config.model_config
    if model.enable_sleep_mode and SINKS not in model.sleep_preserve_parameter_names:
        model.sleep_preserve_parameter_names.append(SINKS)
