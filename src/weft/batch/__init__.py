"""Offline batches in OpenAI's format: request lines in, result lines out, resumable.

    source = InputFile(path)                                # where the lines come from
    results = Results(output, errors, source, answered_by)  # what is done, and where the rest goes
    asker = EngineAsker(...)                                # who answers; or HttpAsker(...)
    await Runner(source, results, asker, order).run()

``Source``, ``Sink``, ``Asker`` and ``Order`` are protocols (``ports.py``): lines may as well come
from a store, and results go into one.
"""
