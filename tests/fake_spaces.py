"""A double of the package `spaces` on ZeroGPU: the body of a decorated generator really runs in a forked process, behind pickles.

As there: arguments and yields are pickled, closing the generator sets an event that is read between two yields, and what the body changes
stays in its process. Written to a folder as `spaces.py` by the tests of the Space.
"""
import functools
import inspect
import multiprocessing
import os
import pickle

_context = multiprocessing.get_context("fork")
_main = os.getpid()
durations: list[float] = []


def GPU(task=None, *, duration=None, size=None):
    if task is None:
        return functools.partial(GPU, duration=duration, size=size)
    assert inspect.isgeneratorfunction(task), "a sync generator function"

    @functools.wraps(task)
    def wrapped(*args):
        assert os.getpid() == _main
        durations.append(duration(*args) if callable(duration) else duration)
        packed, stop, (receiver, sender) = pickle.dumps(args), _context.Event(), _context.Pipe(duplex=False)
        process = _context.Process(target=_body, args=(task, packed, sender, stop), daemon=True)
        process.start()
        sender.close()
        try:
            while (message := pickle.loads(receiver.recv_bytes())) is not None:
                yield message[0]
        except GeneratorExit:
            stop.set()
            raise
        finally:
            receiver.close()
            process.join()
    return wrapped


def _body(task, packed, sender, stop):
    generator = task(*pickle.loads(packed))
    for value in generator:
        if stop.is_set():
            generator.close()
            return
        try:
            sender.send_bytes(pickle.dumps((value,)))
        except BrokenPipeError:
            generator.close()
            return
    sender.send_bytes(pickle.dumps(None))
