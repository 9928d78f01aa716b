"""Janitor: a tiny process that tidies up after this one, also when this one is killed (SIGKILL)."""

import subprocess
from collections.abc import Iterable

__all__ = ["Janitor"]

CLOSE_S = 10.0
SCRIPT = """
pids=
while read -r pid; do pids="$pids $pid"; done
for pid in $pids; do
    if [ "$pid" != $$ ] && grep -q -e ray:: -e "$1" "/proc/$pid/cmdline" 2>/dev/null; then
        kill -9 "$pid"
    fi
done
rm -rf -- "$1"
if [ -e "$1" ]; then sleep 2; rm -rf -- "$1"; fi
"""


class Janitor:
    """Waits for the end of a pipe that only this process holds; then ends and removes.

    Args:
        folder: Removed with all it holds.
    """

    def __init__(self, folder: str) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", SCRIPT, "rlinf-janitor", folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal is not meant for it
            text=True,
        )

    def watch(self, pids: Iterable[int]) -> None:
        """Kill these too: those that still run then, and are Ray's or name the folder."""
        assert self._shell.stdin is not None
        self._shell.stdin.writelines(f"{pid}\n" for pid in pids)
        self._shell.stdin.flush()

    def close(self) -> None:
        """Tidy up now, and wait until it is done."""
        assert self._shell.stdin is not None
        self._shell.stdin.close()
        self._shell.wait(CLOSE_S)
