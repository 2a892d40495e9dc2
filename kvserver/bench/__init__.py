"""What `kvserver bench` measures, and the verdicts; the benchmarks of the repository (`bench/`) use the same parts."""
