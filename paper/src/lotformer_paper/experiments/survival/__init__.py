"""What survives of real checkpoints: a vision transformer, a retriever, a translator; one protocol for all."""

from . import anatomy, retrieval, speed, translation, vision

__all__ = ["anatomy", "retrieval", "speed", "translation", "vision"]
