"""What every op is launched with: configurations, cached launches, registration with torch."""
