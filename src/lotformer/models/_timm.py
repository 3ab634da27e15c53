"""timm, or an error that says how to get it. Imported first: the other modules take timm's parts by name."""

from .. import _torchvision

_torchvision.prepare()

try:
    import timm  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("lotformer.models needs timm: pip install 'lotformer[vision]'.") from error
