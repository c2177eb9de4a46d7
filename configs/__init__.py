"""Ready configurations: each file says its command, time, memory and expected loss."""
