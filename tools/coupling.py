"""Writes what our source uses of the installed vLLM: the record that ``vllm-dsv4 contract`` checks,
and ``docs/coupling.md``. Run it after every change of what we use."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from vllm_dsv4.commands.contract.document import coupling_page  # noqa: E402
from vllm_dsv4.commands.contract.obtain import installed_folder  # noqa: E402
from vllm_dsv4.commands.contract.record import Record, make_record, write_record  # noqa: E402
from vllm_dsv4.versions import installed_vllm  # noqa: E402

PAGE = ROOT / "docs" / "coupling.md"


def current_record() -> Record:
    """Our source as it is, against the installed vLLM."""
    version = (installed_vllm() or "").split("+")[0]
    return make_record(version, installed_folder(), ROOT / "vllm_dsv4")


def main() -> int:
    record = current_record()
    write_record(record)
    PAGE.write_text(coupling_page(record))
    print(f"{len(record.faces)} parts of vLLM {record.vllm}: recorded, and listed in {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
