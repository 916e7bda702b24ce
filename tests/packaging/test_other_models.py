"""Models that are not ours: the same tokens with the plugin live, shut out, and out of range."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.packaging.conftest import Installation
from tests.support.fake_distribution import add_distribution

SERVE = """
import gc, json
from pathlib import Path

def tokens(folder):
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory
    llm = LLM(
        model=folder, max_model_len=256, max_num_seqs=4, enforce_eager=True, dtype="float32",
        kv_cache_memory_bytes=64 << 20, skip_tokenizer_init=True,
    )
    prompts = [[(7 * i + j) % 120 + 1 for i in range(length)] for j, length in enumerate((5, 90))]
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return [list(output.outputs[0].token_ids) for output in outputs]

def configuration(folder):
    from vllm import ModelRegistry
    from vllm.engine.arg_utils import EngineArgs
    try:
        config = EngineArgs(
            model=folder, max_model_len=1024, enforce_eager=True, skip_tokenizer_init=True
        ).create_engine_config()
    except Exception as error:
        return {"error": str(error)}
    (architecture,) = config.model_config.hf_config.architectures
    return {
        "model": ModelRegistry.models[architecture].module_name,
        "cache": repr(config.cache_config),
        "scheduler": repr(config.scheduler_config),
    }

def main():
    folders = json.loads(Path("folders.json").read_text())
    found = {name: tokens(folders[name]) for name in ("llama", "window")}
    found |= {name: configuration(folders[name]) for name in ("v41", "v4")}
    from vllm.platforms import current_platform
    found["platform"] = type(current_platform).__name__
    Path("found.json").write_text(json.dumps(found))

if __name__ == "__main__":
    main()
"""


@dataclass(frozen=True)
class Served:
    """What a process found, and every line of its log that names us."""

    found: dict[str, Any]
    ours: list[str]


def save_random(folder: Path, model_type: str, **config: Any) -> Path:
    """A causal model of 2 small layers with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    small = AutoConfig.for_model(
        model_type,
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.3,
        **config,
    )
    AutoModelForCausalLM.from_config(small).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    v4 = tiny()
    config = json.loads((v4 / "config.json").read_text())
    del config["architectures"], config["model_type"]
    v41 = root / "v41"
    v41.mkdir()
    (v41 / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["DeepseekV41ForCausalLM"],
                "model_type": "deepseek_v41",
                "text_config": config,
            }
        )
    )
    return {
        "llama": str(save_random(root / "llama", "llama")),
        "window": str(save_random(root / "window", "mistral", sliding_window=16)),
        "v41": str(v41),
        "v4": str(v4),
    }


@pytest.fixture(scope="module")
def serve(installed: Installation, folders: dict[str, str]) -> Callable[..., Served]:
    """``serve(path=..., VARIABLE=...)``: run both models, and configure V4.1 and V4."""

    def run(path: Path | None = None, **environment: str) -> Served:
        (installed.empty / "folders.json").write_text(json.dumps(folders))
        (installed.empty / "serve.py").write_text(SERVE)
        chosen = {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | environment
        done = installed.run("serve.py", path=path, **chosen)
        log = done.stdout + done.stderr
        assert done.returncode == 0, log[-6000:]
        found = json.loads((installed.empty / "found.json").read_text())
        return Served(found, [line for line in log.splitlines() if "vllm_dsv4 " in line])

    return run


@pytest.fixture(scope="module")
def absent(serve: Callable[..., Served]) -> Served:
    return serve(VLLM_PLUGINS="")


@pytest.fixture(scope="module")
def live(serve: Callable[..., Served]) -> Served:
    return serve()


MODELS = ("llama", "window")


def test_shut_out_we_say_nothing(absent: Served) -> None:
    assert absent.found["platform"] == "CpuPlatform"
    assert absent.ours == []


@pytest.mark.parametrize("model", MODELS)
def test_another_model_gives_the_same_tokens(absent: Served, live: Served, model: str) -> None:
    assert live.found["platform"] == "Dsv4CpuPlatform"
    assert live.found[model] == absent.found[model]
    assert len(set(live.found[model][1])) > 3, "a model that repeats itself shows nothing"


def test_v41_passes_through_untouched_and_one_line_says_so(absent: Served, live: Served) -> None:
    assert live.found["v41"] == absent.found["v41"]
    assert live.found["v41"]["model"].startswith("vllm.")
    (line,) = [line for line in live.ours if "V41" in line]
    assert "vllm_dsv4 leaves DeepseekV41ForCausalLM to vLLM" in line


def test_outside_the_range_models_run_and_one_error_names_both_versions(
    absent: Served, serve: Callable[..., Served], tmp_path: Path
) -> None:
    """One in all, though here every engine has a process of its own."""
    add_distribution(tmp_path, "vllm", "0.31.0+cpu")
    outside = serve(path=tmp_path, VLLM_ENABLE_V1_MULTIPROCESSING="1")
    assert outside.found == absent.found
    (line,) = outside.ours
    assert "registers nothing: it supports vLLM 0.32.0" in line
    assert "vllm 0.31.0+cpu is installed" in line


def test_a_setting_that_cannot_be_read_stops_v4_only(
    absent: Served, serve: Callable[..., Served]
) -> None:
    broken = serve(VLLM_DSV4_SLOTS="many")
    assert {name: broken.found[name] for name in MODELS} == {
        name: absent.found[name] for name in MODELS
    }
    assert "VLLM_DSV4_SLOTS='many'; use a whole number" in broken.found["v4"]["error"]
    assert len([line for line in broken.ours if "cannot serve DeepseekV4" in line]) == 1
