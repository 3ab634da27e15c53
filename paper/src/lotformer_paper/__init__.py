"""Reproduction of the paper: experiments, benchmarks, their results, and the models and data of the Long Range Arena
and of translation. Adds its commands to `lotformer …`."""
