"""kvserver: a standalone KV-cache server for LLM inference engines. Start at README.md."""

__version__ = "0.1.0"
