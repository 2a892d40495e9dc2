"""The file tier: objects in one preallocated file, found by an index in memory and an append-only journal."""
