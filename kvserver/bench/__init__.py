"""Measurements of `kvserver bench` and their verdicts. The benchmarks of the repository (`bench/`) use the same parts."""
