"""Settings of a run on the Long Range Arena: what is chosen, and a recipe's values for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal, get_args

from lotformer import attention
from lotformer.settings import make, name_value_pairs, setting, tomllib
from lotformer.training.settings import TrainSettings

TaskName = Literal["text", "listops", "retrieval", "film-pairs", "pathfinder", "image"]
Recipe = Literal["paper", "skyformer", "authors"]

_SAME_RECIPE = {"film-pairs": "retrieval"}  # a task of the same form


@dataclass(frozen=True)
class LongRangeSettings(TrainSettings):
    """A run of `lotformer train lra`. What is not given comes from the recipe, see `completed`."""

    task: TaskName = setting("image", "What to learn.")
    attention: str = setting("lot", "The mechanism, by its name in `lotformer zoo`.")
    attention_options: tuple[str, ...] = setting((), "Options of the mechanism, name=value; over those of the recipe.")
    local_mixing: bool = setting(False, "Add a depthwise convolution of the values, 1-D or 2-D by the task.")
    recipe: Recipe = setting("paper", "Whose settings to take for what is not given; authors: those of their code.")
    pooling: Literal["real", "published", "learned"] = setting(
        "real",
        "Mean over real tokens; the published one: token 0 is padding, divided by all positions; or learned weights.",
    )
    dropout: float = setting(0.1, "Of embeddings and layers.", at_least=0, at_most=1)
    attention_dropout: float = setting(0.0, "Inside mechanisms that have it; the protocol's is 0.1.", at_least=0)
    brackets: bool = setting(True, "ListOps with closing brackets; published results have none.")
    released: bool = setting(False, "ListOps and Pathfinder from the arena's files instead of generated.")
    data_seed: int = setting(0, "Of what is generated, paired or split.", at_least=0)
    evaluated: int | None = setting(None, "Examples that an evaluation looks at; all if not given.", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        attention.entry(self.attention)  # an unknown name is refused now, and not when sets have been prepared
        name_value_pairs(self.attention_options)


def completed(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The chosen settings, completed by the recipe for the task and the mechanism.

    Fewer steps shorten the warm-up in proportion. Options of the mechanism win one by one, after the recipe's.
    """
    defaults = LongRangeSettings()
    recipe, task, name = (chosen.get(field, getattr(defaults, field)) for field in ("recipe", "task", "attention"))
    if recipe not in get_args(Recipe):
        return dict(chosen)  # the settings refuse it, and say which there are
    tables = tomllib.loads((resources.files(__package__) / "recipes" / f"{recipe}.toml").read_text(encoding="utf-8"))
    own = tables.get(_SAME_RECIPE.get(task, task), {})
    values = {field: value for field, value in {**tables, **own}.items() if not isinstance(value, dict)}
    if "steps" in chosen:
        values["warmup_steps"] = round(values["warmup_steps"] * chosen["steps"] / values["steps"])
    options = own.get("options", {}).get(name) or tables["options"].get(name, [])
    return {**values, **chosen, "attention_options": [*options, *chosen.get("attention_options", ())]}


def settings_for(**chosen: Any) -> LongRangeSettings:
    """Settings with the recipe's values for what is not chosen."""
    return make(LongRangeSettings, completed(chosen))
