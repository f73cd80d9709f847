"""ContextPatch: the factors of a patch, their file, and the changes of parameters."""
