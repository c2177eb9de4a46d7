"""`python -m purelora.generate`."""

from purelora.commands import entry, generate

if __name__ == "__main__":
    entry.run_command(generate.main, generate.__doc__)
