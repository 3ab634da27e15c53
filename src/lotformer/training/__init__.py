"""Training: one loop for calibration, fine-tuning and training from scratch.

**To train something new**, write a task. The protocol is `task.Task`; `support.torture` of the tests holds a short one:

    @dataclass(frozen=True)
    class VisionSettings(TrainSettings):            # settings.py: every run's settings; add the task's own
        model: str = setting("lot_deit_tiny_patch16_224", "Name of a timm model.")

    class Vision:
        name, metric, higher_is_better = "vision", "top1", True

        def __init__(self, settings): self.settings = settings
        def build_model(self): return timm.create_model(self.settings.model)
        def stream(self, process):                  # loader.py: batches are a pure function of seed and position
            s, data = self.settings, ...            # a map-style data set; transforms may draw random numbers
            return LoaderStream(data, shuffled(len(data), s.part_size, s.seed), seed=s.seed, process=process,
                                workers=s.workers, collate=..., described=...)
        def loss(self, model, batch): ...           # the mean over the batch
        def evaluate(self, model, process): ...     # {"top1": (correct, seen)} of this process's share

    train(Vision(VisionSettings()), Path("out"), resume=True)      # run.py; also under torchrun, accelerate launch

A command line and TOML files come from the settings (`cli.settings.with_settings`), a progress bar from
`cli.training.train_with_progress`.

**How it is built.** `loop` takes steps on batches from a `stream`; what becomes of the weights is up to `updates` (one
process) or `accelerated` (any number). `checkpoints` keep the state, `interrupts` make signals wait;
`schedules`, `random_state`, `precision`, `decay` and `fingerprints` are what their names say. `run` is training from
scratch; calibration and fine-tuning, the other two uses of the loop, are in `conversion.learning`.
"""
