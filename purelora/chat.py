"""`python -m purelora.chat`."""

from purelora.commands import chat, entry

if __name__ == "__main__":
    entry.run_command(chat.main, chat.__doc__)
