import sys

import pytest

import styrax.core
from styrax.core import config, testing

SITE = {
    "pack/__init__.py": """
from styrax.core import lazy_exports
__all__ = ["guard", "Thing"]
__getattr__, __dir__ = lazy_exports(__name__, {"guard": "guard", "Thing": "things"})
""",
    "pack/guard.py": "def guard(): return 'guarded'\n",
    "pack/things.py": "class Thing: pass\n",
}


@pytest.fixture
def pack(tmp_path, monkeypatch):
    (tmp_path / "pack").mkdir()
    for name, text in SITE.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "pack"]:
        del sys.modules[name]


@pytest.mark.usefixtures("pack")
def test_a_name_that_is_its_modules_name_is_the_object_whichever_comes_first():
    import pack.guard  # pyright: ignore[reportMissingImports]
    from pack.guard import guard  # pyright: ignore[reportMissingImports]

    assert pack.guard is guard
    assert pack.guard() == "guarded"
    assert pack.Thing is sys.modules["pack.things"].Thing


@pytest.mark.usefixtures("pack")
def test_names_load_on_use():
    import pack  # pyright: ignore[reportMissingImports]

    assert "pack.things" not in sys.modules
    assert {"guard", "Thing"} <= set(dir(pack))
    assert pack.guard() == "guarded"
    assert "pack.things" not in sys.modules
    with pytest.raises(AttributeError, match="has no attribute 'thing'"):
        _ = pack.thing


@pytest.mark.parametrize("module", [styrax.core, config, testing])
def test_every_public_name_is_there(module):
    for name in module.__all__:
        assert getattr(module, name) is not None
    assert set(module.__all__) <= set(dir(module))
