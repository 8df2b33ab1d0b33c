"""Images of requests: taken from URLs, and decoded in a process of their own."""
