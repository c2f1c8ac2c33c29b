"""What every recipe has: roles, groups, decay, schedule, clipping, precision, and how an optimizer is built of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from styrax.core.config import NonNegativeFloat, build, check
from styrax.core.errors import UsageError, UserError
from styrax.optim.curves import Cycles, InverseSqrt, Linear, Piecewise
from styrax.optim.recipe_parts import Extras, Group, Parameters, Treatment
from styrax.optim.schedules import WSD, Cosine, amount

if TYPE_CHECKING:
    import optax
    from jaxtyping import Array, Float

    from styrax.optim.guard import FusedTransformation
    from styrax.optim.roles import Row, Table

VERSION = 1
"""Of what `to_dict` gives."""

OUTER = ("parameters", "groups", "clip_norm", "extras")
"""Settings of the whole, which a group cannot have for itself."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An optimizer as a frozen config, built for given parameters and a given number of steps.

    Attributes:
        kind: Which recipe this is.
        learning_rate: Peak learning rate.
        weight_decay: Decoupled decay, multiplied by the learning rate.
        schedule: How the learning rate moves: `cosine`, `wsd`, `linear`, `inverse_sqrt`, `piecewise` or `cycles`.
        clip_norm: Largest global norm of the gradient; absent for no clipping.
        parameters: What the parameters are: roles, axes, heads, and which decay.
        groups: Name to parameters that are treated in another way.
        extras: What can be had around any algorithm: skipping, averages, precision, transfer.
    """

    kind: str = ""
    learning_rate: NonNegativeFloat = 6e-4
    weight_decay: NonNegativeFloat = 0.1
    schedule: Cosine | WSD | Linear | InverseSqrt | Piecewise | Cycles = field(default_factory=Cosine)
    clip_norm: NonNegativeFloat | None = 1.0
    parameters: Parameters = field(default_factory=Parameters)
    groups: dict[str, Group] = field(default_factory=dict)
    extras: Extras = field(default_factory=Extras)

    below_one: ClassVar[tuple[str, ...]] = ()
    """Fields that must be below 1."""

    transferable: ClassVar[str] = ""
    """Why settings do not transfer by `transfer`; empty where they do."""

    def __post_init__(self) -> None:
        """Check the values, and then what one field alone cannot tell."""
        check(self, *(f"{name} must be below 1, got 1.0" for name in self.below_one if getattr(self, name) == 1))
        if problems := self.problems():
            raise UsageError("\n".join(problems))

    def problems(self) -> list[str]:
        """Say what does not fit together; a recipe with more to check adds to it. Each value is right by itself."""
        found = []
        if self.extras.transfer is not None and self.transferable:
            found.append(f"extras.transfer: {self.transferable}")
        owners: dict[str, str] = {}
        for name, group in self.groups.items():
            for pattern in group.paths:
                if (first := owners.setdefault(pattern, name)) != name:
                    found.append(f"groups.{name}.paths: {pattern!r} is a pattern of group {first!r} already")
            if not self.learning_rate and group.learning_rate:
                found.append(f"groups.{name}.learning_rate: is kept in proportion to that of the whole, which is 0")
            if name == REST:
                found.append(f"groups.{REST}: is what the other groups leave; take another name")
            try:
                recipe = self.of_group(name, group)
            except ValueError as error:
                found += str(error).splitlines()
                continue
            if recipe is not None and recipe.kind != self.kind:
                # What is around all must suit the algorithm of each.
                try:
                    dataclasses.replace(recipe, extras=self.extras)
                except ValueError as error:
                    found += [f"groups.{name}.optimizer: {line}" for line in str(error).splitlines()]
        return found

    def make(self, treatment: Treatment) -> FusedTransformation:
        """Make the algorithm itself; each recipe has its own."""
        raise NotImplementedError

    def of_group(self, name: str, group: Group) -> Recipe | None:
        """Give the recipe of a group, or `None` if it is frozen.

        Raises:
            UserError: Its `optimizer` has settings that are wrong, or of the whole; all are listed.
        """
        from styrax.core import registry
        from styrax.core.config.convert import plain

        if group.frozen:
            return None
        where = f"groups.{name}.optimizer"
        if outer := [key for key in group.optimizer if key in OUTER]:
            raise UserError("\n".join(f"{where}.{key}: is a setting of the whole, not of a group" for key in outer))
        kind = group.optimizer.get("kind", self.kind)
        try:
            cls = type(self) if kind == self.kind else registry.resolve("styrax.optim", kind)
        except UserError as error:
            raise UserError(f"{where}.kind: {error}") from None
        kept = plain(self)
        own = set(kept) if cls is type(self) else {*OUTER, "schedule", "weight_decay"}
        tree = {key: value for key, value in kept.items() if key in own and key not in ("groups", "extras")}
        tree |= group.optimizer
        tree |= {key: plain(value) for key in LOCAL if (value := getattr(group, key)) is not None}
        return build(cls, tree, where)

    def describe(self, params: Any) -> Table:
        """Tell how each parameter is treated; `print` the result.

        The multiplier on the learning rate is relative to the recipe's `learning_rate`, that of its group included.

        Args:
            params: Tree of arrays or of `jax.ShapeDtypeStruct`s.

        Raises:
            UserError: The rules in `parameters` or `groups` do not fit the parameters.
        """
        from styrax.optim.roles import Table

        rows, recipes = self._rows(params)
        shares = {name: self._relative(recipe) for name, recipe in recipes.items()}
        return Table(row._replace(lr=row.lr * shares[row.group]) for row in rows)

    def build(self, params: Any, *, steps: int) -> optax.GradientTransformationExtraArgs:
        """Make the optimizer.

        Args:
            params: Tree of arrays or of `jax.ShapeDtypeStruct`s; only paths, shapes and dtypes are read.
            steps: Number of steps of the whole run, 1 or more. The schedule is a function of it, so a run
                resumed with another number goes on along the schedule of that number.

        Raises:
            UserError: The rules in `parameters` or `groups` do not fit the parameters.
            ValueError: `steps` is not an integer of 1 or more.
        """
        from styrax.optim.agc import agc
        from styrax.optim.averaging import averaged
        from styrax.optim.groups import groups
        from styrax.optim.guard import guard
        from styrax.optim.precision import precision

        described, extras = self.parameters.specs(params), self.extras
        rows, recipes = self._rows(params)
        eps = {}
        if extras.transfer is not None:
            eps = {path: each.eps for path, each in extras.transfer.by_path(params, described).items()}
        lr, decay = {row.path: row.lr for row in rows}, {row.path: row.decay for row in rows}
        made: dict[str, Any] = {}
        for name, recipe in recipes.items():
            made[name] = None
            if recipe is not None:
                treatment = Treatment(described, lr, decay, eps, recipe.schedule.build(steps=steps), steps)
                made[name] = recipe._masked(treatment, extras)
        if list(made) == [REST]:
            tx = made[REST]
        else:
            relative = {name: self._relative(recipe) for name, recipe in recipes.items()}
            tx = groups(made, self._rules(recipes), relative=relative)
        if extras.agc is not None:
            tx = agc(tx, extras.agc, specs=described)
        if extras.average is not None:
            frozen = [row.path for row in rows if recipes[row.group] is None]
            start = amount(extras.average.start, steps)
            tx = averaged(tx, decay=extras.average.decay, start=start, without=frozen)
        if extras.precision is not None:
            tx = precision(tx, extras.precision, seed=extras.seed)
        return guard(
            tx, clip_norm=self.clip_norm, skip_nonfinite=extras.skip_nonfinite, zclip=extras.zclip, spikes=extras.spikes
        )

    def metrics(self, opt_state: Any) -> dict[str, Float[Array, ""]]:
        """Read the scalars to log, see `styrax.optim.metrics`."""
        from styrax.optim.metrics import metrics

        return metrics(opt_state)

    def eval_params(self, opt_state: Any, params: Any) -> Any:
        """Give the weights to evaluate and to ship, see `styrax.optim.eval_params`."""
        from styrax.optim.evaluation import eval_params

        return eval_params(opt_state, params)

    @property
    def derives_weights(self) -> bool:
        """Whether `eval_params` gives other weights than those that are trained."""
        if self.extras.average is not None:
            return True
        recipes = (self.of_group(name, group) for name, group in self.groups.items())
        return any(recipe is not None and recipe.derives_weights for recipe in recipes)

    def to_dict(self) -> dict[str, Any]:
        """Give plain values, for JSON or TOML; `from_dict` makes the recipe again.

        Example:
            >>> from styrax.optim import AdamW
            >>> tree = AdamW(learning_rate=1e-3).to_dict()
            >>> tree["version"], tree["kind"], tree["learning_rate"]
            (1, 'adamw', 0.001)
        """
        from styrax.core.config.convert import plain

        return {"version": VERSION, **plain(self)}

    @staticmethod
    def from_dict(tree: Mapping[str, Any]) -> Recipe:
        """Make a recipe from what `to_dict` gave, or from any part of it that has a `kind`.

        Raises:
            UserError: The kind or a key is unknown, a value is wrong, or a newer version wrote it; all are listed.

        Example:
            >>> from styrax.optim import AdamW
            >>> Recipe.from_dict(AdamW(b2=0.99).to_dict()) == AdamW(b2=0.99)
            True
        """
        from styrax.core import registry

        if not isinstance(tree, Mapping):
            raise UserError(f"recipe: expected a table such as to_dict gives, got {tree!r}")
        tree = dict(tree)
        version = tree.pop("version", VERSION)
        if version != VERSION:
            raise UserError(f"recipe: expected version {VERSION}, got {version!r}; a newer styrax-optim wrote it")
        if "kind" not in tree:
            raise UserError(f"recipe: no kind; expected one of {', '.join(registry.names('styrax.optim'))}")
        return build(registry.resolve("styrax.optim", tree["kind"]), tree)

    def _masked(self, treatment: Treatment, extras: Extras) -> FusedTransformation:
        """Make the algorithm, with caution if asked for."""
        if not (extras.cautious or extras.cautious_decay):
            return self.make(treatment)
        from styrax.optim.cautious import cautious

        bare = self.make(treatment._replace(decay=dict.fromkeys(treatment.decay, 0.0)))
        return cautious(  # pyright: ignore[reportReturnType]
            bare,
            mask=extras.cautious,
            weight_decay=treatment.decay,
            cautious_decay=extras.cautious_decay,
            lr_multipliers=treatment.lr,
            specs=treatment.specs,
        )

    def _relative(self, recipe: Recipe | None) -> float:
        """Give a group's peak as a multiple of the recipe's own."""
        if recipe is None:
            return 0.0
        return recipe.learning_rate / self.learning_rate if self.learning_rate else 1.0

    def _rows(self, params: Any) -> tuple[list[Row], dict[str, Recipe | None]]:
        """Say how each parameter is treated within its group."""
        from styrax.optim.roles import describe

        members, recipes = self._groups(params)
        rows = {
            name: {
                row.path: row._replace(group=name)
                for row in describe(
                    params,
                    self.parameters.roles,
                    weight_decay=recipe.weight_decay if recipe else 0.0,
                    decay_roles=self.parameters.decay_roles,
                    lr_multipliers=self.parameters.lr_multipliers,
                )
            }
            for name, recipe in recipes.items()
        }
        chosen = [rows[group][path] for path, group in members.items()]
        if self.extras.transfer is not None:
            of = self.extras.transfer.by_path(params, self.parameters.specs(params))
            chosen = [r._replace(lr=r.lr * of[r.path].lr, decay=r.decay * of[r.path].decay) for r in chosen]
        return chosen, recipes

    def _groups(self, params: Any) -> tuple[dict[str, str], dict[str, Recipe | None]]:
        """Give path -> group and group -> recipe, the rest last."""
        from styrax.core.tree import flatten
        from styrax.optim.groups import assign, check_rules

        paths = list(flatten(params))
        if not paths:
            raise UserError("the parameters have no arrays; give the tree that is trained, such as nnx.state(model)")
        recipes = {name: self.of_group(name, group) for name, group in self.groups.items()}
        if not recipes or len(assign(self._rules(recipes), paths)) < len(paths):
            recipes[REST] = self
        rules = self._rules(recipes)
        check_rules(recipes, rules, paths)
        return assign(rules, paths), recipes

    def _rules(self, recipes: Mapping[str, Any]) -> dict[str, str]:
        rules = {pattern: name for name, group in self.groups.items() for pattern in group.paths}
        return {**rules, "**": REST} if REST in recipes else rules


REST = "rest"
"""Name of the group of all parameters that no group takes."""

LOCAL = ("learning_rate", "weight_decay", "schedule")
"""Settings that a group has beside its `optimizer`."""
