"""The libraries whose models can be converted: a class each, which holds what is known of it."""

from .base import Host
from .registry import find, named, present, register_host, unregister_host

__all__ = ["Host", "find", "named", "present", "register_host", "unregister_host"]
