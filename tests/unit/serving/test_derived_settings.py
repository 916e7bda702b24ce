"""What vLLM sets of its configuration after it has asked the platform, read from its source.

A platform's checks see what the user typed. Whatever vLLM derives from it later they must foresee:
each such setting is listed here with the reason why rings are safe from it.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator

from vllm.config import VllmConfig

DERIVED = {
    "kv_transfer_config": "refused by --kv-offloading-size, which alone sets it",
    "kv_transfer_config.kv_connector": "the same",
    "kv_transfer_config.kv_role": "the same",
    "scheduler_config.disable_hybrid_kv_cache_manager": "set by a connector that is "
    "not ours or by attention_chunk_size, both refused; otherwise to the default",
    "scheduler_config.scheduler_cls": "diffusion models only",
    "compilation_config.cudagraph_mode": "graphs need nothing of rings that eager does not",
    "compilation_config.compile_ranges_endpoints": "what is compiled, not what is cached",
    "compilation_config.cudagraph_capture_sizes": "the same",
    "compilation_config.max_cudagraph_capture_size": "the same",
    "compilation_config.debug_dump_path": "where traces go",
    "parallel_config.enable_batch_sharded_sampling": "its default, where nobody asked for it",
    "model_config.multimodal_config.allow_missing_mm_embeddings": "models with images only",
    "model_config.multimodal_config.enable_mm_embeds": "the same",
    "model_config.multimodal_config.mm_processor_kwargs": "the same",
    "instance_id": "a name",
}
"""A field of the configuration, and what keeps rings safe from its late change."""


def _methods() -> dict[str, ast.FunctionDef]:
    (cls,) = ast.parse(textwrap.dedent(inspect.getsource(VllmConfig))).body
    assert isinstance(cls, ast.ClassDef)
    return {node.name: node for node in cls.body if isinstance(node, ast.FunctionDef)}


def _after_the_platform(method: ast.FunctionDef) -> list[ast.stmt]:
    """The statements behind ``current_platform.check_and_update_config(self)``."""
    asks = [
        number
        for number, statement in enumerate(method.body)
        if "current_platform.check_and_update_config(self)" in ast.unparse(statement)
    ]
    assert len(asks) == 1, "vLLM asks the platform elsewhere now: read its order again"
    return method.body[asks[0] + 1 :]


def _assigned(statements: list[ast.stmt], methods: dict[str, ast.FunctionDef]) -> Iterator[str]:
    """Fields of ``self`` that they assign, and the methods of ``self`` that they call, in turn."""
    names = {"self": ""}
    for node in (found for statement in statements for found in ast.walk(statement)):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            value = ast.unparse(node.value) if node.value else ""
            for target in targets:
                if isinstance(target, ast.Name) and value.split(".")[0] in names:
                    names[target.id] = f"{_resolve(value, names)}."
                elif ast.unparse(target).split(".")[0] in names:
                    yield _resolve(ast.unparse(target), names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("self."):
            method = methods.get(ast.unparse(node.func).removeprefix("self."))
            yield from _assigned(method.body if method else [], methods)


def _resolve(chain: str, names: dict[str, str]) -> str:
    """``compilation_config.mode`` of ``self.compilation_config.mode``, aliases followed."""
    first, _, rest = chain.partition(".")
    return f"{names[first]}{rest}"


def test_every_setting_that_vllm_derives_after_our_checks_is_known() -> None:
    methods = _methods()
    found = set(_assigned(_after_the_platform(methods["__post_init__"]), methods))
    assert found == set(DERIVED)
