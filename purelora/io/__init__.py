"""Reading models from disk: weights, configuration and tokenizer, whatever the file format."""
