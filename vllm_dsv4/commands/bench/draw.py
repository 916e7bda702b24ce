"""The plots of every benchmark, from its JSON alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_dsv4.commands.bench.figures import COLOURS, LABELS, paired_bars, panels, save
from vllm_dsv4.commands.bench.planner import SWEEPS
from vllm_dsv4.commands.planner.models import RELEASED

SIDES = ("paged", "rings")


def draw_planner(data: dict[str, Any], folder: Path) -> list[str]:
    """One file a model: capacity over each flag."""
    names = []
    for name, sweeps in data["models"].items():
        base = data["base"]
        figure, axes = panels(
            2,
            f"{RELEASED[name].name}: KV capacity by vLLM's planner, rings paid\n"
            f"unless varied: {base['gpu_memory_gib']:g} GiB, max_model_len "
            f"{base['max_model_len']:,}, {base['max_num_seqs']} slots, "
            f"max_num_batched_tokens {base['max_num_batched_tokens']:,}",
            rows=2,
        )
        for axis, (flag, (label, _)) in zip(axes, SWEEPS.items(), strict=True):
            points = [point for point in sweeps[flag] if point["fits"]]
            for side, key in (("paged", "native"), ("rings", "rings")):
                axis.plot(
                    [point["value"] for point in points],
                    [point[key]["tokens"] / 1e6 for point in points],
                    marker="o", markersize=4, color=COLOURS[side], label=LABELS[side],
                )  # fmt: skip
            axis.set_xlabel(label)
            axis.set_ylabel("million tokens")
            axis.set_ylim(bottom=0)
            if flag != "gpu_memory_gib":
                axis.set_xscale("log", base=2)
                axis.set_xticks(
                    [point["value"] for point in points],
                    [_short(point["value"]) for point in points],
                )
        axes[1].legend(loc="upper left")
        names.append(f"planner-{name}.png")
        save(figure, folder / names[-1])
    return names


def draw_scheduler(data: dict[str, Any], folder: Path) -> list[str]:
    """Requests at once, throughput and time to first token, a pair of bars a shape."""
    shapes = list(data["shapes"].values())
    model = data["step_times"][0]["name"]
    labels = [_label(shape) for shape in shapes]
    figure, axes = panels(
        3,
        f"{data['model']}: vLLM's scheduler without a model, at equal bytes "
        f"(step time: {model}; number above: rings over paged)",
    )
    readings: list[tuple[str, Callable[[dict[str, Any], dict[str, Any]], float]]] = [
        ("requests at once", lambda side, _: side["running_mean"]),
        (
            "requests a modelled second",
            lambda side, shape: shape["requests"] / side["seconds"][model]["drain"],
        ),
        ("median time to first token, s", lambda side, _: side["seconds"][model]["ttft_p50"]),
    ]
    for axis, (title, read) in zip(axes, readings, strict=True):
        values = {side: [read(shape[side], shape) for shape in shapes] for side in SIDES}
        paired_bars(axis, labels, values["paged"], values["rings"])
        axis.set_title(title, fontsize=11)
        axis.tick_params(axis="x", labelsize=8)
    axes[1].legend(loc="upper right", fontsize=9)
    figure.set_size_inches(16, 4.6)
    save(figure, folder / "scheduler.png")
    figure, axes = panels(3, "Requests at once over the run", rows=-(-len(shapes) // 3))
    for axis in axes[len(shapes) :]:
        axis.set_visible(False)
    for axis, shape in zip(axes, shapes, strict=False):
        for side in SIDES:
            running = shape[side]["running"]
            steps = shape[side]["steps"]
            where = [n * steps / len(running) for n in range(len(running))]
            axis.plot(where, running, color=COLOURS[side], label=LABELS[side])
        axis.set_title(f"{shape['title']} ({shape['memory_gib']:g} GiB)", fontsize=11)
        axis.set_xlabel("step")
        axis.set_ylim(bottom=0)
    axes[0].legend(loc="lower left", fontsize=9)
    save(figure, folder / "scheduler-running.png")
    return ["scheduler.png", "scheduler-running.png"]


def draw_cost(data: dict[str, Any], folder: Path) -> list[str]:
    """Microseconds over running requests: manager, step, free."""
    figure, axes = panels(
        3, f"{data['model']}: CPU time of vLLM's scheduler (solid: prefix caching off, dashed: on)"
    )
    titles = {
        "manager_us": "KV cache manager, us a step",
        "step_us": "whole scheduler step, us",
        "free_us": "freeing a request, us",
    }
    for axis, (key, title) in zip(axes, titles.items(), strict=True):
        for caching, style in ((False, "-"), (True, "--")):
            cases = [case for case in data["cases"] if case["prefix_caching"] is caching]
            for side in SIDES:
                axis.plot(
                    [case["running"] for case in cases],
                    [case[side][key] for case in cases],
                    style, marker="o", markersize=4, color=COLOURS[side],
                    label=None if caching else LABELS[side],
                )  # fmt: skip
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("decoding requests")
        axis.set_ylim(bottom=0)
        axis.set_xticks(sorted({case["running"] for case in data["cases"]}))
    axes[0].legend(loc="upper left")
    save(figure, folder / "cost.png")
    return ["cost.png"]


def draw_engine(data: dict[str, Any], folder: Path) -> list[str]:
    """Step time of decode, and prefill time, over requests."""
    figure, axes = panels(
        2, "Engine on the CPU, small model: times (number above: rings over paged)"
    )
    for axis, kind in zip(axes, ("decode", "prefill"), strict=True):
        cases = [case for case in data["cases"] if case["kind"] == kind]
        paired_bars(
            axis,
            [str(case["requests"]) for case in cases],
            [case["paged"]["ms"] for case in cases],
            [case["rings"]["ms"] for case in cases],
            [case["ratio"] for case in cases],
        )
        unit = "ms a step" if kind == "decode" else "ms for all prompts of 512 tokens"
        axis.set_title(f"{kind}, {unit}", fontsize=11)
        axis.set_xlabel("requests")
    axes[0].legend(loc="upper left", fontsize=9)
    save(figure, folder / "engine.png")
    return ["engine.png"]


def draw_prefix(data: dict[str, Any], folder: Path) -> list[str]:
    """Tokens not recomputed of each trace, and the prefill ratio with its range."""
    figure, axes = panels(2, "Prefix caching: what it saves, and what snapshots cost")
    traces = data["traces"]
    paired_bars(
        axes[0],
        [trace["title"].replace(", ", ",\n") for trace in traces],
        [trace["paged"]["hit_rate"] * 100 for trace in traces],
        [trace["rings"]["hit_rate"] * 100 for trace in traces],
    )
    axes[0].set_title("prompt tokens served from the cache, %", fontsize=11)
    axes[0].legend(loc="lower left", fontsize=9, frameon=True)
    axes[0].tick_params(axis="x", labelsize=9)
    for n, case in enumerate(data["cost"]):
        low, high = min(case["ratio_of_starts"]), max(case["ratio_of_starts"])
        axes[1].errorbar(
            [n], [case["ratio"]], [[case["ratio"] - low], [high - case["ratio"]]],
            fmt="o", capsize=5, color=COLOURS["rings"],
        )  # fmt: skip
    axes[1].axhline(1, color=COLOURS["paged"], linewidth=1)
    axes[1].set_xticks(
        range(len(data["cost"])),
        [f"{case['requests']} x {case['tokens']} tokens" for case in data["cost"]],
    )
    axes[1].set_xlim(-0.5, len(data["cost"]) - 0.5)
    axes[1].set_title(
        "prefill, CPU time, snapshots on over off\n(median and range over starts)", fontsize=11
    )
    save(figure, folder / "prefix.png")
    return ["prefix.png"]


DRAW = {
    "planner": draw_planner,
    "scheduler": draw_scheduler,
    "cost": draw_cost,
    "engine": draw_engine,
    "prefix": draw_prefix,
}


def _short(value: int) -> str:
    if value >= 2**20:
        return f"{value // 2**20}M"
    return f"{value // 1024}K" if value >= 1024 else str(value)


def _label(shape: dict[str, Any]) -> str:
    """A shape's title over several lines, with its memory."""
    broken = shape["title"].replace(" in, ", " in,\n").replace(" of ", " of\n")
    return f"{broken}\n{shape['memory_gib']} GiB"
