"""Python processes that start vLLM, of which the part that no variable changes is done once.

Importing PyTorch and Transformers takes half of a start. One process does that; each start is a
child of it, which imports Triton, vLLM and the plugin by itself, with an environment of its own.
"""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

FORKING = """
import json, os, sys, traceback
import torch, transformers
assert not {"triton", "vllm", "vllm_dsv4"} & set(sys.modules), "a start would not do it by itself"

def start(code, environment, folder, files):
    for number, name in enumerate(files):
        mode = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.dup2(os.open(name, mode), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = ["-c"]
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        start(*json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@cache
def _forking() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", FORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(process.kill)
    return process


def start(
    code: str, environment: Mapping[str, str], *, cwd: Path | None = None, given: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Run ``code`` as ``python -c`` would, with this environment and ``given`` on its stdin."""
    process = _forking()
    assert process.stdin is not None and process.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("given", "out", "error")]
        files[0].write_bytes(given)
        order = [code, dict(environment), str(cwd or Path.cwd()), [str(file) for file in files]]
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        status = int(process.stdout.readline())
        out, error = (file.read_bytes() for file in files[1:])
    return subprocess.CompletedProcess(["python", "-c", code], status, out, error)
