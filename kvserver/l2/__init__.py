"""L2, the storage behind L1. No tier exists yet."""
