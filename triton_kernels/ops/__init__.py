"""One file an op: its kernel, its launcher, the registered operator and the function."""
