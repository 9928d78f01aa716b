"""Which host this is, and which process: what decides whether memory can be shared."""

import functools
import ipaddress
import os
import socket
import uuid
from pathlib import Path


@functools.cache
def host_id() -> str:
    """Equal for two processes only where they share a kernel and a network and pid namespace.

    Those are what abstract Unix sockets and process ids are relative to.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "pid")]  # noqa: PTH116
    except OSError:
        return f"{socket.gethostname()}-{uuid.getnode():x}"
    return f"{boot}-{spaces[0]}-{spaces[1]}"


def is_loopback(host: str) -> bool:
    """Whether an address is this very host's, whoever asks: 127.0.0.1, ::1, localhost."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
