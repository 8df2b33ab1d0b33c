"""A network namespace behind a link that delays and loses packets, for tests of remote places.

    python lossy_link.py FD FD DELAY_S LOSS

relays packets between two TUN devices, one of which is in the namespace: what ``tc netem`` does
where the kernel has it. Needs root.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 1500


class LossyLink:
    """The link, while it is up.

    Attributes:
        there: address in the namespace.
        within: a command that runs another one in there.
    """

    def __init__(self, name: str, there: str, device: str) -> None:
        self.there, self.within = there, ["ip", "netns", "exec", name]
        self._device = device

    def cut(self) -> None:
        """Let nothing through."""
        ip("link", "set", self._device, "down")

    def mend(self) -> None:
        """Let packets through again."""
        ip("link", "set", self._device, "up")


def why_not() -> str:
    """Why there can be no such link here; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
        ip("netns", "add", f"weft-try-{os.getpid()}")
        ip("netns", "del", f"weft-try-{os.getpid()}")
    except (OSError, subprocess.CalledProcessError) as error:
        return f"there are no network namespaces or TUN devices: {error}"
    return ""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def lossy_link(delay_s: float, loss: float) -> Iterator[LossyLink]:
    """Make a namespace and the link to it, until the block ends.

    Args:
        delay_s: of each packet, either way; up to a half more at random.
        loss: share of the packets that get lost, either way.
    """
    pid = os.getpid()
    name, here, there = f"weft-{pid}", f"wefta{pid}", f"weftb{pid}"
    net = f"198.18.{pid // 64 % 256}.{pid % 64 * 4}".rsplit(".", 1)
    mine, theirs = (f"{net[0]}.{int(net[1]) + i}" for i in (1, 2))
    ip("netns", "add", name)
    fds = [_tun(here), _tun(there)]
    relay = None
    try:
        ip("link", "set", there, "netns", name)
        for inside, device, address in (((), here, mine), (("-n", name), there, theirs)):
            ip(*inside, "addr", "add", f"{address}/30", "dev", device)
            ip(*inside, "link", "set", device, "up")
        ip("-n", name, "link", "set", "lo", "up")
        words = [sys.executable, __file__, *map(str, fds), str(delay_s), str(loss)]
        relay = subprocess.Popen(words, pass_fds=fds)
        yield LossyLink(name, theirs, here)
    finally:
        if relay is not None:
            relay.kill()
            relay.wait()
        for fd in fds:
            os.close(fd)
        ip("netns", "del", name)


def _tun(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return fd


def relay(ends: tuple[int, int], delay_s: float, loss: float) -> None:
    """Carry packets both ways until the process is killed."""
    draw, to = random.Random(1), {ends[0]: ends[1], ends[1]: ends[0]}
    flying: list[tuple[float, int, int, bytes]] = []
    count, last = 0, dict.fromkeys(ends, 0.0)
    while True:
        now = time.monotonic()
        ready, _, _ = select.select(ends, (), (), max(0.0, flying[0][0] - now) if flying else None)
        for fd in ready:
            with contextlib.suppress(OSError):  # the device is down
                packet = os.read(fd, MTU + 100)
                if draw.random() >= loss:
                    due = time.monotonic() + delay_s * (1 + draw.random() / 2)
                    due = last[fd] = max(due, last[fd])  # no packet overtakes another one
                    count += 1
                    heapq.heappush(flying, (due, count, to[fd], packet))
        while flying and flying[0][0] <= time.monotonic():
            _, _, fd, packet = heapq.heappop(flying)
            with contextlib.suppress(OSError):
                os.write(fd, packet)


if __name__ == "__main__":
    relay((int(sys.argv[1]), int(sys.argv[2])), float(sys.argv[3]), float(sys.argv[4]))
