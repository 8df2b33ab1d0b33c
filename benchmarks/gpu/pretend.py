"""Pretends a part of ``scripts/gpu_check.sh`` in a dry run: a figure, or a way to go wrong."""

from __future__ import annotations

import os
import signal
import sys
import time

from figures import figure

FLOOD_BYTES = 20 * 2**20


def main() -> None:
    kind, *words = sys.argv[1:]
    if kind == "figure":
        figure(f"{' '.join(words)}: pretended", 1.0)
        return
    figure(f"before the {kind}", 1.0)
    if kind == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif kind == "hang":
        time.sleep(600)
    elif kind == "deaf":  # only SIGKILL ends it, and a child as deaf as itself
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.fork()
        time.sleep(600)
    elif kind == "garbage":
        sys.stdout.buffer.write(
            b'\xff\xfe\x00\x1b[2J{"name": \n{}\n[]\n{"name": 3, "value": null}\n'
        )
        sys.stdout.buffer.write(b'{"name": "no number", "value": NaN}\n' + b"{" * 5000 + b"\n")
    elif kind == "half":
        sys.stdout.write('{"name": "half a line", "val')
        sys.stdout.flush()
        os._exit(1)
    elif kind == "flood":
        line = b"x" * 1023 + b"\n"
        for _ in range(FLOOD_BYTES // len(line)):
            sys.stdout.buffer.write(line)
    else:
        raise SystemExit(f"nothing is pretended as {kind}")


if __name__ == "__main__":
    main()
