"""A function in a process of its own: what it leaves behind there, such as vLLM's pool of GPU memory, ends
with it."""

import importlib
import logging
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

_STOP_SECONDS = 30
_STOPPED = 130  # exit code after an interruption
_KINDS = (ValueError, OSError, ImportError, FloatingPointError)
_NOISY = ("matplotlib", "datasets", "filelock", "httpx", "urllib3", "fsspec", "bm25s", "asyncio")


def set_up_logging(level: int) -> None:
    """What the command line shows of the log, on stderr."""
    logging.basicConfig(level=level, format="%(levelname)s %(message)s")
    for noisy in _NOISY:
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # Else every retry without network is two lines, by a handler of its own and by ours; the error comes last
    # anyway.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # read when it is imported


def in_own_process(function: str, *arguments: Any) -> Any:
    """What `function`, "module:name", returns for these arguments in a fresh process, which ends with the
    call.

    Arguments and result must be picklable. Raises what the function raises (of a kind that cannot travel, a
    like one), its traceback as a note; ChildProcessError where the process ends without an answer. An
    interruption stops it first."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    level = logging.getLogger().level
    process = context.Process(target=_child, args=(theirs, function, arguments, level))
    process.start()
    theirs.close()
    try:
        wait([ours, process.sentinel])
        answered = ours.poll()
        error, value = ours.recv() if answered else (None, None)
        process.join(_STOP_SECONDS)
    except EOFError:  # ended between the two
        answered = False
        process.join()
    finally:
        _stop(process)
        ours.close()
    if answered and error is None:
        return value
    if answered:
        raise error
    if process.exitcode == _STOPPED:
        raise KeyboardInterrupt
    killed = "; it was killed, perhaps for want of memory" if process.exitcode == -signal.SIGKILL else ""
    raise ChildProcessError(f"the process of {function} ended with exit code {process.exitcode}{killed}")


def _stop(process: BaseProcess) -> None:
    if not process.is_alive():
        return
    try:
        process.terminate()
        process.join(_STOP_SECONDS)
    finally:
        process.kill()
        process.join()


def _child(answer: Connection, function: str, arguments: tuple, level: int) -> None:
    # A terminal's Ctrl-C reaches parent and child: the parent alone hears it, and passes it on as SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    set_up_logging(level)
    try:
        module, _, name = function.partition(":")
        answer.send((None, getattr(importlib.import_module(module), name)(*arguments)))
    except KeyboardInterrupt:
        raise SystemExit(_STOPPED) from None
    except Exception as error:
        answer.send((_travelling(error), None))


def _end_with_parent() -> None:
    """A parent that is killed takes its child along, and with it the GPU's memory."""
    multiprocessing.parent_process().join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_STOP_SECONDS)
    os._exit(1)


def _travelling(error: Exception) -> Exception:
    """The error, or where it cannot be pickled one of a built-in kind with its message."""
    note = f"\nin a process of its own:\n{traceback.format_exc()}"
    try:
        copy = pickle.loads(pickle.dumps(error))
        if str(copy) != str(error):
            raise TypeError
    except Exception:  # a class may do anything when it is pickled
        kind = next((kind for kind in _KINDS if isinstance(error, kind)), RuntimeError)
        error = kind(str(error))
    error.add_note(note)
    return error
