"""A model that is not there: a token's KV is a number that depends on all tokens up to it (and on layer, head, rank and
weights), and the next token is a function of the last one's.
"""

from __future__ import annotations

import random

VOCAB = 1024
BLOCK = 16  # tokens
LAYERS, HEADS, WIDTH = 2, 2, 2  # of a model of one group
MASK = (1 << 64) - 1


def chain(state: int, token: int) -> int:
    """The KV number of a token after `state`, the one of the token before."""
    return (state * 6364136223846793005 + token * 2 + 1442695040888963407) & MASK


def next_token(state: int) -> int:
    return 3 + (state >> 33) % (VOCAB - 3)


def continuation(prompt: list[int], count: int, weights: int = 0) -> list[int]:
    """What the model generates."""
    state = weights
    for token in prompt:
        state = chain(state, token)
    tokens = []
    for _ in range(count):
        tokens.append(next_token(state))
        state = chain(state, tokens[-1])
    return tokens


def prompt(seed: int, length: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, VOCAB) for _ in range(length)]
