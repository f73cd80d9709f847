"""The base of every op: configurations, cached launches, registration with torch."""
