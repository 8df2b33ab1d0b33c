"""``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from typing import Any

from weft.api.bodies import DetokenizeBody, TokenizeBody
from weft.api.completions import check_ids
from weft.api.conversation import encode_messages, read_variables, rendering
from weft.api.jobs import Builder
from weft.api.logprobs import TokenTexts
from weft.api.pictures import Pictures
from weft.api.rules import Notes
from weft.api.sampling import check_model
from weft.api.tools import offered_tools
from weft.core.errors import ParameterError, PromptTooLongError


def tokenize(
    body: TokenizeBody, builder: Builder, texts: TokenTexts, notes: Notes | None = None
) -> dict[str, Any]:
    """Token ids of a text or a conversation. Raises a typed error that names the parameter."""
    notes = Notes() if notes is None else notes
    check_model(body.model, builder.card)
    if (body.prompt is None) == (body.messages is None):
        raise ParameterError("Give either prompt or messages.", param="prompt")
    if body.messages is not None:
        variables = read_variables(body.chat_template_kwargs or {})
        tools = None if not body.tools else offered_tools(body.tools, notes).shown()
        how = rendering(body, variables, tools)
        ids = encode_messages(body.messages, builder, how, notes, Pictures(builder))
    else:
        prompt = body.prompt or ""
        builder.check_size(len(prompt.encode()), "prompt")
        ids = builder.tokenizer.encode(
            prompt,
            add_special_tokens=body.add_special_tokens,
            parse_special=body.parse_special,
        )
    return {
        "count": len(ids),
        "max_model_len": builder.card.max_model_len,
        "tokens": ids,
        "token_strs": [texts.of(token)[0] for token in ids] if body.return_token_strs else None,
    }


def detokenize(body: DetokenizeBody, builder: Builder) -> dict[str, Any]:
    """Text of token ids. Raises a typed error that names the parameter."""
    check_model(body.model, builder.card)
    limit = builder.card.max_model_len
    if len(body.tokens) > limit:
        raise PromptTooLongError(
            f"There are {len(body.tokens)} tokens; the context of the model has {limit}.",
            param="tokens",
        )
    check_ids(body.tokens, builder.card.vocab_size, "tokens")
    skip = body.skip_special_tokens
    return {"prompt": builder.tokenizer.decode(body.tokens, skip_special_tokens=skip)}
