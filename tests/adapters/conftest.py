"""The fixtures of tests that drive vLLM's schedulers without a model."""

from adapter_fixtures import *  # noqa: F403
