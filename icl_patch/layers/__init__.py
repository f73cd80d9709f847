"""The modules that replace a module of the model and apply a patch to it."""
