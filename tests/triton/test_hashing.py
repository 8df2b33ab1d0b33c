"""Keys of kernels: equal in processes that hash kernels in different orders."""

from __future__ import annotations

import json
import os
import subprocess
import sys

KEYS = """
import json, sys
from triton.runtime.jit import JITFunction
from weft.kernels.triton import activation, gemm, norm, sample
found = {}
for module in (activation, gemm, norm, sample):
    found |= {f"{module.__name__}.{k}": v for k, v in vars(module).items()
              if isinstance(v, JITFunction)}
names = sorted(found, reverse=sys.argv[1] == "reversed")
print(json.dumps({name: found[name].cache_key for name in names}))
"""


def keys(order: str) -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    command = [sys.executable, "-c", KEYS, order]
    return json.loads(subprocess.check_output(command, env=environment, text=True))


def test_keys_do_not_depend_on_the_order_of_launches() -> None:
    """One that does is not found by an engine whose kernels were compiled beforehand."""
    found = keys("sorted")
    assert len(found) > 20
    assert keys("reversed") == found
