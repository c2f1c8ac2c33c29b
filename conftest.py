"""What every test of the workspace shares: JAX's environment, and Markdown pages whose examples are run.

`tools/isolate.py` copies this file beside the tests of one package, so it imports nothing of the workspace.
"""

import collections
import contextlib
import doctest
import os
import re
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def set_environment() -> None:
    """Set the variables that JAX reads when it starts; what is set already stays.

    Eight devices on the host let one process test a mesh. Compiled programs are kept between runs, however
    small, because the stages of CI compile the same ones. The cores are divided among the xdist workers, two
    threads each at least: with one, a host callback that waits for a device computation would never return.
    """
    variables = {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(Path(__file__).parent / ".jax_cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
    if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
        threads = str(max(2, (os.cpu_count() or 2) // int(workers)))
        # BLAS threads wait in a spin, and on a busy machine for each other: one factorisation took minutes.
        variables |= {"NPROC": threads, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    # Tests start dozens of interpreters, and compiling jax's and flax's source anew takes each of them five seconds.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    flags = os.environ.get("XLA_FLAGS", "")
    # Compiling is most of the time, and these sizes need no fast code; the long tests are compiled as users' programs.
    wanted = {
        "xla_force_host_platform_device_count": "8",
        "xla_backend_optimization_level": "0",
        "xla_llvm_disable_expensive_passes": "true",
    }
    flags += "".join(f" --{name}={value}" for name, value in wanted.items() if name not in flags)
    os.environ["XLA_FLAGS"] = flags.strip()


set_environment()

# A first call compiles, which no deadline allows for; and what CI finds should be found again.
hypothesis.settings.register_profile("styrax", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("styrax")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--cases`: where a second look at other versions need not see every case of every test."""
    parser.addoption("--cases", type=int, metavar="N", help="run at most N cases of each parametrised test")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases beyond those that `--cases` asks for."""
    most = config.getoption("--cases")
    if most is None:
        return
    seen = collections.Counter[str]()
    kept, left = [], []
    for item in items:
        name = item.nodeid.partition("[")[0]
        if item.get_closest_marker("slow") is None:  # of those that `-m` leaves out none is to take a place
            seen[name] += 1
        (kept if seen[name] <= most else left).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect the pages."""
    return Page.from_parent(parent, path=file_path) if file_path.suffix == ".md" else None


class Page(pytest.File):
    """A Markdown page."""

    def collect(self) -> Iterator[pytest.Item]:
        """Yield one test: the examples of a page share their names, so they run together and in order."""
        if FENCE.search(self.path.read_text(encoding="utf-8")):
            yield Examples.from_parent(self, name="examples")


class Examples(pytest.Item):
    """All fenced `python` blocks of one page, run as one module in an empty folder."""

    def runtest(self) -> None:
        """Run each block; one that holds `>>>` prompts is compared with the output it shows."""
        text = self.path.read_text(encoding="utf-8")
        module = types.ModuleType("page")
        sys.modules["page"] = module  # dataclasses look up their annotations there
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            for match in FENCE.finditer(text):
                line, source = text.count("\n", 0, match.start(1)), match[1]
                if re.search(r"^>>> ", source, re.MULTILINE):
                    self._compare(source, module, line)
                else:
                    exec(compile("\n" * line + source, str(self.path), "exec"), module.__dict__)

    def _compare(self, source: str, module: types.ModuleType, line: int) -> None:
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        test = doctest.DocTestParser().get_doctest(source, module.__dict__, self.name, str(self.path), line)
        doctest.DebugRunner(optionflags=flags, verbose=False).run(test, clear_globs=False)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException]) -> str:
        """Show the page's own lines; for a comparison, what was expected and what was got."""
        failure = excinfo.value
        if isinstance(failure, doctest.DocTestFailure):
            line = failure.test.lineno + failure.example.lineno + 1
            source, want = failure.example.source, failure.example.want
            return f"{self.path}:{line}: {source}expected:\n{want}got:\n{failure.got}"
        if isinstance(failure, doctest.UnexpectedException):
            excinfo = pytest.ExceptionInfo.from_exc_info(failure.exc_info)
        excinfo.traceback = excinfo.traceback.cut(path=self.path)
        return str(excinfo.getrepr(style="short"))

    def reportinfo(self) -> tuple[Path, int, str]:
        """Name the page in reports."""
        return self.path, 0, f"{self.path.name}: examples"
