"""Parts of `tools/train_builtin.py`, which trains the small model that weft ships."""
