"""L2's tiers in stores that other daemons share: Valkey or Redis, and S3. Their clients are loaded when a tier is made."""
