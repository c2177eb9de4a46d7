"""`python -m purelora.export`."""

from purelora.commands import entry, export

if __name__ == "__main__":
    entry.run_command(export.main, export.__doc__)
