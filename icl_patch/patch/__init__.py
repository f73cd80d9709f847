"""ContextPatch: the factors of a patch, their file, and the changes of parameters that they stand
for.
"""
