"""What survives of real checkpoints: a vision transformer, a retriever, a translator; one protocol for all."""

from . import retrieval, translation, vision

__all__ = ["retrieval", "translation", "vision"]
