"""`python -m purelora.merge`."""

from purelora.commands import entry, merge

if __name__ == "__main__":
    entry.run_command(merge.main, merge.__doc__)
