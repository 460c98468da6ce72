"""`python -m flowstone` is the command line."""

from flowstone.extensions import extension

if __name__ == "__main__":
    extension("cli")()
