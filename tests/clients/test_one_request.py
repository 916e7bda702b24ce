"""One request that ends a server, on rings and pages alike, and the flag that keeps it out.

vLLM's ``auto`` backend of structured outputs hands what xgrammar refuses to llguidance, in the API
server's process and without a limit: a schema of a few bytes takes more memory than a machine has.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

SCHEMA = '{"type": "array", "minItems": 1000000000}'
VALIDATE = """
import os, resource, sys
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output.backend_guidance import validate_guidance_grammar
from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

asked = SamplingParams(structured_outputs=StructuredOutputsParams(json=sys.argv[1]))
with open("/proc/self/statm") as sizes:
    used = int(sizes.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20),) * 2)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
try:
    validate_xgrammar_grammar(asked)
except Exception as error:
    print("xgrammar:", error, flush=True)
validate_guidance_grammar(asked, None)
print("llguidance: done")
"""


def test_a_schema_of_many_items_is_refused_by_xgrammar_and_too_much_for_llguidance() -> None:
    """Fails when llguidance gets along with 512 MiB: then strike it from docs/robustness.md."""
    done = subprocess.run(
        [sys.executable, "-c", VALIDATE, SCHEMA],
        env=dict(os.environ) | {"RUST_BACKTRACE": "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "xgrammar: Failed to transform json schema" in done.stdout
    assert done.returncode == -signal.SIGABRT, done.stdout + done.stderr[-2000:]
    assert "memory allocation" in done.stderr
