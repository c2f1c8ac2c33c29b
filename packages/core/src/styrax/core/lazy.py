"""Names that are imported on first use, so that `import styrax.X` stays cheap."""

import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


def lazy_exports(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make a package's `__getattr__` and `__dir__` that import each public name when it is first asked for.

    A name may equal its submodule's (`{"guard": "guard"}`): the package attribute is then always the
    object, whichever was imported first.

    Args:
        package: The package's `__name__`.
        names: Public name -> submodule (relative to `package`) that defines it.

    Returns:
        The pair to bind as `__getattr__, __dir__` in the package's `__init__.py`.

    Example:
        >>> getattr_, dir_ = lazy_exports("styrax.core", {"path_str": "tree"})
        >>> getattr_("path_str").__module__
        'styrax.core.tree'
    """
    clashes = {name for name, module in names.items() if name == module}
    if clashes and package in sys.modules:

        class Package(ModuleType):
            def __setattr__(self, name: str, value: Any) -> None:
                # The import system binds a loaded submodule on its package; hand out the object instead.
                if name in clashes and isinstance(value, ModuleType):
                    value = getattr(value, name)
                super().__setattr__(name, value)

        sys.modules[package].__class__ = Package

    def getattr_(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        value = getattr(importlib.import_module(f"{package}.{names[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    def dir_() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names})

    return getattr_, dir_
