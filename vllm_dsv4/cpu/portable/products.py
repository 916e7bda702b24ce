"""Linear layers in float32, rounded once: torch's own bf16 products are slow without AVX-512."""

from __future__ import annotations

from collections.abc import Callable

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from vllm_dsv4.cpu.portable import operators

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class FloatLinear(UnquantizedLinearMethod):
    """An unquantised linear layer whose products are float32."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.cpu_linear = float_product(layer.weight)


class FloatEmbedding(UnquantizedEmbeddingMethod):
    """The same for the vocabulary's projection."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.cpu_linear = float_product(layer.weight)


class FloatProduct:
    """``x @ weight.T + bias``, summed in float32 and rounded to the type of ``x``."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.columns = weight.detach().float().t()

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        del weight
        found = x.float() @ self.columns
        return (found if bias is None else found + bias).to(x.dtype)


def float_product(weight: torch.Tensor) -> Product:
    """What a layer with this weight, ``[columns, width]``, multiplies by."""
    return FloatProduct(weight)


METHODS: dict[type, type] = {
    UnquantizedLinearMethod: FloatLinear,
    UnquantizedEmbeddingMethod: FloatEmbedding,
}


def prepare(model: torch.nn.Module) -> None:
    """Build the portable operators and put ``model`` on float products, where they are in use.

    Call at the end of a model's constructor.

    Raises:
        NoPortableOperators: they are needed, and cannot be built.
    """
    if not operators.in_use():
        return
    operators.build()
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        ours = METHODS.get(type(method))
        # vLLM wraps the method of ``wo_a``, which takes part in no linear product.
        if ours is not None and "process_weights_after_loading" not in vars(method):
            module.quant_method = ours()
