"""What of vLLM must be told that its ROCm device is the CPU. Only in the rehearsal's own process.

Each mend looks for what it replaces first: a vLLM that has changed there is refused by name.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from vllm_dsv4.commands.rehearse.card import POOL


class UnknownVllm(RuntimeError):
    """This vLLM differs where the stand-in must fit it."""

    def __init__(self, what: str) -> None:
        super().__init__(f"this vLLM is not the one that the stand-in knows: {what}")


def _replace(owner: Any, name: str, value: Any) -> None:
    if not hasattr(owner, name):
        raise UnknownVllm(f"{getattr(owner, '__name__', owner)} has no {name}")
    setattr(owner, name, value)


def mend_platform() -> None:
    """The live ROCm platform, its device the CPU, its collectives gloo's."""
    from vllm.platforms import current_platform, rocm

    if not current_platform.is_rocm():
        raise UnknownVllm(f"it chose {type(current_platform).__name__} where it should choose ROCm")
    cls = type(current_platform)
    communicator = "vllm.distributed.device_communicators.base_device_communicator"
    for name, value in {
        "device_type": "cpu",
        "dispatch_key": "CPU",
        "dist_backend": "gloo",
        "get_device_communicator_cls": classmethod(
            lambda _cls: f"{communicator}.DeviceCommunicatorBase"
        ),
        "use_custom_allreduce": classmethod(lambda _cls: False),
        "use_custom_op_collectives": classmethod(lambda _cls: False),
        "get_global_graph_pool": lambda _self: POOL,
    }.items():
        _replace(cls, name, value)
    cls.graph_pool_handle = classmethod(lambda _cls: POOL)  # a card's, where PyTorch knows one
    _replace(rocm, "_rocm_device_count_stateless", lambda *_: 1)


def mend_inspection() -> None:
    """vLLM looks at a model class in a process of its own, which would lack the stand-in."""
    from vllm.model_executor.models import registry

    _replace(registry, "_run_in_subprocess", lambda inspect_class: inspect_class())


WORKER_LINES = (
    ('device_type == "cuda"', 'device_type == "cpu"'),
    ('torch.device(f"cuda:{visible_device_index}")', 'torch.device("cpu")'),
)
"""Of ``Worker.init_device``, and what they become."""


def mend_worker() -> None:
    """vLLM's GPU worker takes the CPU for its device; addresses of the host are the device's."""
    import vllm.utils.torch_utils as torch_utils
    from vllm.v1.worker import gpu_worker
    from vllm.v1.worker.gpu import buffer_utils

    source = textwrap.dedent(inspect.getsource(gpu_worker.Worker.init_device))
    source = source[source.index("def init_device") :]
    for old, new in WORKER_LINES:
        if old not in source:
            raise UnknownVllm(f"gpu_worker.Worker.init_device does not say {old}")
        source = source.replace(old, new)
    space: dict[str, Any] = {}
    exec(compile(source, "gpu_worker.Worker.init_device", "exec"), vars(gpu_worker), space)
    gpu_worker.Worker.init_device = space["init_device"]
    for module in (buffer_utils, torch_utils):
        _replace(module, "get_accelerator_view_from_cpu_tensor", _same)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def mend_sleep() -> None:
    """What a worker keeps of a card's parameters is a copy; of the CPU's it keeps nothing."""
    from vllm.v1.worker.gpu_worker import Worker

    if not hasattr(Worker, "_save_sleep_parameters"):
        raise UnknownVllm("the worker has no _save_sleep_parameters")
    save = _off_the_cpu(Worker._save_sleep_parameters)

    def saved(worker: Any, *args: Any) -> None:
        save(worker, *args)
        kept = worker._sleep_saved_parameters
        worker._sleep_saved_parameters = {name: value.clone() for name, value in kept.items()}

    Worker._save_sleep_parameters = saved


def mend_warmups() -> None:
    """Warm-ups that compile, of which the interpreter has nothing, or that other models need.

    Those that run steps of this model stay: two of them once wrote past the rings.
    """
    # These import torchvision, which the CPU installation leaves out, and return at once.
    name = "vllm.model_executor.warmup.minimax_m3_msa_warmup"
    other = ModuleType(name)
    other.minimax_m3_msa_warmup = _nothing  # type: ignore[attr-defined]
    sys.modules[name] = other
    from vllm.model_executor.warmup import jit_warmup, kernel_warmup

    for function in ("qwen_vl_triton_warmup", "qwen_triton_warmup"):
        _replace(kernel_warmup, function, _nothing)
    for cls in (jit_warmup.JitWarmupRegistry, jit_warmup.VllmJitKernel):
        _replace(cls, "warmup", _nothing)

    # The sampler's kernels for all that a request may ask are vLLM's own, and one of them passes
    # an integer to a cast that the interpreter lacks. So the warm-up's requests are greedy.
    from vllm import SamplingParams
    from vllm.v1.worker.gpu import warmup

    greedy = staticmethod(lambda: SamplingParams(temperature=0.0, max_tokens=8))
    _replace(SamplingParams, "for_sampler_warmup", greedy)
    _replace(warmup, "GrammarOutput", _nothing)


LAUNCHERS = (
    "_rocm_sparse_attn_prefill_ragged_triton",
    "_rocm_sparse_attn_decode_ragged_triton",
)
"""Of vLLM's paged path: they assert that their tensors are on a card."""


def mend_launchers() -> None:
    """Within these launchers of vLLM's a tensor says that it is not on the CPU."""
    from vllm.v1.attention.ops import rocm_aiter_mla_sparse

    for name in LAUNCHERS:
        if not hasattr(rocm_aiter_mla_sparse, name):
            raise UnknownVllm(f"v1.attention.ops.rocm_aiter_mla_sparse has no {name}")
        launch = getattr(rocm_aiter_mla_sparse, name)
        setattr(rocm_aiter_mla_sparse, name, _off_the_cpu(launch))


def _off_the_cpu(launch: Callable[..., Any]) -> Callable[..., Any]:
    def launched(*args: Any, **kwargs: Any) -> Any:
        torch.Tensor.is_cpu = False
        try:
            return launch(*args, **kwargs)
        finally:
            del torch.Tensor.is_cpu  # the base class's own answers again

    return launched


def mend_slow_kernels() -> None:
    """Kernels of vLLM's whose programs are many; rings have no part in them."""
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
    from vllm.models.deepseek_v4.common.ops import fused_indexer_q

    from vllm_dsv4.commands.rehearse.operators import experts, indexer_queries

    _replace(TritonExperts, "apply", experts)
    _replace(fused_indexer_q.FusedIndexerQRopeQuantTritonKernel, "__call__", indexer_queries)


def _nothing(*_: Any, **__: Any) -> None: ...
