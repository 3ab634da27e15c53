"""A command line from a settings dataclass: typed options, a TOML file, and defaults that are stated once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest
import typer
from typer.testing import CliRunner

from lotformer.cli.settings import with_settings
from lotformer.settings import Settings, load, make, setting


@dataclass(frozen=True)
class Training(Settings):
    steps: int = setting(1000, "Steps to train for.", at_least=1)
    lr: float = setting(1e-3, "Learning rate.", at_least=0)
    schedule: Literal["cosine", "constant"] = setting("cosine", "How the rate falls.")
    ranks: tuple[int, ...] = setting((16, 32), "Ranks to try.", at_least=1)
    names: tuple[str, ...] = setting(("a", "b"), "Names.")
    ema: bool = setting(False, "Average the weights.")
    init: Path | None = setting(None, "Weights to start from.")


def run(*arguments: str, columns: int = 200) -> tuple[int, str, list[tuple[Training, Path]]]:
    app, received = typer.Typer(), []

    @app.command()
    @with_settings(Training)
    def train(settings: Training, out: Annotated[Path, typer.Option(help="Folder.")] = Path("o")) -> None:
        """Train something."""
        received.append((settings, out))

    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns)})
    return result.exit_code, result.output, received


def test_nothing_typed_gives_the_defaults():
    assert run() == (0, "", [(Training(), Path("o"))])


def test_every_kind_of_field_can_be_typed():
    code, said, received = run(
        "--steps", "5", "--lr", "2", "--schedule", "constant", "--ranks", "1, 2", "--names", "x", "--ema",
        "--init", "w.pt", "--out", "there",
    )  # fmt: skip
    assert code == 0, said
    assert received == [(Training(5, 2.0, "constant", (1, 2), ("x",), True, Path("w.pt")), Path("there"))]


def test_the_command_line_wins_over_the_file_and_the_file_over_the_default(tmp_path):
    config = tmp_path / "run.toml"
    config.write_text('steps = 7\nlr = 1\nranks = [4]\nema = true\ninit = "w.pt"\n')
    code, said, received = run("--config", str(config), "--steps", "1000", "--no-ema")
    assert code == 0, said
    assert received[0][0] == Training(steps=1000, lr=1.0, ranks=(4,), init=Path("w.pt"))
    assert load(Training, config, {"steps": 9}).steps == 9


def test_the_help_shows_each_fields_text_default_and_bound():
    code, said, _ = run("--help")
    assert code == 0
    for part in ("Train something", "--config", "Steps to train for", "default: 1000", "x>=1",
                 "One of cosine, constant.", "16, 32", "--no-ema", "--out"):  # fmt: skip
        assert part in said, part


def test_a_commands_own_options_come_before_those_it_shares():
    @dataclass(frozen=True)
    class Special(Training):
        colour: str = setting("red", "Colour.")

    app = typer.Typer()
    app.command()(with_settings(Special)(lambda settings: None))
    said = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    assert said.index("--colour") < said.index("--steps")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "'--steps'"),
        (["--steps", "two"], "'--steps'"),
        (["--schedule", "cosin"], "Did you mean 'cosine'?"),
        (["--ranks", "4,x"], "expected numbers separated by commas, got '4,x'"),
        (["--ranks", "4,0"], "each of ranks must be at least 1, got 0"),
        (["--config", "/no/such/file.toml"], "cannot read /no/such/file.toml: No such file"),
    ],
    ids=["bound", "type", "choice", "numbers", "bound of parts", "missing file"],
)
def test_what_is_not_allowed_ends_with_code_2_and_its_name(arguments, message):
    code, said, received = run(*arguments)
    assert code == 2
    assert message in " ".join(said.replace("│", " ").split())
    assert not received


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step = 3", "run.toml: unknown setting 'step'; did you mean 'steps'"),
        ("steps = 3.5", "steps must be a whole number, got 3.5"),
        ("steps = true", "steps must be a whole number, got True"),
        ("ranks = 4", "ranks must be a list, got 4"),
        ("steps = ", "is not a TOML file"),
    ],
)
def test_a_file_is_read_strictly(tmp_path, text, message):
    config = tmp_path / "run.toml"
    config.write_text(text)
    with pytest.raises(ValueError, match=message):
        load(Training, config)
    code, said, received = run("--config", str(config))
    assert (code, received) == (2, [])
    assert "Traceback" not in said


def test_settings_made_in_python_are_checked_too():
    with pytest.raises(ValueError, match="lr must be at least 0, got -1"):
        Training(lr=-1)
    with pytest.raises(ValueError, match="the request: unknown setting 'lrr'; did you mean 'lr'"):
        make(Training, {"lrr": 1}, "the request")
