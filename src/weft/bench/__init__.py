"""Benchmarks for users: load on any OpenAI server, throughput of an engine, speed of kernels."""
