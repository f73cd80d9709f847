"""Computing a patch: both streams or a closing pass, the recorders of every block, and the
replay.
"""
