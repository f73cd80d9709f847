"""Other ways to the same result, which the benchmarks compare with."""
