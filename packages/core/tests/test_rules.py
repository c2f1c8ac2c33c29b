"""Rules in force: for a block, for a thread, and in the keys of what JAX keeps."""

import threading

import jax
import numpy as np
import pytest

from styrax.core import DEFAULT_RULES, MeshConfig, UserError, rules_in_force, use_rules
from styrax.core.mesh import spec

SEQ = {**DEFAULT_RULES, "seq": ("tensor",)}
FEW = {"batch": ("data",)}


def test_the_innermost_block_decides_and_ends():
    assert rules_in_force() == DEFAULT_RULES
    with use_rules(SEQ):
        assert rules_in_force() == SEQ
        with use_rules(FEW):
            assert rules_in_force() == FEW
        assert rules_in_force() == SEQ
        with use_rules(DEFAULT_RULES):
            assert rules_in_force() == DEFAULT_RULES
        assert rules_in_force() == SEQ
    assert rules_in_force() == DEFAULT_RULES


def test_an_exception_ends_it():
    with use_rules(FEW):
        with pytest.raises(KeyError, match="inside"), use_rules(SEQ):
            raise KeyError("inside")
        assert rules_in_force() == FEW
    assert rules_in_force() == DEFAULT_RULES


def test_threads_have_their_own():
    both, seen = threading.Barrier(2, timeout=30), {}

    def work(name, rules):
        before = rules_in_force()
        with use_rules(rules):
            both.wait()
            seen[name] = before, rules_in_force()
            both.wait()

    with use_rules(FEW):
        threads = [threading.Thread(target=work, args=each) for each in (("a", SEQ), ("b", FEW))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert rules_in_force() == FEW
    assert seen == {"a": (DEFAULT_RULES, SEQ), "b": (DEFAULT_RULES, FEW)}


def test_they_are_a_copy_that_nobody_changes():
    mine = {"batch": ["data"]}
    with use_rules(mine):
        mine["batch"].append("fsdp")
        mine["seq"] = ()
        assert dict(rules_in_force()) == FEW
        with pytest.raises(TypeError):
            rules_in_force()["seq"] = ()  # pyright: ignore[reportIndexIssue]


def test_partial_rules_are_those_of_spec():
    """Nothing is taken from the usual ones."""
    mesh = MeshConfig(axes={"data": 4, "tensor": 2}).abstract(8)
    with use_rules(FEW):
        assert tuple(spec(("batch", None), rules_in_force(), mesh)) == ("data", None)
        with pytest.raises(UserError, match=r"^no rule for logical axis 'heads'; the rules are for batch$"):
            spec(("batch", "heads"), rules_in_force(), mesh)


def test_what_is_no_rule_is_refused():
    with pytest.raises(UserError) as caught, use_rules({"batch": "data", "seq": (), "embed": (1,)}):  # pyright: ignore
        pass
    assert str(caught.value).splitlines() == [
        "rules['batch']: expected a tuple of names of mesh axes, such as ('fsdp',), got 'data'",
        "rules['embed']: expected a tuple of names of mesh axes, such as ('fsdp',), got (1,)",
    ]
    with pytest.raises(UserError, match="rules: expected logical axis -> mesh axes"), use_rules(("data",)):  # pyright: ignore
        pass
    assert rules_in_force() == DEFAULT_RULES


INNER = {
    "plain": lambda f, x: f(x),
    "jit": lambda f, x: jax.jit(f)(x),
    "loop": lambda f, x: jax.lax.scan(lambda total, _: (f(total), None), x, None, length=2)[0],
    "recomputed": lambda f, x: jax.checkpoint(f)(x),
    "gradient": lambda f, x: jax.grad(lambda x: f(x) ** 2)(x),
}


@pytest.mark.parametrize("kind", INNER)
def test_no_program_of_other_rules_is_taken(kind):
    """What is traced inside of one function, and kept by JAX by that function, is traced again too."""
    traced = []

    def scaled(x):
        traced.append(rules_in_force())
        return x * (2.0 if rules_in_force()["seq"] == ("tensor",) else 3.0)

    function = jax.jit(lambda x: INNER[kind](scaled, x))
    expected = {"loop": (9, 4), "gradient": (18, 8)}.get(kind, (3, 2))
    assert function(1.0) == expected[0]
    with use_rules(SEQ):
        assert function(1.0) == expected[1]
    assert function(1.0) == expected[0]
    count = len(traced)
    with use_rules(dict(DEFAULT_RULES)):  # equal rules are the same
        assert function(1.0) == expected[0]
    with use_rules(dict(SEQ)):
        assert function(1.0) == expected[1]
    assert len(traced) == count


def test_a_program_that_was_lowered_keeps_its_rules():
    @jax.jit
    def function(x):
        return x + len(rules_in_force()["seq"])

    with use_rules({"seq": ()}):
        program = function.lower(1.0).compile()
    np.testing.assert_array_equal([program(1.0), function(1.0)], [1, 2])
