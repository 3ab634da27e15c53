"""Makes transformers know lotformer's attention, without importing transformers.

`AutoModel.from_pretrained` of a converted checkpoint has to work after `import lotformer`, in whatever order the two
are imported: if transformers is loaded already, registration happens at once; otherwise as soon as it is.
"""

from __future__ import annotations

import sys
from importlib import import_module

from ._import_hook import when_imported

_AWAITED = "transformers.modeling_utils"


def install() -> None:
    """Register now if transformers is loaded, else as soon as it is."""
    if _AWAITED in sys.modules:
        _register()
    else:
        when_imported(_AWAITED, after=_register)


def _register() -> None:
    try:
        import_module(f"{__package__}.conversion.pretrained")
    except ImportError as error:
        # a transformers without the interfaces must stay importable; `convert` will say what is missing
        if not (error.name or "").startswith("transformers"):
            raise
