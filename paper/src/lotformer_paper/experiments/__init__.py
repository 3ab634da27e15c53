"""The paper's figures and tables, a module each."""
