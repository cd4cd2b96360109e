"""The process that reads bad files: one line of JSON in (kind and path), one line out (what came of it).

Memory is limited while a file is read, and an audit hook watches: a file that starts a process, imports a package, runs
code made from its texts or writes outside of the folder given is an execution, whatever else comes of it.
"""

import json
import os
import re
import resource
import shutil
import sys
import threading
import warnings
from pathlib import Path

from fuzz.mutate import CANARY

MOST_BYTES = 256 * 1024 * 1024
_STARTS = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "os.forkpty",
    "subprocess.Popen",
    "pty.spawn",
)
_OTHERS = (
    "socket.connect",
    "ctypes.dlopen",
    "os.putenv",
    "os.unsetenv",
    "shutil.rmtree",
    "pickle.find_class",
)
_CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.link", "os.symlink", "os.truncate")
_OUT_OF_MEMORY = re.compile("not enough memory|allocate memory|bad_alloc")  # how torch says it
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Watch:
    """Notes what a file does that no file may."""

    def __init__(self, folders):
        self.folders, self.seen, self.armed, self.known = tuple(folders), [], False, set()

    def __call__(self, event, arguments):
        if not self.armed:
            return
        if event in _STARTS or event in _OTHERS:
            self.seen.append(f"{event} {str(arguments)[:100]}")
        elif event == "import" and str(arguments[0]).partition(".")[0] not in self.known:
            self.seen.append(f"import {arguments[0]}")
        elif event == "exec" and CANARY in _names(arguments[0]):
            self.seen.append("exec of a text of the file")
        elif event == "open" and isinstance(arguments[0], str | bytes) and (arguments[2] or 0) & _WRITES:
            self._inside("open", arguments[0])
        elif event in _CHANGES and not (event == "os.mkdir" and Path(os.fspath(arguments[0])).is_dir()):
            self._inside(event, arguments[0])

    def _inside(self, event, path):
        full = os.path.realpath(os.fspath(path) if not isinstance(path, int) else f"/proc/self/fd/{path}")
        if full != "/dev/null" and not str(full).startswith(self.folders):
            self.seen.append(f"{event} {full}")


def _names(code):
    """Return all names and texts in a code object, as one text."""
    found, waiting = [], [code]
    while waiting:
        one = waiting.pop()
        if hasattr(one, "co_names"):
            found += [*one.co_names, *one.co_varnames, one.co_name]
            waiting += one.co_consts
        elif isinstance(one, str):
            found.append(one)
    return " ".join(found)


def read_artifact(path):
    """Load a compiled model and call it once."""
    import torch

    import sparta

    fast = sparta.load(path)
    str(fast.report), repr(fast.spec)
    leaves = []
    for given in fast.signature.inputs:
        if given.shape is None:
            leaves.append(given.constant)
            continue
        sizes = tuple(8 if size is None else size for size in given.shape)
        if torch.Size(sizes).numel() > 10**6:
            return "loaded"  # its inputs alone are large
        leaves.append(torch.zeros(sizes, dtype=getattr(torch, given.dtype)))
    args, kwargs = torch.utils._pytree.tree_unflatten(leaves, fast.signature.in_spec)
    with torch.no_grad():
        fast(*args, **kwargs)
    return "called"


def read_parts(path):
    """Load the compiled parts of a model into it and call it."""
    import torch

    import sparta
    from fuzz.corpus import Deciding

    fast = sparta.load(path, model=Deciding())
    str(fast.report), repr(fast.spec)
    with torch.no_grad():
        fast(torch.ones(4, 32))
    return "called"


def read_language_model(path):
    """Load a compiled language model and generate a few tokens."""
    import torch

    import sparta

    fast = sparta.load(path)
    str(fast.report), repr(fast.spec)
    fast.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False)
    return "called"


def read_spec(path):
    """Load a spec and print it."""
    from sparta.tesa.spec import Spec

    spec = Spec.load(path)
    str(spec), repr(spec), hash(spec)
    return "loaded"


def read_state(path):
    """Load a training state into a manager, and take a step."""
    import torch

    from fuzz.corpus import attached_manager
    from sparta.create.loop.state_file import load_state

    state = load_state(path)
    manager, model, optimizer = attached_manager()
    manager.load_state_dict(state)
    model(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()
    return "loaded"


def read_exchange(path):
    """Read an exchange file; its reader stands alone and raises ValueError."""
    from sparta.compiler.exchange.reader import read_exchange as read
    from sparta.errors import FileFormatError

    try:
        read(str(path))
    except ValueError as error:
        if str(path) not in str(error):
            raise
        raise FileFormatError(str(error)) from error
    return "loaded"


def read_recipe(path):
    """Load a recipe, work it out and write it."""
    from sparta.create.recipe import Recipe

    recipe = Recipe.load(path)
    recipe.values(10), recipe.to_yaml(), recipe.modifiers(10)
    return "loaded"


def read_entry(path):
    """Put a file in the place of a tuning entry, and ask for it."""
    from fuzz.corpus import tuned_spec
    from sparta.specialize.tuning.select import build, choose
    from sparta.specialize.tuning.store import TuningStore

    spec, store = tuned_spec(), TuningStore(path.parent / "entries")
    store.folder.mkdir(exist_ok=True)
    shutil.copyfile(path, store._path(spec))
    choice = choose(spec, store)
    build(spec, choice.config)
    return "refused" if choice.reason == "not tuned" else "loaded"


def read_export(path):
    """Take an export into an empty store, and ask for what it holds."""
    from fuzz.corpus import tuned_spec
    from sparta.specialize.tuning.select import build, choose
    from sparta.specialize.tuning.store import TuningStore

    store = TuningStore(path.parent / "imported")
    for old in store.folder.glob("*.json"):
        old.unlink()
    store.load(path)
    build(tuned_spec(), choose(tuned_spec(), store).config)
    return "loaded"


READERS = {
    "artifact": read_artifact,
    "language model": read_language_model,
    "parts": read_parts,
    "spec": read_spec,
    "state": read_state,
    "exchange": read_exchange,
    "recipe": read_recipe,
    "entry": read_entry,
    "export": read_export,
}


def outcome_of(kind, path):
    """Return what came of reading a file, and a word on it."""
    from sparta.errors import SpartaError

    try:
        return READERS[kind](path), ""
    except Exception as error:  # noqa: BLE001 - that is the question
        chain = [error]
        while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and len(chain) < 20:
            chain.append(cause)
        words = f"{type(error).__name__}: {str(error)[:300]}"
        if any(isinstance(one, MemoryError) or _OUT_OF_MEMORY.search(str(one)) for one in chain):
            return "memory", words
        if isinstance(error, SpartaError):
            return "refused", words
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = f" at {Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else ""
        return "foreign", words + where


def _address_space():
    pages = Path("/proc/self/statm").read_text().split()[0]
    return int(pages) * resource.getpagesize()


def main():
    """Read the good files first, so that all that is imported late is there, then whatever is asked for."""
    answers = os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    warnings.simplefilter("ignore")
    threading.stack_size(1024 * 1024)
    import torch

    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    watch = Watch([str(folder), os.environ["SPARTA_CACHE"]])
    sys.addaudithook(watch)
    for line in sys.stdin:
        asked = json.loads(line)
        path, warm = Path(asked["path"]), asked.get("warm", False)
        watch.seen, watch.known = [], {name.partition(".")[0] for name in sys.modules} | set(sys.stdlib_module_names)
        watch.armed = not warm
        if not warm:
            limit = _address_space() + max(MOST_BYTES, 4 * path.stat().st_size)
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        outcome, detail = outcome_of(asked["kind"], path)
        watch.armed = False
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        if watch.seen:
            outcome, detail = "execution", "; ".join(watch.seen)[:300]
        answers.write(json.dumps({"outcome": outcome, "detail": detail}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
