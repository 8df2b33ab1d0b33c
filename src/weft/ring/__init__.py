"""The ring: shared memory through which request plane and engine meet, and nothing else passes."""
