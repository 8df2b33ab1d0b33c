"""The block that a sequence was filling when its engine was killed, for the next engine."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from weft.kv.cache import KVCache


def find_opened(cache: KVCache, sequence_id: int, tokens: Seq[int], hit: int) -> int:
    """Extend a hit of a sequence that another engine decoded by the block that it was filling.

    That is there until the sequence is opened for the first time.

    Args:
        tokens: of the sequence that the other engine has given out, prompt included.
        hit: what ``find_prefix`` returned.

    Returns:
        All tokens but the last one; or up to the end of the block, which is cached from now on,
        where steps under a lease have gone beyond it; or ``hit``.
    """
    computed = len(tokens) - 1
    sizes = {group.block_size for group in cache.groups}
    for group, pool in zip(cache.groups, cache.pools, strict=True):
        first = hit // group.block_size
        if hit % group.block_size or pool.opened(sequence_id) != first:
            return hit
    if all(hit // size == computed // size for size in sizes):
        return computed
    end = hit + max(sizes)
    if len(sizes) > 1 or end > computed:
        return hit
    for index, pool in enumerate(cache.pools):
        hashes = cache.block_hashes(sequence_id, index, tokens, end // max(sizes))
        pool.seal_opened(sequence_id, hashes[-1])
    return end
