"""Word times from a model's attention to its text. Torch-free."""
