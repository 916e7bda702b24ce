"""vLLM's originals of the metadata kernels are run by Triton's interpreter."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, so before anything else

from tests.kernels.conftest import mended_interpreter

__all__ = ["mended_interpreter"]
