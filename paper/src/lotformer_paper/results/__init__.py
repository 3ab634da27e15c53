"""Results: what benchmarks and experiments write, and how it is rendered.

A benchmark is a module with four parts:

- settings: a frozen dataclass of `lotformer.settings`, from which its command line is built;
- cells: dataclasses of plain values, one per thing measured;
- `run(settings, …)`: fills the cells and stores them as JSON, with their settings and where they come from;
- `render(folder) -> Report`: tables and figures from what is stored, without computing anything again.

An experiment declares its settings, cells and tables, and `experiments.engine` runs, stores and renders it.

On disk that is one folder: the JSON, which names what made it, `table.md` with the command, and the figure where there
is one.
"""
