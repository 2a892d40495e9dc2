"""The fixtures of tests with real engines."""

from engine_fixtures import *  # noqa: F403
