"""The ``autoshard`` command, also as ``python -m autoshard_ilp``: interrupts are quiet from the first moment on."""

import signal


def main() -> None:
    """Loads the command line and runs it. Until then nothing can be lost, and an interrupt just ends the process."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from autoshard_ilp.cli import main as run

    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
