"""Tiers of L2 in stores that other daemons share: Valkey or Redis, S3, and Mooncake Store. Their clients are loaded when a tier is made."""
