"""Results: provenance, cells, tables and figures; what benchmarks and experiments write and render."""
