"""A server with a damaged checkpoint ends before it is ready, and says what is damaged."""

from __future__ import annotations

import subprocess
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from tests.support.server import EXAMPLES, environment, free_port

LOST = "layers.3.ffn.experts.17.w3.weight"


def copy_without(model: Path, lost: str, folder: Path) -> None:
    """The checkpoint, less one tensor; files that it is not in are links."""
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
        if file.suffix != ".safetensors":
            continue
        with safe_open(file, framework="pt") as stored:
            names = list(stored.keys())
            if lost in names:
                kept = {name: stored.get_tensor(name) for name in names if name != lost}
                (folder / file.name).unlink()
                save_file(kept, folder / file.name, metadata={"format": "pt"})


def test_a_lost_tensor_ends_both_ranks_before_the_server_is_ready(
    model: Path, tmp_path: Path
) -> None:
    """Of 64 experts' tensors in one fused parameter, the one that vLLM itself would not miss."""
    copy_without(model, LOST, tmp_path)
    done = subprocess.run(
        [EXAMPLES / "serve.sh", tmp_path, "--tensor-parallel-size", "2"],
        env=environment() | {"PORT": str(free_port()), "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    printed = done.stdout + done.stderr
    assert done.returncode != 0
    assert "Application startup complete" not in printed
    for rank in range(2):
        said = [line for line in printed.splitlines() if f"Worker_TP{rank} " in line]
        assert any(f"CheckpointError: checkpoint {tmp_path}: missing: {LOST}." in s for s in said)
