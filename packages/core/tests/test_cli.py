import errno
import json
import re
import warnings

import pytest

from styrax.core import cli

HEAVY = "jax jaxlib flax optax orbax grain numpy tokenizers matplotlib"
NO_HEAVY = f"""
import sys
from styrax.core.cli import main
code = main(sys.argv[1:])
loaded = sorted(set("{HEAVY}".split()) & set(sys.modules))
assert not loaded, loaded
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["cnfig"], 2),
        (["config", "show", "fake-tiny", "--schema=fake"], 0),
        (["config", "show", "fake-tiny", "--schema=fake", "run.stepz=3"], 2),
        (["explain", "run.steps", "--schema=fake"], 0),
        (["config", "--help"], 0),
    ],
)
def test_nothing_heavy_is_imported(styrax, arguments, code):
    done = styrax(*arguments, code=NO_HEAVY)
    assert (done.code, "Traceback" in done.err) == (code, False), done.err


def test_importing_core_imports_nothing_heavy(styrax):
    modules = "core core.config core.cli core.mesh core.tree core.precision core.random core.registry"
    modules += " core.protocols core.trackers core.distributed core.testing"
    code = "import sys\n" + "".join(f"import styrax.{name}\n" for name in modules.split())
    code += f"assert not set({HEAVY!r}.split()) & set(sys.modules)\n"
    assert styrax(code=code).err == ""


def test_help_lists_commands_and_says_why_one_is_unavailable(styrax):
    done = styrax("--help")
    assert done.code == 0
    lines = {line.split()[0]: line for line in done.out.splitlines() if line.startswith("  ")}
    assert lines["fake-hello"].endswith("say hello")
    assert "unavailable: ModuleNotFoundError: No module named 'a_module" in lines["fake-broken"]
    assert "fake_broken of fake 1.0" in lines["fake-broken"]
    assert lines["fake-empty"].endswith("unavailable: fake_empty of fake 1.0 lacks add_arguments, run")
    assert "Traceback" not in done.err


def test_a_broken_command_fails_alone(styrax):
    assert styrax("fake-hello").out == "hello\n"
    done = styrax("fake-broken")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: 'fake-broken' in styrax.commands is unavailable: ModuleNotFoundError")
    assert "Traceback" in styrax("fake-broken", STYRAX_DEBUG="1").err


def run(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_mistyped_command(fake, capsys):
    code, out, err = run(capsys, "fake-helo")
    assert (code, out) == (2, "")
    assert err.startswith("error: no command 'fake-helo' (did you mean 'fake-hello'?); the commands are ")
    code, _, err = run(capsys, "--verison")
    assert code == 2
    assert "no option '--verison' (did you mean '--version'?)" in err
    code, _, err = run(capsys)
    assert code == 2
    assert "commands:" in err


def test_a_mistyped_argument(fake, capsys):
    code, out, err = run(capsys, "fake-hello", "--fial", "x")
    assert (code, out) == (2, "")
    assert "no option --fial (did you mean '--fail'?)" in err
    assert "usage: styrax fake-hello" in err
    code, _, err = run(capsys, "config", "shw")
    assert code == 2
    assert "(did you mean 'show'?)" in err
    code, _, err = run(capsys, "config", "show", "--jsn")
    assert code == 2
    assert "no option --jsn (did you mean '--json'?)" in err
    assert "usage: styrax config show" in err
    assert run(capsys, "config", "list", "more")[0] == 2


def test_overrides_may_come_after_options(fake, capsys):
    assert run(capsys, "fake-hello", "a=1", "--fail=", "b=2", "c=[3]") == (0, "hello a=1 b=2 c=[3]\n", "")


@pytest.mark.parametrize(
    ("fail", "code", "message"),
    [
        ("user", 1, "error: the disk is round\n         make it flat\n"),
        ("interrupt", 130, "error: interrupted\n"),
        (f"os{errno.ENOSPC}", 1, "error: No space left on device: /some/file; free some space or choose "),
        (f"os{errno.EACCES}", 1, "error: Permission denied: /some/file; "),
        (f"os{errno.EROFS}", 1, "error: Read-only file system: /some/file; "),
        (f"os{errno.ENOENT}", 1, "error: No such file or directory: /some/file; "),
    ],
)
def test_errors_have_no_traceback(fake, capsys, monkeypatch, fail, code, message):
    got, out, err = run(capsys, "fake-hello", "--fail", fail)
    assert (got, out) == (code, "")
    assert err.startswith(message)
    assert "Traceback" not in err
    monkeypatch.setenv("STYRAX_DEBUG", "1")
    assert "Traceback" in run(capsys, "fake-hello", "--fail", fail)[2]


@pytest.mark.parametrize("fail", ["bug", f"os{errno.EBADF}"])
def test_a_bug_has_a_traceback_and_says_whose_it_is(fake, capsys, fail):
    code, _, err = run(capsys, "fake-hello", "--fail", fail)
    assert code == 1
    assert "Traceback" in err
    assert "This is a bug in fake_hello of fake 1.0" in err


def test_a_reader_that_leaves_is_no_error(styrax):
    code = "import sys, os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1); from styrax.core.cli import main"
    done = styrax("fake-hello", "--fail=pipe")
    assert (done.code, done.err) == (1, "")
    done = styrax("fake-hello", code=f"{code}; sys.exit(main(sys.argv[1:]))")  # a full disk while flushing
    assert done.err.startswith("error: No space left on device")
    assert (done.code, len(done.err.splitlines())) == (1, 1)


@pytest.mark.parametrize("closed", ["1", "2", "0 1 2"])
def test_channels_that_the_shell_closed(styrax, tmp_path, closed):
    code = f"""
import os, sys
for number in map(int, {closed.split()!r}):
    os.close(number)
    setattr(sys, ("stdin", "stdout", "stderr")[number], None)
from styrax.core.cli import main
codes = [main(["fake-hello"]), main(["fake-hello", "--fail=user"]), main(["--help"])]
number = os.open({str(tmp_path / "file")!r}, os.O_CREAT)
os._exit(0 if codes == [0, 1, 0] and number > 2 else 3)
"""
    done = styrax(code=code)
    assert done.code == 0, done.err
    assert "AttributeError" not in done.err


def test_a_warning_is_one_line_for_a_user(fake, capsys, monkeypatch):
    before = warnings.showwarning
    code, out, err = run(capsys, "fake-hello", "--fail", "warn")
    assert (code, out) == (0, "hello\n")
    assert err == "warning: step 5 is damaged: x; taking step 4\n"
    assert warnings.showwarning is before
    monkeypatch.setenv("STYRAX_DEBUG", "1")
    assert "UserWarning" in run(capsys, "fake-hello", "--fail", "warn")[2]


def test_an_interruption_can_say_what_it_means(fake, capsys):
    assert run(capsys, "fake-hello", "--fail", "stopped") == (130, "", "error: SIGTERM before it began\n")


def test_version(capsys):
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert re.match(r"styrax .*\d+\.\d+", out)


def test_config_show(fake, capsys, tmp_path):
    show = ("config", "show", "--schema", "fake")
    code, out, _ = run(capsys, *show, "fake-tiny", "run.name=x")
    assert (code, out) == (0, '[run]\nsteps = 7\nname = "x"\n\n[optim.schedule]\nwarmup = 1\n')
    code, out, _ = run(capsys, *show, "--json", "fake-tiny")
    assert json.loads(out) == {"run": {"steps": 7}, "optim": {"schedule": {"warmup": 1}}}
    code, out, _ = run(capsys, *show, "fake-tiny", "--all")
    again = tmp_path / "again.toml"
    again.write_text(out)
    assert 'kind = "sgd"' in out
    assert run(capsys, *show, str(again), "--all") == (0, out, "")
    assert run(capsys, *show) == (0, "# nothing differs from the defaults\n", "")
    assert run(capsys, *show, "run.steps=9") == (0, "[run]\nsteps = 9\n", "")
    assert "fake-tiny" in run(capsys, "config", "list")[1]


def test_config_show_errors(fake, capsys, tmp_path):
    show = ("config", "show", "--schema", "fake")
    good, bad, binary = tmp_path / "good.toml", tmp_path / "bad.toml", tmp_path / "binary.toml"
    good.write_text("[run]\n")
    bad.write_text("[run]\nsteps = \n")
    binary.write_bytes(b"[run]\n# \xff\n")
    for arguments, message in (
        (["fake-tinny"], "error: no recipe named 'fake-tinny' (did you mean 'fake-tiny'?); installed: "),
        ([f"{tmp_path}/god.toml"], f"error: no file {tmp_path}/god.toml (did you mean 'good.toml'?)"),
        ([str(bad)], f"error: {bad}:2:"),
        ([str(binary)], f"error: {binary}:2: not UTF-8"),
        ([str(tmp_path)], f"error: no recipe named '{tmp_path}'; a file's name must end in .toml"),
        ([str(good), "run.stepz=1"], "error: run.stepz: unknown key (did you mean 'steps'?)\n"),
        (["fake-tiny", "--schema=fale"], "error: no schema named 'fale' (did you mean 'fake'?)"),
    ):
        code, out, err = run(capsys, *show, *arguments)
        assert (code, out) == (2, "")
        assert err.startswith(message)


def test_explain(fake, capsys):
    explain = ("explain", "--schema", "fake")
    code, out, _ = run(capsys, *explain, "run.steps", "fake-tiny")
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        ["run.steps"],
        ["type", "integer", ">=", "1"],
        ["default", "100"],
        ["constraint", ">=", "1"],
        ["value", "7"],
        ["Updates", "in", "all."],
    ]
    _, out, _ = run(capsys, *explain, "--json", "optim.rate")
    assert json.loads(out) == {
        "path": "optim.rate",
        "type": "number > 0.0",
        "constraint": "> 0.0",
        "doc": "Peak learning rate, per step.",
        "default": 0.1,
    }
    _, out, _ = run(capsys, *explain, "optim", "--json")
    assert [key["path"] for key in json.loads(out)["keys"]][:3] == ["optim.kind", "optim.rate", "optim.betas"]
    _, out, _ = run(capsys, *explain, "optim.schedule.decay", "--json")  # of a member not in use
    assert json.loads(out)["default"] == 0.2
    _, out, _ = run(capsys, *explain, "optim.schedule.warmup", "--json")  # the field's default
    assert json.loads(out)["default"] == 100
    _, out, _ = run(capsys, *explain, "optim.schedule", "optim.schedule.kind=wsd", "--json")
    paths = [key["path"].rpartition(".")[2] for key in json.loads(out)["keys"]]
    assert sorted(paths) == ["decay", "final", "kind", "warmup"]
    _, out, _ = run(capsys, *explain, "optim.named", "--json")  # whatever the names will be
    assert [key["path"] for key in json.loads(out)["keys"]][-2:] == [
        "optim.named.NAME.warmup",
        "optim.named.NAME.final",
    ]
    _, out, _ = run(capsys, *explain, "optim.named.a.decay", "optim.named={a={kind='wsd', decay=0.5}}", "--json")
    assert json.loads(out)["value"] == 0.5
    _, out, _ = run(capsys, *explain, "optim.named.a.decay", "--json")
    assert json.loads(out)["default"] == 0.2
    code, _, err = run(capsys, *explain, "optim.named.a.decai")
    assert (code, err) == (2, "error: optim.named.a.decai: unknown key; known: kind, warmup, final\n")
    assert "default" not in json.loads(
        run(capsys, *explain, "extra.size", "extra.size=1", "extra.kind=needy", "--json")[1]
    )
    assert [key["path"] for key in json.loads(run(capsys, *explain, "--json")[1])["keys"]] == [
        "run",
        "optim",
        "mesh",
        "extra",
    ]
    for key, message in (
        ("run.step", "error: run.step: unknown key (did you mean 'steps'?); known: "),
        ("rum.steps", "error: rum: unknown section (did you mean 'run'?); known: "),
        ("run.steps.x", "error: run.steps.x: run.steps is no table, it takes integer >= 1"),
        ("optim.schedule.x", "error: optim.schedule.x: unknown key; known: kind, warmup, final"),
    ):
        code, _, err = run(capsys, *explain, key)
        assert code == 2
        assert err.startswith(message)
    for key in ("run", "optim.kind", "optim.schedule", "mesh.axes", "extra", ""):
        assert run(capsys, *explain, key)[0] == 0
