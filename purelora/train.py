"""`python -m purelora.train`."""

from purelora.commands import entry, train

if __name__ == "__main__":
    entry.run_command(train.main, train.__doc__)
