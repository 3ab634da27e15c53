"""Subjects of `lotformer convert`, of any modality: a model, inputs to learn from, inputs to compare on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import conversion
from ..conversion import hosts
from ..conversion.calling import call
from ..data.batches import Batch, inputs_of, main_tensor, pooled, tensors_of
from ..data.checkpoints import checkpoint_root, encoder_part, fill_like
from ..data.images import open_image
from ..data.prose import python_reference
from ..data.text import load_tokenizer, text_batches
from ..reading import read_lines
from .recordings import read_recordings

_PICTURES = {".jpeg", ".jpg", ".png", ".webp", ".bmp"}
_HELD = 128  # inputs to compare on, at most


@dataclass(frozen=True)
class Subject:
    """A model to convert. `body` is the part that is converted and taught, `held` what it is compared on.

    `translate` turns the held-back texts into another language; None if the model does not. `transcribe` writes down
    what is said in held-back recordings, and `said` is what really is. `fill` saves the model into a folder, with what
    came with it.
    """

    model: Any
    body: nn.Module
    learned: Sequence[Batch]
    held: Sequence[Batch]
    translate: Callable[[], list[str]] | None
    fill: Callable[[Path], None]
    how_to_load: str
    transcribe: Callable[[], list[str]] | None = None
    said: Sequence[str | None] = ()
    is_sound: bool = False

    @property
    def prefix(self) -> str:
        """The prefix of names in the model over names in its body."""
        name = next((name for name, module in self.model.named_modules() if module is self.body), "")
        return name and f"{name}."

    @property
    def count(self) -> int:
        """The number of inputs held back."""
        return sum(len(next(iter(tensors_of(inputs_of(batch)).values()))) for batch in self.held)

    @property
    def longest(self) -> int:
        """Tokens of the longest text among the held-back inputs; 0 if they are no texts."""
        texts = (batch for batch in self.held if isinstance(batch, Mapping) and "input_ids" in batch)
        return max((batch["input_ids"].shape[1] for batch in texts), default=0)

    def embeddings(self) -> Tensor:
        """Unit vectors of the held-back inputs: outputs, or means of hidden states over real tokens."""
        found = [pooled(hidden, batch).float() for hidden, batch in zip(self._hidden(), self.held, strict=True)]
        return nn.functional.normalize(torch.cat([x.flatten(1) for x in found]), dim=-1)

    def states(self) -> Tensor:
        """Unit vectors of all tokens of the held-back inputs."""
        return nn.functional.normalize(torch.cat([x.float().flatten(0, -2) for x in self._hidden()]), dim=-1)

    @torch.no_grad()
    def _hidden(self) -> list[Tensor]:
        training = self.body.training
        self.body.eval()
        try:
            return [main_tensor(call(self.body, batch)) for batch in self.held]
        finally:
            self.body.train(training)


def open_subject(
    source: str,
    *,
    model: str | None,
    texts: Path | None,
    images: Path | None,
    audio: Path | None,
    size: int | None,
    steps: int,
) -> Subject:
    """A timm model from a file of weights, or a Hugging Face checkpoint for texts, images, speech or translation.

    Images and recordings are read for as many `steps` as will be learned, spread over their folder; for none, nothing
    is read.
    """
    if model is not None:
        return _timm(Path(source), model, images, size, steps)
    root = checkpoint_root(source)
    loaded, kind = _hugging_face(root / encoder_part(root))
    fill: Callable[[Path], None] = lambda out: fill_like(root, loaded, out)  # noqa: E731  beside others of its kind
    takes = getattr(loaded, "main_input_name", "input_ids")
    if takes == "pixel_values":
        processor: Any = kind.AutoImageProcessor.from_pretrained(str(root)) if steps else None
        wanted = {} if size is None else {"size": {"height": size, "width": size}}

        def picture(file: Path) -> Tensor:
            return processor(open_image(file), return_tensors="pt", **wanted)["pixel_values"][0]

        learned, held = _apart([{"pixel_values": batch} for batch in _image_batches(images, picture, steps)])
        return Subject(loaded, loaded, learned, held, None, fill, _with_transformers(loaded))
    body = loaded.get_encoder() if loaded.config.is_encoder_decoder else loaded
    if any(host.input_kind(loaded) == "sound" for host in hosts.present()):
        heard = read_recordings(root, loaded, kind, audio, steps, _apart)
        return Subject(
            loaded, body, heard.learned, heard.held, None, fill, _with_transformers(loaded),
            transcribe=heard.transcribe, said=heard.said, is_sound=True,
        )  # fmt: skip
    if takes != "input_ids":
        if steps:
            raise ValueError(
                f"{type(loaded).__name__} takes {takes}, and here models learn from texts, images or recordings: give "
                "--steps 0 to convert only, then calibrate the result in Python, `lotformer.calibrate(model, batches)`."
            )
        return Subject(loaded, body, [], [], None, fill, _with_transformers(loaded))
    tokenizer = load_tokenizer(root / encoder_part(root))
    learned_texts, held_texts = _texts(texts) if steps else ([], [])
    learned, held = (_tokenized(tokenizer, part, loaded) for part in (learned_texts, held_texts[:_HELD]))

    def translate() -> list[str]:
        found: list[str] = []
        for batch in held:
            made = loaded.generate(**batch, num_beams=1, max_new_tokens=batch["input_ids"].shape[1] * 2)
            found += tokenizer.batch_decode(made, skip_special_tokens=True)
        return found

    translates = loaded.config.is_encoder_decoder and loaded.can_generate()
    return Subject(
        loaded,
        body,
        learned,
        held,
        translate if translates else None,
        fill,
        _with_transformers(loaded),
    )


def _tokenized(tokenizer: Any, texts: Sequence[str], model: Any) -> list[dict[str, Tensor]]:
    batches = text_batches(tokenizer, texts, model=model)
    if not model.config.is_encoder_decoder:
        return batches
    taken = ("input_ids", "attention_mask")  # encoders take nothing else, and `generate` refuses it
    return [{name: batch[name] for name in taken if name in batch} for batch in batches]


def _with_transformers(model: Any) -> str:
    return f"{type(model).__name__}.from_pretrained after `import lotformer`"


def _hugging_face(folder: Path) -> tuple[Any, Any]:
    """The model in a folder, and the library."""
    import transformers
    from transformers import AutoConfig, AutoModel, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        named = AutoConfig.from_pretrained(str(folder)).architectures or []
        # the class that was saved keeps its head; AutoModel would drop it
        kind = getattr(transformers, named[0], AutoModel) if named else AutoModel
        return kind.from_pretrained(str(folder)), transformers
    except Exception as error:
        raise ValueError(f"the checkpoint in {folder} cannot be read: {error}") from error


def _timm(weights: Path, name: str, images: Path | None, size: int | None, steps: int) -> Subject:
    import timm
    from safetensors.torch import load_file

    if not weights.is_file():
        raise ValueError(f"{weights} is not a file: with --model, give the weights as a safetensors file.")
    state = load_file(str(weights))
    head = state.get("head.weight")  # of as many classes as it was trained for
    options: dict[str, Any] = {"num_classes": 0 if head is None else head.shape[0]}
    if size is not None:
        options["dynamic_img_size"] = True
    model = timm.create_model(name, **options)
    model.load_state_dict(state)
    config = timm.data.resolve_model_data_config(model)
    if size is not None:
        config["input_size"] = (config["input_size"][0], size, size)
    transform = timm.data.create_transform(**config)
    learned, held = _apart(_image_batches(images, lambda file: transform(open_image(file)), steps))

    def fill(out: Path) -> None:
        conversion.save(model, out / "model.safetensors")

    return Subject(model, model, learned, held, None, fill, f"lotformer.conversion.load(model, …), model a {name}")


def _image_batches(
    folder: Path | None, read: Callable[[Path], Tensor], steps: int, batch_size: int = 8
) -> list[Tensor]:
    """As many batches as steps learn from, and a quarter more of which some are kept back; evenly over the folder."""
    if not steps:
        return []
    if folder is None:
        raise ValueError("a vision model learns from images: give a folder of them, --images.")
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _PICTURES)
    if not files:
        raise ValueError(f"{folder} holds no image ({', '.join(sorted(_PICTURES))}).")
    count = min(len(files), max(10, steps + steps // 4) * batch_size)
    chosen = [files[i * len(files) // count] for i in range(count)]
    return [torch.stack([read(f) for f in chosen[i : i + batch_size]]) for i in range(0, count, batch_size)]


def _texts(file: Path | None) -> tuple[list[str], list[str]]:
    """To learn from, and to compare on: other topics of Python's manual, or every tenth line of a file."""
    if file is None:
        prose = python_reference()
        return prose.calibration, prose.held_back
    lines = [line for line in read_lines(file) if line.strip()]
    if not lines:
        raise ValueError(f"{file} holds no text.")
    return _apart(lines)


def _apart(items: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Nine parts and one; all for both if there are few."""
    if len(items) < 10:
        return list(items), list(items)
    return [x for i, x in enumerate(items) if i % 10], list(items[::10])
