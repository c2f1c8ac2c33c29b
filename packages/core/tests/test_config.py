import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from styrax.core import UsageError
from styrax.core.config import NonNegativeFloat, Positive, PositiveFloat, Resolved, Schema, Seed, build, check, parse
from styrax.core.config import toml as toml_module
from styrax.core.config.convert import changed
from styrax.core.config.toml import Bare, dumps, override
from styrax.core.config.types import words


def errors(call, *args: Any, **kwargs: Any) -> list[str]:
    with pytest.raises(UsageError) as caught:
        call(*args, **kwargs)
    return str(caught.value).splitlines()


def test_every_mistake_is_reported_at_once_with_its_path(fake):
    found = errors(
        fake.SCHEMA.resolve,
        {
            "run": {"steps": 0, "nane": "x", "mode": "fist", "debug": 1, "zzz": 1},
            "optim": {"rate": "high", "betas": [0.9], "schedule": {"final": 2.0, "warmup": -1}},
            "mesh": {"axes": {"data": 0.5}},
            "meash": {},
        },
        ["optim.clip=big", "run.trackers=[1]"],
    )
    assert found == [
        "meash: unknown section (did you mean 'mesh'?)",
        "run.nane: unknown key (did you mean 'name'?)",
        "run.zzz: unknown key; known: steps, name, mode, folder, note, trackers, debug",
        "run.steps: expected integer >= 1, got 0",
        'run.mode: expected "fast" or "exact", got "fist" (did you mean \'fast\'?)',
        'run.trackers[0]: expected string, got 1 (text is written "1")',
        "run.debug: expected true or false, got 1",
        'optim.rate: expected number > 0.0, got "high"',
        "optim.betas: expected list of 2 (number, number), got [0.9]",
        "optim.schedule.warmup: expected integer >= 0, got -1",
        "optim.schedule.final: expected number >= 0.0, <= 1.0, got 2.0",
        'optim.clip: expected number > 0.0 or "none", got big, which is not a TOML value '
        "(text would be written '\"big\"')",
        "mesh.axes.data: expected integer, got 0.5",
    ]


def test_cross_field_checks_are_collected_at_their_section(fake):
    found = errors(fake.SCHEMA.resolve, {"run": {"steps": 0}, "optim": {"betas": [1.0, 2.0]}})
    assert found == [
        "run.steps: expected integer >= 1, got 0",
        "optim: betas[0] = 1.0 is not below 1",
        "optim: betas[1] = 2.0 is not below 1",
    ]


def test_missing_key(fake):
    assert errors(fake.SCHEMA.resolve, {"extra": {"kind": "needy"}}) == ["extra.size: missing, expected integer >= 1"]


def test_a_part_that_is_not_there(fake):
    (line,) = errors(fake.SCHEMA.resolve, {"optim": {"kind": "sdg"}})
    assert line == "optim.kind: no optim named 'sdg' (did you mean 'sgd'?); installed: broken, sgd"
    (line,) = errors(fake.SCHEMA.resolve, {"optim": {"kind": "broken"}})
    assert line.startswith("optim.kind: 'broken' in fake.optim is unavailable: ModuleNotFoundError")
    (line,) = errors(fake.SCHEMA.resolve, {"extra": {"size": 3}})
    assert line == 'extra.kind: expected one of "needy"; missing'


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("run.steps=5", "steps", 5),
        ("run.name=alpha", "name", "alpha"),
        ('run.name="a b"', "name", "a b"),
        ("run.name = a b ", "name", "a b"),
        ("run.mode=exact", "mode", "exact"),
        ("run.folder=runs/a", "folder", "runs/a"),
        ("run.note=none", "note", None),
        ("run.note=word", "note", "word"),
        ('run.trackers=["a", "b"]', "trackers", ("a", "b")),
        ("run.debug=true", "debug", True),
        ('"run".steps=1_000', "steps", 1000),
    ],
)
def test_overrides(fake, text, field, value):
    got = getattr(fake.SCHEMA.resolve({}, [text])["run"], field)
    assert got == (value if field != "folder" else type(got)(value))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run.steps", "'run.steps' is not an override: expected key=value, such as train.steps=100"),
        ("run..steps=1", "'run..steps=1': 'run..steps' is not a dotted key, such as train.steps"),
        ("run.steps.x=1", "run.steps.x: run.steps is 3, not a table"),
        ("run.debug=True", "which is not a TOML value (write true)"),
        ("optim.rate=.5", "which is not a TOML value (write 0.5)"),
        ("run.steps=1,000", "which is not a TOML value (write 1000)"),
        ("optim.schedule=wsd", "which is not a TOML value (write optim.schedule.kind=wsd)"),
        ("run.steps=1e3", "run.steps: expected integer >= 1, got 1000.0"),
        ("run.steps=1\n[mesh]", "run.steps: expected integer >= 1, got 1\n"),
        ("run.name=123", 'run.name: expected string, got 123 (text is written "123")'),
    ],
)
def test_override_errors(fake, text, message):
    with pytest.raises(UsageError) as caught:
        fake.SCHEMA.resolve({"run": {"steps": 3}}, [text])
    assert message in str(caught.value)


def test_overrides_leave_the_tree_alone():
    tree = {"a": {"b": [1]}}
    assert override(tree, ["a.c=1", "a.b=[2]"]) == {"a": {"b": [2], "c": 1}}
    assert tree == {"a": {"b": [1]}}


def test_a_nested_table_changes_only_what_it_names(fake):
    resolve = fake.SCHEMA.resolve
    default = resolve({})["optim"].schedule
    assert default.warmup == 100  # the field's default, not the class's
    assert resolve({}, ["optim.schedule.final=0.5"])["optim"].schedule == fake.Cosine(warmup=100, final=0.5)
    assert resolve({}, ["optim.schedule.kind=cosine"])["optim"].schedule == default
    assert resolve({}, ["optim.schedule.kind=wsd"])["optim"].schedule == fake.WSD()
    assert resolve({}, ['optim.schedule={kind="wsd", decay=0.5}'])["optim"].schedule == fake.WSD(decay=0.5)
    (line,) = errors(resolve, {}, ["optim.schedule.kind=wsdd"])
    assert line == 'optim.schedule.kind: expected "cosine" or "wsd", got wsdd (did you mean \'wsd\'?)'
    (line,) = errors(resolve, {}, ["optim.schedule.kind=wsd", "optim.schedule.final=0.5"])
    assert line == "optim.schedule.final: unknown key; known: kind, warmup, decay"
    (line,) = errors(resolve, {}, ["optim.stages=[{warmup=1}]"])
    assert line == 'optim.stages[0].kind: missing, expected "cosine" or "wsd"'


def test_a_table_of_tables_by_name_shows_what_differs(fake):
    resolved = fake.SCHEMA.resolve({}, ["optim.named={a={kind='wsd', decay=0.5}, b={kind='cosine'}}"])
    assert resolved["optim"].named == {"a": fake.WSD(decay=0.5), "b": fake.Cosine()}
    assert changed(resolved["optim"]) == {"named": {"a": {"kind": "wsd", "decay": 0.5}, "b": {"kind": "cosine"}}}
    (line,) = errors(fake.SCHEMA.resolve, {}, ["optim.named={a={kind='wsd', decai=0.5}}"])
    assert line == "optim.named.a.decai: unknown key (did you mean 'decay'?)"


def test_what_is_told_with_the_rest(fake):
    with pytest.raises(UsageError) as caught:
        check(fake.WSD(), "one thing", "another")
    assert str(caught.value) == "one thing\nanother"


def configs(fake) -> st.SearchStrategy:
    """Any configuration of the fake schema."""
    fraction = st.floats(0, 1)
    cosine = st.builds(fake.Cosine, warmup=st.integers(0, 9), final=fraction)
    wsd = st.builds(fake.WSD, warmup=st.integers(0, 9), decay=fraction)
    schedule = st.one_of(cosine, wsd)
    text = st.text(st.characters(codec="utf-8"), max_size=5)
    below_one = st.floats(max_value=1, exclude_max=True, allow_nan=False, allow_infinity=False)
    sgd = st.builds(
        fake.Sgd,
        rate=st.floats(0, exclude_min=True, allow_infinity=False),
        betas=st.tuples(below_one, below_one),
        schedule=schedule,
        clip=st.none() | st.floats(1, 2),
        groups=st.dictionaries(text, st.floats(allow_nan=False, allow_infinity=False)),
        stages=st.lists(schedule, max_size=2).map(tuple),
        named=st.dictionaries(text, schedule, max_size=2),
    )
    run = st.builds(
        fake.Run,
        steps=st.integers(1, 2**62),
        name=text,
        mode=st.sampled_from(["fast", "exact"]),
        note=st.none() | text.filter(lambda t: t != "none"),
        trackers=st.lists(text, max_size=3).map(tuple),
        debug=st.booleans(),
    )
    extra = st.none() | st.builds(fake.Needy, size=st.integers(1, 9))

    def whole(run, sgd, extra):
        sections = {"run": run, "optim": sgd, "mesh": fake.MeshConfig()}
        kinds = {"optim": "sgd"}
        if extra is not None:
            sections["extra"], kinds["extra"] = extra, "needy"
        return Resolved(sections, kinds, fake.SCHEMA)

    return st.builds(whole, run, sgd, extra)


def test_a_resolved_configuration_round_trips(fake):
    @settings(max_examples=25, deadline=None, phases=[Phase.generate])
    @given(configs(fake))
    def check(resolved):
        for text in (resolved.to_toml(), resolved.to_toml(all=False)):
            assert fake.SCHEMA.resolve(parse(text, "x.toml")) == resolved
        assert fake.SCHEMA.resolve(resolved.to_dict()) == resolved
        assert fake.SCHEMA.resolve(json.loads(json.dumps(resolved.to_dict()))) == resolved

    check()


def test_the_difference_is_minimal(fake):
    resolve = fake.SCHEMA.resolve
    assert resolve({}).diff() == {}
    overrides = ["run.steps=5", "optim.schedule.final=0.5", "optim.clip=none", "mesh.axes={data=1, tensor=2}"]
    assert resolve({}, overrides).diff() == {
        "run": {"steps": 5},
        "optim": {"schedule": {"final": 0.5}, "clip": None},
        "mesh": {"axes": {"data": 1, "tensor": 2}},
    }
    assert resolve({}, ["optim.schedule.kind=wsd"]).diff() == {"optim": {"schedule": {"kind": "wsd"}}}
    assert resolve({"extra": {"kind": "needy", "size": 1}}).diff() == {"extra": {"kind": "needy", "size": 1}}
    assert resolve({}, ["run.steps=100"]).diff() == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nsteps = three\n", "f.toml:2:9: Invalid value\n  steps = three\n          ^"),
        ("a = 1\na = 2\n", "f.toml:2:"),
        ("a = [1,\n", "f.toml:1:"),
        ("", None),
    ],
)
def test_syntax_errors_name_the_place(text, message):
    if message is None:
        assert parse(text, "f.toml") == {}
        return
    with pytest.raises(UsageError) as caught:
        parse(text, "f.toml")
    assert str(caught.value).startswith(message)


def test_short_lists_stay_on_one_line_and_long_ones_do_not():
    text = dumps({"short": [1, 2], "long": ["x" * 60, "y" * 60], "text": "[\n]", "empty": []})
    assert "short = [1, 2]\n" in text
    assert 'long = [\n    "x' in text
    assert parse(text, "f") == {"short": [1, 2], "long": ["x" * 60, "y" * 60], "text": "[\n]", "empty": []}


def test_limits_in_words():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Inner:
        kind: Literal["inner"] = "inner"

    assert words(Annotated[str, msgspec.Meta(min_length=1, pattern="^a")]) == "string length >= 1, matching '^a'"
    assert words(Inner | None) == 'table with kind = "inner" or "none"'
    assert words(dict[str, tuple[int, ...]]) == "table of (list of (integer))"
    assert toml_module.literal(Bare("x")) == "x"


def test_build_alone(fake):
    assert build(fake.Run, {"steps": 3}) == fake.Run(steps=3)
    assert errors(build, fake.Run, {"stepz": 3}) == ["stepz: unknown key (did you mean 'steps'?)"]
    assert errors(build, fake.Sgd, {"schedule": 3}, "optim") == [
        'optim.schedule: expected table with kind = "cosine" or table with kind = "wsd", got 3'
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    count: Positive = 1
    seed: Seed = 0
    rate: NonNegativeFloat | None = 0.0
    plain: float = 0.0
    many: tuple[float, ...] = ()
    table: dict[str, PositiveFloat] = dataclasses.field(default_factory=dict)
    anything: Any = None

    def __post_init__(self) -> None:
        check(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Named:
    name: str
    folder: Path


TOO_FAR = [
    "count: expected integer >= 1, got an integer of 64 bits: 64 are the most",
    "seed: expected integer >= 0, <= 4294967295, got 4294967296",
    'rate: expected number >= 0.0 or "none", got inf: numbers must be finite',
    "plain: expected number, got nan: numbers must be finite",
    "many[1]: expected number, got -inf: numbers must be finite",
    "table.x: expected number > 0.0, got inf: numbers must be finite",
]


def test_no_number_is_infinite_or_longer_than_64_bits_in_a_file_or_in_python():
    inf = float("inf")
    tree = parse(
        "count = 0x8000_0000_0000_0000\nseed = 4294967296\nrate = inf\nplain = nan\nmany = [1.0, -inf]\ntable.x = inf",
        "",
    )
    assert errors(build, Numbers, tree) == TOO_FAR
    given = {"rate": inf, "plain": float("nan"), "many": (1.0, -inf), "table": {"x": inf}}
    assert errors(Numbers, count=2**63, seed=2**32, **given) == TOO_FAR
    assert Numbers(anything=inf, rate=None, count=2**63 - 1, seed=2**32 - 1).anything == inf
    assert errors(parse, "x = " + "9" * 5000, "f.toml") == [
        "f.toml: an integer has thousands of digits; 64 bits are the most"
    ]


def test_python_values_are_held_to_the_annotations():
    assert errors(Numbers, count="x", rate=-1) == [
        'count: expected integer >= 1, got "x"',
        'rate: expected number >= 0.0 or "none", got -1',
    ]
    numbers = Numbers(count=np.int32(3), rate=np.float32(0.5), many=(np.float64(1), 2))  # pyright: ignore[reportArgumentType]
    assert build(Numbers, dataclasses.asdict(numbers)) == numbers
    assert build(Named, {"name": Path("a/b"), "folder": Path("c")}) == Named(name="a/b", folder=Path("c"))


def test_bytes_that_are_no_text_are_refused():
    assert errors(override, {}, ["a=\udcff", "b\udcff=1"]) == [
        r"'a=\udcff' is not UTF-8 text; write it in UTF-8",
        r"'b\udcff=1' is not UTF-8 text; write it in UTF-8",
    ]


def test_sections_that_do_not_fit_together_are_told_when_asked():
    schema = Schema(
        sections={"one": Numbers, "other": Numbers},
        misfits=lambda sections: [f"{name}.count is not 1" for name, each in sections.items() if each.count != 1],
    )
    assert schema.resolve({}).check().sections["one"] == Numbers()
    resolved = schema.resolve({"one": {"count": 2}, "other": {"count": 3}})
    assert errors(resolved.check) == ["one.count is not 1", "other.count is not 1"]
