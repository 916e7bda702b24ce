"""``docs/benchmarks.md``, made from the JSON of the benchmarks that were run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_dsv4.commands.bench.paired import spread
from vllm_dsv4.commands.planner.models import RELEASED

Data = dict[str, Any]

HEAD = """\
# Benchmarks

Made by `vllm-dsv4 bench` (all: `make bench`) from the JSON files in `benchmarks/`. Every ratio is
rings over vLLM's paged path, both measured in the same run; a figure is written only if the run's
correctness check passed.
"""


def write_document(folder: Path) -> Path:
    """Write ``<folder>.md`` beside ``folder`` from the JSON files in it."""
    parts = [HEAD]
    for name, (title, section) in SECTIONS.items():
        file = folder / f"{name}.json"
        if file.exists():
            data = json.loads(file.read_text())
            parts.append(f"## {title}\n\n{section(data)}\n{_pictures(data, folder)}\n{_on(data)}")
    document = folder.with_suffix(".md")
    document.write_text("\n".join(parts))
    return document


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _pictures(data: Data, folder: Path) -> str:
    return "".join(f"![{plot}]({folder.name}/{plot})\n" for plot in data["plots"])


def _on(data: Data) -> str:
    c = data["conditions"]
    quick = " Quick run: fewer points and repeats." if data["quick"] else ""
    return (
        f"`vllm-dsv4 bench {data['benchmark']}{' --quick' if data['quick'] else ''}`, "
        f"vLLM {c['vllm']}, torch {c['torch']}, Python {c['python']}, {c['processor']}.{quick}\n"
    )


def _planner(data: Data) -> str:
    base = data["base"]
    text = (
        "Capacity as vLLM reports it (`KV cache size`), with the rings' bytes taken out of the "
        "same memory. Checked against sums of block and row bytes done apart from vLLM. Unless "
        f"varied: {base['gpu_memory_gib']:g} GiB for caches, max_model_len "
        f"{base['max_model_len']:,}, {base['max_num_seqs']} slots, max_num_batched_tokens "
        f"{base['max_num_batched_tokens']:,}, one batch in flight, no prefix caching. With it, "
        "which is vLLM's default, rings pay for snapshots too: the table by snapshots.\n\n"
    )
    for name, sweeps in data["models"].items():
        for flag, points in [*sweeps.items(), ("snapshots", data["snapshots"][name])]:
            rows = [
                [
                    f"{p['value']:,}",
                    f"{p['ratio']['tokens']:.2f}x",
                    f"{p['rings']['tokens']:,}",
                    f"{p['native']['tokens']:,}",
                    f"{p['rings']['concurrency']:.1f}",
                    f"{p['native']['concurrency']:.1f}",
                    f"{p['rings']['ring_bytes'] / 2**30:.2f}",
                ]
                for p in points
                if p["fits"]
            ]
            header = [
                f"{RELEASED[name].name}, {flag}", "ratio", "tokens, rings", "tokens, paged",
                "requests, rings", "requests, paged", "rings, GiB",
            ]  # fmt: skip
            text += table(header, rows) + "\n"
    return text


def _scheduler(data: Data) -> str:
    model, *others = [m["name"] for m in data["step_times"]]
    times = "; ".join(
        f"{m['name']}: {m['base_ms']:g} ms + {m['decode_us']:g} us a decoding request + "
        f"{m['prefill_us']:g} us a prefill token"
        for m in data["step_times"]
    )
    rows = []
    for shape in data["shapes"].values():
        ratio, rings, paged = shape["ratio"], shape["rings"], shape["paged"]
        rows.append(
            [
                f"{shape['title']} ({shape['requests']:,} requests, {shape['memory_gib']:g} GiB, "
                f"{shape['slots']} slots)",
                f"{ratio['running']:.2f}x",
                f"{rings['running_mean']:.0f} / {paged['running_mean']:.0f}",
                f"{rings['running_max']} / {paged['running_max']}",
                f"{ratio['drain'][model]:.2f}x",
                *[f"{ratio['drain'][name]:.2f}x" for name in others],
                f"{ratio['ttft_p50'][model]:.2f}x",
                f"{rings['steps']:,} / {paged['steps']:,}",
                f"{rings['preemptions']} / {paged['preemptions']}",
                f"{rings['hit_rate']:.0%} / {paged['hit_rate']:.0%}" if shape["prefix_caching"]
                else "off",
            ]
        )  # fmt: skip
    header = [
        "shape", "requests at once", "rings / paged", "at most", f"throughput, {model}", *others,
        "median TTFT", "steps", "preemptions", "prefix hits",
    ]  # fmt: skip
    return (
        f"{data['model']}. vLLM's own scheduler and block managers, driven without a model, the "
        "same bytes for caches on both sides, rings included. Requests at once: mean over the "
        "steps in which others waited. The time of a step is assumed, the same on both sides, and "
        f"varied ({times}). Where it is mostly compute, more requests at once bring less: a "
        "throughput near 1 then means that memory was not the limit. Slots are as many as memory "
        "holds of the shape's mean request at its end; `--max-num-seqs` does not limit the paged "
        f"path. Both sides gave the same tokens, and all blocks and slots came back.{_behind(data)}"
        "\n\n" + table(header, rows)
    )


def _behind(data: Data) -> str:
    """Says where the paged path ran more at once at some time, and why."""
    titles = [
        shape["title"]
        for shape in data["shapes"].values()
        if shape["paged"]["running_max"] > shape["rings"]["running_max"]
    ]
    if not titles:
        return ""
    return (
        f" In {' and '.join(titles)} the paged path had more running for a while: slots are fixed, "
        "and sized for conversations at their end, while pages follow them as they grow."
    )


def _cost(data: Data) -> str:
    rows = [
        [
            f"{case['running']} requests, prefix caching {_on_off(case['prefix_caching'])}",
            f"{case['ratio']['manager']:.2f}x",
            f"{case['ratio']['idle']:.2f}x",
            f"{case['rings']['manager_us']:,.0f} / {case['paged']['manager_us']:,.0f}",
            f"{case['ratio']['step']:.2f}x",
            f"{case['rings']['step_us']:,.0f} / {case['paged']['step_us']:,.0f}",
            f"{case['ratio']['free']:.2f}x",
            f"{case['rings']['free_us']:.1f} / {case['paged']['free_us']:.1f}",
        ]
        for case in data["cases"]
    ]  # fmt: skip
    header = [
        "decoding", "KV cache manager", "with an idle ring manager", "us a step, rings / paged",
        "scheduler step",
        "us, rings / paged", "freeing a request", "us, rings / paged",
    ]  # fmt: skip
    return (
        f"{data['model']}, prompts of {data['prompt_tokens']:,} tokens and more. CPU time of the "
        f"thread, the least disturbed of {data['steps_timed'] // 8} chunks of 8 steps, both sides "
        "in turn. Both sides gave the same tokens. With an idle ring manager: the same ratio where "
        "the manager of the rings does nothing at all, which leaves vLLM's own work on the pages "
        "and bounds what any block manager can reach.\n\n" + table(header, rows)
    )


def _engine(data: Data) -> str:
    rows = [
        [
            f"{case['kind']}, {case['requests']} requests",
            f"{case['ratio']:.2f}x",
            spread(case),
            " / ".join(f"{case[side]['ms']:.1f}" for side in ("rings", "paged")),
            " / ".join(f"{case[side]['tokens_per_second']:,.0f}" for side in ("rings", "paged")),
        ]
        for case in data["cases"]
    ]
    header = [
        "engine on the CPU", "time", "lowest to highest", "ms, rings / paged",
        "tokens/s, rings / paged",
    ]  # fmt: skip
    return (
        f"{data['model']}. Two engines in turn on the same machine, eager mode; both gave the same "
        "tokens in every round. Decode: the median step. Prefill: the time until all prompts of "
        "512 tokens were computed (2,048 tokens a step on both sides). A small model on a CPU: "
        f"read the ratio, not the tokens. {_paired(data)}\n\n" + table(header, rows)
    )


def _paired(data: Data) -> str:
    return (
        f"Both engines were started {data['starts']} times, since the same code differs by a few "
        f"percent from one process to the next: the ratio is the median over starts, each the "
        f"median of {data['rounds']} rounds' ratios."
    )


def _prefix(data: Data) -> str:
    hits = [
        [
            f"{trace['title']} ({trace['requests']:,} requests)",
            " / ".join(f"{trace[side]['hit_rate']:.1%}" for side in ("rings", "paged")),
            " / ".join(f"{trace[side]['hit_tokens']:,}" for side in ("rings", "paged")),
            " / ".join(f"{trace[side]['prefilled_tokens']:,}" for side in ("rings", "paged")),
            f"{trace['snapshots']:,}, {trace['snapshot_evictions']:,} evicted",
        ]
        for trace in data["traces"]
    ]
    cost = [
        [
            f"{case['requests']} x {case['tokens']} tokens",
            f"{case['ratio']:.3f}x",
            spread(case),
            f"{case['on_ms']:.1f} / {case['off_ms']:.1f}",
        ]
        for case in data["cost"]
    ]
    sizes = [[name, f"{size / 2**20:.2f}"] for name, size in data["snapshot_bytes"].items()]
    lower = [f'"{trace["title"]}"' for trace in data["traces"] if not trace["no_lower"]]
    verdict = (
        f" Rings hit less in {' and '.join(lower)}. There, snapshots were evicted before their "
        "conversation came back: a conversation needs a snapshot of its own to be resumed, however "
        "many of its pages are still cached, and each turn leaves one or two. The remedy is more "
        "of them, `VLLM_DSV4_SNAPSHOT_SLOTS`."
        if lower
        else ""
    )
    return (
        f"{data['model']}, {data['gpu_memory_gib']:g} GiB for caches on both sides, "
        f"max_num_seqs {data['max_num_seqs']:,}, max_num_batched_tokens "
        f"{data['max_num_batched_tokens']:,}, vLLM's default retention; a row that names "
        "slots or snapshots sets those instead. vLLM's scheduler without a model; both "
        "sides gave the same tokens. With MTP vLLM drops the end of every hit, because the draft "
        "layer reads a token ahead. At its default retention the paged path keeps a "
        "window for the end of each prompt only, so that a next turn recomputes the answer before "
        f"it; rings keep a snapshot in the answer too. Rings hit less where a burst behind a new "
        "common prefix is admitted in one step: pages can be hit by later requests of that step, a "
        f"snapshot from the next step on.{verdict}\n\n"
        + table(
            ["trace", "hit rate, rings / paged", "tokens not recomputed", "tokens prefilled",
             "snapshots"],
            hits,
        )
        + f"\nEngine on the CPU, make-tiny: rings with prefix caching on over rings with it off, "
        "prompts never asked before, CPU time from submission to the answer, both engines in turn. "
        "First, a repeated prompt hit and gave the cold answer; in every round both engines gave "
        f"the same tokens. {_paired(data)} Nothing that snapshots do could bring it below 1: what "
        "is below is noise.\n\n"
        + table(["prefill", "CPU time", "lowest to highest", "median CPU ms, on / off"], cost)
        + "\n"
        + table(["one snapshot of", "MiB"], sizes)
    )  # fmt: skip


def _on_off(on: bool) -> str:
    return "on" if on else "off"


SECTIONS: dict[str, tuple[str, Callable[[Data], str]]] = {
    "planner": ("Capacity", _planner),
    "scheduler": ("Scheduler simulation", _scheduler),
    "cost": ("Scheduler cost", _cost),
    "engine": ("Engine", _engine),
    "prefix": ("Prefix caching", _prefix),
}
