"""The background half: collect, encode, seal, hand over, deliver; and the black box.

Nothing here runs on the user's thread, except where `ci.trace()` asks the collector.
"""
