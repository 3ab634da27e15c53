"""`lotformer …`: one module per command group, joined in `main`."""
