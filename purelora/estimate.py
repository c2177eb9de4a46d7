"""`python -m purelora.estimate`."""

from purelora.commands import entry, estimate

if __name__ == "__main__":
    entry.run_command(estimate.main, estimate.__doc__)
