"""`python -m purelora.adapters`."""

from purelora.commands import adapters, entry

if __name__ == "__main__":
    entry.run_command(adapters.main, adapters.__doc__)
