"""What the scripts of benchmarks/ share."""
