"""The fused CPU kernel: C++, forward and backward, chosen at run time for the instruction set of the machine."""

from .op import instruction_sets, run, sum_to_one, why_unavailable, why_unsupported

__all__ = ["instruction_sets", "run", "sum_to_one", "why_unavailable", "why_unsupported"]
