"""The HTTP server in front of an engine; imports nothing heavy before it is asked for."""
