"""The ablations of vision models, and pictures of their attention."""
