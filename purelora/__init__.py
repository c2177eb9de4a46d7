"""purelora: LoRA and QLoRA fine-tuning of language models in JAX, as a functional core."""

__version__ = "0.1.0"
