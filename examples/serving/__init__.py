"""A service that ranks while its model is trained; `python -m examples.serving.run` shows it through kills."""
