"""The ring: shared memory, and the only channel between request plane and engine."""
