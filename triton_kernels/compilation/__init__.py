"""Compiling without a launch: ahead of time, for every specialisation, and to tune."""
