"""`python -m purelora.verify`."""

from purelora.commands import entry, verify

if __name__ == "__main__":
    entry.run_command(verify.main, verify.__doc__)
