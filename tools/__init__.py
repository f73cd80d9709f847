"""Scripts that build, check and measure the project. They are not installed."""
