"""``weft chat``: a conversation in the terminal with any server that has OpenAI's API."""
