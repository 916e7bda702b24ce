"""Two hosts on one machine: network namespaces with names of their own, joined by a cable.

What is inside has one interface besides loopback, ``eth0``, and reaches the other host only. Both
share this machine's files and its ``/dev/shm``. Nothing is left behind, even by a test run that is
killed: the kernel removes a namespace, and a cable with it, once no process is inside.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

INTERFACE = "eth0"
NETWORK = "10.0.0"
NAMES = ("host-a", "host-b")


class HostsNotAllowed(Exception):
    """This machine lets us make no namespaces; the message says why."""


@dataclass(frozen=True)
class Host:
    name: str
    address: str
    enter: tuple[str, ...]
    """Put before a command to run it on this host."""


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Hosts that can reach each other.

    Raises:
        HostsNotAllowed: not root, or a container that may not.
    """
    with ExitStack() as stack:
        first, second = (stack.enter_context(_namespace(name)) for name in NAMES)
        _run(
            *("ip", "link", "add", INTERFACE, "netns", str(first), "type", "veth"),
            *("peer", "name", INTERFACE, "netns", str(second)),
        )
        hosts = []
        for number, (name, process) in enumerate(zip(NAMES, (first, second), strict=True), 1):
            enter = ("nsenter", "--target", str(process), "--net", "--uts")
            address = f"{NETWORK}.{number}"
            _run(*enter, "ip", "address", "add", f"{address}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                _run(*enter, "ip", "link", "set", interface, "up")
            hosts.append(Host(name, address, enter))
        yield hosts[0], hosts[1]


@contextmanager
def _namespace(name: str) -> Iterator[int]:
    """The process that holds a namespace; it ends with this one, however that ends."""
    if not all(shutil.which(tool) for tool in ("ip", "unshare", "nsenter")):
        raise HostsNotAllowed("ip, unshare or nsenter is not installed")
    command = ["unshare", "--net", "--uts", "sh", "-c", f"hostname {name} && echo up && exec cat"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stderr is not None
        if holder.stdout.readline() != "up\n":
            raise HostsNotAllowed(holder.stderr.read().strip())
        yield holder.pid
        holder.stdin.close()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HostsNotAllowed(f"{' '.join(command)}: {done.stderr.strip()}")
