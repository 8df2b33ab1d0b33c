"""Kernels in Triton, for GPUs; on a CPU they run in Triton's interpreter, for tests.

Every kernel reads what differs from step to step from device memory, on a grid that depends on
nothing but the shapes of its inputs, so that a captured graph can replay it.
"""

from weft.kernels.triton.hashing import hash_callees_first

hash_callees_first()
