"""Storage behind L1. There is none yet."""
