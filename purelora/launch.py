"""`python -m purelora.launch`."""

from purelora.commands import entry, launch

if __name__ == "__main__":
    entry.run_command(launch.main, launch.__doc__)
