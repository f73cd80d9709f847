"""What builds, checks and measures the project. None of it is installed."""
