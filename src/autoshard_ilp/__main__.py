"""The ``autoshard`` command, also as ``python -m autoshard_ilp``: interrupts are quiet from the first moment on."""

import signal


def main() -> None:
    """Runs the command line. Until a command begins nothing can be lost, and an interrupt just ends the process.

    While libraries load and arguments are parsed, Python's own handler would not do: some of them turn its exception
    into one of their own, or do not survive it. A command takes over with :func:`autoshard_ilp.console.reported`.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from autoshard_ilp.cli.app import main as run

    run()


if __name__ == "__main__":
    main()
