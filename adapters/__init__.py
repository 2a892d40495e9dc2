"""Adapters: what runs inside an engine. Each needs only msgspec, pyzmq, torch and its engine."""
