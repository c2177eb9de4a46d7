"""`python -m purelora` and the console command `purelora`."""

from purelora.commands import console

if __name__ == "__main__":
    console.main()
