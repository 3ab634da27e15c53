"""timm, or an error that says how to get it. Imported first: the other modules take timm's parts by name."""

from ..extras import needed_for

with needed_for("lotformer.models cannot be imported"):
    import timm  # noqa: F401
