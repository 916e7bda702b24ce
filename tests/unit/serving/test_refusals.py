"""Bad input gets an error that names the flag, its value and the remedy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_dsv4.checkpoint import entries
from vllm_dsv4.checkpoint.expected import SIZES
from vllm_dsv4.ring.refusal import Refusal
from vllm_dsv4.serving import refusals
from vllm_dsv4.settings import VARIABLES, SettingError, Settings, read_settings


def config(**changes: Any) -> Any:
    """A configuration that the rings accept, with the parts that the checks read."""
    hf = SimpleNamespace(
        architectures=["DeepseekV4ForCausalLM"],
        sliding_window=128,
        head_dim=512,
        qk_rope_head_dim=64,
        index_head_dim=128,
        num_hidden_layers=5,
        compress_ratios=[0, 0, 4, 128, 4],
        rms_norm_eps=1e-6,
        hc_eps=1e-6,
        rope_theta=10_000,
        compress_rope_theta=160_000.0,
        num_hash_layers=2,
        index_topk=512,
        **dict.fromkeys(set(SIZES.values()) - {"head_dim", "index_head_dim"}, 64),
    )
    parts = {
        "model_config": SimpleNamespace(
            hf_config=hf, max_model_len=4096, dtype="torch.bfloat16", attention_chunk_size=None
        ),
        "parallel_config": SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            enable_dbo=False,
            ubatch_size=0,
            data_parallel_size=1,
            enable_elastic_ep=False,
        ),
        "scheduler_config": SimpleNamespace(
            max_num_seqs=16, max_num_batched_tokens=2048, disable_hybrid_kv_cache_manager=False
        ),
        "cache_config": SimpleNamespace(
            cache_dtype="auto",
            block_size=256,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=None,
            kv_offloading_size=None,
            kv_offloading_backend="native",
        ),
        "attention_config": SimpleNamespace(indexer_kv_dtype="auto"),
        "device_config": SimpleNamespace(device_type="cpu"),
        "kv_transfer_config": None,
        "speculative_config": None,
        "num_speculative_tokens": 0,
        "num_lookahead_tokens": 0,
        "additional_config": {},
    }
    made = SimpleNamespace(**parts)
    for path, value in changes.items():
        *parents, name = path.split("__")
        place: Any = made
        for parent in parents:
            place = getattr(place, parent)
        setattr(place, name, value)
    return made


def test_a_sound_configuration_is_accepted() -> None:
    refusals.check_all(config())


@pytest.mark.parametrize(
    ("change", "flag", "value", "remedy"),
    [
        ({"model_config__hf_config__architectures": ["DeepseekV4ForConditionalGeneration"]},
         "architecture", "DeepseekV4ForConditionalGeneration", "VLLM_DSV4_RING=0"),
        ({"model_config__hf_config__vision_n_layers": 24},
         "architecture", "DeepseekV4ForConditionalGeneration", "VLLM_DSV4_RING=0"),
        ({"parallel_config__decode_context_parallel_size": 2},
         "--decode-context-parallel-size", "2", "Set it to 1"),
        ({"parallel_config__enable_dbo": True}, "--enable-dbo", "True", "Remove the flag"),
        ({"parallel_config__ubatch_size": 2}, "--ubatch-size", "2", "Remove the flag"),
        ({"parallel_config__enable_elastic_ep": True},
         "--enable-elastic-ep", "True", "Remove the flag"),
        ({"speculative_config": SimpleNamespace(method="mtp", enable_adaptive_verification=True,
          use_dspark=lambda: False, draft_model_config=SimpleNamespace(
              hf_config=SimpleNamespace(num_nextn_predict_layers=1)))},
         "--speculative-config enable_adaptive_verification", "True", "Remove the entry"),
        ({"kernel_config": SimpleNamespace(monokernel=True)},
         "--monokernel", "True", "Remove the flag"),
        ({"parallel_config__prefill_context_parallel_size": 4},
         "--prefill-context-parallel-size", "4", "Set it to 1"),
        ({"kv_transfer_config": SimpleNamespace(kv_connector="NixlConnector")},
         "--kv-transfer-config", "NixlConnector", "Dsv4RingConnector"),
        ({"cache_config__kv_offloading_size": 0.0},
         "--kv-offloading-size", "0.0", "Dsv4RingConnector"),
        ({"cache_config__kv_offloading_size": 4.0,
          "cache_config__kv_offloading_backend": "lmcache"},
         "--kv-offloading-size", "4.0", "Dsv4RingConnector"),
        ({"model_config__attention_chunk_size": 8192},
         "config.json attention_chunk_size", "8192", "--hf-overrides"),
        ({"scheduler_config__disable_hybrid_kv_cache_manager": True},
         "--disable-hybrid-kv-cache-manager", "True", "Remove the flag"),
        ({"cache_config__cache_dtype": "int8_per_token_head"},
         "--kv-cache-dtype", "int8_per_token_head", "fp8_ds_mla"),
        ({"attention_config__indexer_kv_dtype": "mxfp4"},
         "--attention-config indexer_kv_dtype", "mxfp4", "auto, fp8"),
        ({"speculative_config": SimpleNamespace(method="dspark", use_dspark=lambda: True)},
         "--speculative-config method", "dspark", "ngram"),
        ({"model_config__dtype": "torch.float16"}, "--dtype", "float16", "Set it to bfloat16"),
        ({"model_config__dtype": "torch.float32"}, "--dtype", "float32", "Set it to bfloat16"),
        ({"cache_config__kv_cache_memory_bytes": -1}, "--kv-cache-memory-bytes", "-1", "Give"),
        ({"model_config__hf_config__sliding_window": -128}, "sliding_window", "-128", "checkpoint"),
        ({"model_config__hf_config__sliding_window": "128"},
         "sliding_window", "'128'", "checkpoint"),
        ({"model_config__hf_config__sliding_window": 256}, "sliding_window", "256", "checkpoint"),
        ({"model_config__hf_config__head_dim": 128}, "head_dim", "128", "checkpoint"),
        ({"model_config__hf_config__index_head_dim": None}, "index_head_dim", "None", "checkpoint"),
        ({"model_config__hf_config__compress_ratios": [0] * 5},
         "compress_ratios", "[0, 0, 0, 0, 0]", "checkpoint"),
        ({"additional_config": {"vllm_dsv4_snapshot_interval": 100},
          "cache_config__enable_prefix_caching": True},
         "--prefix-cache-retention-interval", "100", "multiple of 256"),
        ({"model_config__enable_prompt_embeds": True},
         "--enable-prompt-embeds", "True", "Remove the flag"),
        ({"speculative_config": SimpleNamespace(method="ngram"), "num_speculative_tokens": 129},
         "num_speculative_tokens", "129", "128 or fewer"),
        ({"model_config__hf_config__scoring_func": "softmaxx"},
         "config.json scoring_func", "'softmaxx'", "checkpoint"),
        ({"model_config__hf_config__index_topk": 0}, "config.json index_topk", "0", "checkpoint"),
        ({"model_config__hf_config__index_topk": 1024},
         "config.json index_topk", "1024", "another device"),
    ],
)  # fmt: skip
def test_a_refusal_names_flag_value_and_remedy(
    change: dict[str, Any], flag: str, value: str, remedy: str
) -> None:
    with pytest.raises(Refusal) as caught:
        refusals.check_all(config(**change))
    message = str(caught.value)
    assert f"{flag}={value}" in message
    assert remedy in message


@pytest.mark.parametrize("value", [None, 0, -1e-6, "x", True, float("nan")])
@pytest.mark.parametrize("name", entries.POSITIVE)
def test_a_number_that_is_missing_or_absurd_is_named(name: str, value: object) -> None:
    with pytest.raises(Refusal, match=f"config.json {name}={value!r}"):
        refusals.check_all(config(**{f"model_config__hf_config__{name}": value}))


@pytest.mark.parametrize("value", [None, -1, 6, "2"])
def test_a_number_of_hashed_layers_that_cannot_be_is_named(value: object) -> None:
    with pytest.raises(Refusal, match=f"config.json num_hash_layers={value!r}"):
        refusals.check_all(config(model_config__hf_config__num_hash_layers=value))


def test_an_interval_without_effect_is_no_concern() -> None:
    """vLLM's own flag, with prefix caching off."""
    refusals.check_all(config(additional_config={"vllm_dsv4_snapshot_interval": 100}))


def test_the_most_drafts_are_vllms() -> None:
    from vllm.v1.sample.rejection_sampler import MAX_SPEC_LEN

    assert refusals.MAX_DRAFTS == MAX_SPEC_LEN


def test_the_released_models_numbers_are_accepted_elsewhere_than_on_a_cpu() -> None:
    refusals.check_all(
        config(model_config__hf_config__index_topk=1024, device_config__device_type="cuda")
    )


def test_an_unknown_ratio_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"compress_ratios holds 8.*VLLM_DSV4_RING=0"):
        refusals.check_all(config(model_config__hf_config__compress_ratios=[0, 0, 8, 128, 4]))


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        (None, "compress_ratios has 0 entries for 5 layers"),
        ([0, 0, 4], "compress_ratios has 3 entries for 5 layers"),
        ([0, 0, "4", 128, 4], "not a list of whole numbers"),
        ([0, 0, None, 128, 4], "not a list of whole numbers"),
        ([0, 0, 4.5, 128, 4], "not a list of whole numbers"),
        ("00484", "not a list of whole numbers"),
        (4, "not a list of whole numbers"),
        ([0, 0, -4, 128, 4], "compress_ratios holds -4"),
    ],
)
def test_a_damaged_ratio_list_is_named(ratios: object, said: str) -> None:
    with pytest.raises(
        ValueError, match=f"compress_ratios.*{said.removeprefix('compress_ratios')}"
    ):
        refusals.check_all(config(model_config__hf_config__compress_ratios=ratios))


@pytest.mark.parametrize("layers", [None, 0, -1, "five"])
def test_a_damaged_number_of_layers_is_named(layers: object) -> None:
    with pytest.raises(ValueError, match=f"num_hidden_layers is {layers!r}"):
        refusals.check_all(config(model_config__hf_config__num_hidden_layers=layers))


@pytest.mark.parametrize("value", [None, 0, -4, "64", 2.5])
@pytest.mark.parametrize("name", sorted(SIZES.values()))
def test_a_size_that_is_missing_or_absurd_is_named(name: str, value: object) -> None:
    with pytest.raises(Refusal, match=f"config.json {name}={value!r}"):
        refusals.check_all(config(**{f"model_config__hf_config__{name}": value}))


MANY = 10**9


@pytest.mark.parametrize(
    ("change", "env", "flag", "value"),
    [
        ({}, {"VLLM_DSV4_SLOTS": str(MANY)}, "VLLM_DSV4_SLOTS", MANY),
        ({"cache_config__enable_prefix_caching": True}, {"VLLM_DSV4_SNAPSHOT_SLOTS": str(MANY)},
         "VLLM_DSV4_SNAPSHOT_SLOTS", MANY),
        ({"scheduler_config__max_num_seqs": MANY}, {}, "--max-num-seqs", MANY),
        ({"num_speculative_tokens": MANY}, {},
         "--speculative-config num_speculative_tokens", MANY),
        ({"scheduler_config__max_num_batched_tokens": MANY}, {}, "--max-num-batched-tokens", MANY),
        ({"cache_config__kv_cache_memory_bytes": 1 << 60}, {}, "--kv-cache-memory-bytes", 1 << 60),
    ],
)  # fmt: skip
def test_what_asks_for_too_much_is_named_before_anything_is_allocated(
    change: dict[str, Any],
    env: dict[str, str],
    flag: str,
    value: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``MANY`` of anything is more than any machine holds. Nothing else refuses it, and the check
    is the first thing that the model's constructor does."""
    from vllm_dsv4.cpu import model as cpu

    for name, setting in env.items():
        monkeypatch.setenv(name, setting)
    asked = config(**change)
    refusals.check_all(asked)
    monkeypatch.setattr(cpu, "require_our_platform", lambda: None)
    with pytest.raises(Refusal) as caught:
        cpu.DeepseekV4ForCausalLM(vllm_config=asked)
    message = str(caught.value)
    assert message.startswith(f"{flag}={value}: ")
    assert f"Lower {flag}" in message and ", or another of " in message
    assert message.partition("Lower ")[2].count(flag) == 1, "it is not another of itself"
    assert "GiB are there (free memory)" in message


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("VLLM_DSV4_RING", "yes", "use 0 or 1"),
        ("VLLM_DSV4_SLOTS", "0", "1 or more"),
        ("VLLM_DSV4_SLOTS", "-3", "1 or more"),
        ("VLLM_DSV4_SLOTS", "many", "whole number"),
        ("VLLM_DSV4_SLOTS", "9" * 5000, "whole number"),
        ("VLLM_DSV4_SNAPSHOT_SLOTS", "-1", "0 or more"),
        ("VLLM_DSV4_C128_STATE", "raw", "online"),
        ("VLLM_DSV4_SNAPSHOT_INTERVAL", "-256", "0 or more"),
        ("VLLM_DSV4_SNAPSHOT_INTERVAL", "256 tokens", "whole number"),
        ("VLLM_DSV4_POISON", "true", "use 0 or 1"),
        ("VLLM_DSV4_SNAPSHOT_SLOTS", "1.5", "whole number"),
        ("VLLM_DSV4_ATTENTION", "cuda", "triton"),
        ("VLLM_DSV4_SLOT", "4", "unknown environment variable"),
    ],
)
def test_a_bad_variable_is_named_with_what_can_be_used(name: str, value: str, hint: str) -> None:
    with pytest.raises(SettingError) as caught:
        read_settings({name: value})
    assert name in str(caught.value)
    assert value in str(caught.value)
    assert hint in str(caught.value)


def test_an_interval_that_ends_inside_a_block_is_named_where_rings_are_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_DSV4_SNAPSHOT_INTERVAL", "100")
    with pytest.raises(SettingError, match=r"VLLM_DSV4_SNAPSHOT_INTERVAL=100.* multiple of 256"):
        refusals.check_all(config())


def test_an_empty_variable_is_one_that_is_not_set() -> None:
    assert read_settings(dict.fromkeys(VARIABLES, "")) == Settings()


def test_settings_default_to_rings_one_slot_a_sequence() -> None:
    settings = read_settings({"PATH": "/usr/bin"})
    assert settings.ring
    assert settings.slots is None
    assert settings.attention == "triton"
