"""Runs a command that ends with the thread that started it: `python tether.py PARENT COMMAND…`.

The kernel kills a process that has asked for it when the thread that forked it ends. A process that asks for that
itself, as here, needs no code between fork and exec in its parent, where other threads may hold locks. The request
outlives `exec`. Only the standard library is imported, so that it starts in a few milliseconds.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        sys.exit(f"error: the kernel does not tie processes to their parents: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it had ended before we asked
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # Ray's worker processes block or ignore what the command waits for
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.execvp(command[0], command)
