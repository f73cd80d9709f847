"""The modules that take another module's place, with a patch."""
