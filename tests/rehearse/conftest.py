"""The rehearsal's parts in this process, and the whole of it in processes of its own."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, so before anything else
