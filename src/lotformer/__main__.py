"""`python -m lotformer …`, which launchers of many processes need: `torchrun … -m lotformer train vision …`."""

from .cli.main import app

app(prog_name="lotformer")
