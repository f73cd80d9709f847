"""The commands ``icl-patch bench`` and ``icl-patch tune``, registered as entry points."""
