"""`lotformer experiment`, `bench`, `figures`, `render`, … : a module per group."""
