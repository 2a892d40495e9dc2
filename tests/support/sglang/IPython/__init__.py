"""A stand-in: SGLang imports IPython for notebooks."""
