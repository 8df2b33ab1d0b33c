"""Turns a new request into a sequence, or refuses it with a reason."""

from __future__ import annotations

from weft.core.errors import OutOfMemoryError, ParameterError
from weft.core.types import NEVER, Request, Sequence
from weft.sched.draft import NgramDrafter


def sequence_of(
    request: Request,
    order: tuple[int, int],
    *,
    max_model_len: int,
    kv_tokens: int,
    speculation: int,
    synchronous: bool = False,
) -> Sequence:
    """Return the sequence of a request, with the output that it brings along.

    Args:
        order: the priority of its class, and the number of its arrival.
        max_model_len: tokens in one sequence, prompt and output.
        kv_tokens: tokens of the longest sequence that the KV memory holds.
        speculation: tokens of the longest draft of a request that does not say; 0 for none.
        synchronous: whether a token is planned only when the one before it is on the host.

    Raises:
        ParameterError: an empty or over-long prompt.
        OutOfMemoryError: the sequence could never fit into the KV memory.
    """
    prompt = len(request.prompt)
    if not 0 < prompt < max_model_len:
        raise ParameterError(
            f"The prompt has {prompt} tokens; the context takes 1 to {max_model_len - 1} and at "
            "least one more for the output.",
            param="prompt",
        )
    wanted = request.sampling.max_tokens
    if request.embed:
        wanted = 1  # never sampled: what would be the first token is the vector
    end = max_model_len if wanted is None else min(max_model_len, prompt + wanted)
    if end > kv_tokens:
        raise OutOfMemoryError(
            f"The request may grow to {end} tokens, but the KV memory holds {kv_tokens}; lower "
            "max_tokens or raise kv_memory."
        )
    tokens = [*request.prompt, *request.output]
    drafter = _drafter(request, speculation)
    # Tokens with log probabilities come with the end of a lease: the blame for an engine's death is
    # found by what was published.
    late_and_charged = request.crashes > 0 and request.sampling.logprobs is not None
    return Sequence(
        request,
        request.id,
        tokens,
        end,
        order,
        request.stop_ids(),
        known=len(tokens),
        synchronous_from=0 if synchronous or drafter is not None else NEVER,
        drafter=drafter,
        leasable=drafter is None and not request.embed and not late_and_charged,
    )


def _drafter(request: Request, speculation: int) -> NgramDrafter | None:
    """Of a request with speculation; a grammar must see each token before the next."""
    wish = request.sampling.speculation
    most = speculation if wish is None else wish
    if most == 0 or request.sampling.grammar is not None or request.embed:
        return None
    return NgramDrafter(most, len(request.prompt))
