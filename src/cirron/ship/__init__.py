"""The background half: collect, encode, seal, hand over, deliver; and the black box.

Nothing here runs on the user's thread, except the collector during `ci.trace()`.
"""
