"""The HTTP server in front of an engine; heavy imports are lazy."""
